"""The way to trace a model: `trace` gives a Plan, and the plan runs batches stage by stage.

    plan = trace(model, batches, targets=None, leaves=(), engine="auto", max_variants=8, verify="first")
    plan.stages, plan.variants, plan.guards, plan.leaves, plan.engine, plan.why, plan.report()
    for stage in plan.run(batches, store):
        stage.calibrate()      # then compress what lies inside
        stage.propagate()

Randomness: every sample's forward starts from the state that the random generators have when the run starts, and keeps a state of its
own, so that a sample sees the same numbers whatever the other samples do, and in both passes of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.model import resolve_device
from compressor.settings.kinds import DEVICE, FLAG, FUNCTION, MODULE, TEXTS, WHOLE, Kind
from compressor.settings.options import checked
from compressor.tracing.footprint import Footprint, Stirred
from compressor.tracing.graph.engine import GraphEngine
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.graph.planner import GraphPlanner, Variant, content_digest
from compressor.tracing.graph.program import schedule
from compressor.tracing.graph.run import GraphRun
from compressor.tracing.graph.shared_objects import exchanged, written_in_place
from compressor.tracing.picking import are_leaves, are_new_together, as_batches, check_model, excerpt, uncalled_of
from compressor.tracing.proof import Found
from compressor.tracing.reads import check_borrowed
from compressor.tracing.suspend.engine import SuspendedRun
from compressor.tracing.suspend.interleaving import check_apart, check_apart_with_other_numbers, pick_apart
from compressor.tracing.targets.call_order import observe_trail, plain_forward, settles, stages_of
from compressor.tracing.targets.order import Trail, check_orders, check_replaced, merged_rank, run_late
from compressor.tracing.targets.partition import Partition, module_names, partition
from compressor.tracing.targets.records import Engine, Guard, Leaf, Stage, Verify, check_tracing_options
from compressor.tracing.targets.running import Run, RunningStage, ValueStore, Watched, hooked, hooks_around
from compressor.tracing.targets.sample_state import TorchState
from compressor.tracing.traces import KeptWeights, PythonValues, Traces, check_kept_weights

__all__ = ["Engine", "Guard", "Leaf", "Plan", "Run", "RunningStage", "Stage", "Verify", "trace"]

_Made = TypeVar("_Made")


class Plan:
    """How the batches of a model flow through its sequential targets.

    Attributes:
        model: the model.
        partition: its targets, and why these.
        engine: `graph` or `suspend`: what runs.
        why: why this engine, in one line.
        stages: in the order in which the first batch reaches them.
        uncalled: targets that none of the batches that were planned calls.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Partition,
        asked: Engine,
        make_graph: Callable[[], GraphEngine],
        verify: Verify,
        device: torch.device | None,
        put_away: Callable[[], None],
    ) -> None:
        """Made by `trace`."""
        self.model, self._put_away = model, put_away
        self.partition = cut
        self.engine: Engine = "graph"
        self.why = ""
        self.stages: tuple[Stage, ...] = ()
        self._asked, self._make_graph, self._verify, self._device = asked, make_graph, verify, device
        self._graph: GraphEngine | None = None
        self.uncalled: tuple[str, ...] = ()
        self._trails: dict[bytes, Trail] = {}  # by the content of the batch
        self._kept: set[str] = set()
        self._own_hooks = frozenset(number for module in model.modules() for number in hooks_around(module))
        self._widened, self._left = "", ""  # why all batches take turns; what one left to another where a few did
        self._apart: dict[Any, set[Any]] = {}  # of batches that were run in turns to show that they do not notice each other
        self._stirred = Stirred()  # what forwards change
        self._settles: bool | None = None  # the first forward rewrites tensors, and later ones do not
        self._has_read = False  # forwards have been seen to read the same weights again
        self._planned_on: PythonValues | None = None
        self._changed = ""  # of that, before the last run
        self._traces: Traces | None = None  # of the last run
        self._footprint: Footprint | None = None  # of the model as forwards find it; while there is planning
        self._start_over()

    @property
    def rewritten(self) -> tuple[str, ...]:
        """Parameters and buffers that the model's own forward rewrites; as they were when planning and runs have ended."""
        return tuple(self._stirred.rewritten)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The recorded forwards, each with its graphs: `variant.segments[k].graph`; empty for the suspend engine."""
        return () if self._graph is None else tuple(self._graph.planner.variants)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What Python code looked at, of all variants; empty for the suspend engine, which looks again itself."""
        return () if self._graph is None else self._graph.guards()

    @property
    def kept(self) -> tuple[str, ...]:
        """Attributes of modules by which one batch changes the next one's result in the plain model; here each starts from the model's."""
        return tuple(sorted(self._kept | (set() if self._graph is None else self._graph.kept)))

    @property
    def widened(self) -> str:
        """Why all batches were proved, where a few would have been no proof for the others; empty where a few were enough."""
        return self._widened if self._graph is None else self._graph.widened

    @property
    def unproved(self) -> str:
        """A place in the model that the last run has changed though no batch of the proof did; empty where there is none."""
        return "" if self._traces is None else self._traces.unproved

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Functions that are recorded as one node."""
        return () if self._graph is None else self._graph.planner.leaves

    @checked(
        store=Kind(lambda value: all(hasattr(value, name) for name in ("put", "get", "prefetch", "drop", "close")), "a ValueStore"),
        device=DEVICE,
        **dict.fromkeys(("watched", "on_sample", "quiet", "beside", "everywhere"), FUNCTION),
        **dict.fromkeys(("keep_outputs", "may_wait"), FLAG),
    )
    def run(
        self,
        batches: Sequence[Batch],
        store: ValueStore | None = None,
        *,
        device: torch.device | None = None,
        watched: Callable[[], Watched] | None = None,
        keeping: Watched | None = None,
        on_sample: Callable[[int], None] = lambda index: None,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep_outputs: bool = False,
        beside: Callable[[], AbstractContextManager[None]] | None = None,
        own: Collection[int] | None = None,
        everywhere: Callable[[Sequence[str]], list[str]] = list,
        may_wait: bool = False,
    ) -> Run:
        """Prepare to run batches stage by stage. Batches that were not traced are planned first, before any stage.

        Args:
            batches: one forward each; need not be those that were traced.
            store: where values wait between stages; None keeps them where they are. The suspend engine keeps them in paused frames.
            device: of the model; None leaves batches where they are.
            watched: modules with calibration hooks, which keep statistics; None: all with hooks, but those from before `trace` keep none.
            keeping: those of the watched modules on which, or below, hooks keep statistics of all samples; None: all.
            on_sample: called with the number of a sample before it runs on.
            quiet: context in which hooks of calibrated targets sleep.
            keep_outputs: keep what the forwards return.
            beside: run a twin of every batch through the targets as they are before each stage; context for hooks that see it (graph only).
            own: numbers of the batches that run here; the others run in processes that share them. None: all.
            everywhere: puts names of all these processes together; for the suspend engine, which finds the order of stages as it runs.
            may_wait: where much would be live behind a stage, batches run through it with the next one; but for the suspend engine.

        Returns:
            The stages.

        Raises:
            TracingError: the engine that was asked for cannot follow these batches.
        """
        batches = as_batches(batches)
        known, has_hooks = self._set_by_forwards(), watched is None
        if watched is None:
            watched, keeping = lambda: hooked(self.model), hooked(self.model, self._own_hooks)
        self._notice_changes()

        def decide() -> tuple[list[Variant] | None, tuple[Trail, ...]]:
            self._check_kept_weights(batches[0])
            chosen = self._plan(batches)
            return chosen, () if chosen is not None else self._look(batches)

        def settle() -> None:
            with quiet():
                self._forward(batches[0])

        with quiet():
            chosen, trails = self._unchanged(batches, decide)
        kept_by_hooks = watched() if keeping is None else keeping
        to_look_at = None if self._verify != "first" or self.widened else kept_by_hooks
        self._traces = traces = Traces(self.model, self._stirred, settle if self._settles else None, to_look_at)
        known = known if has_hooks else self._set_by_forwards()  # which do not sleep while more is planned
        common: Any = {"device": device, "watched": watched, "keeping": keeping, "on_sample": on_sample, "quiet": quiet, "own": own}
        common |= {"keep_outputs": keep_outputs, "traces": traces, "set_by_forwards": known}
        if chosen is None or self._graph is None:
            targets = self.partition.targets
            return SuspendedRun(self.model, targets, batches, trails=trails, everywhere=everywhere, **common)
        programs, groups = [variant.program for variant in chosen], self._graph.planner.groups
        return GraphRun(self.model, batches, programs, groups, store, beside=beside, may_wait=may_wait, **common)

    def run_late(self, watched: Collection[str]) -> tuple[str, ...]:
        """Find targets that run, or whose weights are read, after their stage on the way to what a later stage learns from.

        Args:
            watched: modules that learn.

        Returns:
            Their names.
        """
        if self.engine == "graph":
            programs = [variant.program for variant in self.variants]
            return tuple(dict.fromkeys(name for one in programs for name in (*one.called_late(watched), *sorted(one.lent))))
        trails, targets = tuple(self._trails.values()), self.partition.targets
        rank = merged_rank(trails, {name: place for place, name in enumerate(targets)})
        learning = [name for name in targets if not set(watched).isdisjoint(module_names(self.model, name))]
        return tuple(dict.fromkeys((*run_late(trails, rank, learning), *sorted({name for trail in trails for name in trail.lent}))))

    def _set_by_forwards(self) -> frozenset[str]:
        """What the forwards that have been planned set on modules, by dotted name."""
        planned = [*(variant.program.reassigned for variant in self.variants), *(one.reassigned for one in self._trails.values())]
        return frozenset[str]().union(*planned)

    def _notice_changes(self) -> None:
        """Plan anew where Python between targets would read something else now than when the plan was made."""
        now = PythonValues(self.model, self.partition.targets)
        self._changed = "" if self._planned_on is None else self._planned_on.change(now)
        self._planned_on = now
        if self._changed:
            self._start_over()

    def _unchanged(self, batches: Sequence[Batch], work: Callable[[], _Made]) -> _Made:
        """Let planning find the model as every forward of a run will, and put it back, however planning ends.

        A model may rewrite its weights in its first forward (RWKV divides them). If a second one leaves them alone, all begin there.
        """
        made, refused = None, None
        if not self._settles:
            try:
                with self._looking(Footprint(self.model)):
                    made = work()
            except TracingError as error:
                refused = error
            may_settle = self.rewritten or (isinstance(refused, Unrepeatable) and not isinstance(refused, KeptWeights))
            if self._settles is None and may_settle:
                self._settles = settles(self.model, self.partition.targets, lambda: self._forward(batches[0]))
            if not self._settles:
                if refused is not None:
                    raise refused
                return cast("_Made", made)
            self._start_over()
        with self._looking(Footprint(self.model)):
            self._forward(batches[0])
            with self._looking(Footprint(self.model)):
                return work()

    @contextmanager
    def _looking(self, footprint: Footprint) -> Iterator[None]:
        outer, self._footprint = self._footprint, footprint
        try:
            with footprint, ExitStack() as away:
                away.callback(self._put_away)
                yield
        finally:
            self._footprint = outer
            self._stirred.add(footprint.stirred)

    def _start_over(self) -> None:
        """Forget what was planned."""
        self._graph = None if self._asked == "suspend" else self._make_graph()
        self.engine = "suspend" if self._graph is None else "graph"
        self.why = "asked for" if self._asked != "auto" else "all batches can be followed"
        for kept in (self._apart, self._trails, self._kept):
            kept.clear()
        if self._graph is not None:
            self._graph.planner.returning = self._returning

    def _check_kept_weights(self, batch: Batch) -> None:
        """Look at the first batch only: before anything else has run, for what is kept shows once."""
        if not self._has_read and self._verify != "off":
            here = batch if self._device is None else batch_to(batch, self._device)
            try:
                with self._returning():
                    check_kept_weights(self.model, self.partition.targets, excerpt(here, 0))
            except Unrepeatable as error:
                if isinstance(error, KeptWeights):
                    raise
                with self._returning():  # the model may take whole batches only
                    check_kept_weights(self.model, self.partition.targets, here)
            self._has_read = True

    def _forward(self, batch: Batch) -> Any:
        """Run a plain forward; what it leaves on the model stays."""
        state = TorchState.current(foreign=True)
        try:
            with torch.no_grad():
                return plain_forward(self.model, batch if self._device is None else batch_to(batch, self._device))
        finally:
            state.restore()

    @contextmanager
    def _returning(self) -> Iterator[Footprint | None]:
        """Put the model back at the end of a forward, or of several that belong together."""
        with nullcontext() if self._footprint is None else self._footprint.returning() as before, ExitStack() as away:
            away.callback(self._put_away)
            yield before

    def verify(self, batches: Sequence[Batch]) -> int:
        """Hold the recorded graphs, as they are now, against the plain model, bit for bit.

        Args:
            batches: those that no graph covers yet are planned first.

        Returns:
            How many batches were compared; none for the suspend engine, which runs the plain model itself.

        Raises:
            TracingError: the first difference: module, node and line.
        """
        batches = as_batches(batches)
        return self._unchanged(batches, lambda: self._verified(batches))

    def _verified(self, batches: Sequence[Batch]) -> int:
        chosen = self._plan(batches)
        if chosen is None or self._graph is None:
            return 0
        self._graph.verify(chosen, batches, range(len(batches)))
        return len(batches)

    def _plan(self, batches: Sequence[Batch]) -> list[Variant] | None:
        """Give each batch its variant; None where the suspend engine must run them."""
        if self._graph is None:
            return None
        try:
            chosen = self._graph.choose(batches)
            schedule([variant.program for variant in chosen], self._graph.planner.groups)
            used = [use for variant in chosen for use in variant.program.borrowed]
            check_borrowed(used, {name for variant in chosen for name in variant.program.targets})
        except TracingError as error:
            if self._asked == "graph" and error.__cause__ is not None:  # the model's own, if it raises without a recorder, too
                for batch in batches:
                    self._trail(batch)
            if self._asked == "graph" or isinstance(error, Unrepeatable):
                raise
            self.engine, self.why, self._graph = "suspend", f"the graph engine refused: {error}", None
            return None
        self.stages = self._graph.stages()
        self._note_uncalled({name for variant in chosen for name in variant.program.targets})
        return chosen

    def _look(self, batches: Sequence[Batch]) -> tuple[Trail, ...]:
        """Prepare for the suspend engine: see what each batch calls, and that forwards which take turns do not notice each other."""
        try:
            trails = tuple(self._trail(batch) for batch in batches)
            self._note_uncalled(called := {name for trail in trails for name in trail.calls})
            check_borrowed((use for trail in trails for use in trail.borrowed), called)
            check_replaced(trails)
            check_orders(trails, merged_rank(trails, {name: place for place, name in enumerate(self.partition.targets)}))
            self._check_turns(batches, trails)
        except TracingError as error:
            odd = self._rewritten_anew()
            if odd and not isinstance(error, Unrepeatable):
                is_written = self._footprint is not None and self._footprint.is_written(odd[0])
                raise Unrepeatable((written_in_place if is_written else exchanged)(odd[0])) from error
            if self._asked != "auto" or isinstance(error, Unrepeatable):
                raise
            raise TracingError(f"{error} ({self.why.rsplit('; ', 1)[0]})") from error  # what it advises has been done
        self.stages = stages_of(self.model, trails[0])
        return trails

    def _check_turns(self, batches: Sequence[Batch], trails: Sequence[Trail]) -> None:
        """Let a few batches take turns, or all of them, as in the run, where a few could agree by chance."""
        reads = self._left or next((trail.reads for trail in trails if trail.reads), "")
        if self._verify == "off" and not self._rewritten_anew():
            return
        if is_few := self._verify != "all" and not reads:
            turns = pick_apart(batches, self._apart)
        else:
            self._widened = reads if self._verify == "first" else ""
            turns = [*batches] if are_new_together(batches, self._apart) else []
        given = (self.model, self.partition.targets, turns, self._device, trails, self._returning)
        found = check_apart(*given, is_few=is_few and self._verify == "first") if turns else Found((), "")
        self._kept |= set(found.kept)
        if found.left:
            self._left = found.left
            self._check_turns(batches, trails)
        elif turns and self._widened:
            check_apart_with_other_numbers(*given)

    def _rewritten_anew(self) -> tuple[str, ...]:
        """Tensors that more than the first forward rewrites."""
        return () if self._footprint is None else tuple(self._footprint.stirred.rewritten)

    def _trail(self, batch: Batch) -> Trail:
        """Run a plain forward of a batch that has not been seen: which targets it calls may depend on all that is in it."""
        digest = content_digest(batch)
        if digest not in self._trails:
            here = batch if self._device is None else batch_to(batch, self._device)
            with self._returning() as before:
                self._trails[digest] = observe_trail(self.model, self.partition, here, before)
        return self._trails[digest]

    def _note_uncalled(self, called: Collection[str]) -> None:
        self.uncalled = uncalled_of(self.partition.targets, called)

    def report(self) -> str:
        """Say in a few lines what was decided and why."""
        lines = [f"engine: {self.engine} ({self.why})", f"targets: {self.partition.reason}"]
        lines.append(f"stages: {len(self.stages)}, traced into {len(self.stages) + 1} subgraphs")
        if self._graph is not None:
            planner = self._graph.planner
            lines.append(f"planning: {planner.num_forwards} forwards, {self._graph.num_verified} batches verified against the plain model")
            lines += [f"variant {one.index}: {one.num_batches} batches, {len(one.program.guard_nodes)} guards" for one in planner.variants]
        lines += [f"planned anew: {self._changed}"] if self._changed else []
        lines += [f"proof: all batches, for {self.widened}"] if self.widened else []
        lines += [f"rewritten: {', '.join(self.rewritten)} by the model's own forward; put back when a run ends"] if self.rewritten else []
        if self.kept:
            lines.append(f"state: {', '.join(self.kept)} would pass from batch to batch; every batch starts with the state of the model")
        lines += [f"leaf {leaf.name}: {leaf.reason}" for leaf in self.leaves]
        lines += [f"guard {guard}" for guard in self.guards if guard.is_value]
        return "\n".join(lines)


@checked(
    model=MODULE,
    targets=Kind(lambda value: isinstance(value, Partition) or TEXTS.holds(value), "a list of texts, or what `partition` gave"),
    leaves=Kind(are_leaves, "a list of functions, or of texts 'package.module:function'"),
    max_variants=WHOLE,
    device=DEVICE,
    targets_per_stage=Kind(lambda value: value == "input" or WHOLE.holds(value), "a whole number, or 'input'"),
    put_away=FUNCTION,
)
def trace(
    model: nn.Module,
    batches: Sequence[Batch],
    targets: Sequence[str] | Partition | None = None,
    leaves: Sequence[str | Callable[..., Any]] = (),
    engine: Engine = "auto",
    max_variants: int = 8,
    verify: Verify = "first",
    device: torch.device | None = None,
    targets_per_stage: int | Literal["input"] = 1,
    put_away: Callable[[], None] = lambda: None,
) -> Plan:
    """Find out how batches flow through the sequential targets of a model.

    Args:
        model: in eval mode, and without caches that grow; as it was afterwards.
        batches: what will be run, or a sample of it; at least one. Mappings, tuples or tensors.
        targets: class names, dotted names or `re:` patterns, or what `partition` gave; None infers them.
        leaves: functions, or `package.module:qualified.name`, that are recorded as one node.
        engine: `graph`, `suspend`, or `auto`: the graph engine where it can follow the model, else the suspend engine.
        max_variants: recorded graphs at most.
        verify: batches on which the plan is compared with the plain model, bit for bit: none, for each recorded graph the first one and
            those that give each size another value, or other padding, or all. What these batches show is right or refused. `first` takes
            all where it sees that the first ones would be no proof for the others (see The proof in the chapter); for what it does not
            see, take `all`. With `auto` a difference is a reason to take the suspend engine, and reported. The suspend engine, but for
            `off`, runs the batches, chosen likewise, alone and in turns, to show that they do not notice each other.
        device: of the model; None leaves batches where they are.
        targets_per_stage: targets that follow each other and share a stage; `input`: as many as read the same values. Anything but 1
            needs the graph engine.
        put_away: takes back what was lent to the model for forwards, before it is held against what it was.

    Returns:
        The plan.

    Raises:
        TracingError: a choice that does not exist, no batch, or a model that the engine cannot follow.
        TargetError: a pattern matches nothing, or a target lies inside another.
        ModelError: there is no such device.
    """
    check_tracing_options(engine, verify, max_variants)
    device = None if device is None else resolve_device(device)
    batches = as_batches(batches)
    if targets_per_stage != 1 and (engine == "suspend" or (targets_per_stage != "input" and targets_per_stage < 1)):
        where = f"targets_per_stage (--targets-per-subgraph): {targets_per_stage} is not possible with engine={engine!r}"
        raise TracingError(f"{where}; give 1, or take the graph engine")
    check_model(model)
    cut = targets if isinstance(targets, Partition) else partition(model, targets)
    sizes: Any = {"max_variants": max_variants, "targets_per_stage": targets_per_stage}

    def make_graph() -> GraphEngine:
        return GraphEngine(model, GraphPlanner(model, cut.targets, leaves=leaves, device=device, **sizes), verify, device)

    plan = Plan(model, cut, engine, make_graph, verify, device, put_away)

    def decide() -> None:
        plan._check_kept_weights(batches[0])
        if plan._plan(batches) is None:
            if targets_per_stage != 1:
                raise TracingError(f"targets_per_stage: {targets_per_stage} was given, but {plan.why}; give 1")
            plan._look(batches)

    plan._planned_on = PythonValues(model, cut.targets)
    plan._unchanged(batches, decide)
    return plan
