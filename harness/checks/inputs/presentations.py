"""How one and the same values may be handed in, for all kinds of subjects: layouts of memory, kinds of tensors, grad modes.

Whoever reads a tensor by its values sees no difference; whoever reads its memory, or asks what it is, may. Every presentation comes with
an ordinary tensor of the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch
from torch import Tensor, nn

_FILLED = 3  # stands where a view has nothing


def _within(x: Tensor, before: tuple[int, ...], after: tuple[int, ...], step: tuple[int, ...]) -> Tensor:
    """The values as a part of a larger tensor: so many places before and behind them in each dimension, and so many a step."""
    sizes = [first + size * by + last for size, first, last, by in zip(x.shape, before, after, step, strict=True)]
    larger = torch.full(sizes, _FILLED, dtype=torch.float32).to(x.dtype)
    view = larger[tuple(slice(first, first + size * by, by) for size, first, by in zip(x.shape, before, step, strict=True))]
    view.copy_(x.detach())
    return view


def _ones(x: Tensor, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """One number per dimension, 1 in those between."""
    return (*(1 for _ in range(x.dim() - 2)), first, last) if x.dim() > 1 else (last,)


def _zeros(x: Tensor) -> tuple[int, ...]:
    return (0,) * x.dim()


def _swapped(x: Tensor, one: int, two: int) -> Tensor:
    return x.transpose(one, two).contiguous().transpose(one, two) if x.dim() > 1 else x.clone()


# The same values, laid out in another way; for tensors of any rank above 0 and any dtype.
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "a transposed view": lambda x: _swapped(x, 0, -1),
        "rows and columns swapped": lambda x: _swapped(x, -1, -2),
        "sequences that lie apart": lambda x: _swapped(x, 0, -2),
        "rows that lie apart": lambda x: _within(x, _zeros(x), (*_zeros(x)[1:], 5), _ones(x)),
        "every other column": lambda x: _within(x, (*_zeros(x)[1:], 1), _zeros(x), _ones(x, last=2)),
        "every other row": lambda x: _within(x, _zeros(x), _zeros(x), _ones(x, first=2)),
        "the last rows of a larger tensor": lambda x: _within(x, (2, *_zeros(x)[1:]), _zeros(x), _ones(x)),
        "a part of a larger tensor": lambda x: _within(x, _ones(x), _ones(x), _ones(x)),
    }
)
# Of some values only the first, seen again and again without a copy: stride 0.
EXPANDED: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "one row, expanded": lambda x: x[:1].expand_as(x),
        "one column, expanded": lambda x: x[..., :1].expand_as(x),
        "one number, expanded": lambda x: x.reshape(-1)[:1].expand(x.shape) if x.numel() else x,
    }
)
# What a tensor of floats may be beside its values.
TENSORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "a Parameter": lambda x: nn.Parameter(x.detach().clone()),
        "a frozen Parameter": lambda x: nn.Parameter(x.detach().clone(), requires_grad=False),
        "a result that has a gradient": lambda x: _with_history(x),
        "a transposed view of a Parameter": lambda x: _view_of_parameter(x),
    }
)
# What a tensor of floats may be whatever its layout, which it keeps.
HELD: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "as a plain tensor": lambda x: x,
        "as a Parameter": nn.Parameter,
        "as a frozen Parameter": lambda x: nn.Parameter(x, requires_grad=False),
        "as a result that has a gradient": lambda x: _view_of_leaf(x),
    }
)
GRAD_MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType(
    {"where gradients are on": torch.enable_grad, "where gradients are off": torch.no_grad}
)


# All layouts, by words.
WAYS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"as it is": torch.clone, **LAYOUTS, **EXPANDED})


def _view_of_leaf(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().requires_grad_()[...]


def _with_history(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().clone().requires_grad_().clone()


def _view_of_parameter(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return nn.Parameter(x.detach().transpose(0, -1).clone(memory_format=torch.contiguous_format)).transpose(0, -1)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Lay some values out in every way.

    Args:
        x: any rank above 0, any dtype; not modified.

    Yields:
        Words, the values in that layout, and an ordinary tensor of the same values.
    """
    plain = x.detach().clone(memory_format=torch.contiguous_format)
    for name, lay in LAYOUTS.items():
        yield name, lay(plain), plain
    for name, expand in EXPANDED.items():
        view = expand(plain)
        yield name, view, view.clone(memory_format=torch.contiguous_format)


def presentations(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Present some values in every way: in every layout, and as every kind of tensor.

    Args:
        x: floats of any rank above 0; not modified.

    Yields:
        Words, the values in that way, and an ordinary tensor of the same values.
    """
    yield from layouts(x)
    for name, make in TENSORS.items():
        yield name, make(x), x.detach().clone(memory_format=torch.contiguous_format)


def places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return one place of each kind in a tensor: its corners, its middle, and those behind where a piece of it may end.

    Args:
        shape: of the tensor, without a dimension of 0.

    Returns:
        Indices, each once.
    """
    corners = [tuple(0 if bit >> place & 1 else size - 1 for place, size in enumerate(shape)) for bit in range(1 << len(shape))]
    inner = [tuple(min(size - 1, step) for size in shape) for step in (1, 8, 32, 64, 128, 256, 512)]
    return list(dict.fromkeys([*corners, tuple(size // 2 for size in shape), *inner]))
