"""Loads a checkpoint the way its users will, through transformers, and keeps what transformers says about it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from safetensors import SafetensorError

from compressor.errors import ModelError
from compressor.model.checkpoints.format import stored_names
from compressor.model.experts.unfuse import disk_names, weight_converters
from compressor.model.folder import one_line, read_config
from compressor.model.loading.load import quiet_transformers, remedy
from compressor.model.targets import text_config
from harness.validation.format.fused import FusedLayout

LOADER_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError, OSError, RuntimeError, ArithmeticError),
    *(SafetensorError, StrictDataclassError),
)
"""What a loader raises on a broken checkpoint: there it is a finding about the checkpoint, never swallowed silently."""


@dataclass(frozen=True)
class LoadAttempt:
    """What came of loading a checkpoint.

    Attributes:
        model: on the CPU, in eval mode, quantized weights decompressed; None where it did not load whole.
        problems: why it did not, or what the loader complained about.
    """

    model: torch.nn.Module | None
    problems: list[str] = field(default_factory=list)


def load_compressed(folder: Path, *, dequantize: bool = False, dtype: str = "auto", trust_remote_code: bool = False) -> LoadAttempt:
    """Load a compressed checkpoint on the CPU and run one token through it, which makes compressed-tensors decompress the weights.

    Args:
        folder: the checkpoint.
        dequantize: ask the loader to dequantize while it reads, instead of at the first forward.
        dtype: of the model, by its name in torch; `auto` for that of its config.
        trust_remote_code: run Python files of the folder, where its config asks for them.
    Returns:
        The model, or why there is none.
    """
    try:
        with _quiet(), torch.no_grad():
            model, info = _from_pretrained(folder, dequantize, dtype, trust_remote_code)
            problems = [f"{kind}: {_shown(item)}" for kind, items in sorted(info.items()) for item in sorted(items, key=str)]
            if info["missing_keys"] or info["mismatched_keys"]:
                return LoadAttempt(None, problems)
            model.eval()
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
            _let_move(model)
    except LOADER_ERRORS as error:
        return LoadAttempt(None, [first_line(error)])
    return LoadAttempt(model, problems)


def _let_move(model: torch.nn.Module) -> None:
    """Take away what compressed-tensors puts around weights that it decompresses: it would hold them where they are, on the CPU."""
    from compressed_tensors.offload.module import remove_module_offload

    for module in model.modules():
        remove_module_offload(module, onload_tensors=True)


def save_again(folder: Path, target: Path) -> dict[str, bool]:
    """Load a checkpoint and save it with `save_pretrained`, without a forward between: it would decompress the weights.

    Args:
        folder: the checkpoint.
        target: new folder for the other one.
    Returns:
        Options of `save_pretrained` that were needed: transformers cannot take back what it dequantized and fused while it loaded
        (experts), so that is saved as the model holds it.
    Raises:
        Exception: one of `LOADER_ERRORS`.
    """
    settings = read_config(folder).get("quantization_config") or {}
    options = {"save_original_format": False} if settings.get("dequantize") else {}
    with _quiet():
        model: Any = _from_pretrained(folder, False, "auto")[0]
        model.save_pretrained(target, **options)
    return options


def _from_pretrained(
    folder: Path, dequantize: bool, dtype: str, trust_remote_code: bool = False
) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    read_config(folder)  # which refuses sizes of which no model could be built
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    if dequantize:
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    return model, info


def with_settings(config: Any, settings: Mapping[tuple[str, ...], Any]) -> Any:
    """Give settings of a config other values.

    Args:
        config: of transformers; changed.
        settings: names of attributes from the config to a setting, to its value.
    Returns:
        The config.
    """
    for (*path, name), value in settings.items():
        holder = config
        for step in path:
            holder = getattr(holder, step)
        getattr(holder, name)  # one that is not there is no setting
        setattr(holder, name, value)
    return config


def load_with_tensors(
    like: torch.nn.Module, tensors: Mapping[str, torch.Tensor], settings: Mapping[tuple[str, ...], Any] | None = None
) -> torch.nn.Module:
    """Load a model of the same class and config with other tensors.

    Args:
        like: a model of transformers.
        tensors: by the names of its files; all of them. Where two differ that the config ties, they are not tied.
        settings: of the config that have other values, as for `with_settings`.
    Returns:
        The model in float32, in eval mode, on the CPU.
    Raises:
        Exception: one of `LOADER_ERRORS`.
    """
    loader: Any = type(like)
    with _quiet(), torch.no_grad():
        options = {"config": with_settings(_config_for(like, tensors), settings or {}), "dtype": torch.float32, "output_loading_info": True}
        model, info = loader.from_pretrained(None, state_dict=dict(tensors), **options)
    problems = [f"{kind}: {_shown(item)}" for kind, items in sorted(info.items()) for item in sorted(items, key=str)]
    if problems:
        raise ValueError(problems[0])
    loaded: torch.nn.Module = model.eval()
    return loaded


def _config_for(like: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    config = copy.deepcopy(like.config)
    ties = (getattr(like, "all_tied_weights_keys", None) or {}).items()
    if any(name in tensors and source in tensors and not torch.equal(tensors[name], tensors[source]) for name, source in ties):
        for part in {id(part): part for part in (config, text_config(config))}.values():
            part.tie_word_embeddings = False
    return config


def load_with_our_reader(folder: Path, *, trust_remote_code: bool = False) -> LoadAttempt:
    """Load a checkpoint that transformers cannot load, with the runtime layers that it was written from.

    Args:
        folder: the checkpoint.
        trust_remote_code: run Python files of the folder, where its config asks for them.
    Returns:
        The model, or why there is none.
    """
    from compressor.model.checkpoints.load import load_compressed as load_own

    try:
        with _quiet(), torch.no_grad():
            model = load_own(folder, device="cpu", trust_remote_code=trust_remote_code)
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except LOADER_ERRORS as error:
        return LoadAttempt(None, [first_line(error)])
    return LoadAttempt(model)


def load_for_running(folder: str | Path, *, device: str = "auto", matmul: Literal["reference", "native"] = "reference") -> torch.nn.Module:
    """Load a checkpoint with our own layers, experts one by one, also where nothing in it is quantized (pruned, scaled or rotated only).

    Args:
        folder: the checkpoint.
        device: where the model runs: auto, cpu, cuda.
        matmul: of quantized layers.
    Returns:
        The model in eval mode.
    Raises:
        ModelError: the folder cannot be used.
    """
    from compressor.model.checkpoints.load import load_compressed as load_own
    from compressor.model.experts.unfuse import UnfusedModel, unfuse_into
    from compressor.model.loading.load import load_model

    if "quantization_config" in read_config(Path(folder)):
        return load_own(folder, device=device, matmul=matmul)
    model = load_model(folder, device=device).model.eval()
    unfuse_into(UnfusedModel(model), prove=False)
    return model


def modules_as_stored(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a loaded model, fused experts one by one and also under the names that the files have for them.

    Args:
        model: as it was loaded; the same afterwards.
    Returns:
        Name to module; the weights of experts are views of what the loader made.
    """
    from compressor.model.checkpoints.format import stored_names
    from compressor.model.experts.unfuse import UnfusedModel, unfuse_into
    from compressor.nn.experts import Expert

    found = dict(model.named_modules())
    unfused = UnfusedModel(model)
    unfuse_into(unfused, prove=False)
    try:
        names = [
            f"{name}.{child}"
            for name, module in model.named_modules()
            if isinstance(module, Expert)
            for child, _ in module.named_children()
        ]
        stored = stored_names(model, names) if names else {}
        return found | {stored.get(name, name): model.get_submodule(name) for name in names}
    finally:
        unfused.restore()


def _shown(item: Any) -> str:
    """A mismatched key comes with the shape in the file and the shape in the model."""
    if isinstance(item, tuple) and len(item) == 3:
        return f"{item[0]}, {list(item[1])} in the file, {list(item[2])} in the model"
    return str(item)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the loaders' bars and warnings off the terminal; what is wrong with a checkpoint is told by the records."""
    import warnings

    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """Return the kind of an exception and its reason in one line; every single finding of a pydantic validation.

    Args:
        error: of another library.
    Returns:
        One line.
    """
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return one_line(error)


_LAYOUT_FLAGS = ("is_transposed", "is_concatenated")


def fused_layouts(model_dir: Path, *, trust_remote_code: bool = False) -> dict[str, FusedLayout]:
    """Return how the layers of experts of a model keep their weights, as their classes and the rules of transformers for its files say.

    Args:
        model_dir: folder with config.json.
        trust_remote_code: run Python files of the folder, where its config asks for them.
    Returns:
        By dotted name in the files; of classes that do not say so nothing is known.
    Raises:
        ModelError: transformers does not know the architecture.
    """
    model = _empty_model(model_dir, trust_remote_code)
    flags = {name: [getattr(module, flag, None) for flag in _LAYOUT_FLAGS] for name, module in model.named_modules()}
    layers = {name: (bool(turned), bool(joined)) for name, (turned, joined) in flags.items() if turned is not None and joined is not None}
    if not layers:
        return {}
    converters, stored, found = weight_converters(model), stored_names(model, list(layers)), {}
    for name, (is_transposed, is_concatenated) in layers.items():
        disk = disk_names(converters, name)
        names = {"gate_up_proj": (disk.gate, disk.up), "up_proj": (disk.up,), "down_proj": (disk.down,)}
        found[stored.get(name, name)] = FusedLayout(is_transposed, is_concatenated, names)
    return found


def module_classes(model_dir: Path, *, trust_remote_code: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the class names of every module of a model, from its config alone.

    Args:
        model_dir: folder with config.json.
        trust_remote_code: run Python files of the folder, where its config asks for them.
    Returns:
        Names of the class and its bases, by module name.
    Raises:
        ModelError: transformers does not know the architecture.
    """
    model = _empty_model(model_dir, trust_remote_code)
    return {name: tuple(cls.__name__ for cls in type(module).__mro__) for name, module in model.named_modules()}


def _empty_model(model_dir: Path, trust_remote_code: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with _quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except LOADER_ERRORS as error:
        what = f"transformers cannot build a causal language model from its config ({first_line(error)})"
        raise ModelError(f"{model_dir}: {what}; {remedy(error, 'check config.json')}") from error
    return model
