"""Values of a few kinds as JSON and a list of tensors, for what processes of one run tell each other; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.json_text import from_json

_PLAIN = (str, int, float, type(None))


def written(value: Any) -> tuple[bytes, list[Tensor]]:
    """Take a value apart.

    Args:
        value: None, numbers, text, tensors, lists and tuples, mappings by text, dataclasses and named tuples.

    Returns:
        Its skeleton as JSON, in which tensors, dataclasses and named tuples stand by number and name; and the tensors.

    Raises:
        TypeError: it holds something else.
    """
    tensors: list[Tensor] = []
    skeleton = _skeleton(value, tensors)
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type] for tensor in tensors]
    return json.dumps([skeleton, kinds]).encode(), tensors


def blanks(text: bytes, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Make room for the tensors of a value.

    Args:
        text: of `written`.
        device: for those that are not on the CPU.

    Returns:
        The skeleton, for `read`; and tensors without values.
    """
    skeleton, kinds = from_json(text)
    made = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if kind == "cpu" else device) for dtype, shape, kind in kinds]
    return skeleton, made


def read(skeleton: Any, tensors: Sequence[Tensor], types: Sequence[type]) -> Any:
    """Put a value together.

    Args:
        skeleton: of `blanks`.
        tensors: in their order.
        types: dataclasses and named tuples that may occur.

    Returns:
        The value; tuples have become lists.
    """
    if not isinstance(skeleton, dict):
        return [read(item, tensors, types) for item in skeleton] if isinstance(skeleton, list) else skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    inside = {key: read(item, tensors, types) for key, item in skeleton["items"].items()}
    made = next((one for one in types if one.__name__ == skeleton["type"]), None)
    return inside if made is None else made(**inside)


def _skeleton(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return value
    named = value._asdict() if hasattr(value, "_asdict") else None
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
    if named is not None or isinstance(value, Mapping):
        items = {key: _skeleton(item, tensors) for key, item in (value if named is None else named).items()}
        return {"type": "" if named is None else type(value).__name__, "items": items}
    if isinstance(value, list | tuple):
        return [_skeleton(item, tensors) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")
