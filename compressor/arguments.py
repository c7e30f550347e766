"""Of what kind the arguments of the Python functions must be, in one table: a wrong one is named before anything is done with any.

What a value means (whether a folder exists, whether an engine has that name) is checked where it is used.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from compressor.errors import UserInputError

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _path(value: Any) -> bool:
    return isinstance(value, Path) or _text(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_text(one) for one in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_number(one) for one in value)


def _model(value: Any) -> bool:
    return isinstance(value, nn.Module) or _path(value)


def _model_class(value: Any) -> bool:
    return _text(value) or isinstance(value, type)


def _tokenizer(value: Any) -> bool:
    return _path(value) or (callable(value) and hasattr(value, "save_pretrained"))


def _recipe_args(value: Any) -> bool:
    pairs = [value] if isinstance(value, str) else value
    if isinstance(pairs, Mapping):
        return all(_text(name) for name in pairs)
    return isinstance(pairs, list | tuple) and all(_text(pair) and pair.partition("=")[1:2] == ("=",) and pair[0] != "=" for pair in pairs)


def _memory(value: Any) -> bool:
    return isinstance(value, str) or _number(value)


def _dtype(value: Any) -> bool:
    return _text(value) or isinstance(value, torch.dtype)


def _device(value: Any) -> bool:
    return _text(value) or isinstance(value, torch.device)


def _progress(value: Any) -> bool:
    return _flag(value) or hasattr(value, "task")


_WHOLE, _FLAG, _TEXT = (_whole, "a whole number"), (_flag, "True or False"), (_text, "a text")
_KINDS: Mapping[str, tuple[Check, str]] = MappingProxyType(
    {
        **dict.fromkeys(("num_calibration_samples", "max_seq_length", "batch_size", "max_variants", "seed"), _WHOLE),
        **dict.fromkeys(
            ("targets_per_subgraph", "steps", "warmup_steps", "accumulate", "eval_every", "save_every", "check_every", "audit_every"),
            _WHOLE,
        ),
        **dict.fromkeys(("resume", "shuffle", "shuffle_calibration_samples", "calibrate_all_experts", "propagate_error"), _FLAG),
        **dict.fromkeys(("trust_remote_code_model", "ema_warmup"), _FLAG),
        **dict.fromkeys(("text_column", "pipeline", "engine", "verify", "autocast", "mode", "modality"), _TEXT),
        **dict.fromkeys(("epochs", "learning_rate", "weight_decay", "clip_norm", "save_ema"), (_number, "a number")),
        **dict.fromkeys(("output_dir", "run_dir", "offload_dir", "folder"), (_path, "a path")),
        **dict.fromkeys(("activation_memory", "activation_device_memory"), (_memory, "a number of bytes, or a text such as '4GB'")),
        **dict.fromkeys(("dtype", "save_dtype"), (_dtype, "the name of a dtype")),
        **dict.fromkeys(("leaves", "ignore"), (_texts, "a list of texts")),
        "sequential_targets": (lambda value: bool(value) and _texts(value), "a list of at least one text"),
        "ema": (_numbers, "a list of numbers"),
        "model": (_model, "the path of a folder, or a model (torch.nn.Module)"),
        "model_class": (_model_class, "a class of transformers, or its name"),
        "tokenizer": (_tokenizer, "a tokenizer of transformers, or the path of its folder"),
        "recipe_args": (_recipe_args, "a mapping of names to values, or a list of texts 'name=value'"),
        "device": (_device, "the name of a device"),
        "progress": (_progress, "True, False, or an object with a method task()"),
    }
)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments of the wrong kind.

    Args:
        function: that was called; where a default is None, None may be given.
        given: its arguments by name; names that are not in the table are not looked at.

    Raises:
        UserInputError: the first that is of the wrong kind.
    """
    defaults: Mapping[str, Any] = getattr(function, "__kwdefaults__", None) or {}
    for name, value in given.items():
        if name not in _KINDS or (value is None and defaults.get(name, ...) is None):
            continue
        check, words = _KINDS[name]
        if not check(value):
            text = repr(str(value) if isinstance(value, Path) else value)
            raise UserInputError(f"{name}: {text if len(text) <= 60 else text[:57] + '...'} was given, where {words} belongs; correct it")


def plain_number(value: Any) -> Any:
    """Return a number of numpy, and the like, as one of Python, which JSON can hold.

    Args:
        value: anything.

    Returns:
        An int for a whole number, a float for another real one; what is no number, or one of Python already, as it is.
    """
    if isinstance(value, bool | int | float) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_dtypes_around(function: Callable[..., Any]) -> None:
    """Refuse to run under torch.autocast or another default dtype: forwards would compute otherwise than where the result is loaded.

    Args:
        function: that was called, for the error.

    Raises:
        UserInputError: autocast is on, for any kind of device, or torch.set_default_dtype() was called.
    """
    kind = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
    if kind is not None:
        raise UserInputError(
            f"{function.__name__}: torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}) is on around the call, and would compute "
            "forwards and statistics in another dtype than the model's; call it outside, and cast the model if that is meant"
        )
    if torch.get_default_dtype() != torch.float32:
        raise UserInputError(
            f"{function.__name__}: torch.set_default_dtype({torch.get_default_dtype()}) is in force, and what a forward makes would "
            "have another dtype than where the result is loaded; call torch.set_default_dtype(torch.float32) first, and cast the model if "
            "that is meant"
        )


def suggest(given: str, choices: Iterable[str]) -> str:
    """Return advice for a word that is not among the choices.

    Args:
        given: the word.
        choices: what would be valid.

    Returns:
        `did you mean 'x'?`, the list of choices where none is near, or to leave it out where there is no choice.
    """
    choices = list(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1)
    return f"did you mean '{by_lower[near[0]]}'?" if near else f"choose from {', '.join(choices)}" if choices else "leave it out"
