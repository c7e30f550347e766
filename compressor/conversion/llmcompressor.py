"""`model_free_ptq`, as scripts written for llm-compressor 0.14 call it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compressor.conversion.convert import ConvertResult, model_free
from compressor.errors import UserInputError
from compressor.model.folder import one_line, resolve_folder
from compressor.numerics import QuantizationScheme

_DONE_ANYWAY = "FP8BlockDequantizer"


def model_free_ptq(
    model_stub: str | Path,
    save_directory: str | Path,
    scheme: Any = None,
    config: Any = None,
    ignore: str | Iterable[str] = (),
    max_workers: int = 1,
    device: Any = None,
    converter: Any = None,
) -> ConvertResult:
    """Call `model_free` by the names of llm-compressor.

    Args:
        model_stub: the model; `model` there.
        save_directory: `output_dir` there.
        scheme: name of a preset, or a QuantizationScheme, also one of compressed-tensors.
        config: None; several schemes are a recipe with `config_groups`.
        ignore: modules that stay as they are.
        max_workers: `workers` there.
        device: None is `auto`; a single one.
        converter: None, or a converter of compressed-tensors that gives floats: a `CompressedTensorsDequantizer` first writes the base as
            floats into a folder beside `save_directory`, which goes again. An `FP8BlockDequantizer` is not needed.

    Returns:
        What `model_free` gives.

    Raises:
        UserInputError: an argument asks for something that is not done here.
    """
    if config is not None:
        raise UserInputError("config: a quantization config was given; call model_free(recipe=...) with its groups as config_groups")
    if isinstance(device, list | tuple):
        if len(device) != 1:
            raise UserInputError(f"device: {len(device)} devices were given, and all workers share one; give one of them")
        device = device[0]
    if hasattr(scheme, "model_dump") and not isinstance(scheme, QuantizationScheme):
        scheme = scheme.model_dump(mode="json")
    names = ignore if isinstance(ignore, str) else list(ignore)
    chosen = "auto" if device is None else device
    with _as_floats(model_stub, converter, Path(save_directory)) as base:
        return model_free(base, output_dir=save_directory, scheme=scheme, ignore=names, workers=max_workers, device=chosen)


@contextmanager
def _as_floats(model: str | Path, converter: Any, output_dir: Path) -> Iterator[str | Path]:
    """Let a converter write a quantized base as floats, into a folder that is there as long as it is needed."""
    if converter is None or type(converter).__name__ == _DONE_ANYWAY:
        yield model
        return
    from compressed_tensors.entrypoints.convert import convert_checkpoint

    name = type(converter).__name__
    if not all(hasattr(converter, part) for part in ("process", "validate", "update_config")):
        raise UserInputError(
            f"converter: {name} is no converter of compressed-tensors; give a CompressedTensorsDequantizer, or leave it out"
        )
    if converter.update_config(None) is not None:
        raise UserInputError(
            f"converter: {name} gives weights that are quantized already, and floats alone are converted here; convert the model that the "
            "base was made from"
        )
    folder = resolve_folder(model).path
    output_dir = output_dir.absolute()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output_dir.parent, prefix=f"{output_dir.name}.floats-") as floats:
        try:
            convert_checkpoint(folder, floats, converter, max_workers=1, device="cpu")
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            raise UserInputError(
                f"converter: {name} cannot read {folder} ({one_line(error)}); give the base that it was made for, "
                "and name in its ignore what is not quantized there"
            ) from error
        yield floats
