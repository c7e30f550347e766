"""Saving a compressed model that is in memory: by `save_pretrained`, as users of transformers do, or as the result of a run.

`save_pretrained` of transformers knows nothing of quantized layers. Called on a compressed model it would write their tensors and a config
that does not tell what they mean, and `from_pretrained` would fill the model with random numbers. So a compressed model gets a
`save_pretrained` of its own, an attribute of this one object: it writes what `output_dir=` writes, byte for byte. No class is changed. The
model goes as soon as nobody needs it, for it is held weakly, and copies and pickles of it save themselves.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import ModelError, SchemeError, UserInputError
from compressor.model.checkpoints.online import rotation_notes
from compressor.model.checkpoints.save import MAX_SHARD_BYTES, as_pretrained, save_checkpoint
from compressor.model.class_readers import check_readable, reading_notes
from compressor.model.folder import some
from compressor.nn import QuantizedLayer, float_layer
from compressor.nn.attention.kv_cache import kv_scheme_of, quantized_parts
from compressor.nn.online_rotation import rotated_modules

_NAME = "save_pretrained"
_TOKEN = "save"  # always the same, so that what a kill leaves behind is taken away by the next save
_ALL: Any = object()
# Further keywords of transformers and of llm-compressor: the values that ask for nothing else than what is written, and what to do else.
_KEYWORDS: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "push_to_hub": ((False, None), "save to a folder, or call model.push_to_hub(repo_id), which does both"),
        "safe_serialization": ((True, None), "leave it out; weights are written as safetensors only"),
        "save_compressed": ((True, False), "give False for the dequantized weights as floats, or leave it out"),
        "variant": ((None,), "leave it out; readers of compressed-tensors look for model.safetensors"),
        "save_original_format": ((True,), "leave it out; compressed layers are stored under the names of the architecture's own files"),
        "distributed_checkpoint": ((False,), "leave it out; the model is written by one process"),
        "quantization_format": ((None,), "leave it out; the schemes of the recipe decide it"),
        "sparsity_config": ((None,), "leave it out; zeros are stored as they are"),
        "disable_sparse_compression": ((_ALL,), ""),
        "skip_sparsity_compression_stats": ((_ALL,), ""),
        "skip_compression_stats": ((_ALL,), ""),
        "save_function": ((_ALL,), ""),
        "save_peft_format": ((_ALL,), ""),
        "token": ((_ALL,), ""),
    }
)


@dataclass(frozen=True)
class CompressedModel:
    """A model that a run has compressed or trained, with all that it takes to save it.

    Attributes:
        model: the model; an in-memory model is changed in place and is the same object.
        tokenizer: the tokenizer that came with the model, None for a plain module.
        record: everything that made the result; what `compression.json` holds beside the digests of the tensors.
        output_dir: the checkpoint, None when nothing was saved.
        source_dir: the folder whose tokenizer files `save` copies; None where the caller gave the model or a tokenizer.
    """

    model: nn.Module
    tokenizer: Any
    record: dict[str, Any]
    output_dir: Path | None
    source_dir: Path | None

    def save(self, output_dir: str | Path, max_shard_size: int | str = MAX_SHARD_BYTES) -> Path:
        """Write the checkpoint, tokenizer included: what `output_dir=` would have written, byte for byte.

        Args:
            output_dir: folder to write; may hold other files, but no model.
            max_shard_size: above this the weights are split over several files: bytes, or text such as "5GB".

        Returns:
            The absolute path of the folder.

        Raises:
            OutputError: the folder cannot be used.
            SchemeError: transformers would not read the checkpoint back.
            CheckpointError: the model is not fit to be written, or the disk is full or fails; nothing is left behind.
        """
        return save_compressed(
            self.model, output_dir, self.record, tokenizer=self.tokenizer, source_dir=self.source_dir, max_shard_size=max_shard_size
        )


def save_compressed(
    model: nn.Module,
    output_dir: str | Path,
    record: Mapping[str, Any] | None,
    *,
    tokenizer: Any = None,
    source_dir: Path | None = None,
    max_shard_size: int | str = MAX_SHARD_BYTES,
) -> Path:
    """Write a compressed model that is in memory, as `output_dir=` would have done.

    Args:
        model: the compressed model, as it is now; it is not changed.
        output_dir: folder to write; may hold other files (a tokenizer), but no checkpoint and none of the files that are written.
        record: what compression.json is to say; None writes none.
        tokenizer: saved if `source_dir` holds no tokenizer.
        source_dir: folder whose tokenizer files are copied byte for byte.
        max_shard_size: above this the weights are split over several files: bytes, or text such as "5GB".

    Returns:
        The absolute path of the folder.

    Raises:
        OutputError: the folder cannot be used.
        SchemeError: transformers would not read the checkpoint back.
        CheckpointError: something of the model is not fit to be written, or the disk is full or fails; nothing is left behind.
    """
    schemes = {name: layer.scheme for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    check_readable(schemes, model, kv_scheme_of(model))
    queries = any("q" in quantized_parts(module) for module in model.modules())
    for note in (*reading_notes(model, schemes, kv_scheme_of(model), queries=queries), *rotation_notes(model)):
        warnings.warn(note, UserWarning, stacklevel=3)
    return save_checkpoint(
        model,
        output_dir,
        tokenizer=tokenizer,
        source_dir=source_dir,
        schemes=schemes,
        record=record,
        max_shard_bytes=max_shard_size,
        token=_TOKEN,
        beside_others=True,
    )


def save_decompressed(model: nn.Module, output_dir: str | Path, max_shard_size: int | str = MAX_SHARD_BYTES) -> Path:
    """Write the weights that a compressed model computes with as floats: an ordinary folder, without compression.json.

    Args:
        model: the compressed model; the same afterwards.
        output_dir: as for `save_compressed`.
        max_shard_size: as for `save_compressed`.

    Returns:
        The absolute path of the folder.

    Raises:
        SchemeError: inputs, or keys and values, are quantized or turned, which float weights cannot say.
        OutputError: the folder cannot be used.
        CheckpointError: the disk is full or fails; nothing is left behind.
    """
    inputs = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer) and layer.scheme.input_activations]
    if inputs or kv_scheme_of(model) is not None:
        what = f"the inputs of {some(inputs)}" if inputs else "keys and values"
        raise SchemeError(
            f"save_compressed=False: {what} are quantized, and float weights cannot say so; leave save_compressed out to save the model "
            "as it computes"
        )
    rotated = rotated_modules(model)
    if rotated:
        raise SchemeError(
            f"save_compressed=False: {some(rotated)} turn inputs or outputs in every forward, and float weights cannot say so; leave "
            "save_compressed out"
        )
    with _decompressed(model):
        return save_checkpoint(model, output_dir, schemes={}, record=None, max_shard_bytes=max_shard_size, token=_TOKEN, beside_others=True)


def attach_save(model: nn.Module, record: Mapping[str, Any] | None) -> None:
    """Give a compressed model, and each model inside it, a `save_pretrained` that writes what it is, and say in its config what it is.

    Changes them; none gets a new method.

    Args:
        model: compressed.
        record: what compression.json is to say of it as a whole; None writes none.
    """
    is_compressed = _is_compressed(model)
    for part in model.modules():
        if is_compressed and as_pretrained(part) is not None:
            # So does transformers, and no file holds it. FalconMamba and Jamba then call a layer whose weight they read otherwise.
            vars(part.config)["_is_quantized"] = True
        is_whole = part is model and as_pretrained(part) is not None  # one without compressed layers may be sparse
        if callable(getattr(part, _NAME, None)) and (is_whole or _is_compressed(part)):
            vars(part)[_NAME] = SavePretrained(part, record if part is model else None)


def _is_compressed(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLayer) for module in model.modules()) or kv_scheme_of(model) is not None


class SavePretrained:
    """`save_pretrained` of one compressed model."""

    def __init__(self, model: nn.Module, record: Mapping[str, Any] | None) -> None:
        """Hold the model weakly, and what it consists of, so that a method that outlives the model still saves it."""
        self._model = weakref.ref(model)
        self._kind = type(model)
        self._parts = {name: part for name, part in vars(model).items() if name != _NAME}
        self._record = record

    def __reduce__(self) -> tuple[Any, ...]:
        """Follow the model: a copy of it, or what comes out of a pickle, saves itself."""
        return type(self), (self._whole(), self._record), self._parts

    def __setstate__(self, parts: dict[str, Any]) -> None:
        """Take the parts of the copy, which has none yet when its `save_pretrained` is made."""
        self._parts = parts

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = MAX_SHARD_BYTES,
        variant: str | None = None,
        token: str | bool | None = None,
        save_compressed: bool = True,
        **keywords: Any,
    ) -> None:
        """Write the model, without a tokenizer, as `output_dir=` would have done.

        Args:
            save_directory: folder to write; may hold other files (a tokenizer), but no checkpoint.
            is_main_process: False writes nothing, as in transformers.
            state_dict: the model's own, or None; nothing else can be saved as this model.
            push_to_hub: False; `model.push_to_hub` uploads what this writes.
            max_shard_size: above this the weights are split over several files: bytes, or text such as "5GB".
            variant: None.
            token: not used.
            save_compressed: False writes the dequantized weights as floats.
            **keywords: of transformers and llm-compressor, with values that ask for nothing else.

        Raises:
            UserInputError: a keyword asks for something else.
            ModelError: the model carries adapters, or is none of transformers and quantized, which its own save_pretrained cannot tell.
        """
        model = self._whole()
        _check_keywords({"push_to_hub": push_to_hub, "variant": variant, "token": token, "save_compressed": save_compressed, **keywords})
        if getattr(model, "_hf_peft_config_loaded", False):  # what is saved then is the adapters alone
            type(model).save_pretrained(model, save_directory, is_main_process, state_dict)  # type: ignore[attr-defined]
            return
        _check_class(model)
        if state_dict is not None:
            _check_own_state(model, state_dict)
        if not is_main_process:
            return
        if save_compressed:
            _save_compressed(model, save_directory, self._record, max_shard_size=max_shard_size)
        else:
            save_decompressed(model, save_directory, max_shard_size)

    def _whole(self) -> nn.Module:
        """The model; or, where nobody holds it any more, one of the same parts."""
        model = self._model()
        if model is None:
            model = self._kind.__new__(self._kind)
            vars(model).update(self._parts)
        return model


_save_compressed = save_compressed  # a keyword of the method above has the same name


def _check_keywords(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in _KEYWORDS:
            raise UserInputError(f"save_pretrained: {name!r} is no argument for a compressed model; leave it out")
        allowed, remedy = _KEYWORDS[name]
        if not any(one is _ALL or value is one for one in allowed):
            raise UserInputError(f"save_pretrained: {name}={value!r} cannot be done for a compressed model; {remedy}")


def _check_class(model: nn.Module) -> None:
    """Refuse where nobody would read what is written: only transformers knows quantized layers."""
    if getattr(model, "peft_config", None):
        raise ModelError(f"{type(model).__name__}: adapters of peft are attached; save those by their own model, or unload them first")
    if as_pretrained(model) is None:
        raise ModelError(
            f"{type(model).__name__}: its own save_pretrained and from_pretrained know no compressed layers; use result.save(folder), and "
            "read compression.json for their formats"
        )


def _check_own_state(model: nn.Module, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise UserInputError("state_dict: holds something else than tensors by name; leave it out")
    own = model.state_dict()
    other = [name for name in own.keys() | given.keys() if name not in own or name not in given or not _equal(own[name], given[name])]
    if other:
        raise UserInputError(
            f"state_dict: {len(other)} entries differ from the model's own ({some(other)}), and codes without their scales mean nothing; "
            "leave state_dict out"
        )


def _equal(own: Tensor, given: Tensor) -> bool:
    return own.dtype == given.dtype and own.shape == given.shape and torch.equal(own.cpu(), given.cpu())


@contextmanager
def _decompressed(model: nn.Module) -> Iterator[None]:
    """Put float layers in the places of the quantized ones, and take them away again. Changes the model, and back."""
    layers = {name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, QuantizedLayer)}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, float_layer(layer))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
