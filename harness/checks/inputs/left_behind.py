"""What a model holds beside its weights: the settings of its config, attributes of its modules, and buffers that no checkpoint holds.

Some of them are copies of what the config says (`model.num_experts`), which go stale where only the config is changed. What they should
be is what the model's own class makes of the config that was written, so that a model in memory is held against itself, loaded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from compressor.pages import raw_bytes

_MARK = "_is_hf_initialized"  # of who loads
_SAVED = frozenset({"architectures", "dtype", "transformers_version"})  # settings that saving writes into the config on its way
_DIGEST = "_original_object_hash"  # of all other settings of how it generates
_SAVES = "save_pretrained"  # which a model may have of its own: it decides how the model is written
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, str)
_ABSENT = "nothing"


def settings(model: Any) -> Iterator[tuple[str, Any]]:
    """Read the settings of a model.

    Args:
        model: of transformers.

    Yields:
        Dotted name and value; where the model was loaded from is none.
    """
    generation = {} if model.generation_config is None else model.generation_config.to_dict()
    generation.pop(_DIGEST, None)
    yield from _flat("", {**model.config.to_dict(), "_name_or_path": None, "generation_config": generation})


def attributes(model: nn.Module) -> dict[tuple[str, str], object]:
    """Read what modules hold beside what is saved, hooks and their mode: attributes, what stands in their configs, computed buffers.

    Args:
        model: of transformers.

    Returns:
        Values by name of the module and dotted name of the attribute; the class of what is no plain value, a digest of a tensor.
    """
    return {(name, key): _plain(value) for name, module in model.named_modules() for key, value in _held(module)}


def left_behind(
    model: nn.Module, before: Mapping[Any, object], after: Mapping[Any, object], again: nn.Module, base: nn.Module
) -> list[str]:
    """Say which attributes are not what the class makes of the config that was written.

    Args:
        model: that was changed.
        before: its attributes, as they were.
        after: the same, behind the change.
        again: the model that was changed, loaded again.
        base: the model as it was, loaded again: what loading alone makes otherwise may stay what it was.

    Returns:
        Sentences.
    """
    loaded, unchanged, classes = attributes(again), attributes(base), {name: type(module) for name, module in again.named_modules()}
    its_own = {name for name, module in model.named_modules() if type(module) is not classes.get(name)}
    found = []
    for place in sorted(before.keys() | after.keys() | loaded.keys()):
        was, now, due, plain = (values.get(place, _ABSENT) for values in (before, after, loaded, unchanged))
        may_stay = now == was and was != plain
        may_differ = place == ("", _SAVES) or (place[0] in its_own and _ABSENT in (now, due))  # another class has attributes of its own
        if now != due and not may_stay and not may_differ:
            name = ".".join(filter(None, place))
            found.append(f"{name} was {was} and is {now}, where the class makes {due} of the config that is saved")
    return found


def _held(module: nn.Module) -> Iterator[tuple[str, object]]:
    for key, value in vars(module).items():
        if key not in _OF_TORCH and key not in (_MARK, _DIGEST):
            yield from ((name, one) for name, one in _flat(key, value) if name == key or name.rpartition(".")[2] not in _SAVED)
    yield from ((key, one) for key, one in module._buffers.items() if key in module._non_persistent_buffers_set)
    yield from ((key, nn.Module) for key, child in module._modules.items() if child is not None)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Follow tables and configs to what stands in them."""
    value = vars(value) if hasattr(value, "to_dict") else value
    if isinstance(value, dict) and value:  # an empty one is something, too
        for key, one in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), one)
    else:
        yield name, value


def _plain(value: object) -> object:
    """What can be compared: a place in a list or set may hold anything."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        digest = hashlib.sha256(bytes(raw_bytes(value.cpu()).numpy())).hexdigest()[:12]
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {digest}"
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
