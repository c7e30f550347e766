"""The state machine of one modifier without a session: events in any order, an index that goes where it wants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from compressor.lifecycle import Event, EventType, Modifier, State
from harness.lifecycle.driving.callback_actions import Actor
from harness.lifecycle.driving.callback_recorder import Recorder, record
from harness.lifecycle.driving.driver import apply_settings, call_modifier, flags_of, settings_of
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.probes import Chain, Probe
from harness.lifecycle.driving.time_limit import Stopwatch
from harness.lifecycle.machines import strategies
from harness.lifecycle.oracle import Deed, EventSeen, Flags, ModifierModel, Script, SessionModel, Settings, exact, upcoming

# Where events are sent: exact in binary or not, and beyond every start and end that is drawn.
_INDICES = (0.0, 1.0, 2.0, 3.0, 4.0, 0.5, 1.5, 2.5, 0.1, 0.3, 1 / 3, 2 / 3, 4 / 3, 0.7)


class SoloRun:
    """A modifier alone; the names of the methods are those of a run, and it has no session.

    Args:
        model: the model.
        modifier: fresh; it becomes recorded.
    """

    features: frozenset[str] = frozenset({"update", "reentry", "single_hooks"})

    def __init__(self, model: nn.Module, modifier: Modifier) -> None:
        self.model = model
        self.recorder = Recorder()
        self.modifier = record(modifier, self.recorder, 0)
        self.state = State(model=model)

    def initialize(self) -> bool:
        """Initialize the modifier."""
        return self.modifier.initialize(self.state)

    def send(self, event: str, has_loss: bool, modules: tuple[str, ...]) -> None:
        """Send an event at index 0."""
        self.send_event(Event(EventType[event], loss=torch.tensor(0.5) if has_loss else None, modules=modules))

    def send_event(self, event: Event) -> None:
        """Send an event."""
        self.modifier.update_event(self.state, event)

    def finalize(self) -> bool:
        """Finalize the modifier."""
        return self.modifier.finalize(self.state)

    def abort(self) -> None:
        """Take the hooks away, as a session that gives up does."""
        self.modifier.remove_hooks()

    def leave(self, error: BaseException | None) -> None:
        """There is no block to leave."""

    def call_modifier(self, number: int, method: str) -> None:
        """Call a method of the modifier."""
        del number
        call_modifier(self.modifier, method, self.state)

    def act(self, number: int, step: str) -> Deed:
        """Have the modifier carry out a step outside of any callback."""
        return self.recorder.outside(number, step, self.modifier, self.state)

    def hooks_disabled(self, number: int | None = None) -> AbstractContextManager[None]:
        """Put its hooks to sleep."""
        del number
        return self.modifier.disable_hooks()

    def flags(self) -> list[Flags]:
        """Return where it stands."""
        return [flags_of(self.modifier)]

    def standing(self) -> tuple[str, int, float]:
        """There is no session that could stand anywhere."""
        return "", 0, 0.0

    def shared(self) -> Mapping[str, object]:
        """Return the state and the settings, by kind."""
        state = {name: value for name, value in vars(self.state).items() if name != "model"}
        return {"state": state, "settings": settings_of(self.modifier)}


@dataclass
class SoloStage:
    """What a modifier machine drives.

    Attributes:
        make: makes a fresh modifier that does nothing of its own.
        stopwatch: restarted at the start of every example.
        num_steps: steps done so far, of all examples.
    """

    make: Callable[[], Modifier] = Probe
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    num_steps: int = 0


class ModifierMachine(RuleBasedStateMachine):
    """One modifier after another, driven at random beside the oracle."""

    stage: ClassVar[SoloStage]
    checked: CheckedRun | None = None
    run: SoloRun

    @initialize(data=st.data(), settings=strategies.settings, begin=strategies.begins)
    def open(self, data: st.DataObject, settings: Settings, begin: bool) -> None:
        """Make the first modifier."""
        self.stage.stopwatch.restart()
        self._open(data, settings, begin)

    @rule(data=st.data())
    def initialize_modifier(self, data: st.DataObject) -> None:
        """Initialize it, the first time or again."""
        self._perform(data, "initialize()", lambda model: model.initialize(), self.run.initialize)

    @rule(data=st.data(), event=strategies.events, index=st.sampled_from(_INDICES), step=st.integers(0, 5))
    def send(self, data: st.DataObject, event: str, index: float, step: int) -> None:
        """Send any event, at any index."""
        self._send(data, event, index, step)

    @precondition(lambda self: self._is("initialized"))
    @rule(data=st.data(), start=st.sampled_from(_INDICES), by=st.sampled_from((1.0, 0.5, 0.1, 1 / 3)), count=st.integers(2, 4))
    def train(self, data: st.DataObject, start: float, by: float, count: int) -> None:
        """Send the first and the last event of several batches."""
        for number in range(count):
            for event, step in (("BATCH_START", number), ("BATCH_END", number + 1)):
                self._send(data, event, float(exact(start) + step * exact(by)), step)

    @rule(data=st.data())
    def finalize_modifier(self, data: st.DataObject) -> None:
        """Finalize it, too early, the first time or again."""
        self._perform(data, "finalize()", lambda model: model.finalize(), self.run.finalize)

    @precondition(lambda self: self._is("finalized"))
    @rule(data=st.data(), settings=strategies.settings, begin=strategies.begins)
    def again(self, data: st.DataObject, settings: Settings, begin: bool) -> None:
        """Go on with another modifier."""
        self._checked.close()
        self._open(data, settings, begin)

    @precondition(lambda self: self._is("finalized"))
    @rule(data=st.data(), settings=strategies.settings)
    def once_more(self, data: st.DataObject, settings: Settings) -> None:
        """The same, so that most steps are spent on a modifier that lives."""
        self.again(data, settings, True)

    @rule()
    def enter_disabled(self) -> None:
        """Put its hooks to sleep."""
        self._checked.enter_disabled(0)

    @precondition(lambda self: self.checked is not None and self.checked.num_disabled > 0)
    @rule(which=st.integers(0, 3), error=st.sampled_from((None, None, ValueError("left"))))
    def exit_disabled(self, which: int, error: Exception | None) -> None:
        """Leave one of the contexts, not always the latest."""
        self._checked.exit_disabled(which, error)

    @precondition(lambda self: not self._is("finalized"))
    @rule(step=strategies.hook_steps)
    def hook(self, step: str) -> None:
        """Register a hook, or remove some, from outside."""
        self._checked.act(0, step)

    @rule()
    def forward(self) -> None:
        """Run the model."""
        self.stage.num_steps += 1
        self._checked.forward(lambda: self.run.model(torch.ones(1, 2)))

    @rule()
    def forward_that_fails(self) -> None:
        """Run the model on inputs that its first layer cannot take."""
        self._checked.forward(lambda: self.run.model(torch.ones(1, 3)), fails=True)

    def teardown(self) -> None:
        """Leave the contexts."""
        if self.checked is not None:
            self.checked.close()

    def _open(self, data: st.DataObject, settings: Settings, begin: bool) -> None:
        self.run = SoloRun(Chain(), apply_settings(self.stage.make(), settings))
        self.run.recorder.perform = Actor(self.run).perform
        oracle = SessionModel([settings])
        oracle.last = "INITIALIZE"  # there is no session; only the model of its one modifier is asked
        self.checked = CheckedRun(self.run, oracle)
        if begin:
            self.initialize_modifier(data)

    def _send(self, data: st.DataObject, event: str, index: float, step: int) -> None:
        modules = ("first",) if event == "SEQUENTIAL_EPOCH_END" else ()
        sent = Event(EventType[event], index, step, torch.tensor(0.5) if event == "LOSS_CALCULATED" else None, modules)
        seen = EventSeen(event, index, step, event == "LOSS_CALCULATED", modules)
        call = f"update_event({event} at {index:g})"
        self._perform(data, call, lambda model: model.update_event(seen, exact(index)), lambda: self.run.send_event(sent))

    def _perform(self, data: st.DataObject, call: str, script: Callable[[ModifierModel], Script], invoke: Callable[[], object]) -> None:
        self.stage.num_steps += 1
        keys = upcoming(script(copy.deepcopy(self._model)))
        acts = data.draw(strategies.acts(keys, strategies.SOLO_STEPS, often_wrong=True), label="acts") if keys else {}
        self._checked.perform(call, invoke, script(self._model), acts)

    def _is(self, flag: str) -> bool:
        return self.checked is not None and getattr(self._model.flags, flag)

    @property
    def _model(self) -> ModifierModel:
        return self._checked.oracle.modifiers[0]

    @property
    def _checked(self) -> CheckedRun:
        assert self.checked is not None
        return self.checked
