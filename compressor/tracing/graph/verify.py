"""The proof of recorded graphs: they are run as a run does, beside the plain model, and all that modules see is compared, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from compressor.data.collate import Batch
from compressor.errors import TracingError
from compressor.tracing.graph.program import Program
from compressor.tracing.graph.refusal import one_line
from compressor.tracing.graph.run import GraphRun
from compressor.tracing.observe import plain_forwards
from compressor.tracing.proof import Comparison, Difference, Seen
from compressor.tracing.store import RenewingStore

_AT_ONCE = 4  # samples that take turns: two would do, more are live at once where all batches are verified


class Mismatch(TracingError):
    """A recorded graph computes something else than the plain model."""


class Case(NamedTuple):
    """A batch, the recorded graph that it takes, and its number, for errors."""

    program: Program
    batch: Batch
    sample: int


@torch.no_grad()
def verify_programs(
    model: nn.Module,
    cases: Sequence[Case],
    groups: Mapping[str, int],
    returning: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[str, ...]:
    """Run recorded graphs and the plain model on the same batches, and compare all that modules are given and give back.

    All plain forwards come first: a graph that depends on what the forward of its own batch left behind then meets what another left.

    Args:
        model: as it was afterwards.
        cases: what to compare; the graphs are read as they are now.
        groups: target to the number of the stage it shares.
        returning: context that puts the model back after a forward.

    Returns:
        Attributes of modules by which one batch changes what the next one gives in the plain model.

    Raises:
        Mismatch: the first difference: module, value, node and line.
    """
    taken_apart = _taken_apart(groups)
    watched = [name for name, _ in model.named_modules() if name not in taken_apart]
    kept: tuple[str, ...] = ()
    num_rounds = -(-len(cases) // _AT_ONCE)
    for number in range(num_rounds):
        taken = cases[number::num_rounds]
        expected, found = plain_forwards(model, watched, [case.batch for case in taken], returning)
        kept += found
        comparison = _GraphComparison(taken, expected, groups)
        run = GraphRun(
            model,
            [case.batch for case in taken],
            [case.program for case in taken],
            groups,
            RenewingStore(),
            on_sample=comparison.begin,
            keep_outputs=True,
        )
        comparison.run = run
        with returning():
            comparison.follow(run, watched, model)
    return kept


class _GraphComparison(Comparison):
    """Finds node and line of a difference."""

    run: GraphRun

    def __init__(self, cases: Sequence[Case], expected: Sequence[Sequence[Seen]], groups: Mapping[str, int]) -> None:
        super().__init__(expected, groups)
        self._cases = cases

    def error(self, difference: Difference) -> TracingError:
        program, _, sample = self._cases[difference.sample]
        node = self.run.node if difference.seen.name is not None else None
        node = node or program.segments[-1].graph.output_node()
        source = _argument(node, difference.path) or node
        place = source.meta.get("place") or node.meta.get("place") or "the end of forward"
        return Mismatch(f"{place}: verify: batch {sample}: {difference.what} (node {source.name}); {_REMEDY}")

    def raised(self, error: Exception, sample: int) -> TracingError:
        name, _, place = getattr(error, "__notes__", ["the recorded graph, "])[-1].rpartition(", ")
        return Mismatch(
            f"{place or 'forward'}: verify: batch {self._cases[sample].sample}: {one_line(error)} ({name}), which the plain "
            f"model does not raise; {_REMEDY}"
        )


_REMEDY = 'use engine="suspend", or wrap the function at this line with leaf(fn)'


def _argument(node: fx.Node, path: str) -> fx.Node | None:
    """Find the node that made the argument in which a difference was found."""
    keys = [key for key in path.replace("]", "").split("[") if key]
    value: Any = (node.args, node.kwargs) if node.op != "output" else (node.args,)
    for key in keys if node.op != "output" else ["0", "0", *keys]:
        if isinstance(value, fx.Node):
            return value
        value = (
            value.get(key) if isinstance(value, dict) else value[int(key)] if isinstance(value, tuple | list) and key.isdigit() else None
        )
    return value if isinstance(value, fx.Node) else None


def _taken_apart(targets: Mapping[str, int]) -> set[str]:
    """Name the modules that hold a target; a graph does not call them."""
    found = {""} if any(targets) else set()
    for target in targets:
        parts = target.split(".")
        found |= {".".join(parts[:number]) for number in range(1, len(parts))}
    return found - set(targets)
