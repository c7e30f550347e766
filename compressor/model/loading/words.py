"""Tokenizers and processors: as a user gives them, or of the folder that a model came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from compressor.errors import ModelError
from compressor.model.folder import is_dir, one_line, resolve_folder
from compressor.model.hub import split_name
from compressor.model.loading.load import LOAD_ERRORS, load_tokenizer, quiet_transformers

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def resolve_tokenizer(tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """Take a tokenizer as a user gives it.

    Args:
        tokenizer: an object, the path of its folder or its name on the hub, or None.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The tokenizer; None for None.

    Raises:
        ModelError: the folder is missing or holds none, or the hub does not give it.
    """
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    folder = resolve_folder(tokenizer, weights=False, code=trust_remote_code, argument="tokenizer").path
    if not is_dir(folder):
        raise ModelError(f"tokenizer: {str(tokenizer)!r} is not a folder; give one with tokenizer.json, or a name on the hub (owner/name)")
    with quiet_transformers():
        found = load_tokenizer(folder, trust_remote_code)
    if found is None:
        raise ModelError(f"tokenizer: {folder} holds none; give a folder with tokenizer.json")
    return found


def resolve_processor(processor: Any, trust_remote_code: bool = False) -> Any:
    """Take a processor as a user gives it.

    Args:
        processor: an object, a tokenizer among them, the path of its folder or its name on the hub, or None.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The processor; None for None.

    Raises:
        ModelError: the folder is missing or holds none, or the hub does not give it.
    """
    if not isinstance(processor, str | Path):
        return processor
    from transformers import AutoProcessor

    folder = resolve_folder(processor, weights=False, code=trust_remote_code, argument="processor").path
    if not is_dir(folder):
        raise ModelError(
            f"processor: {str(processor)!r} is not a folder; give one with preprocessor_config.json, or a name on the hub (owner/name)"
        )
    try:
        with quiet_transformers():
            return AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise ModelError(f"processor: {folder} holds none that can be loaded ({one_line(error)}); give a folder with one") from error


def is_tokenizer(processor: Any) -> bool:
    """Tell a tokenizer, which reads texts alone, from a processor.

    Args:
        processor: of transformers.

    Returns:
        True for a tokenizer.
    """
    from transformers import PreTrainedTokenizerBase

    return isinstance(processor, PreTrainedTokenizerBase)


def find_tokenizer(source: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model, where it has one.

    Args:
        source: its folder, or its name on the hub.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The tokenizer; None for a model without one.

    Raises:
        ModelError: it cannot be loaded, or the hub does not give it.
    """
    with quiet_transformers():
        return load_tokenizer(resolve_folder(source, weights=False, code=trust_remote_code, argument="tokenizer").path, trust_remote_code)


def find_processor(source: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model, where it has one.

    Args:
        source: its folder, or its name on the hub.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The processor; None for a model without one.

    Raises:
        ModelError: it cannot be loaded, or the hub does not give it.
    """
    folder = resolve_folder(source, weights=False, code=trust_remote_code, argument="processor").path
    has_one = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    return resolve_processor(folder, trust_remote_code) if has_one else None


def origin_of(model: nn.Module) -> str | None:
    """Say where transformers loaded a model from that is in memory.

    Args:
        model: any module.

    Returns:
        The folder, or the name on the hub; None where neither is known, or the folder is gone.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    return name if isinstance(name, str) and name and (is_dir(Path(name)) or split_name(name) is not None) else None
