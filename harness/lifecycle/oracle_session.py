"""The model of a whole run: which moment may follow which, and what becomes of the run when a callback fails. See `oracle.py`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fractions import Fraction

from harness.lifecycle.oracle import CallFailed, ModifierModel, Refused, Script, World, upcoming
from harness.lifecycle.terms import MOMENTS, EventSeen, Flags, Settings


class SessionModel:
    """One run of several modifiers over one model.

    Attributes:
        modifiers: their models, in order.
        world: what stands where in the model.
        step: batches that have ended.
        last: the last moment that was gone through.
    """

    def __init__(self, settings: Sequence[Settings], steps_per_epoch: int | None = None, keep: bool = False) -> None:
        """Start before `initialize`; with `keep`, replaced modules are kept for the whole run."""
        self.world = World()
        self.modifiers = [ModifierModel(one, number, self.world, keep) for number, one in enumerate(settings)]
        self.steps_per_epoch = steps_per_epoch
        self.keep = keep
        self.step = 0
        self.last = "CREATE"
        self.calibrated = False

    @property
    def place(self) -> str:
        """Where the run is: before, between, in a batch, in a calibration, or over."""
        if self.last in ("CREATE", "FINALIZE", "ABORT"):
            return "before" if self.last == "CREATE" else "over"
        if self.last in ("CALIBRATION_START", "SEQUENTIAL_EPOCH_END"):
            return "in a calibration"
        return "between" if self.last in ("INITIALIZE", "BATCH_END", "CALIBRATION_END") else "in a batch"

    def allows(self, moment: str) -> bool:
        """Say whether a moment may come now."""
        rules = {
            "INITIALIZE": self.place == "before",
            "BATCH_START": self.place == "between",
            "LOSS_CALCULATED": self.last == "BATCH_START",
            "OPTIM_PRE_STEP": self.last == "LOSS_CALCULATED",
            "OPTIM_POST_STEP": self.last == "OPTIM_PRE_STEP",
            "BATCH_END": self.place == "in a batch" and self.last != "OPTIM_PRE_STEP",
            "CALIBRATION_START": self.place == "between" and not self.calibrated,
            "SEQUENTIAL_EPOCH_END": self.place == "in a calibration",
            "CALIBRATION_END": self.place == "in a calibration",
            "FINALIZE": self.place == "between",
            "ABORT": True,
        }
        return rules[moment]

    def allowed(self) -> list[str]:
        """Return every moment but ABORT that may come now."""
        return [moment for moment in MOMENTS if self.allows(moment)]

    def upcoming(self, moment: str) -> tuple[tuple[int, str], ...]:
        """Return the callbacks that a moment would bring if all went well, as modifier and name; none where it may not come."""
        twin = copy.deepcopy(self)
        if moment in ("INITIALIZE", "FINALIZE"):
            return upcoming(twin.initialize() if moment == "INITIALIZE" else twin.finalize())
        return upcoming(twin.send(moment, moment == "LOSS_CALCULATED"))

    def index_at(self, step: int) -> Fraction:
        """Return how far a run with so many ended batches has come."""
        return Fraction(step, self.steps_per_epoch or 1)

    def initialize(self) -> Script:
        """All modifiers or none; a run that could not begin may try again."""
        self._must("INITIALIZE")
        before, modules, kept = self._standing(), dict(self.world.modules), dict(self.world.kept)
        for modifier in self.modifiers:
            try:
                willing = yield from modifier.initialize()
                if not willing:
                    raise CallFailed([modifier.number])
            except (Refused, CallFailed) as error:
                self._stand(before)
                for one in self.modifiers:
                    one.hooks.clear()
                self.world.modules, self.world.kept = modules, kept
                raise CallFailed([modifier.number]) from error
        self.last = "INITIALIZE"
        return True

    def send(self, event: str, has_loss: bool = False, modules: tuple[str, ...] = ()) -> Script:
        """One event for all modifiers, in order; when one fails, the run is over and no modifier's flags have moved."""
        self._must(event)
        if has_loss != (event == "LOSS_CALCULATED") or (modules and event != "SEQUENTIAL_EPOCH_END"):
            raise Refused
        step = self.step + (event == "BATCH_END")
        index = self.index_at(step)
        seen = EventSeen(event, float(index), step, has_loss, modules)
        before = self._standing()
        for modifier in self.modifiers:
            try:
                yield from modifier.update_event(seen, index)
            except (Refused, CallFailed) as error:
                self._stand(before)
                self._give_up()
                raise CallFailed([modifier.number]) from error
        self.step, self.last = step, event
        self.calibrated = self.calibrated or event == "CALIBRATION_START"
        return True

    def finalize(self) -> Script:
        """Every modifier finalizes, also after the failure of another; all failures come together."""
        self._must("FINALIZE")
        failed = []
        for modifier in self.modifiers:
            try:
                done = yield from modifier.finalize()
            except (Refused, CallFailed) as error:
                if isinstance(error, CallFailed) and error.interrupted:
                    self._give_up()
                    raise
                done = False
            if not done:
                failed.append(modifier.number)
        if failed:
            self._give_up()
            raise CallFailed(failed, together=True)
        self.last = "FINALIZE"
        return True

    def abort(self) -> Script:
        """Legal at any moment; calls nobody."""
        yield from ()
        self._give_up()
        return True

    def leave(self, by_exception: bool) -> Script:
        """The end of the `with` block: what is not finished is aborted, and without an exception that is an error."""
        yield from ()
        if by_exception:
            self._give_up()
        elif self.last == "FINALIZE":
            self.world.kept.clear()
        elif self.place != "before" and self.place != "over":
            self._give_up()
            raise CallFailed([])
        return True

    def _standing(self) -> list[tuple[Flags, tuple[int | None, bool]]]:
        return [(modifier.flags, modifier.interval) for modifier in self.modifiers]

    def _stand(self, standing: list[tuple[Flags, tuple[int | None, bool]]]) -> None:
        for modifier, (flags, interval) in zip(self.modifiers, standing, strict=True):
            modifier.flags, modifier.interval = flags, interval

    def _give_up(self) -> None:
        for modifier in self.modifiers:
            modifier.hooks.clear()
        self.world.bring_back()
        self.last = "ABORT"

    def _must(self, moment: str) -> None:
        if not self.allows(moment):
            raise Refused
