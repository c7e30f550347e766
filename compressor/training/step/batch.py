"""Batches as nested structures of tensors: their metadata as a key, and fixed buffers that only an equal batch can fill."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from compressor.errors import BindError
from compressor.training.guards.frozen_value import is_long

Batch = Any  # a dict, list or tuple, nested as deep as one likes; its leaves are tensors or Python constants
_CONTAINERS = (dict, list, tuple)
_CONSTANTS = (bool, int, float, str, type(None))


def named_leaves(batch: Batch) -> dict[str, Any]:
    """List the leaves of a batch by their path.

    Args:
        batch: a nested structure.

    Returns:
        Path, such as `['input_ids']` or `[1]['labels']`, to leaf.

    Raises:
        BindError: a leaf is neither a dense tensor nor a Python constant.
    """
    leaves = _leaves(batch)
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                kind = "nested tensor" if leaf.is_nested else f"tensor of layout {leaf.layout}"
                raise BindError(f"batch{path}: a {kind} cannot be copied into a fixed buffer; make it dense")
            if leaf.is_quantized:  # copied into another scale, it would be rounded anew
                raise BindError(
                    f"batch{path}: a quantized tensor brings its own scale, which a fixed buffer has not; give its dequantize()"
                )
        elif not isinstance(leaf, _CONSTANTS):
            how = "give dict() of it" if isinstance(leaf, Mapping) else "convert it before the step"
            raise BindError(f"batch{path}: {type(leaf).__name__} is neither a tensor nor a constant; {how}")
    return leaves


def _leaves(batch: Batch) -> dict[str, Any]:
    if type(batch) is dict and all(isinstance(leaf, Tensor) for leaf in batch.values()):
        return {f"[{key!r}]": leaf for key, leaf in batch.items()}  # the same names; a pytree takes a tenth of a small model's step
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}


_Key = tuple[tuple[Hashable, ...], ...]
BatchKey = tuple[_Key, tuple[str, ...], tuple[type, ...]]


def batch_key(batch: Batch) -> BatchKey:
    """Return what a plan must know of a batch: paths, classes, shapes, strides, dtypes and devices of tensors, the constants, and their
    order, and what holds them.

    Args:
        batch: a nested structure of tensors and constants.

    Returns:
        A key that is equal for batches that are the same to a function that does not ask for values.

    Raises:
        BindError: a leaf is neither a dense tensor nor a Python constant, or a tensor has what a buffer would not have.
    """
    leaves = named_leaves(batch)
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            _refuse_more_than_values(path, leaf)
    return _key_of(leaves), tuple(leaves), tuple(_holders(batch)) if isinstance(batch, _CONTAINERS) else ()


def varying_constants(key: BatchKey, others: Iterable[BatchKey]) -> list[str]:
    """Name the Python constants of a batch that have had another value in every batch before.

    Args:
        key: the key of the batch.
        others: keys of batches before.

    Returns:
        Their paths.
    """
    seen = {part for other in others for part in other[0]}
    return [str(part[0]) for part in key[0] if part[1] != "tensor" and part not in seen]


def _refuse_more_than_values(path: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise BindError(
            f"batch{path}: it requires its gradient, which eager would leave on the caller's tensor and a replay would not; "
            "set requires_grad on a clone in the loss function"
        )
    if isinstance(tensor, nn.Parameter):
        raise BindError(f"batch{path}: it is a parameter, which the buffer of a replay is not; give its .detach()")
    kind = type(tensor)
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise BindError(f"batch{path}: {kind.__name__} keeps its values in its own way, which a buffer does not; give plain tensors")
    own = [name for name in tensor.__dict__ if kind is not Tensor or not name.startswith("_")]
    if own:
        raise BindError(
            f"batch{path}: it carries the attribute '{own[0]}', which the buffer of a replay would not; give it with the batch, beside it"
        )


def _key_of(leaves: dict[str, Any]) -> _Key:
    first: dict[int, str] = {}  # one tensor in two places is another batch than two equal ones
    return tuple(
        (path, "tensor", tuple(leaf.shape), leaf.dtype, leaf.device, type(leaf), _strides(leaf), _twin(first, path, leaf))
        if isinstance(leaf, Tensor)
        else (path, type(leaf).__name__, *_constant(leaf))
        for path, leaf in sorted(leaves.items())
    )


def _holders(batch: Batch) -> Iterator[type]:
    """Give the classes of a batch's containers: whether constants come as a list or as a tuple is a fact that code may ask for."""
    yield type(batch)
    for item in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(item, _CONTAINERS):
            yield from _holders(item)


def _containers(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, dict | list):
        yield batch
    for item in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, _CONTAINERS) else ():
        yield from _containers(item)


def _twin(first: dict[int, str], path: str, leaf: Tensor) -> str | None:
    """Name the place at which the very same tensor was met before."""
    place = first.setdefault(id(leaf), path)
    return None if place == path else place


def _constant(value: Any) -> tuple[Hashable, ...]:
    """Return a constant as a key: -0.0 is not 0.0, and each NaN is equal to the next."""
    if not isinstance(value, float):
        return (hex(value) if is_long(value) else value,)
    return ("nan" if math.isnan(value) else value, math.copysign(1.0, value))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, which the buffer has too: other strides are other kernels, whose last bits may differ."""
    if tensor.is_contiguous():
        return ()
    return tensor.stride()


def _span(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor that repeats itself in it, such as an expanded one, as one row; else the tensor."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)) if reach < tensor.numel() else tensor


def _buffer_of(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides."""
    tensor = _plain(tensor).detach()
    if tensor.is_contiguous():
        return tensor.clone()
    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _span(buffer).copy_(_span(tensor))
    return buffer


def _with_aliases(leaves: Mapping[str, Any], structure: Any, class_of: Callable[[Tensor], type[Tensor]] = type) -> Batch:
    """Build a batch of new aliases, so that what a step sets on them (`requires_grad`) does not stay."""
    aliases = {id(leaf): _alias(leaf, class_of(leaf)) for leaf in leaves.values() if isinstance(leaf, Tensor)}
    return tree_unflatten([aliases.get(id(leaf), leaf) for leaf in leaves.values()], structure)


def _alias(leaf: Tensor, kind: type[Tensor]) -> Tensor:
    plain = _plain(leaf).detach()
    return plain if kind is Tensor else plain.as_subclass(kind)


@contextmanager
def lent(batch: Batch) -> Iterator[Batch]:
    """Lend a batch to a step that is taken back.

    Args:
        batch: as the caller gave it; a step that is to be refused may write to it.

    Yields:
        The same memory under new aliases; what was written to it is put back at the end.
    """
    leaves = named_leaves(batch)
    before = {path: (_plain(leaf), _buffer_of(leaf)) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    try:
        yield _with_aliases(leaves, tree_flatten_with_path(batch)[1])
    finally:
        with torch.no_grad():
            for leaf, kept in before.values():
                if not torch.equal(leaf, kept):
                    _span(leaf).copy_(_span(kept))


def num_tokens(batch: Batch) -> int:
    """Count the elements of the batch's integer tensors called `input_ids`, else the rows of its first tensor.

    Args:
        batch: a nested structure of tensors and constants.

    Returns:
        What a progress bar calls tokens.
    """
    leaves = _leaves(batch)  # of whatever kind: an eager step takes them all
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and not leaf.is_nested}
    ids = sum(leaf.numel() for path, leaf in tensors.items() if path.endswith("['input_ids']"))
    first = next(iter(tensors.values()), None)
    return ids or (0 if first is None else first.shape[0] if first.dim() else 1)


class InputBuffers:
    """Fixed storages that batches flow into by `copy_`, never by broadcasting.

    Args:
        batch: the first batch; it is copied, and its metadata binds all later ones.

    Attributes:
        taken: places of dicts in a batch, and the keys that the step takes out of them.
        repeats_container: the caller's batch holds one dict or list in two places, which are two in the buffers.
    """

    def __init__(self, batch: Batch) -> None:
        self._key = batch_key(batch)[0]
        self.taken: list[tuple[tuple[Any, ...], Any]] = []
        inside = [id(one) for one in _containers(batch)]
        self.repeats_container = len(set(inside)) < len(inside)
        copies: dict[int, Tensor] = {}
        self._classes: dict[int, type[Tensor]] = {}
        self._leaves = named_leaves(batch)
        for path, leaf in self._leaves.items():
            if isinstance(leaf, Tensor):
                if id(leaf) not in copies:
                    copies[id(leaf)] = _buffer_of(leaf)
                    self._classes[id(copies[id(leaf)])] = type(leaf)
                self._leaves[path] = copies[id(leaf)]
        self._structure = tree_flatten_with_path(batch)[1]
        self.tensors = {path: _span(leaf) for path, leaf in self._leaves.items() if isinstance(leaf, Tensor)}

    @property
    def batch(self) -> Batch:
        """The buffers as a batch; new aliases each time."""
        return _with_aliases(self._leaves, self._structure, lambda leaf: self._classes[id(leaf)])

    def bind(self, batch: Batch) -> None:
        """Copy a batch in.

        Args:
            batch: has exactly the metadata of the first batch.

        Raises:
            BindError: a leaf is missing, new, or of another shape, dtype, device or value; nothing was copied.
        """
        source = named_leaves(batch)
        key = _key_of(source)  # in whatever order: buffers have that of the first batch
        if key != self._key:
            self._refuse(key)
        with torch.no_grad():
            for path, buffer in self.tensors.items():
                buffer.copy_(_span(_plain(source[path])))

    def _refuse(self, key: _Key) -> None:
        given, expected = ({str(part[0]): part[1:] for part in some} for some in (key, self._key))
        path = next(path for path in {**expected, **given} if given.get(path) != expected.get(path))
        raise BindError(
            f"batch{path}: {_spell(given.get(path))} was given for a buffer that was captured as {_spell(expected.get(path))}; "
            "give a batch of the captured metadata, or let the trainer choose the plan"
        )

    def take_from(self, batch: Batch) -> None:
        """Take out of a batch what the step has taken out of its buffers, as an eager one would have done.

        Args:
            batch: of the caller; changed.
        """
        # All found before one goes, which may hold the next.
        for holder, key in [(functools.reduce(operator.getitem, path, batch), key) for path, key in self.taken]:
            del holder[key]

    def holds(self, batch: Batch) -> bool:
        """Say whether the buffers hold the values of a batch already.

        Args:
            batch: fits the buffers.

        Returns:
            True when every tensor is equal.
        """
        source = named_leaves(batch)
        return all(torch.equal(buffer, _span(_plain(source[path]))) for path, buffer in self.tensors.items())


def _plain(tensor: Tensor) -> Tensor:
    """The values without what a subclass makes of them."""
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _spell(part: Any) -> str:
    if part is None:
        return "nothing"
    if part[0] == "tensor":
        kind = "" if part[4] is Tensor else f"{part[4].__name__} of "
        return f"{kind}{str(part[2]).removeprefix('torch.')} {list(part[1])} on {part[3]}"
    return f"{part[0]} {part[1]!r}"
