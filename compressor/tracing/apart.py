"""Forwards that take turns must not notice each other. Shown on two batches, before the suspend engine runs any.

What a forward keeps on modules is exchanged at every pause. What it keeps elsewhere is not: a global, an attribute of an object or of a
class, parameters that are swapped for the time of a call. No list of such places is complete, so two forwards are run alone and then in
turns, and must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.tracing.graph.verify import digests
from compressor.tracing.isolation import TorchState
from compressor.tracing.observe import copied_batch
from compressor.tracing.order import Trail
from compressor.tracing.out_of_memory import is_out_of_memory
from compressor.tracing.suspend import SuspendedRun

_Digest = tuple[tuple[str, str], ...]


@torch.no_grad()
def check_apart(
    model: nn.Module, targets: Mapping[str, nn.Module], batches: Sequence[Batch], device: torch.device | None, trails: Sequence[Trail]
) -> None:
    """Run two different batches alone and in turns, and compare what targets are given and what the forwards return, bit for bit.

    Args:
        model: as it was afterwards, but for what its own forward changes.
        targets: dotted name to module.
        batches: two are taken; where all are the same, there is nothing to confuse.
        device: of the model; None leaves batches where they are.
        trails: what is known of the forwards.

    Raises:
        TracingError: the two forwards notice each other.
    """
    pair = _two_that_differ(batches)
    if not pair:
        return
    if device is not None:
        pair = [batch_to(batch, device) for batch in pair]
    parameters = [(module, name, value) for module in model.modules() for name, value in module._parameters.items()]
    state = TorchState.current(foreign=True)
    try:
        alone, in_turns = _Seen(targets), _Seen(targets)
        with alone.watching():
            one_by_one = [Trail((), trail.foreign_random) for trail in trails]
            _run(model, (), pair, one_by_one, alone)  # without targets nothing pauses: one plain forward after the other
        state.restore()
        with in_turns.watching():
            try:
                _run(model, targets, pair, trails, in_turns)
            except TracingError:
                raise
            except Exception as error:  # alone both forwards came to their end, so whatever it is, the turns are its cause
                if is_out_of_memory(error):
                    raise
                raise TracingError(_message(f"one of them raised {type(error).__name__}: {error}")) from error
    finally:
        state.restore()
        swapped = [name for module, name, value in parameters if module._parameters.get(name) is not value]
        for module, name, value in parameters:
            module._parameters[name] = value
    if swapped or not alone.is_same(in_turns):
        raise TracingError(_message(f"its parameter {swapped[0]} stays swapped" if swapped else "targets or results differ"))


def _run(model: nn.Module, targets: Collection[str], pair: Sequence[Batch], trails: Sequence[Trail], seen: _Seen) -> None:
    with SuspendedRun(model, targets, [copied_batch(batch) for batch in pair], keep_outputs=True, trails=trails) as run:
        for stage in run.stages():
            stage.propagate()
    seen.results = [tuple(digests(output)) for output in run.outputs]


def _message(what: str) -> str:
    return (
        f"suspend: two forwards that take turns do not give what each gives alone ({what}), so the model keeps something of a forward "
        'outside of its modules (a global, an object, a class, swapped parameters); keep it on a module, or use pipeline="basic"'
    )


class _Seen:
    """What targets were given, and what the forwards returned."""

    def __init__(self, targets: Mapping[str, nn.Module]) -> None:
        self.targets = targets
        self.calls: dict[str, list[_Digest]] = {}
        self.results: list[_Digest] = []

    def watching(self) -> ExitStack:
        """Hang hooks on the targets until the stack is left."""
        hooks = ExitStack()
        for name, module in self.targets.items():
            hooks.callback(module.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)
        return hooks

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            self.calls.setdefault(name, []).append(tuple(digests((args, kwargs))))

        return hook

    def is_same(self, other: _Seen) -> bool:
        """True if all results are equal, and all calls, in whatever order the forwards made them."""
        calls, others = ({name: sorted(seen) for name, seen in one.calls.items()} for one in (self, other))
        return self.results == other.results and calls == others


def _two_that_differ(batches: Sequence[Batch]) -> list[Batch]:
    """The first batch and one of other shapes, or else of other content."""
    first = batches[0]
    others = [batch for batch in batches[1:] if _shapes(batch) != _shapes(first)] or batches[1:]
    other = next((batch for batch in others if not _is_same(first, batch)), None)
    return [] if other is None else [first, other]


def _values(batch: Batch) -> dict[Any, Any]:
    return batch if isinstance(batch, dict) else dict(enumerate(batch))


def _shapes(batch: Batch) -> dict[Any, Any]:
    return {name: getattr(value, "shape", None) for name, value in _values(batch).items()}


def _is_same(left: Batch, right: Batch) -> bool:
    a, b = _values(left), _values(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name] for name in a)
