"""What is verified: a modifier, the model it works on, and the tags that say which parts of the contract apply to it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy
import torch
from torch import Tensor, nn

from compressor.data import CalibrationData
from compressor.data.collate import leading_tensor
from compressor.errors import CompressorError, RecipeError, TargetError
from compressor.lifecycle import Modifier, Session
from compressor.lifecycle.hooks import raised_in_hook, without_modifier_hooks
from compressor.lifecycle.interface import TRAINING_CALLBACKS
from compressor.lifecycle.modifier import overrides
from compressor.pipelines.forward_checks import watched_modules
from compressor.random_state import random_numbers_kept
from harness.lifecycle.driving.callback_actions import Actor
from harness.lifecycle.driving.callback_recorder import Acts, Entry
from harness.lifecycle.driving.class_values import frozen_class_values
from harness.lifecycle.driving.compare import CallResult, Violation, describe, failures, failures_in
from harness.lifecycle.driving.driver import CompressorRun, Run, apply_settings, set_times
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.probes import Probe, TinyModel, tiny_batches
from harness.lifecycle.driving.snapshot import Allowed, Snapshot
from harness.lifecycle.driving.time_limit import Stopwatch
from harness.lifecycle.driving.torch_settings import EnteredModes
from harness.lifecycle.forwards import Batch, call, gradients, token_mask
from harness.lifecycle.machines.strategies import Setup
from harness.lifecycle.oracle import BATCH_EVENTS, SessionModel, Settings, exact
from harness.lifecycle.stages import Stages, calls_of, stages_of, whole
from harness.profiles import PROFILES, Profile

MOST_BATCHES = 12
"""Of a training, in a life."""
_LAST_END = MOST_BATCHES - 2
"""The last index at which a life comes to `on_end`."""

_OF_A_MODEL = ("module", "tensor", "attribute", "training", "requires_grad", "grad")
_CALIBRATION_CALLBACKS = ("on_calibration_start", "on_sequential_epoch_end", "on_calibration_end")


class NothingToCheckError(Exception):
    """A check does not apply to the subject; the message says why."""


class CannotTellError(Exception):
    """The subject refuses to be tried as it is tried here; the message says why."""


@dataclass(frozen=True)
class Training:
    """A further look at a modifier: with the times that a training starts and ends it.

    Attributes:
        settings: these times; a modifier that has `on_event` and no `on_start` takes part without any.
        steps_per_epoch: None where an index is a step.
        has_batches: False for a calibration with these times, as `oneshot` runs it.
        in_calibration: True where that is of a modifier that asks for none, has callbacks of one, and may refuse it.
    """

    settings: Settings
    steps_per_epoch: int | None = None
    has_batches: bool = True
    in_calibration: bool = False

    def __str__(self) -> str:
        """Return the times in words."""
        epochs = f", {self.steps_per_epoch} steps an epoch" if self.steps_per_epoch else ""
        calibration = ", in a calibration" if self.in_calibration else ""
        return f"with start={self.settings.start} and end={self.settings.end}{epochs}{calibration}"


@dataclass
class Subject:
    """A modifier and everything that is needed to run it.

    Attributes:
        template: a fresh modifier; runs take copies of it.
        model: the model; runs take copies of it.
        batches: inputs of the model.
        tags: what the modifier declares; see TAGS.
        refusals: exceptions with which its own code may turn down what it is asked.
        session_class: the session to drive.
        is_tiny: the model is the one that the harness brings along.
        profile: how long a state machine looks.
        stopwatch: restarted at every new run.
        latest: the run that was opened last, for the report of one that hangs.
        make: makes a fresh modifier, where a class was given; else the template is copied.
        steps_per_epoch: of its runs; None where an index is a step.
        has_batches: its life is one of batches, whatever it needs and is given.
        in_calibration: its life is a calibration, though it asks for none and has a start.
        keeps_originals: its runs keep the modules that they replace, as those over a model in memory do, and not those over a path.
        as_oneshot: its calibrations have the stages that `oneshot` makes for it alone, and not those of two passes.
        watched: dotted names of the modules with its hooks, in the latest calibration of two passes.
        class_values: what the modifier's classes and their modules held before the first run.
        completed: ways of runs over copies of the model that came to their end.
    """

    template: Modifier
    model: nn.Module = field(default_factory=TinyModel)
    batches: Sequence[Batch] = field(default_factory=tiny_batches)
    tags: frozenset[str] = frozenset()
    refusals: tuple[type[BaseException], ...] = (CompressorError,)
    session_class: type[Session] = Session
    is_tiny: bool = True
    profile: Profile = PROFILES["pr"]
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    latest: CompressorRun | None = None
    make: Callable[[], Modifier] | None = None
    steps_per_epoch: int | None = None
    has_batches: bool = False
    in_calibration: bool = False
    keeps_originals: bool = True
    as_oneshot: bool = False
    watched: Collection[str] = ()
    class_values: Mapping[str, object] = field(init=False)
    completed: set[object] = field(default_factory=set)
    _modes: EnteredModes | None = None
    _stages: tuple[object, Stages] | None = None
    _written: tuple[nn.Module, set[tuple[str, str]]] | None = None

    def __post_init__(self) -> None:
        """Look at what the classes hold before the first run."""
        self.class_values = frozen_class_values(self.template)

    @property
    def label(self) -> str:
        """The name in reports."""
        return type(self.template).__name__

    @property
    def can_be_named(self) -> bool:
        """True when a recipe, or another process, finds its class where it says that it is."""
        cls = type(self.template)
        return "<locals>" not in cls.__qualname__ and cls.__module__ != "__main__" and cls.__module__ in sys.modules

    @property
    def trains(self) -> bool:
        """True when its life is one of batches and not a calibration, as that of a modifier which training starts."""
        return self.has_batches or (self.template.start is not None and not self.calibrates)

    @property
    def trains_beside_calibration(self) -> bool:
        """True when its life is one of batches though it asks for a calibration, which another look shows it."""
        return self.trains and self.calibrates

    @property
    def calibrates(self) -> bool:
        """True when it asks for calibration data, or is looked at in a calibration all the same."""
        return self.in_calibration or self.template.calibration_need != "none"

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Names of modules, in the stages in which a calibration would go through the model."""
        return self.stages.parts

    @property
    def stages(self) -> Stages:
        """In which a calibration would go through the model: at layers, or at what it watches."""
        way = (self.model, self.as_oneshot, self.watched)
        if self._stages is None or self._stages[0] != way:
            if self.as_oneshot and self.template.calibration_need != "sequential":
                found = whole(self.model)
            else:
                calls = calls_of(self.model, self.batches[0])
                found = stages_of(self.model, self.watched if self.as_oneshot else (), calls)
            self._stages = way, found
        return self._stages[1]

    def running(self) -> str:
        """Return the callback that is running now, for the report of one that hangs."""
        return (self.latest.recorder.running if self.latest is not None else None) or "no callback"

    def fresh(self, settings: Settings | None = None) -> Modifier:
        """Return a fresh modifier, with other times where settings give them; what it was given it does not lose."""
        one = self.make() if self.make is not None else self.template.model_copy(deep=True)
        if settings is None:
            return one
        own = self.settings
        start = own.start if settings.start is None else settings.start
        end = own.end if settings.end is None else settings.end
        if start is not None and end is not None and end <= start:
            end = start + 1
        return set_times(one, Settings(start, end, own.update if settings.update is None else settings.update))

    @property
    def settings(self) -> Settings:
        """The times of the modifier as it was given."""
        return Settings(self.template.start, self.template.end, self.template.update)

    def alone(self, keep_originals: bool | None = None) -> Setup:
        """Return how a run of the modifier alone begins, with the times that it has now."""
        return Setup((self.settings,), self.steps_per_epoch, self.keeps_originals if keep_originals is None else keep_originals)

    def trainings(self) -> list[Training]:
        """Return trainings to look at beside the times that it was given, where it has callbacks that a training calls.

        Returns:
            None but its own times, where a training sends it events without a start; times at which a training starts and ends it, for
            those that it lacks or that no life here reaches, or whose life was a calibration; where it asks for none, also times between
            two whole indices: its own where they are such, and others.
        """
        template = self.template
        if not overrides(template, *TRAINING_CALLBACKS):
            return []
        is_reached = template.start is not None and template.start + 1 <= _LAST_END
        start = template.start if is_reached and template.start is not None else 0.0
        end = template.end if template.end is not None and start < template.end <= _LAST_END else start + 1
        settings = Settings(start, end, template.update)
        is_sent_without = template.start is None and overrides(template, "on_event") and not overrides(template, "on_start")
        found = [Training(self.settings)] if is_sent_without else []
        found += [Training(settings, has_batches=not self.calibrates)] if (template.start, template.end) != (start, end) else []
        if self.calibrates:
            return [*found, Training(settings)]
        if template.start is not None and overrides(template, *_CALIBRATION_CALLBACKS):  # which a calibration calls, whatever its times
            found.append(Training(self.settings, has_batches=False, in_calibration=True))
        own = _steps_per_epoch(start, end)
        found += [Training(settings, own)] if own is not None else []
        return list(dict.fromkeys([*found, Training(Settings(0.5, 1.5, template.update), 2)]))

    @contextmanager
    def trained(self, training: Training) -> Iterator[None]:
        """Give the modifier other times, and its runs other epochs and batches, for a while.

        Args:
            training: one of `trainings`.
        """
        template, make, steps_per_epoch = self.template, self.make, self.steps_per_epoch
        self.template, self.steps_per_epoch = self.fresh(training.settings), training.steps_per_epoch
        self.has_batches, self.in_calibration, self.keeps_originals = training.has_batches, training.in_calibration, False
        self.make = lambda: set_times(make() if make is not None else template.model_copy(deep=True), self.settings)
        try:
            yield
        finally:
            self.template, self.make, self.steps_per_epoch = template, make, steps_per_epoch
            self.has_batches, self.in_calibration, self.keeps_originals = False, False, True

    @contextmanager
    def in_other_mode(self) -> Iterator[None]:
        """Have the model in its other mode, training or evaluation, loaded by its path, and the stages that `oneshot` makes."""
        model, keeps_originals = self.model, self.keeps_originals
        self.model, self.keeps_originals, self.as_oneshot = copy.deepcopy(model).train(not model.training), not keeps_originals, True
        try:
            yield
        finally:
            self.model, self.keeps_originals, self.as_oneshot = model, keeps_originals, False

    def open(self, setup: Setup | None = None, model: nn.Module | None = None) -> CompressorRun:
        """Open a run: the modifier first, then probes, one for each further entry of the setup. Modes of earlier runs are left.

        Args:
            setup: how the run begins; by default the modifier alone, as `alone` says.
            model: to work on; by default a copy of the subject's.

        Returns:
            The run, not yet initialized.
        """
        self.stopwatch.restart()
        self._modes = self._modes or EnteredModes()
        self._modes.put_back()  # else they add up from run to run, and every call of torch goes through all of them
        move_random_numbers()
        chosen = setup or self.alone()
        modifiers = [self.fresh(chosen.settings[0]), *(apply_settings(Probe(), one) for one in chosen.settings[1:])]
        run = CompressorRun(
            copy.deepcopy(self.model) if model is None else model,
            modifiers,
            chosen.steps_per_epoch,
            chosen.keep_originals,
            self.session_class,
            None if self.trains else self.data(),
        )
        run.recorder.perform = Actor(run, self.session_class).perform
        run.recorder.on_begin = self.stopwatch.restart
        run.way = (chosen, self.trains, self.model.training, model is None) if chosen.settings == (self.settings,) else None
        self.latest = run
        return run

    def data(self) -> CalibrationData:
        """Return copies of the batches, as a calibration hands them to modifiers that run forwards of their own."""
        batches = [(batch,) if isinstance(batch, Tensor) else batch for batch in copy.deepcopy(list(self.batches))]
        shapes, masks = [leading_tensor(batch).shape for batch in batches], [token_mask(batch) for batch in batches]
        counts = [shape[:2].numel() if mask is None else int(mask.sum()) for shape, mask in zip(shapes, masks, strict=True)]
        data = CalibrationData(batches, masks, "", sum(shape[0] for shape in shapes), sum(counts))
        len(data.sample_parts)  # is made here, so that no forward seems to have left it
        return data

    def check(self, run: CompressorRun) -> CheckedRun:
        """Put the oracle beside a run.

        Args:
            run: not yet initialized.

        Returns:
            Both.
        """
        settings = [Settings(modifier.start, modifier.end, modifier.update) for modifier in run.modifiers]
        oracle = SessionModel(settings, run.session.steps_per_epoch, run.state.keep_originals)
        checked = CheckedRun(run, oracle, obedient=False, refusals=self.refusals, allowed=self.allowed)
        checked.on_failure = partial(self._stopped, run)
        return checked

    def _stopped(self, run: CompressorRun, outcome: CallResult, entries: Sequence[Entry]) -> None:
        """A run has failed by itself: one like it may have come to its end before, or it refuses to run as it is run here."""
        if run.way in self.completed:
            text = f"a run like one that came to its end before has failed: {failures(outcome, entries)}"
            raise Violation("state", f"{text}; keep nothing of a run outside of its modifier", failures_in(entries))
        refusal = next((entry.error for entry in entries if isinstance(entry.error, RecipeError | TargetError)), None)
        if run.way is not None and refusal is not None:
            raise CannotTellError(f"alone and on this model it does not run: {refusal}")

    @property
    def allowed(self) -> set[Allowed]:
        """Kinds of differences that the tags allow, and what the model's own forward writes to."""
        return {kind for tag, kind in (("random", "rng"), ("annotates", "attribute")) if tag in self.tags} | self.written

    @property
    def written(self) -> set[tuple[str, str]]:
        """By kind and name: what the model's own forward changes of it, such as counters, caches, running statistics."""
        if self._written is None or self._written[0] is not self.model:
            model = copy.deepcopy(self.model)
            before = Snapshot(model)
            with torch.no_grad(), random_numbers_kept():
                for batch in [*self.batches, *self.batches]:  # some write in their second forward
                    call(model, copy.deepcopy(batch))
            changes = before.differences(Snapshot(model))
            self._written = self.model, {(one.kind, one.where) for one in changes if one.kind in _OF_A_MODEL}
        return self._written[1]

    def forward(self, run: Run) -> None:
        """Run the model of a run over copies of all batches, as a calibration does; as the base stream first, where a modifier takes it."""
        with torch.no_grad():
            for number, batch in enumerate(self.batches):
                for is_base in self.streams(run):
                    with entered(run, number, is_base):
                        call(run.model, copy.deepcopy(batch))

    def streams(self, run: Run) -> tuple[bool, ...]:
        """Return of each forward of a batch in a calibration whether it is that of the base stream."""
        return (True, False) if isinstance(run, CompressorRun) and run.state.has_base_stream else (False,)

    def backward(self, run: Run) -> None:
        """Run the model of a run over copies of all batches and back again; no gradient is kept."""
        with torch.enable_grad():
            for batch in self.batches:
                gradients(run.model, call(run.model, copy.deepcopy(batch)))

    @property
    def num_batches(self) -> int:
        """Of a training that goes on behind the end of the modifier, as far as a life goes."""
        end = self.template.end if self.template.end is not None else MOST_BATCHES
        return min(int(end * (self.steps_per_epoch or 1)) + 2, MOST_BATCHES)

    def life(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the moments of a whole run in which the modifier does its work, each with the names of modules that go with it."""
        if self.trains:
            batches = [(event, ()) for event in BATCH_EVENTS * self.num_batches]
            return [("INITIALIZE", ()), *batches, ("FINALIZE", ())]
        stages = [("SEQUENTIAL_EPOCH_END", part) for part in self.parts]
        calibration = [("CALIBRATION_START", ()), *stages, ("CALIBRATION_END", ())]
        return [("INITIALIZE", ()), *calibration, ("FINALIZE", ())]

    def go(self, checked: CheckedRun, run: CompressorRun, moment: str, names: tuple[str, ...], acts: Acts | None = None) -> CallResult:
        """Go through a moment of the life, before a stage of a calibration with the forwards that it has.

        Args:
            checked: the run with its oracle.
            run: the run.
            moment: as `life` gives it.
            names: of modules that go with it.
            acts: what callbacks are made to do, whenever they come.

        Returns:
            The outcome.

        Raises:
            Violation: the model does not take its batches any more, for what earlier stages were changed to.
        """
        if moment == "SEQUENTIAL_EPOCH_END":
            self.flow(checked, run, names)
        outcome = checked.go(moment, acts, names)
        if moment == "CALIBRATION_START" and not self.as_oneshot:
            self.watched = watched_modules(run.session)
        return outcome

    def flow(self, checked: CheckedRun, run: CompressorRun, names: tuple[str, ...]) -> None:
        """Have the batches run before a stage, that of these modules, which the model may not take any more."""
        try:
            checked.forward(lambda: self._flow_past(run, names))
        except Exception as error:  # a model raises what it likes
            if isinstance(error, Violation) or raised_in_hook(error) or not checked.past:
                raise
            text = f"before the stage of {names[0] or 'the model'} the model does not take its batches any more ({describe(error)})"
            advice = "change in one stage, or in on_calibration_end, what fits only together"
            raise Violation("state", f"{text}; {advice}", [describe(error)]) from error

    def _flow_past(self, run: CompressorRun, names: tuple[str, ...]) -> None:
        with without_modifier_hooks(run.model, but=self.stages.awake(names)):
            self.forward(run)

    def live(self, checked: CheckedRun, run: CompressorRun, until: int | None = None, acts: Acts | None = None) -> CallResult | None:
        """Go through the life, with forwards where a calibration has them, until a failure or a number of moments.

        Args:
            checked: the run with its oracle.
            run: the run.
            until: moments to go through; None for all.
            acts: what callbacks are made to do, whenever they come.

        Returns:
            The outcome of the last moment.
        """
        outcome = None
        for moment, names in self.life()[:until]:
            outcome = self.go(checked, run, moment, names, acts)
            if outcome.kind == "failed":
                return outcome
        if until is None and acts is None and run.way is not None and run.way[-1]:
            self.completed.add(run.way)
        return outcome

    def result(self, model: nn.Module | None = None, *, seed: int) -> dict[str, Tensor]:
        """Go through a whole life.

        Args:
            model: to work on; by default a copy of the subject's.
            seed: that the caller has chosen; the making of the modifier and the run find its numbers at one place.

        Returns:
            The state dict that it leaves, copied.
        """
        begin_random_numbers(seed)
        run = self.open(model=model)
        begin_random_numbers(seed)
        self.live(self.check(run), run)
        return {key: value.detach().clone() for key, value in run.model.state_dict().items()}


@contextmanager
def entered(run: Run, number: int, is_base: bool) -> Iterator[None]:
    """Show modifiers which batch runs, and in which stream, as a calibration does."""
    if not isinstance(run, CompressorRun) or run.state.data is None:
        yield
        return
    with run.session.only_base_hooks() if is_base else nullcontext():
        run.state.enter_batch(run.state.data, number)
        run.state.base_stream = is_base
        try:
            yield
        finally:
            run.state.leave_batch()
            run.state.base_stream = False


def move_random_numbers() -> None:
    """Bring every global generator into a state that no seed gives, so that seeding one is a change that is seen."""
    torch.rand(1)
    random.random()
    numpy.random.random()


def begin_random_numbers(seed: int = 1) -> None:
    """Bring every global generator to a place that the seed alone decides, and that is no beginning of its numbers.

    Args:
        seed: that the caller may have chosen; whoever reads it, draws nothing and is told by what comes out under another one.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    move_random_numbers()


def _steps_per_epoch(start: float, end: float) -> int | None:
    """Of epochs in which a training comes exactly to times between two whole indices, or else near them; None if both are whole."""
    fitting = [number for number in range(2, _LAST_END + 1) if end * number <= _LAST_END]
    meeting = [number for number in fitting if all((exact(time) * number).denominator == 1 for time in (start, end))]
    is_whole = float(start).is_integer() and float(end).is_integer()
    return None if is_whole or not fitting else (*meeting, fitting[-1])[0]
