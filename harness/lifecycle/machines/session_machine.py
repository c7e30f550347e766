"""State machines over the lifecycle: random calls, legal and illegal, with callbacks that misbehave, the oracle beside every one.

`SessionMachine` drives a session of several modifiers; `modifier_machine.py` has that of a single one. Both are templates: `build` fills in
what is driven, so that one machine serves our core, somebody's modifier and, through an adapter, another library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness.lifecycle.driving.callback_recorder import Acts
from harness.lifecycle.driving.driver import Run
from harness.lifecycle.driving.oracle_run import CheckedRun, OverError
from harness.lifecycle.driving.time_limit import Stopwatch
from harness.lifecycle.machines import strategies
from harness.lifecycle.machines.strategies import Setup
from harness.lifecycle.oracle import BATCH_EVENTS, CALIBRATION_EVENTS, MOMENTS


@dataclass
class Stage:
    """What a session machine drives.

    Attributes:
        open_run: makes a fresh run of the modifiers of a setup, over a fresh model, with the oracle beside it.
        forward: runs the model of a run.
        kinds: the small things that callbacks may be made to do.
        part_names: module names to send with SEQUENTIAL_EPOCH_END.
        stopwatch: restarted at the start of every example.
        num_steps: steps done so far, of all examples.
    """

    open_run: Callable[[Setup], CheckedRun]
    forward: Callable[[Run], object]
    kinds: strategies.StepKinds = strategies.OBEDIENT_STEPS
    part_names: Sequence[tuple[str, ...]] = (("first",), ("second",), ("first", "second"))
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    num_steps: int = 0


class SessionMachine(RuleBasedStateMachine):
    """One session after another, driven at random beside the oracle."""

    stage: ClassVar[Stage]
    checked: CheckedRun | None = None
    ended = False
    num_parts = 0

    @initialize(data=st.data(), setup=strategies.setups, begin=strategies.begins)
    def open(self, data: st.DataObject, setup: Setup, begin: bool) -> None:
        """Open the first run."""
        self.stage.stopwatch.restart()
        self._open(data, setup, begin)

    @rule(data=st.data(), which=st.integers(0, 7))
    def advance(self, data: st.DataObject, which: int) -> None:
        """Go through a moment that may come now; open another run where this one is over."""
        allowed = self._checked.oracle.allowed()
        if allowed:
            self._go(data, allowed[which % len(allowed)])
        else:
            self._step(lambda checked: checked.close())
            self._open(data, data.draw(strategies.setups, label="setup"), data.draw(strategies.begins, label="begin"))

    @rule(data=st.data(), moment=strategies.moments)
    def attempt(self, data: st.DataObject, moment: str) -> None:
        """Try any moment, allowed or not."""
        self._go(data, moment)

    @rule()
    def attempt_all(self) -> None:
        """Try every moment that may not come now: each is refused, and nothing has changed for the next."""
        for moment in MOMENTS:
            if not self._checked.oracle.allows(moment):
                self._step(functools.partial(_go_without_acts, moment))

    @precondition(lambda self: self._can("payload"))
    @rule(event=strategies.events, has_loss=st.booleans(), parts=st.integers(0, 2))
    def send_payload(self, event: str, has_loss: bool, parts: int) -> None:
        """Send an event with a payload that may not belong to it."""
        modules = self.stage.part_names[parts % len(self.stage.part_names)]
        self._step(lambda checked: checked.send(event, has_loss=has_loss, modules=modules))

    @precondition(lambda self: self._place == "between")
    @rule(count=st.integers(1, 6))
    def train(self, count: int) -> None:
        """Go through whole batches."""
        for event in BATCH_EVENTS * count:
            self._step(functools.partial(_send_unless_over, event))

    @precondition(lambda self: self._place == "between" and not self._checked.oracle.calibrated)
    @rule()
    def calibrate(self) -> None:
        """Go through a whole calibration."""
        for event in CALIBRATION_EVENTS:
            self._step(functools.partial(_send_unless_over, event))

    @precondition(lambda self: self._place != "before" and self._can("standing"))
    @rule(number=st.integers(0, 2), method=st.sampled_from(("initialize", "update_event", "finalize")))
    def call_modifier(self, number: int, method: str) -> None:
        """Call a modifier past the session, at a moment when it must refuse."""
        number %= len(self._checked.oracle.modifiers)
        if self._checked.oracle.modifiers[number].refuses(method):
            self._step(lambda checked: checked.call_modifier(number, method))

    @precondition(lambda self: self._place not in ("before", "over") and self._checked.obedient)
    @rule(number=st.integers(0, 2), step=strategies.hook_steps)
    def hook(self, number: int, step: str) -> None:
        """Register a hook, or remove some, from outside."""
        self._step(lambda checked: checked.act(number % len(checked.oracle.modifiers), step))

    @rule(number=st.none() | st.integers(0, 2))
    def enter_disabled(self, number: int | None) -> None:
        """Put hooks to sleep."""
        if number is not None and "single_hooks" not in self._checked.run.features:
            number = None
        self._checked.enter_disabled(None if number is None else number % len(self._checked.oracle.modifiers))

    @precondition(lambda self: self.checked is not None and self.checked.num_disabled > 0)
    @rule(which=st.integers(0, 3), error=st.sampled_from((None, None, ValueError("left"))))
    def exit_disabled(self, which: int, error: Exception | None) -> None:
        """Leave one of the contexts, not always the latest."""
        self._step(lambda checked: checked.exit_disabled(which, error))

    @rule()
    def forward(self) -> None:
        """Run the model."""
        self._step(lambda checked: checked.forward(lambda: self.stage.forward(checked.run)))

    @precondition(lambda self: self.checked is not None and self.checked.obedient)
    @rule()
    def forward_that_fails(self) -> None:
        """Run the model on inputs that its first layer cannot take."""
        self._step(lambda checked: checked.forward(lambda: checked.run.model(torch.ones(1, 3)), fails=True))

    @precondition(lambda self: self._can("leave"))
    @rule(data=st.data(), how=st.integers(0, 11))
    def end(self, data: st.DataObject, how: int) -> None:
        """Abort, or leave the `with` block; mostly go on all the same, since nothing can be seen after an end."""
        errors: dict[int, BaseException | None] = {1: None, 2: ValueError("left"), 3: KeyboardInterrupt()}
        if how == 0:
            self._step(lambda checked: checked.abort())
        elif how in errors:
            self._step(lambda checked: checked.leave(errors[how]))
        else:
            self.advance(data, how)

    def teardown(self) -> None:
        """Try once more what is illegal, and close the last run."""
        if self.checked is not None:
            self.attempt_all()
            self._step(lambda checked: checked.close())

    def _open(self, data: st.DataObject, setup: Setup, begin: bool) -> None:
        self.checked = self.stage.open_run(setup)
        if begin:
            self._go(data, "INITIALIZE")

    def _go(self, data: st.DataObject, moment: str) -> None:
        acts: Acts = {}
        if keys := self._checked.oracle.upcoming(moment):
            acts = data.draw(strategies.acts(keys, self.stage.kinds, often_wrong=moment == "FINALIZE"), label="acts")
        parts = self.stage.part_names[self.num_parts % len(self.stage.part_names)]
        self.num_parts += moment == "SEQUENTIAL_EPOCH_END"
        self._step(lambda checked: checked.go(moment, acts, parts))

    def _step(self, call: Callable[[CheckedRun], object]) -> None:
        """Do one step; after the example has come to an end nothing more is looked at."""
        if self.ended:
            return
        self.stage.num_steps += 1
        self.ended = True  # unless the step comes to its end: after a violation a teardown must not report another one
        with suppress(OverError):
            call(self._checked)
            self.ended = False

    def _can(self, feature: str) -> bool:
        return self.checked is not None and feature in self.checked.run.features

    @property
    def _place(self) -> str:
        return "" if self.checked is None else self.checked.oracle.place

    @property
    def _checked(self) -> CheckedRun:
        assert self.checked is not None
        return self.checked


def _go_without_acts(moment: str, checked: CheckedRun) -> None:
    checked.go(moment)


def _send_unless_over(event: str, checked: CheckedRun) -> None:
    if not checked.is_over:
        checked.send(event)


def build(template: type[Any], stage: Any) -> type[Any]:
    """Return a machine that drives a stage.

    Args:
        template: SessionMachine or ModifierMachine.
        stage: what it drives.

    Returns:
        A machine class for `run_state_machine_as_test` or `.TestCase`.
    """
    return type(template.__name__, (template,), {"stage": stage})
