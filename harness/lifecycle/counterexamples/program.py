"""One program on one run of a library, with the oracle beside it, until the first deviation; and how a deviation is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.lifecycle.driving.callback_recorder import Act, Acts
from harness.lifecycle.driving.compare import CallResult, Violation
from harness.lifecycle.driving.driver import Run
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.snapshot import num_hooks
from harness.lifecycle.oracle import BATCH_EVENTS, CALLBACKS, MOMENTS, Script, SessionModel, Settings

DISABLE, ENABLE, LEAVE = "enter disable_hooks()", "leave disable_hooks()", "leave by an exception"
RAISING, SILENT = ", its callback raises", ", its callback returns None"
LEFT_KINDS = ("hooks", "added modules", "patched forwards")

OpenRun = Callable[[str, Settings], Run]


class Program(NamedTuple):
    """One modifier, its times, and what is done to the run."""

    modifier: str
    times: Settings
    steps: tuple[str, ...]


class Symptom(NamedTuple):
    """A way of breaking the contract: the clause, the step that shows it, where, and the callback or things in question."""

    clause: str
    step: str
    after: str
    detail: str = ""

    def __str__(self) -> str:
        """Say it as a sentence."""
        texts = {
            "accepted": f"{self.step} is accepted {self.after}",
            "refused": f"{self.step} is refused {self.after}",
            "missing": f"{self.detail} does not come at {self.step}",
            "extra": f"{self.detail} comes at {self.step}, where it must not",
            "awake": f"a hook runs inside disable_hooks(), after the step: {self.step}",
            "hooks": f"hooks are not as they must be, after the step: {self.step}",
            "errors": f"an error is not passed on as it must be, at the step: {self.step}",
            "unchanged": f"something has changed after the step: {self.step}",
            "left behind": f"{self.detail} {self.after} stay on the model after the step: {self.step}",
        }
        return texts.get(self.clause, f"{self.clause}: {self.step} {self.after}")


class Deviation(NamedTuple):
    """The first deviation of a run: what it is, what was seen, and after how many steps."""

    symptom: Symptom
    seen: str
    num_steps: int


@dataclass(frozen=True)
class CounterExample:
    """The shortest program that shows a symptom, and what was seen at its last step."""

    symptom: Symptom
    program: Program
    seen: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        modifier, times, steps = self.program
        return {"symptom": str(self.symptom), "modifier": modifier, **asdict(times), "steps": list(steps), "seen": self.seen}

    def to_text(self) -> str:
        """Return it as lines."""
        modifier, times, steps = self.program
        given = ", ".join(f"{name}={value:g}" for name, value in asdict(times).items() if value is not None)
        return f"{self.symptom}\n    {modifier}({given}): {' -> '.join(steps)}\n    {self.seen}"


class _WatchedRun(CheckedRun):
    """A checked run that remembers what the latest call raised."""

    error: BaseException | None = None

    def perform(
        self, call: str, invoke: Callable[[], object], script: Script, acts: Acts | None = None, moment: str | None = None
    ) -> CallResult:
        """Make a call on both sides, as CheckedRun does."""

        def watched() -> object:
            self.error = None
            try:
                return invoke()
            except BaseException as error:
                self.error = error
                raise

        return super().perform(call, watched, script, acts, moment)


class Trial:
    """One program on one run, with the oracle beside it, until the first deviation.

    Args:
        open_run: opens a fresh run.
        program: what to do; the harness's own probe is to be called `Probe`, and does nothing but what it is told.
    """

    def __init__(self, open_run: OpenRun, program: Program) -> None:
        self.program = program
        run = open_run(program.modifier, program.times)
        self.obedient = program.modifier == "Probe"
        self.parts = _parts(run.model)
        self.run, self.oracle = run, SessionModel([program.times])
        # A modifier of the library itself may add attributes, tensors and classes of observers in its normal course.
        self.checked = _WatchedRun(
            run, self.oracle, obedient=self.obedient, allowed=() if self.obedient else ("attribute", "class", "requires_grad")
        )

    def deviation(self) -> Deviation | None:
        """Carry the program out; returns the first deviation, or None where the run keeps the contract."""
        try:
            for number, step in enumerate(self.program.steps, start=1):
                moment, after, before = step.split(",")[0], self._after(step), self.run.flags()
                legal = moment in MOMENTS and self.oracle.allows(moment)
                if step != moment and not legal:
                    return None  # whether a callback that misbehaves comes at all is not the question here
                try:
                    self._do(step)
                except Violation as violation:
                    symptom = self._symptom(violation, step, after, legal)
                    return Deviation(symptom, self._seen(symptom, violation, before), number)
            return None
        finally:
            while self.checked.num_disabled:
                self.checked.exit_disabled(0)

    def _after(self, step: str) -> str:
        """Say where the run is: by its last moment for the events of a batch, whose order counts, else by its place."""
        if step in BATCH_EVENTS and self.oracle.place != "in a calibration":
            return f"after {self.oracle.last}"
        words = {"between": "outside of batches", "over": "after FINALIZE", "before": "before INITIALIZE"}
        return words.get(self.oracle.place, self.oracle.place)

    def _do(self, step: str) -> None:
        if step == DISABLE:
            self.checked.enter_disabled(None)
        elif step == ENABLE and self.checked.num_disabled:
            self.checked.exit_disabled(self.checked.num_disabled - 1)
        elif step == LEAVE:
            self._leave()
        elif step != ENABLE:
            moment = step.split(",")[0]
            self.checked.go(moment, self._acts(step, moment), ("first", "second"))
        if not self.checked.is_over and self.oracle.modifiers[0].hooks:
            self.checked.forward(partial(self.run.model, torch.ones(1, 2)))

    def _leave(self) -> None:
        error = ValueError("the forward of the pipeline failed")
        if self.obedient:
            self.checked.leave(error)
            return
        self.run.leave(error)
        patched = [name for name, module in self.run.model.named_modules() if "forward" in vars(module)]
        hooks = [str(num_hooks(self.run.model))] if num_hooks(self.run.model) else []
        left = dict(zip(LEFT_KINDS, (hooks, sorted(_parts(self.run.model) - self.parts), patched), strict=True))
        if any(left.values()):
            raise Violation("left behind", "; ".join(f"{kind}: {', '.join(names)}" for kind, names in left.items() if names))

    def _acts(self, step: str, moment: str) -> Acts:
        """The probe hangs a hook up when calibration starts and takes it away when it ends; the last step may make a callback fail."""
        callback = f"on_{moment.lower()}" if f"on_{moment.lower()}" in CALLBACKS else "on_event"
        if step.endswith(RAISING):
            return {(0, callback): Act(("hook forward_pre first",) if self.obedient else (), ending="raised")}
        if step.endswith(SILENT):
            return {(0, callback): Act(answer=None)}
        steps = {"CALIBRATION_START": ("hook forward_pre first",), "CALIBRATION_END": ("unhook all",)}
        return {(0, callback): Act(steps[moment])} if self.obedient and moment in steps else {}

    def _symptom(self, violation: Violation, step: str, after: str, legal: bool) -> Symptom:
        text = str(violation)
        if step in MOMENTS and not legal and self.checked.error is None:
            return Symptom("accepted", step, after)
        if violation.clause == "callbacks":
            named = re.findall(r"\bon_\w+", text)
            return Symptom("missing" if "should have come next" in text else "extra", step, "", named[0] if named else "")
        if violation.clause == "refused":
            return Symptom("refused", step, after)
        if "inside disable_hooks" in text:
            return Symptom("awake", step, "")
        if violation.clause in ("hooks", "left behind") and step not in MOMENTS:
            kinds = ", ".join(kind for kind in LEFT_KINDS if f"{kind}:" in text) or "hooks"
            return Symptom("left behind", "a callback raised" if step.endswith(RAISING) else step, f"of {self.program.modifier}", kinds)
        return Symptom(violation.clause, step, "")

    def _seen(self, symptom: Symptom, violation: Violation, before: Sequence[object]) -> str:
        if symptom.clause != "accepted":
            return str(violation).split("] ", 1)[-1]
        came = ", ".join(entry.seen.callback for entry in self.run.recorder.entries) or "no callback"
        changed = "no flag changed" if self.run.flags() == before else f"now {self.run.flags()[0]}"
        return f"it raised nothing; {came} ran; {changed}"


def _parts(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}
