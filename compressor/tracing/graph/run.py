"""Batches on their way through recorded graphs, stage by stage: calibrate on copies, then propagate for real.

Every sample has its own state of the random generators and its own view of what forwards set on modules; both start as they are when
the run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.nn.online_rotation import sees_outputs
from compressor.random_state import RandomState
from compressor.tracing.footprint import Stirred
from compressor.tracing.graph.nodes import ROOT
from compressor.tracing.graph.planner import copy_batch, named_inputs
from compressor.tracing.graph.program import Program, Stop, check_inside, find_module, schedule, target_of
from compressor.tracing.graph.replay import (
    OF_ALL_MODULES,
    CallModule,
    call_plainly,
    copy_alone,
    needed_to_show,
    next_values,
    run_segment,
    show_inputs,
    show_to_hooks,
)
from compressor.tracing.graph.torch_patches import noting_values
from compressor.tracing.targets.partition import module_names
from compressor.tracing.targets.running import WAITING_STREAMS, MemoryStore, ValueStore, Watched
from compressor.tracing.targets.sample_state import ModuleValues, SetByForwards, View, copy_arguments
from compressor.tracing.traces import Traces

# Copies of live values for a calibration pass, so that the propagation pass finds them as they were.


_LIVE = ("this value, which lives on behind a stage,", 'use engine="suspend", or, where a sequential target is handed it, pipeline="basic"')


def copy_live(values: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Copy all that is live, since what a target writes to, and in what way, may depend on the sample.

    Args:
        values: live values by name; not modified.
        model: its modules and tensors are not copied.

    Returns:
        The values; tensors that share memory share it in the copy, too.
    """
    ordered = sorted(values, key=lambda name: not isinstance(values[name], Tensor))  # tensors before the objects that hold them as well
    copies = copy_arguments({name: values[name] for name in ordered}, model, _LIVE)
    return {name: copies[name] for name in values}


class GraphRun:
    """Batches of one model on their way through recorded graphs. A context manager and an iterator over stages.

    Attributes:
        model: the model; its modules may be replaced between the two passes of a stage.
        outputs: what each forward returned, when kept; None for a forward that was ended early.
        uncalled: targets that no sample calls.
        node: of the module call that runs, or ran last; for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        programs: Sequence[Program],
        groups: Mapping[str, int],
        store: ValueStore | None,
        *,
        device: torch.device | None = None,
        watched: Callable[[], Watched] = tuple,
        keeping: Watched | None = None,
        on_sample: Callable[[int], None] = lambda index: None,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep_outputs: bool = False,
        traces: Traces | None = None,
        beside: Callable[[], AbstractContextManager[None]] | None = None,
        own: Collection[int] | None = None,
        may_wait: bool = False,
        set_by_forwards: Collection[str] = (),
    ) -> None:
        """Schedule the stages of all batches; nothing runs yet, and of the batches only `own` will, where others run elsewhere.

        With `beside`, every batch has a twin, whose number is larger by the number of batches: a twin runs through each stage before that
        is compressed, ahead of the calibration of its batch. Its hooks are awake inside the targets, within the context that is given.
        Where more would wait behind a stage than before it, the twin is only shown to the hooks, and runs through the modules as they
        were when the next stage is calibrated. With `may_wait` batches wait like that themselves where all would take more than
        WAITING_STREAMS allows: they run through the compressed modules twice, for the hooks of the next stage and for good.
        """
        self._traces = traces or Traces(model, Stirred())
        self.model = model
        self.node: fx.Node | None = None
        self._beside, self._num_own = beside, len(batches)
        self._runs_here = set(range(len(batches)) if own is None else own)
        streams = 1 if beside is None else 2
        self.outputs: list[Any] = [None] * (streams * len(batches))
        self._batches: list[Batch | None] = [*batches] * streams
        self._programs = list(programs) * streams
        self._stops = schedule(programs, groups)
        called = {name for stop in self._stops for name in stop.targets}
        self.uncalled = tuple(name for name in groups if name not in called)
        self._store = MemoryStore() if store is None else store
        self._keeping, self._set_by_forwards = keeping, SetByForwards(model, set_by_forwards)
        self._device, self._watched, self._on_sample, self._quiet, self._keep = device, watched, on_sample, quiet, keep_outputs
        self._values = ModuleValues()
        self._views: dict[int, View] = {}
        self._random: dict[int, RandomState] = {}
        self._ended: set[int] = set()
        self._calibrated: set[str] = set()
        self._to_show: dict[tuple[int, int], list[fx.Node] | None] = {}
        self._late: dict[int, int] = {}  # sample to the segment that it has been shown to, and must still run through
        self._before: dict[str, nn.Module] = {}  # modules of the stage behind which twins are late, as they were
        self._closed: set[int] = set()
        self._checked: set[str] = set()  # watched modules
        self._cleanup = ExitStack()
        self._may_wait = may_wait
        self._is_open = False
        self._is_running = False

    def __enter__(self) -> Self:
        """Patch nn.Module, so that what samples set on modules is kept apart."""
        # What hooks keep on the modules that they hang on, or below, are statistics of all samples and not values of one.
        keeping = self._watched() if self._keeping is None else self._keeping
        hooked = {below for name in keeping for below in self.model.get_submodule(name).modules()}
        others = [module for module in self.model.modules() if module not in hooked]
        self._is_open = True
        self._cleanup.enter_context(self._traces)
        self._cleanup.enter_context(noting_values(self._values, others, lambda: self._is_running, self._set_by_forwards))
        self._cleanup.callback(self._values.undo, {})
        self._cleanup.callback(self._forget)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Forget all live values, undo the patches, and take back what forwards have left."""
        self._is_open = False
        self._cleanup.close()

    def give_back(self, names: Collection[str]) -> None:
        """Put back what forwards have rewritten in some modules, before these are compressed.

        Args:
            names: dotted names.
        """
        self._traces.give_back(names)

    def __iter__(self) -> Iterator[GraphStage]:
        """Give the stages; enters the run where nobody has."""
        with nullcontext() if self._is_open else self:
            yield from self._stages()

    def _check_watched(self) -> None:
        """Refuse watched modules that are called behind their stage, too: before anything is compressed, or when hooks come later."""
        watched = set(self._watched()) - self._checked
        self._checked |= watched
        for stop in self._stops if watched else ():
            inside = {name for target in stop.targets for name in module_names(self.model, target)} & watched
            firsts = {id(self._programs[sample]): sample for sample in reversed(stop.samples)}
            for sample in firsts.values() if inside else ():
                check_inside(self._programs[sample], stop.samples[sample], stop.targets, inside, sample)

    def _stages(self) -> Iterator[GraphStage]:
        self._check_watched()
        # The same for all samples, so that none depends on how many come before it.
        start = RandomState.current(foreign=False)
        for sample, batch in enumerate(self._batches):
            assert batch is not None
            # From here on the sample has a copy; the batch may go where nobody else holds it.
            self._batches[sample] = None
            self._random[sample], self._views[sample] = start, {}
            if self._passes_by(sample, 0):
                continue
            self._on_sample(sample)
            values = named_inputs(copy_batch(batch if self._device is None else batch_to(batch, self._device)))
            with self._traces.forwards(), self._as_sample(sample):
                self._advance(sample, 0, values, self._call_propagating() if sample < self._num_own else self._call_beside(()))
        for index, stop in enumerate(self._stops):
            samples = {sample: segment for sample, segment in stop.samples.items() if sample not in self._ended}
            if not samples:
                continue
            yield GraphStage(self, index, Stop(stop.targets, samples))
            if index not in self._closed:
                raise TracingError(f"{stop.targets[0]}: its stage was left without propagate(), so no sample can run on; call it")

    @contextmanager
    def _as_sample(self, sample: int, keep: bool = True) -> Iterator[None]:
        """Exchange what belongs to the process for what belongs to a sample; without `keep`, all that happens is taken back."""
        outside = RandomState.current(foreign=False)
        self._values.restore(self._views[sample])
        before = self._values.view()
        self._random[sample].restore()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            if keep:
                self._random[sample], self._views[sample] = RandomState.current(foreign=False), self._values.view()
            else:
                self._values.undo(before)
            outside.restore()

    def _passes_by(self, sample: int, segment: int) -> bool:
        """True for a sample that another process runs through this segment."""
        passes = sample % self._num_own not in self._runs_here
        if passes and self._programs[sample].segments[segment].is_last:
            self._ended.add(sample)
        return passes

    def _advance(self, sample: int, segment: int, values: dict[str, Any], call: CallModule) -> None:
        """Run one segment for real, and keep what lives on."""
        program = self._programs[sample]
        result = run_segment(program.segments[segment], values, self.model, call)
        if program.segments[segment].is_last:
            self._store.drop(sample)
            self._ended.add(sample)
            self.outputs[sample] = result if self._keep else None
        else:
            self._store.put(sample, next_values(program, segment, values, result))

    def _call_propagating(self) -> CallModule:
        """Hooks are awake, but inside targets that have been calibrated."""

        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.node = node
            with self._quiet() if target_of(node) in self._calibrated else nullcontext():
                return call_plainly(node, module, args, kwargs)

        return call

    def _call_calibrating(self, targets: Sequence[str]) -> CallModule:
        """Hooks are awake inside the targets of the stage only."""

        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.node = node
            with nullcontext() if target_of(node) in targets else self._quiet():
                return call_plainly(node, module, args, kwargs)

        return call

    def _call_beside(self, targets: Sequence[str]) -> CallModule:
        """Hooks are awake inside the targets of the stage only, as far as they want to see a twin."""

        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.node = node
            assert self._beside is not None
            with self._beside() if target_of(node) in targets else self._quiet():
                return call_plainly(node, module, args, kwargs)

        return call

    def _run_twin(self, sample: int, segment: int, stop: Stop, is_last: bool, hooks: bool = True) -> None:
        """Let the twin of a sample go on to its next stage; at the last one, only as far as the targets."""
        twin = sample + self._num_own
        if self._beside is None or twin in self._ended:
            return
        self._on_sample(twin)
        values, program = self._store.get(twin), self._programs[twin]
        call = self._call_beside(stop.targets) if hooks else self._call_as_before()
        late = self._late.pop(twin, segment)
        is_last = is_last or program.segments[segment].is_last  # modules of stages before may be watched to the end, as for keys and values
        if late == segment and not is_last and self._waits_before(program, segment, stop):
            self._late[twin] = segment
            if hooks:
                with self._traces.forwards(), self._as_sample(twin, keep=False):
                    show_inputs(
                        self._to_show[id(program), segment] or [], values, self.model, self._call_showing(stop.targets, self._beside)
                    )
            return
        with self._traces.forwards(), self._as_sample(twin):
            values = self._run_through(program, range(late, segment), values, self._call_as_before())
            if is_last:
                run_segment(program.segments[segment], values, self.model, call, {name or ROOT for name in stop.targets})
                self._end(twin)
            else:
                self._advance(twin, segment, values, call)

    def _waits_before(self, program: Program, segment: int, stop: Stop) -> bool:
        """True where less is live before a stage than behind it, and its modules can be kept as they are."""
        now, then = program.segments[segment : segment + 2]
        read = {str(node.target) for node in now.graph.nodes if node.op == "get_attr"}
        return (
            then.live_bytes > now.live_bytes
            and bool(self._shown(program, segment, stop))
            and all("forward" not in vars(self.model.get_submodule(name)) for name in stop.targets)
            and not any(one.startswith(f"{name}.") for name in stop.targets for one in {*read, *self._set_by_forwards.names})
        )

    def _keep_before(self) -> None:
        """Keep modules as they are now for the twins that have not run through their stage, and let those before go."""
        segments = [self._programs[one].segments[index] for one, index in self._late.items() if one >= self._num_own]
        names = {target_of(node) for segment in segments for node in segment.graph.nodes if node.op == "call_module"}
        modules = {name: find_module(self.model, name) for name in names}
        alone = {name: one for name, one in modules.items() if next(one.children(), None) is None and "forward" not in vars(one)}
        self._before = {name: copy_alone(one, with_hooks=True) for name, one in alone.items()}

    def _call_as_before(self) -> CallModule:
        """Hooks are asleep, and modules of the stage behind which twins are late are those that they were."""

        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.node = node
            with self._quiet():
                return call_plainly(node, self._before.get(target_of(node), module), args, kwargs)

        return call

    def _call_showing(self, targets: Sequence[str], awake: Callable[[], AbstractContextManager[None]] | None = None) -> CallModule:
        """The pre-hooks of the targets of the stage see what these are handed; the targets do not run."""

        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.node = node
            if target_of(node) in targets:
                with nullcontext() if awake is None else awake():
                    return show_to_hooks(module, args, kwargs, target_of(node))
            with self._quiet():
                return call_plainly(node, module, args, kwargs)

        return call

    def _shown(self, program: Program, segment: int, stop: Stop) -> list[fx.Node] | None:
        """What must run for the pre-hooks of a stage, where nobody asks for more than these see; else None."""
        modules = [self.model.get_submodule(name) for name in stop.targets]
        asked = any(next(module.children(), None) is not None or sees_outputs(module) for module in modules)
        if asked or OF_ALL_MODULES._global_forward_hooks or OF_ALL_MODULES._global_forward_pre_hooks or program.spans[segment] != segment:
            return None
        key = (id(program), segment)
        if key not in self._to_show:
            self._to_show[key] = needed_to_show(program.segments[segment], stop.targets)
        return self._to_show[key]

    def _calibrate_sample(self, sample: int, segment: int, stop: Stop) -> None:
        self._on_sample(sample)
        program, late = self._programs[sample], self._late.get(sample, segment)
        shown = self._shown(program, segment, stop)
        values = self._store.get(sample)
        if shown is None or any(program.segments[index].mutates for index in range(late, segment)):
            values = copy_live(values, self.model)
        span = range(segment, program.spans[segment] + 1)
        call = self._call_calibrating(stop.targets)
        with self._traces.forwards(), self._as_sample(sample, keep=False):
            values = self._run_through(program, range(late, segment), values, call)
            if shown is not None:
                show_inputs(shown, values, self.model, self._call_showing(stop.targets))
                return
            values = self._run_through(program, span[:-1], values, call)
            run_segment(program.segments[span[-1]], values, self.model, call, {name or ROOT for name in stop.targets})

    def _run_through(self, program: Program, segments: Iterable[int], values: dict[str, Any], call: CallModule) -> dict[str, Any]:
        """Run some segments, one behind the other; return what is live behind the last."""
        for index in segments:
            values = next_values(program, index, values, run_segment(program.segments[index], values, self.model, call))
        return values

    def _propagate_sample(self, sample: int, segment: int) -> None:
        self._on_sample(sample)
        values, call = self._store.get(sample), self._call_propagating()
        with self._traces.forwards(), self._as_sample(sample):
            late = self._late.pop(sample, segment)
            self._advance(sample, segment, self._run_through(self._programs[sample], range(late, segment), values, call), call)

    def _put_off(self, samples: Collection[int], stop: Stop) -> set[int]:
        """Let those samples wait before a stage that is done for which there is no room behind it; say which."""
        pairs = {one: [part.own_bytes for part in self._programs[one].segments[stop.samples[one] :][:2]] for one in samples}
        granted = {one: WAITING_STREAMS * self._programs[one].least_bytes for one in samples}
        room = sum(granted.values()) - sum(pair[0] for pair in pairs.values()) if self._beside is None else 0
        waiting = set()
        for sample, (now, *then) in pairs.items():
            more = max(then, default=now) - now
            if now + more > granted[sample] and more > max(0, room) and sample not in self._late:
                waiting.add(sample)
            else:
                room -= more
        self._late.update((sample, stop.samples[sample]) for sample in waiting)
        return waiting

    def _forget(self) -> None:
        for sample in range(len(self._batches)):
            self._store.drop(sample)

    def _end(self, sample: int) -> None:
        self._store.drop(sample)
        self._ended.add(sample)


class GraphStage:
    """All samples that wait at one stage: `calibrate`, then compress what lies inside, then `propagate`.

    Attributes:
        index: position among the stages.
        name: dotted name of the target; several are joined by commas.
        num_samples: how many samples wait at it here.
    """

    def __init__(self, run: GraphRun, index: int, stop: Stop) -> None:
        """Made by GraphRun."""
        self.index = index
        self.name = ", ".join(stop.targets)
        self._run, self._stop = run, stop
        self._samples = [sample for sample in stop.samples if sample in run._runs_here]
        self.num_samples = len(self._samples)

    @property
    def module(self) -> nn.Module:
        """The (first) target as it is now; a modifier may have replaced it."""
        return self._run.model.get_submodule(self._stop.targets[0])

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the targets and of all modules inside them, as they are now."""
        return tuple(name for target in self._stop.targets for name in module_names(self._run.model, target))

    @property
    def put_off(self) -> tuple[str, ...]:
        """Dotted names of the modules of the stage before that samples run through in this one."""
        late = {one: index for one, index in self._run._late.items() if one in self._stop.samples and one < self._run._num_own}
        return tuple(dict.fromkeys(name for one, index in late.items() for name in self._run._programs[one].segments[index].targets))

    @property
    def passed(self) -> frozenset[str]:
        """Dotted names of the modules and tensors that samples have used on their way here."""
        ways = {id(self._run._programs[one]): (self._run._programs[one], index) for one, index in self._stop.samples.items()}
        return frozenset(name for program, end in ways.values() for name, first in program.first_uses.items() if first < end)

    def calibrate(self) -> None:
        """Call the targets for every sample, on copies of their inputs, so that the hooks inside see them.

        A target without watched modules is not called, but by twins.
        """
        run, watched = self._run, set(self._run._watched())
        run._check_watched()
        # Nobody looks, so the calls would only cost time; twins run on, for they have one pass only.
        if watched.isdisjoint(self.module_names):
            self._run_twins()
            return
        run._calibrated |= set(self._stop.targets)
        is_last = watched <= set(self.module_names)
        for sample in self._prefetched(self._samples):
            run._run_twin(sample, self._stop.samples[sample], self._stop, is_last)
            run._calibrate_sample(sample, self._stop.samples[sample], self._stop)
        run._keep_before()

    def rehearse(self) -> None:
        """Call the targets for every sample without consequences, as `calibrate` does for hooks; for the proof."""
        for sample in self._prefetched(self._samples):
            self._run._calibrate_sample(sample, self._stop.samples[sample], self._stop)

    def skip_calibration(self) -> None:
        """Take the statistics of the targets for complete, though nothing is called: an earlier run has compressed what lies inside."""
        self._run._calibrated |= set(self._stop.targets)
        self._run_twins()

    def _run_twins(self) -> None:
        for sample in self._samples:
            self._run._run_twin(sample, self._stop.samples[sample], self._stop, is_last=False, hooks=False)
        self._run._keep_before()

    def _prefetched(self, samples: Sequence[int]) -> Iterator[int]:
        """Give the samples, while the store brings back what the next one needs."""
        for position, sample in enumerate(samples):
            self._run._store.prefetch(samples[min(position + 1, len(samples) - 1)])
            yield sample

    def propagate(self, only_first: bool = False) -> None:
        """Call the targets for real and let every sample run on to its next stage, or to its end.

        Args:
            only_first: end all samples but the first where they stand: for when nothing that comes later is watched.
        """
        run = self._run
        torch.clear_autocast_cache()  # it would serve casts of weights that have been replaced
        run._closed.add(self.index)
        first, *others = [sample for sample in self._stop.samples if sample < run._num_own]
        if only_first:
            for sample in range(len(run.outputs)):
                if sample != first:
                    run._end(sample)
            others = []
        here = [one for one in (first, *others) if not run._passes_by(one, self._stop.samples[one])]
        waiting = run._put_off(here, self._stop) if run._may_wait and not only_first else set()
        for sample in self._prefetched(here):
            if sample in waiting:
                run._on_sample(sample)
            else:
                run._propagate_sample(sample, self._stop.samples[sample])
