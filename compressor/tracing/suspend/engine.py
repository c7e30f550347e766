"""The suspend engine: ordinary forwards that pause at every sequential target, so that all samples advance target by target.

Each sample runs the model's own `forward` in a greenlet and pauses where it is about to call a target. When every sample waits, the
earliest target that someone waits for becomes a stage, and a stage has two passes. The calibration pass calls the target on copies of
its inputs and drops the outputs. The propagation pass calls the target, by then compressed, for real and lets each sample run on to its
next target. Nothing is traced or rewritten: whatever the plain forward computes, this computes too, bit for bit.

What it cannot do is rewind. So a target that a forward calls repeatedly must be known beforehand, by the `trails`: it is calibrated by
forwards that run again from the start. A target that a sample calls again unforeseen is an error, and so is a watched module that is
called outside its stage later on. One blind spot: after `propagate(only_first=True)` only the first sample can show such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from compressor.data.collate import Batch
from compressor.errors import TracingError
from compressor.random_state import foreign_random
from compressor.tracing.footprint import Stirred
from compressor.tracing.graph.nested_values import parametrizations_cached, set_parametrizations_cached
from compressor.tracing.suspend.module_calls import CallRouter
from compressor.tracing.suspend.paused_forward import Sample
from compressor.tracing.targets.order import Trail, check_outside, merged_rank, repeated
from compressor.tracing.targets.partition import module_names
from compressor.tracing.targets.running import Watched
from compressor.tracing.targets.sample_state import TorchState
from compressor.tracing.traces import Traces

# Forwards that run again from the start, so that a target that they call repeatedly is calibrated with all its calls.
#
# Such a call depends on targets in between, so no paused forward can reach it without passing stages that are not finished. A forward of
# its own can: it runs on the weights of this moment, which is what the statistics of the target are defined by, with hooks awake inside
# the target only.


class Replays:
    """Keeps the batches, and runs them again on demand."""

    def __init__(
        self,
        router: CallRouter,
        batches: Sequence[Batch],
        device: torch.device | None,
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Keep the batches.

        Args:
            router: of the run.
            batches: not modified.
            device: of the model; None leaves batches where they are.
            quiet: context in which hooks sleep.
        """
        self._router, self._device, self._quiet = router, device, quiet
        self._batches = list(batches)
        self._start = TorchState.current(foreign=router.foreign)

    def begin(self) -> None:
        """Remember the state that the forwards begin in."""
        self._start = TorchState.current(foreign=self._router.foreign)

    def run(self, model: nn.Module, target: str, index: int) -> None:
        """Run one forward from its start to its end, for the hooks inside a target.

        Args:
            model: as it is now.
            target: dotted name.
            index: of the batch.

        Raises:
            TracingError: the weights of an earlier target are not those that the samples met.
        """
        self._router.weights.check(model, self._router.values.noted())
        values = self._router.values
        before = values.view()
        values.undo({})
        foreign = self._router.foreign
        sample = Sample(model, self._batches[index], index, self._device, values, foreign, replays=target, start=self._start)
        try:
            with sample.hush:
                sample.hush.enter_context(self._quiet())
                self._router.advance(sample, propagate=True)
        finally:
            sample.kill()
            values.restore(before)
        self._router.covered.setdefault(target, set()).add(index)


class SuspendedRun:
    """Forwards of one model over many batches, paused and resumed together. A context manager; `stages` drives it.

    Leaving it, by whatever exception, ends every paused forward, undoes every patch and takes back what forwards have set on modules.

    Attributes:
        model: the model; its modules may be replaced between the two passes of a stage.
        outputs: what each forward returned, when kept; None for a forward that was ended early.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Collection[str],
        batches: Sequence[Batch],
        *,
        device: torch.device | None = None,
        watched: Callable[[], Watched] = tuple,
        keeping: Watched | None = None,
        on_sample: Callable[[int], None] = lambda index: None,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep_outputs: bool = False,
        trails: Sequence[Trail] = (),
        traces: Traces | None = None,
        own: Collection[int] | None = None,
        everywhere: Callable[[Sequence[str]], list[str]] = list,
        set_by_forwards: Collection[str] = (),
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            model: in eval mode, and without caches that grow.
            targets: dotted names in the order of the model; none inside another.
            batches: one forward each.
            device: of the model; None leaves batches where they are.
            watched: says which modules carry calibration hooks now.
            keeping: modules on which, or below, hooks keep statistics of all samples; None: the watched ones.
            on_sample: called with the number of a sample before it runs on, for what depends on the batch.
            quiet: context in which a target that has been calibrated is propagated, with hooks asleep.
            keep_outputs: keep what the forwards return.
            trails: the targets that a forward of each kind of batch calls, in order, where that is known. They decide in which order
                targets become stages, and which are called repeatedly.
            traces: takes back at the end what forwards leave on the model beside what they set on modules.
            own: numbers of the batches that run here; None: all.
            everywhere: puts names of all processes together that share the batches: what samples wait for, so that all take one order.
            set_by_forwards: dotted names of attributes and buffers that the model's own forward sets, a sample's wherever they are.
        """
        self.model = model
        self._trails = trails
        self._traces = traces or Traces(model, Stirred())
        self.outputs: list[Any] = [None] * len(batches)
        self._rank = merged_rank(trails, {name: rank for rank, name in enumerate(targets)})
        self._router = CallRouter(model, targets, quiet, watched() if keeping is None else keeping, set_by_forwards)
        self._router.repeated = repeated(trails)
        self._router.foreign = any(trail.foreign_random for trail in trails)
        self._replays = Replays(self._router, batches, device, quiet) if self._router.repeated else None
        foreign = self._router.foreign
        self._samples = [
            Sample(model, batch, index, device, self._router.values, foreign)
            for index, batch in enumerate(batches)
            if own is None or index in own
        ]
        self._everywhere = everywhere
        self._watched, self._on_sample, self._keep_outputs = watched, on_sample, keep_outputs
        self._cleanup = ExitStack()
        self._is_open = False

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Targets that no sample has called so far."""
        return tuple(name for name in self._rank if name not in self._router.closed)

    def __enter__(self) -> Self:
        """Patch nn.Module."""
        self._is_open = True
        self._cleanup.enter_context(self._traces)
        self._router.watch(self._watched())
        self._cleanup.enter_context(self._router.patched())
        self._cleanup.callback(self._kill, self._samples)
        return self

    def _kill(self, samples: Sequence[Sample]) -> None:
        with self._traces.forwards(), ExitStack() as every:
            for sample in reversed(samples):
                every.callback(sample.kill)

    def give_back(self, names: Collection[str]) -> None:
        """Put back what forwards have rewritten in some modules, before these are compressed.

        Args:
            names: dotted names.
        """
        self._traces.give_back(names)

    def __exit__(self, *exc_info: object) -> None:
        """End every forward, then undo the patches."""
        self._is_open = False
        self._cleanup.close()

    def __iter__(self) -> Iterator[Stage]:
        """Give the stages; enters the run where nobody has."""
        with nullcontext() if self._is_open else self:
            yield from self.stages()

    def stages(self) -> Iterator[Stage]:
        """Start all samples, then yield one stage after another until every forward has ended.

        Yields:
            A stage; `propagate` must have been called on it before the next one is asked for.

        Raises:
            TracingError: it was not.
            CalibrationError: a watched module is known to be called after the stage of the target that it lies in.
        """
        check_outside(self._trails, self._rank, self._watched())
        # They start from where all samples start, whatever has been drawn by then.
        if self._replays is not None:
            self._replays.begin()
        with self._traces.forwards(), self._foreign_random_watched():
            for sample in self._samples:
                self._advance(sample)
        index = 0
        while waiting := self._everywhere([sample.at for sample in self._samples if sample.at is not None]):
            # The earliest in the merged order, so that no other sample still comes to a stage that is over.
            name = min(waiting, key=self._rank.__getitem__)
            yield Stage(self, index, name, [sample for sample in self._samples if sample.at == name])
            if name not in self._router.closed:
                raise TracingError(f"{name}: its stage was left without propagate(), so no sample can run on; call it")
            index += 1

    def _advance(self, sample: Sample, propagate: bool = True) -> None:
        self._on_sample(sample.index)
        self._router.advance(sample, propagate)
        if sample.dead:
            self.outputs[sample.index] = sample.output if self._keep_outputs else None
            sample.output = None

    def _calibrate(self, stage: Stage, samples: list[Sample]) -> None:
        watched = self._watched()
        check_outside(self._trails, self._rank, watched)
        self._router.watch(watched)
        if set(watched).isdisjoint(stage.module_names):
            return
        self._router.calibrated.add(stage.name)
        self._rehearse(stage, samples)

    def _rehearse(self, stage: Stage, samples: list[Sample]) -> None:
        with self._traces.forwards():
            self._rehearse_all(stage, samples)

    def _rehearse_all(self, stage: Stage, samples: list[Sample]) -> None:
        for sample in samples:
            if self._replays is not None and stage.name in self._router.repeated:
                self._on_sample(sample.index)
                self._replays.run(self.model, stage.name, sample.index)
            else:
                self._advance(sample, propagate=False)

    def _skip_calibration(self, stage: Stage) -> None:
        watched = self._watched()
        self._router.watch(watched)
        if not set(watched).isdisjoint(stage.module_names):
            self._router.calibrated.add(stage.name)

    def _propagate(self, stage: Stage, samples: list[Sample], only_first: bool) -> None:
        # They would serve casts, and parametrizations, of weights that have been replaced.
        torch.clear_autocast_cache()
        set_parametrizations_cached(parametrizations_cached())
        self._router.close(stage.name, stage.module_names)
        if only_first:
            samples = samples[:1]
            self._kill([sample for sample in self._samples if sample not in samples])
        with self._traces.forwards(), self._foreign_random_watched():
            for sample in samples:
                self._advance(sample)

    @contextmanager
    def _foreign_random_watched(self) -> Iterator[None]:
        """Forwards that turn out to draw from generators which they share have already seen each other's numbers."""
        before = None if self._router.foreign else foreign_random()
        yield
        if before is not None and before != foreign_random():
            raise TracingError(
                "suspend: a forward draws random numbers from Python or numpy, unlike those that were looked at before, and forwards that "
                'take turns would share them; seed a generator inside the forward, or use pipeline="basic"'
            )


class Stage:
    """All samples that wait at one target: `calibrate`, then compress what lies inside, then `propagate`.

    Attributes:
        index: position among the stages.
        name: dotted name of the target.
        num_samples: how many samples wait at it, of those that run here.
        put_off: none, for a forward cannot run through a stage again.
    """

    put_off: tuple[str, ...] = ()

    def __init__(self, run: SuspendedRun, index: int, name: str, samples: list[Sample]) -> None:
        """Made by `SuspendedRun.stages`."""
        self.index = index
        self.name = name
        self.num_samples = len(samples)
        self._run = run
        self._samples = samples

    @property
    def module(self) -> nn.Module:
        """The target as it is now; a modifier may have replaced it."""
        return self._run.model.get_submodule(self.name)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the target and of all modules inside it, as they are now."""
        return module_names(self._run.model, self.name)

    @property
    def passed(self) -> frozenset[str]:
        """Dotted names of the modules that samples have run through on their way here, as far as they lie in targets."""
        return frozenset(name for target in self._run._router.closed for name in module_names(self._run.model, target))

    def calibrate(self) -> None:
        """Call the target for every sample, on copies of its inputs, so that the hooks inside see them.

        A target without watched modules is not called.
        """
        self._run._calibrate(self, self._samples)

    def rehearse(self) -> None:
        """Call the target for every sample without consequences, as `calibrate` does for hooks; for the proof."""
        self._run._rehearse(self, self._samples)

    def skip_calibration(self) -> None:
        """Take the statistics of the target for complete, though nothing is called: an earlier run has compressed what lies inside."""
        self._run._skip_calibration(self)

    def propagate(self, only_first: bool = False) -> None:
        """Call the target for real and let every sample run on to its next target, or to its end.

        Args:
            only_first: end all samples but the first where they stand: for when nothing that comes later is watched.

        Raises:
            CalibrationError: the calibration pass missed a call.
            TracingError: a sample calls a target again whose stage is over.
        """
        self._run._propagate(self, self._samples, only_first)
