"""Forwards that take turns must not notice each other. Shown on a few batches, before the suspend engine runs any.

What a forward keeps on modules is exchanged at every pause. What it keeps elsewhere is not: a global, an attribute of an object or of a
class, parameters that are swapped for the time of a call. No list of such places is complete, so forwards are run alone and then in
turns, and must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.tracing.footprint import Footprint, held_tensors
from compressor.tracing.graph.nodes import one_line
from compressor.tracing.picking import facts_of, other_content, pick
from compressor.tracing.proof import Comparison, Difference, Found, OtherNumbers
from compressor.tracing.reads import HostReads, LeftMemory
from compressor.tracing.suspend.engine import SuspendedRun
from compressor.tracing.targets.call_order import plain_forwards
from compressor.tracing.targets.order import Trail
from compressor.tracing.targets.sample_state import TorchState

_A_FEW = 4  # batches


@torch.no_grad()
def check_apart(
    model: nn.Module,
    targets: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    device: torch.device | None,
    trails: Sequence[Trail],
    returning: Callable[[], AbstractContextManager[Footprint | None]],
    numbers: OtherNumbers | None = None,
    is_few: bool = False,
) -> Found:
    """Run batches alone and in turns, and compare what targets are given and give, and what the forwards return, bit for bit.

    Args:
        model: as it was afterwards, but for what its own forward changes.
        targets: dotted name to module.
        batches: a few; a single one is held against its own trial calls.
        device: of the model; None leaves batches where they are.
        trails: what is known of the forwards.
        returning: context that puts the model back after a forward.
        numbers: changes what targets compute, alone and in turns.
        is_few: these are to stand for other batches, so look for tensors that one leaves to the next.

    Returns:
        What was found beside.

    Raises:
        TracingError: the forwards notice each other.
    """
    here = [batch if device is None else batch_to(batch, device) for batch in batches]
    before, reads = _parameters(model), HostReads(model)
    state = TorchState.current(foreign=True)
    try:
        left = LeftMemory([*held_tensors(model), *here]) if is_few else None
        expected, kept = plain_forwards(model, targets.keys(), here, returning, numbers, left, reads if is_few else None)
        reads.forget()
        comparison = _Turns(expected, targets, numbers, left)
        run = SuspendedRun(model, targets, here, on_sample=comparison.begin, keep_outputs=True, trails=trails)
        with returning():
            comparison.follow(run, targets.keys(), model)
            after = _parameters(model)
            swapped = [place[1] for place, value in before.items() if after.get(place) is not value]
    finally:
        state.restore()
    if swapped:
        raise TracingError(_message(f"its parameter {swapped[0]} stays swapped"))
    return Found(kept, reads.first or ("" if left is None else left.first))


def _parameters(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    return {
        (module, name): value
        for module in model.modules()
        for name, value in module.named_parameters(recurse=False, remove_duplicate=False)
    }


class Noticed(TracingError):
    """A forward computes something else where others take turns with it."""


def check_apart_with_other_numbers(
    model: nn.Module,
    targets: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    device: torch.device | None,
    trails: Sequence[Trail],
    returning: Callable[[], AbstractContextManager[Footprint | None]],
) -> None:
    """Do the same as if the targets were compressed, by far: what Python reads off their numbers may differ then where it was one value.

    Args:
        model: as it was afterwards, but for what its own forward changes.
        targets: dotted name to module.
        batches: the first few take part.
        device: of the model; None leaves batches where they are.
        trails: what is known of the forwards.
        returning: context that puts the model back after a forward.

    Raises:
        Noticed: the forwards notice each other.
    """
    try:
        check_apart(model, targets, batches[:_A_FEW], device, trails, returning, OtherNumbers(model, targets))
    except Noticed:
        raise
    except TracingError:
        return  # with these numbers the model does not run, or not in stages; it may with its own


class _Turns(Comparison):
    """Says what forwards that notice each other have in common."""

    def error(self, difference: Difference) -> TracingError:
        return Noticed(_message(difference.what))

    def raised(self, error: Exception, sample: int) -> TracingError:
        return TracingError(_message(f"one of them raised {one_line(error)}"))


def _message(what: str) -> str:
    return (
        f"suspend: forwards that take turns do not give what each gives alone ({what}), so the model hands something on outside of "
        "arguments and module attributes (a global, an object or a generator in it, a list, a class, swapped parameters), or in one "
        "that is True or False, which counts as set-up and outlives a forward; hand it on as "
        'an argument, or use pipeline="basic"'
    )


def pick_apart(batches: Sequence[Batch], proved: dict[Any, set[Any]]) -> list[Batch]:
    """Pick the batches that are to take turns: they differ in sizes and padding where they can, else in content, else in nothing.

    Args:
        batches: not modified.
        proved: what has been shown already; what these will show is noted in it.

    Returns:
        Two or more, or a single one where there is no other; none where these would show nothing new.
    """
    facts = {place: {"place": place, **facts_of(batch)} for place, batch in enumerate(batches)}
    for place, known in facts.items():
        known |= {"padded place": place} if known["padding"] else {}  # two of them: one alone meets no other that goes its way
    picked = pick(facts, proved)
    if picked:
        picked += other_content([place for place in range(len(batches)) if place not in picked], picked, batches, proved)
    if len(picked) == 1:  # alone it would meet no other
        picked += [place for place in range(len(batches)) if place not in picked][:1]
    return [batches[place] for place in sorted(picked)]
