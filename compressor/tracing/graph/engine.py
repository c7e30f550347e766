"""The graph engine as a plan sees it: which program each batch takes, the proof that it is right, and what there is to say about it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.tracing.footprint import Footprint, held_tensors
from compressor.tracing.graph.guards import Wording, describe_guard
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.graph.planner import GraphPlanner, Variant
from compressor.tracing.graph.program import Program, target_of
from compressor.tracing.graph.run import GraphRun
from compressor.tracing.picking import are_new_together, excerpt, facts_of, other_content, pick, unproved
from compressor.tracing.proof import Comparison, Difference, Found, OtherNumbers, Seen
from compressor.tracing.reads import HostReads, LeftMemory, catching
from compressor.tracing.targets.call_order import check_weights, plain_forwards
from compressor.tracing.targets.partition import module_names, taken_apart
from compressor.tracing.targets.records import Guard, Stage, Verify
from compressor.tracing.targets.running import RenewingStore

# The proof of recorded graphs: they are run as a run does, beside the plain model, and all that modules see is compared, bit for bit.

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
    returning: Callable[[], AbstractContextManager[Footprint | None]] = nullcontext,
    numbers: OtherNumbers | None = None,
    inside: bool = True,
    is_few: bool = False,
) -> Found:
    """Run recorded graphs and the plain model on the same batches, and compare all that modules are given and give back.

    All plain forwards come first: a graph that depends on what the forward of its own batch left behind then meets what another left. Where
    there are several rounds, they go on from each other, as the run does.

    Args:
        model: as it was afterwards.
        cases: what to compare; the graphs are read as they are now.
        groups: target to the number of the stage it shares.
        returning: context that puts the model back after a forward.
        numbers: changes what targets compute, in the plain model and in the graphs.
        inside: look at the modules inside targets, too, and not only at what targets are given and give.
        is_few: these are to stand for other batches, so look for tensors that one leaves to the next.

    Returns:
        What was found beside.

    Raises:
        Mismatch: the first difference: module, value, node and line.
    """
    around = taken_apart(groups)
    below = set() if inside else {name for target in groups for name in module_names(model, target) if name != target}
    watched = [name for name, _ in model.named_modules() if name not in around and name not in below]
    found, reads = Found((), ""), HostReads(model, around)
    comparisons = []
    for taken in _rounds(cases):
        batches = [case.batch for case in taken]
        for case in taken if numbers is None else ():
            with returning():
                case.program.lent |= check_weights(model, groups, case.batch)
        left = LeftMemory([*held_tensors(model), *batches]) if is_few else None
        expected, kept = plain_forwards(model, watched, batches, returning, numbers, left, reads if is_few else None)
        reads.forget()
        comparisons.append((_GraphComparison(taken, expected, groups, numbers, left), left))
        found = Found(found.kept + kept, found.left or reads.first)
    with returning():  # once for all rounds: what a sample leaves behind is there for those of later rounds, as in a run
        for comparison, _ in comparisons:
            comparison.follow_graphs(model, watched, groups)
    return Found(found.kept, found.left or next((left.first for _, left in comparisons if left is not None and left.first), ""))


def _rounds(cases: Sequence[Case]) -> list[list[Case]]:
    """In the order of the run, so that each meets what those before it have left, and the last of one round again in the next."""
    ordered = sorted(cases, key=lambda case: case.sample)
    return [ordered[start : start + _AT_ONCE] for start in range(0, max(1, len(ordered) - 1), _AT_ONCE - 1)]


class _GraphComparison(Comparison):
    """Finds node and line of a difference."""

    run: GraphRun

    def __init__(
        self,
        cases: Sequence[Case],
        expected: Sequence[Sequence[Seen]],
        groups: Mapping[str, int],
        numbers: OtherNumbers | None,
        left: LeftMemory | None,
    ) -> None:
        super().__init__(expected, groups, numbers, left)
        self._cases = cases

    def follow_graphs(self, model: nn.Module, watched: Collection[str], groups: Mapping[str, int]) -> None:
        """Take the samples through the stages of their graphs, and compare; see `follow`."""
        batches, programs = [case.batch for case in self._cases], [case.program for case in self._cases]
        self.run = GraphRun(model, batches, programs, groups, RenewingStore(), on_sample=self.begin, keep_outputs=True, may_wait=True)
        self.follow(self.run, watched, model)

    def error(self, difference: Difference) -> TracingError:
        program, _, sample = self._cases[difference.sample]
        # The call that ran last; the result of the forward belongs to none.
        node = self.run.node if difference.seen.name is not None else None
        node = node or program.segments[-1].graph.output_node()
        source = _argument(node, difference.path) or node
        place = source.meta.get("place") or node.meta.get("place") or "the end of forward"
        when = "" if self._numbers is None else "with other numbers inside the targets, as compression makes them, "
        return Mismatch(f"{place}: verify: batch {sample}: {when}{difference.what} (node {source.name}); {_REMEDY}")

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


def _refuse_other_results(variants: Sequence[Variant]) -> None:
    """Refuse a module behind a target that builds its results by what it reads off its data, as the variants show."""
    known: dict[Any, Any] = {}
    for variant in variants:
        calls: Counter[Any] = Counter()
        for node in variant.guards.late_results:
            asked: Any = node.args[0]
            name = asked.args[0].target
            calls[name] += 1
            if name in variant.program.readers and known.setdefault((name, calls[name]), node.args[1]) != node.args[1]:
                raise TracingError(
                    f"{node.args[2]}: {name} builds its result by values behind a sequential target, in other ways for other batches, and "
                    'compression changes them; only engine="suspend" can follow'
                )


class GraphEngine:
    """A planner, with the proofs of its programs.

    Attributes:
        planner: records programs and gives batches theirs.
        num_verified: batches on which a program was held against the plain model.
        kept: attributes of modules by which one batch changes what the next one gives in the plain model.
        widened: why all batches are proved, where `verify="first"` would take a few; empty if it does.
    """

    def __init__(self, model: nn.Module, planner: GraphPlanner, verify: Verify, device: torch.device | None) -> None:
        """Start without a program."""
        self.planner = planner
        self.num_verified = 0
        self.widened = ""
        self.kept: set[str] = set()
        self._left = ""  # by one batch to another, as a proof of few has shown
        self._model, self._verify, self._device = model, verify, device
        # Planning may start over: what was proved of a program goes with it.
        self._proved: WeakKeyDictionary[Variant, dict[Any, set[Any]]] = WeakKeyDictionary()
        self._together: dict[Any, set[Any]] = {}  # contents that took turns in one proof

    def choose(self, batches: Sequence[Batch]) -> list[Variant]:
        """Give each batch its variant, and prove those that are new.

        Args:
            batches: not modified.

        Returns:
            A variant for each batch.

        Raises:
            TracingError: the engine cannot follow the model, or a program computes something else than the plain model.
        """
        chosen = self.planner.choose(batches)
        for variant in self.planner.variants:
            variant.num_batches = sum(one is variant for one in chosen)
        _refuse_other_results(list(dict.fromkeys(chosen)))
        self.widened = self._blind_spot(chosen) if self._verify == "first" else ""
        few, others = self._to_prove(chosen, batches)
        if not self.widened:
            # Excerpts are quick and show what a graph has frozen; where they fail or are no proof, whole batches decide.
            if not self._verify_excerpts(chosen, batches, few):
                self.verify(chosen, batches, few)
            if not self._left:
                return chosen
            self.widened = self._left
            others = [one for found in self._to_prove(chosen, batches) for one in found if one not in few]
        self.verify(chosen, batches, few)
        if few:
            self._verify_widely(chosen, batches, few, others)
        return chosen

    def _verify_excerpts(self, chosen: Sequence[Variant], batches: Sequence[Batch], samples: Sequence[int]) -> bool:
        """Compare on a few rows and tokens of each batch; False where that proves nothing, and whole batches must be compared."""
        if self._verify == "all":
            return False
        cases = self._cases(chosen, batches, samples)
        small = [case._replace(batch=excerpt(case.batch, place)) for place, case in enumerate(cases)]
        try:
            self._note(verify_programs(self._model, small, self.planner.groups, self.planner.returning, is_few=True))
        except TracingError:
            return False  # of these sizes the graph may be wrong where of the whole batch it is right, or the model itself fails
        self.num_verified += len(samples)
        return True

    def _verify_widely(self, chosen: Sequence[Variant], batches: Sequence[Batch], few: Sequence[int], others: Sequence[int]) -> None:
        """Compare on all other batches, and as if targets were compressed by far: what Python reads of their numbers may differ then."""
        groups, returning = self.planner.groups, self.planner.returning
        if others:
            together = self._cases(chosen, batches, [*few, *others])  # what the few leave may be for one of the others
            self._note(verify_programs(self._model, together, groups, returning, inside=False))
            self.num_verified += len(others)
        try:
            numbers = OtherNumbers(self._model, groups)
            verify_programs(self._model, self._cases(chosen, batches, few[:_AT_ONCE]), groups, returning, numbers)
        except Unrepeatable:
            return  # the model itself does not run with these numbers

    def _blind_spot(self, chosen: Sequence[Variant]) -> str:
        """Say why a few batches would be no proof for the others."""
        programs = [variant.program for variant in dict.fromkeys(chosen)]
        reads = self._left or next((program.reads for program in programs if program.reads), "")
        if reads:
            return reads
        catches = catching(code for program in programs for code in program.busy)
        return f"{catches} catches exceptions around layers" if catches else ""

    def _to_prove(self, chosen: Sequence[Variant], batches: Sequence[Batch]) -> tuple[list[int], list[int]]:
        """Choose the batches for the proof, and those for the quicker part of it; takes them for proved from now on."""
        few: list[int] = []
        others: list[int] = []
        for variant in dict.fromkeys(chosen) if self._verify != "off" else ():
            samples = [sample for sample, one in enumerate(chosen) if one is variant]
            proved = self._proved.setdefault(variant, {})
            if self._verify == "all":
                few += unproved(samples, batches, proved)
                continue
            picked = pick({sample: facts_of(batches[sample]) for sample in samples}, proved)
            picked += other_content([sample for sample in samples if sample not in picked], picked, batches, proved)
            few += picked
            if self.widened:
                others += [sample for sample in unproved(samples, batches, proved) if sample not in picked]
        if (self.widened or self._verify == "all") and are_new_together(batches, self._together):
            few += [sample for sample in range(len(batches)) if sample not in few and sample not in others]
        return self._connected(few, others, len(batches))

    def _connected(self, few: list[int], others: list[int], number: int) -> tuple[list[int], list[int]]:
        """Add one that is proved already: alone, or among their like, new ones would meet nothing else that a sample has left behind."""
        if len(few) + len(others) == 1 or ((few or others) and (self.widened or self._verify == "all")):
            few = [sample for sample in range(number) if sample not in few and sample not in others][:1] + few
        return (few, others) if few else (others[:_AT_ONCE], others[_AT_ONCE:])

    def verify(self, chosen: Sequence[Variant], batches: Sequence[Batch], samples: Sequence[int]) -> None:
        """Hold programs, as they are now, against the plain model.

        Args:
            chosen: variant of each batch.
            batches: not modified.
            samples: numbers of the batches to compare.

        Raises:
            TracingError: the first difference.
        """
        cases = self._cases(chosen, batches, samples)
        is_few = self._verify == "first" and not self.widened
        self._note(verify_programs(self._model, cases, self.planner.groups, self.planner.returning, is_few=is_few))
        self.num_verified += len(samples)

    def _note(self, found: Found) -> None:
        self.kept |= set(found.kept)
        self._left = self._left or found.left

    def _cases(self, chosen: Sequence[Variant], batches: Sequence[Batch], samples: Sequence[int]) -> list[Case]:
        here = {sample: batches[sample] if self._device is None else batch_to(batches[sample], self._device) for sample in samples}
        return [Case(chosen[sample].program, batch, sample) for sample, batch in here.items()]

    def stages(self) -> tuple[Stage, ...]:
        """Describe the stages of the first variant."""
        program = self.planner.variants[0].program
        segments, made = program.segments, []
        calls = Counter(target_of(node) for node in program.flat.nodes if node.op == "call_module")
        for index, segment in enumerate(segments[1:]):
            following = segments[index + 2].live_in if index + 2 < len(segments) else ()
            modules = tuple(name for target in segment.targets for name in module_names(self._model, target))
            made.append(
                Stage(
                    index=index,
                    target_names=segment.targets,
                    modules=modules,
                    live_in=segment.live_in,
                    live_out=following,
                    mutates=tuple(name for name in segment.live_in if name in segment.mutates),
                    live_bytes=segment.live_bytes,
                    num_calls=sum(calls[name] for name in segment.targets),
                    graph=segment.graph,
                )
            )
        return tuple(made)

    def guards(self) -> tuple[Guard, ...]:
        """Describe the guards of all variants, but for those that cannot fail."""
        names = list(inspect.signature(self._model.forward).parameters)
        wording = Wording({f"arg_{place}": name for place, name in enumerate(names)})
        made = []
        for variant in self.planner.variants:
            place = {node.name: index for index, segment in enumerate(variant.program.segments) for node in segment.graph.nodes}
            made += [describe_guard(node, place.get(node.name, 0), variant.index, wording) for node in variant.program.guard_nodes]
        return tuple(one for one in made if one is not None)
