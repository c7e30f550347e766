"""The base of every modifier: a small state machine that obeys the tables of `interface.py`.

A callback that raises leaves the flags as they were before the call. The methods `initialize`, `update_event` and `finalize` are for
the session; a modifier's author writes the `on_*` callbacks, of which only `on_initialize` is required.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator
from torch import nn

from compressor.errors import LifecycleError, RecipeError
from compressor.lifecycle.events import Event, EventType
from compressor.lifecycle.hooks import HooksMixin
from compressor.lifecycle.interface import (
    CALLS,
    TRANSITIONS,
    AcrossRanks,
    BaseStream,
    CalibrationNeed,
    Flags,
    ModifierInterface,
    PlannedModule,
    Transition,
)
from compressor.lifecycle.settings_errors import describe
from compressor.lifecycle.state import FinishedStage, StageValue, State
from compressor.numerics.scheme import refuse_flag

if TYPE_CHECKING:  # else a type checker sees no metaclass behind the call
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Checked(ModelMetaclass):
    """Makes `Class(setting=value)` answer wrong settings in the words of a recipe; `model_validate`, which recipes call, passes by."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        fields = cast("type[BaseModel]", cls).model_fields
        if hidden := next((name for name in ("start", "end", "update") if callable(fields[name].default)), None):
            raise RecipeError(f"{cls.__name__}: {hidden} is a setting of every modifier, and a method has its name; give it another")
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            raise RecipeError(describe(error, cast("type[BaseModel]", cls), settings, cls.__name__, None)) from error


class Modifier(HooksMixin, ModifierInterface, metaclass=_Checked):
    """Base of every modifier: settings as pydantic fields, state as read-only properties, work in the `on_*` callbacks.

    Attributes:
        index: position in the recipe, from 0; filled by the recipe.
        group: name of the group in the recipe.
        start: index from which the modifier is active; None: not started by training.
        end: index at which it ends; None: no end.
        update: length of the update interval in units of the index; `on_update` then comes only during the first batch of each
            interval counted from `start`. None or 0: during every batch.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    calibration: ClassVar[CalibrationNeed] = "none"
    # True where `on_initialize` takes modules out of the model; it then finds the data in the state, and stands first in a recipe.
    reshapes: ClassVar[bool] = False
    # True where it trains through all layers at one time, so that none can wait elsewhere for its turn.
    needs_all_layers: ClassVar[bool] = False
    # False: its hooks leave nothing on the modules that they look at, nor below, so all that is set there is a sample's.
    keeps_on_modules: ClassVar[bool] = True
    # How it works where several processes share a run; None: it does not know of them, so that it cannot where it looks at data.
    across_ranks: ClassVar[AcrossRanks | None] = None
    # What the modifier does differently on purpose, for `harness.verify`; nothing here reads it.
    contract_tags: ClassVar[Collection[str]] = frozenset()

    index: int | None = Field(default=None, ge=0)
    group: str | None = None
    start: float | None = None
    end: float | None = None
    update: float | None = Field(default=None, ge=0)

    _lifecycle_flags: Flags = PrivateAttr(default=Flags())
    _running_method: str | None = PrivateAttr(default=None)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_flag(value, cls.model_fields[info.field_name].annotation) if info.field_name in cls.model_fields else value

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(f"start={self.start} is not before end={self.end}, so it would never start; give a smaller start")
        return self

    def __eq__(self, other: object) -> bool:
        """Equal settings of the same class; where a modifier stands in its life, and what it keeps under private names, does not count."""
        return type(self) is type(other) and _settings(self) == _settings(other)

    if not TYPE_CHECKING:  # else a type checker would take any name for an attribute

        def __setattr__(self, name: str, value: object) -> None:
            """Set a field, or a private attribute, which need not be declared.

            Args:
                name: of the attribute.
                value: of it.

            Raises:
                LifecycleError: a public name that is no field.
            """
            if not name.startswith("_") and name not in type(self).model_fields and not hasattr(type(self), name):
                raise LifecycleError(
                    f"{self.label}.{name}: it has no such field, and fields are settings; keep state under a private name, as self._{name}"
                )
            super().__setattr__(name, value)

    @property
    def label(self) -> str:
        """The name in messages: the class, and the position in the recipe where it is known."""
        return type(self).__name__ if self.index is None else f"{type(self).__name__}[{self.index}]"

    @property
    def flags(self) -> Flags:
        """Where the modifier stands."""
        return self._lifecycle_flags

    @property
    def initialized(self) -> bool:
        """True after `on_initialize` said True."""
        return self._lifecycle_flags.initialized

    @property
    def started(self) -> bool:
        """True after `on_start` or `on_calibration_start`."""
        return self._lifecycle_flags.started

    @property
    def ended(self) -> bool:
        """True after `on_end` or `on_calibration_end`."""
        return self._lifecycle_flags.ended

    @property
    def finalized(self) -> bool:
        """True after `on_finalize` said True."""
        return self._lifecycle_flags.finalized

    @property
    def calibration_need(self) -> CalibrationNeed:
        """What data the modifier needs with its settings; the class attribute `calibration` unless overridden."""
        return self.calibration

    @property
    def base_stream(self) -> BaseStream:
        """Say whether the sequential pipeline shall run every batch through the uncompressed model, too, ahead of each calibration.

        Where it does, `state.has_base_stream` is True, and hooks of a modifier that does not say `unused` run twice for each batch: first
        while `state.base_stream` is True. Others never see that stream.
        """
        return "unused"

    @property
    def needs_gradients(self) -> bool:
        """Whether forwards of its own keep something for a backward, which a plan must look at; False unless overridden."""
        return False

    def check_settings(self) -> None:
        """Refuse settings that no other modifier makes up for; called once a recipe is whole, and again when it is initialized.

        Raises:
            SchemeError: of modifiers that quantize.
        """

    def check_oneshot(self) -> list[str]:
        """Look at settings that count the steps of a training, for a run in one shot, which has none; called before it, and by its plan.

        Returns:
            What a user must know of those that then change nothing, a sentence each.

        Raises:
            RecipeError: they ask for what is not done without steps.
        """
        times = [f"{name}={getattr(self, name)}" for name in ("start", "end", "update") if getattr(self, name) is not None]
        if times and type(self).on_start is Modifier.on_start:
            raise RecipeError(f"{self.label}: {times[0]} is for training, in which it takes no part; leave it out")
        return [
            f"{self.label}: {', '.join(times)} {'count' if times[1:] else 'counts'} in a training, and here there is none"
            for _ in times[:1]
        ]

    def parts(self) -> list[Modifier]:
        """Say which modifiers do what it asks for; a recipe puts them in its place. May change it.

        Returns:
            In order; itself, unless overridden.
        """
        return [self]

    def followers(self) -> list[Modifier]:
        """Make the modifiers that its settings ask for behind it.

        Returns:
            Fresh ones; a recipe appends each to the stage, unless one of its type stands there already.
        """
        return []

    def restore_flags(self, flags: Flags) -> None:
        """Go back to earlier flags, after a call of the session that failed as a whole.

        Args:
            flags: what `flags` was before that call.
        """
        self._lifecycle_flags = flags

    def initialize(self, state: State) -> bool:
        """Prepare for a model; on failure the hooks made so far are removed.

        Args:
            state: the session's state.

        Returns:
            What `on_initialize` said; False leaves the modifier as it was.
        """
        with self._calling("initialize", drop_hooks=True):
            done = self._checked_bool("on_initialize", self.on_initialize(state))
            if done:
                self._lifecycle_flags = self._lifecycle_flags._replace(initialized=True)
                # Due at the very beginning: it starts ahead of the first batch, not within it.
                if self.should_start(0.0):
                    self.on_start(state, Event(EventType.BATCH_START))
                    self._lifecycle_flags = self._lifecycle_flags._replace(started=True)
            else:
                self.remove_hooks()
            return done

    def update_event(self, state: State, event: Event) -> None:
        """Take one event: `on_event`, then the callbacks of the first row of TRANSITIONS that fits.

        Args:
            state: the session's state.
            event: what happened.
        """
        with self._calling("update_event"):
            self._note_period(event)
            self.on_event(state, event)
            row = next((row for row in TRANSITIONS if self._fits(row, event)), None)
            if row is None:
                return
            for callback in row.callbacks:
                getattr(self, callback)(state, event)
                if row.sets is not None:
                    self._lifecycle_flags = self._lifecycle_flags._replace(**{row.sets: True})

    def finalize(self, state: State) -> bool:
        """End the work and remove the hooks that are left.

        Args:
            state: the session's state.

        Returns:
            What `on_finalize` said; False leaves the modifier as it was.
        """
        with self._calling("finalize"):
            done = self._checked_bool("on_finalize", self.on_finalize(state))
            if done:
                self.remove_hooks()
                self._lifecycle_flags = self._lifecycle_flags._replace(finalized=True)
            return done

    def should_start(self, index: float) -> bool:
        """Say whether the modifier is to start at an index.

        Args:
            index: how far training has come.

        Returns:
            True when start <= index < end, with no upper bound where `end` is None; False where `start` is None.
        """
        return self.start is not None and self.start <= index and (self.end is None or index < self.end)

    def should_end(self, index: float) -> bool:
        """Say whether the modifier is to end at an index.

        Args:
            index: how far training has come.

        Returns:
            True when index >= end; False where `end` is None.
        """
        return self.end is not None and index >= self.end

    def should_update(self, index: float) -> bool:
        """Say whether `on_update` is due in the running batch.

        Args:
            index: how far training has come; the interval was looked at when the batch started.

        Returns:
            True without an update interval, and during the first batch of each interval.
        """
        del index
        return not self.update or self._lifecycle_flags.due

    def plan(self, model: nn.Module) -> list[PlannedModule]:
        """List what this modifier would do, without doing it.

        Args:
            model: the model; not modified.

        Returns:
            One entry per module that it would change or leave for a reason; empty unless overridden.
        """
        del model
        return []

    def watches(self, model: nn.Module) -> list[str]:
        """Name the modules that it will hook while data flows, for a plan: layers are cut at them, or run whole around them.

        Args:
            model: with or without values; not modified.

        Returns:
            Dotted names; unless overridden, of all that it would change where it needs data that flow, and else of none.
        """
        if self.calibration_need in ("none", "own"):
            return []
        return [module.name for module in self.plan(model) if module.reason is None]

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue] | None:
        """Say what a resumed run must know of a finished stage beside model and report.

        None, the default: the modifier cannot resume. One that can promises that what its stages change of the model lies inside
        them: quantized layers put in place, or tensors changed.

        Args:
            modules: dotted names of the stage's modules.

        Returns:
            What `skip_stage` will need, or None.
        """
        del modules
        return None

    def skip_stage(self, state: State, stage: FinishedStage) -> None:
        """Take over a stage that an earlier run has finished: put back what replaced modules, and forget the work. Changes the model.

        Args:
            state: the session's state; tensors that were changed in place are put back by the caller.
            stage: what it left.
        """

    def settle(self) -> None:
        """Follow weights that were written outside of a step, such as averages, with what OPTIM_POST_STEP keeps: zeros, scales."""

    @abstractmethod
    def on_initialize(self, state: State) -> bool:
        """Prepare for `state.model`; return True, or False where the modifier cannot work on it."""

    def on_finalize(self, state: State) -> bool:
        """Complete the work; return True, or False where it could not be completed."""
        del state
        return True

    def on_event(self, state: State, event: Event) -> None:
        """Every event, before anything else."""

    def on_start(self, state: State, event: Event) -> None:
        """The index has reached `start`."""

    def on_update(self, state: State, event: Event) -> None:
        """An event between start and end; that of the end comes here behind `on_end`, as in llm-compressor."""

    def on_end(self, state: State, event: Event) -> None:
        """The index has reached `end`."""

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Calibration data is about to flow."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        """The subgraph with `event.modules` has seen all calibration data."""

    def on_calibration_end(self, state: State, event: Event) -> None:
        """All calibration data has been seen."""

    @contextmanager
    def _calling(self, method: str, drop_hooks: bool = False) -> Iterator[None]:
        """Check that `method` may be called, and undo its changes of the flags when it raises."""
        before = self._lifecycle_flags
        if self._running_method is not None:
            raise LifecycleError(
                f"{self.label}: {method}() was called from inside its own {self._running_method}(); callbacks must not drive the lifecycle"
            )
        if (before.initialized, before.finalized) != CALLS[method]:
            stands = "finalized" if before.finalized else "initialized" if before.initialized else "not initialized"
            raise LifecycleError(
                f"{self.label}: {method}() was called while the modifier is {stands}; initialize it once, send events, finalize it once"
            )
        # Set for the duration, so that a callback which calls back is told so instead of corrupting the flags.
        self._running_method = method
        try:
            yield
        except BaseException:
            self._lifecycle_flags = before
            if drop_hooks:
                self.remove_hooks()
            raise
        finally:
            self._running_method = None

    def _checked_bool(self, callback: str, answer: object) -> bool:
        if not isinstance(answer, bool):
            raise LifecycleError(f"{self.label}: {callback}() returned {answer!r}, which is neither True nor False; add the missing return")
        return answer

    def _fits(self, row: Transition, event: Event) -> bool:
        return (
            row.event in (None, event.type)
            and row.started in (None, self._lifecycle_flags.started)
            and row.ended in (None, self._lifecycle_flags.ended)
            and (row.condition is None or getattr(self, row.condition)(event.index))
        )

    def _note_period(self, event: Event) -> None:
        """At the start of a batch, find its update interval; 1e-9 absorbs the rounding of fractional epochs."""
        if self.update and event.type is EventType.BATCH_START:
            period = math.floor((event.index - (self.start or 0.0)) / self.update + 1e-9)
            self._lifecycle_flags = self._lifecycle_flags._replace(period=period, due=period != self._lifecycle_flags.period)


def overrides(modifier: Modifier, *callbacks: str) -> bool:
    """Say whether the class of a modifier, a base or a mixin has one of these callbacks of its own."""
    return any(getattr(type(modifier), name) is not getattr(Modifier, name) for name in callbacks)


def _settings(modifier: Modifier) -> dict[str, object]:
    """What a recipe could say of a modifier: its fields, without what it keeps under private names that were not declared."""
    return {name: value for name, value in modifier.__dict__.items() if not name.startswith("_")}
