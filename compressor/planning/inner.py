"""Which layers end an MLP, followed on shapes: what R4 would turn, as `compressor.mappings.inner` finds it on values.

Each linear layer's output is followed through the forward. Views and what works entry by entry keep its channels apart (pure); everything
else, and whatever meets such a result, mixes them. A layer whose input is a pure function of another one's output ends an MLP, where the
rest of the forward sees nothing of that output. Sets of sources are bits of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.lifecycle import Modifier, State
from compressor.mappings.pairs import pattern_of
from compressor.mappings.probe import all_experts, columns_of, has_weight, tied_modules
from compressor.model.loading.sample_batches import batch_of_shapes
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.nn.build import is_quantizable
from compressor.pipelines.forward_checks import calibration_mode
from compressor.planning.footprint import FusedAttention
from compressor.planning.operations import FROM_SHAPES, run_mixed, tensors_in
from compressor.planning.refusals import CANNOT_FOLLOW
from compressor.planning.repeats import filled, outside, repeated_layers, shapes_of, standing_in

_VIEWS = (
    *("view", "_unsafe_view", "slice", "split", "split_with_sizes", "unbind", "select", "unsqueeze", "squeeze", "expand", "transpose"),
    *("permute", "t", "clone", "detach", "alias", "_to_copy", "copy_", "glu", "cat", "stack"),
)
_KEEPING = frozenset(getattr(torch.ops.aten, name) for name in _VIEWS)
_ROWS, _TOKENS = 2, 16


def foresee_inner(skeleton: nn.Module, modifiers: Sequence[Modifier]) -> None:
    """Tell modifiers with R4 what it would turn; they go by shapes where no forward can be followed.

    Args:
        skeleton: the model without values, experts taken apart; not changed.
        modifiers: of the recipe; those with R4 note it.
    """
    asking = [one for one in modifiers if isinstance(one, SpinQuantModifier) and "R4" in one.rotations]
    if asking:
        try:
            names: tuple[str, ...] | None = inner_layers(skeleton)
        except CANNOT_FOLLOW:
            names = None
        for one in asking:
            one.foresee_inner(names)


def inner_layers(model: nn.Module) -> tuple[str, ...]:
    """Find the last layers of a model's MLPs, experts among them.

    Args:
        model: on the meta device, in eval mode, experts taken apart; not changed.

    Returns:
        Dotted names of linear layers, in the order of the model, that have a weight of their own.

    Raises:
        RuntimeError: the forward asks for a value; like the other errors of CANNOT_FOLLOW.
    """
    watched = {name: module for name, module in model.named_modules() if has_weight(module)}
    linear = {name for name, module in watched.items() if is_quantizable(module) and not isinstance(module, nn.Embedding)}
    flow = _Flow()
    skipped = repeated_layers(model, watched)
    gave: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any, *, name: str) -> None:
        del module
        gave[name] = shapes_of(output, (args, kwargs))

    def like(*args: Any, name: str, **kwargs: Any) -> Any:
        return filled(gave[name], (args, kwargs), lambda size, dtype: torch.empty(size, dtype=dtype, device="meta"))

    with ExitStack() as stack:
        for name in outside(watched, skipped):
            stack.callback(watched[name].register_forward_pre_hook(flow.reading(name), with_kwargs=True).remove)
            stack.callback(watched[name].register_forward_hook(flow.writing(name if name in linear else None)).remove)
        for name in set(skipped.values()):
            stack.callback(model.get_submodule(name).register_forward_hook(partial(note, name=name), with_kwargs=True).remove)
        for name, other in skipped.items():
            stack.enter_context(standing_in(model.get_submodule(name), partial(like, name=other)))
        stack.enter_context(calibration_mode(State(model=model)))
        stack.enter_context(all_experts(model))
        stack.enter_context(torch.no_grad())
        batch = batch_of_shapes(model, _ROWS, _TOKENS)
        stack.enter_context(flow)
        stack.enter_context(FusedAttention(flow))
        flow.ends_with(model(**batch))
    kinds, tied = {pattern_of(name) for name in flow.found()}, tied_modules(model)
    return tuple(name for name in watched if name in linear and pattern_of(name) in kinds and name not in tied)


class _Flow(TorchDispatchMode):
    """Follows from which calls of linear layers each storage comes, and how."""

    def __init__(self) -> None:
        super().__init__()
        self._pure: dict[int, int] = {}
        self._mixed: dict[int, int] = {}
        self._held: list[Tensor] = []  # so that no storage takes the place of another
        self._widths: dict[str, int] = {}  # of what sources give, whose places are their bits
        self._rows: dict[str, set[int]] = {}
        self._readers: dict[str, tuple[int, int]] = {}  # the sources that reach them channel by channel in all calls, and in any
        self._blocked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = run_mixed(func, args, kwargs)
        pure, mixed = (0, 0) if func._overloadpacket in FROM_SHAPES else self._of((args, kwargs))
        if func._overloadpacket not in _KEEPING and torch.Tag.pointwise not in func.tags:
            pure, mixed = 0, pure | mixed
        self._mark(out, pure, mixed)
        return out

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what attention gives: of all tokens, so mixed."""
        made = query.new_empty(*query.shape[:-1], value.shape[-1])
        pure, mixed = self._of((query, key, value))
        self._mark(made, 0, pure | mixed)
        return made

    def reading(self, name: str) -> Callable[..., None]:
        """A pre-hook of a layer that notes what reaches it."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            pure, mixed = self._of((args, kwargs))
            columns = columns_of(module)
            rows = {tensor.numel() // columns for tensor in tensors_in((args, kwargs))}
            # A norm of heads, say, reads a token in several rows: no channel of it is one of the source.
            uneven = sum(
                1 << place
                for place, (source, width) in enumerate(self._widths.items())
                if pure >> place & 1 and (width % columns or rows.isdisjoint(self._rows[source]))
            )
            self._blocked |= mixed | uneven
            every, some = self._readers.get(name, (pure, pure))
            self._readers[name] = every & pure, some | pure

        return hook

    def writing(self, source: str | None) -> Callable[..., None]:
        """A hook of a layer, whose output may be a source of its own; what the layer read goes no further."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            for tensor in tensors_in(output):
                if source is not None:
                    self._widths.setdefault(source, tensor.shape[-1])
                    self._rows.setdefault(source, set()).add(tensor.numel() // tensor.shape[-1])
                self._mark(tensor, 0 if source is None else 1 << [*self._widths].index(source), 0)

        return hook

    def ends_with(self, output: Any) -> None:
        """Note what the model itself gives."""
        pure, mixed = self._of(dict(output) if hasattr(output, "keys") else output)
        self._blocked |= pure | mixed

    def found(self) -> list[str]:
        """Name the layers that read what nothing else sees."""
        blocked = self._blocked
        for every, some in self._readers.values():  # what is called on other inputs, too, cannot take the turn
            blocked |= some & ~every
        return [name for name, (every, _) in self._readers.items() if every & ~blocked]

    def _of(self, value: Any) -> tuple[int, int]:
        pure = mixed = 0
        for tensor in tensors_in(value):
            key = tensor.untyped_storage()._cdata
            pure, mixed = pure | self._pure.get(key, 0), mixed | self._mixed.get(key, 0)
        return pure & ~mixed, mixed

    def _mark(self, value: Any, pure: int, mixed: int) -> None:
        for tensor in tensors_in(value):
            self._held.append(tensor)
            key = tensor.untyped_storage()._cdata
            self._pure[key], self._mixed[key] = pure, mixed
