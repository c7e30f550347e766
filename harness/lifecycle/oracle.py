"""The lifecycle contract once more, as a model to compare with: written from its text, importing neither compressor nor torch.

A call is a generator. It yields each callback that has to come next, as an `Expected`, and is sent the `Deed` that really happened in
it; it returns what the call answers, or raises Refused (the call is illegal, nothing may have changed) or CallFailed (a callback went
wrong). So the model decides what comes when and what it leads to, and never what a callback does.

Numbers are exact: an index is a fraction of integers, and a setting is the simple fraction that its float stands for.
The model of one modifier comes first; that of a run is built on it.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor
from typing import Literal

# The words that the oracle, the recorder and the machines share: names of moments, and what is seen of a callback. Imports nothing.

BATCH_EVENTS = ("BATCH_START", "LOSS_CALCULATED", "OPTIM_PRE_STEP", "OPTIM_POST_STEP", "BATCH_END")
CALIBRATION_EVENTS = ("CALIBRATION_START", "SEQUENTIAL_EPOCH_END", "CALIBRATION_END")
EVENTS = (*BATCH_EVENTS, *CALIBRATION_EVENTS)
MOMENTS = ("INITIALIZE", *EVENTS, "FINALIZE")
CALLBACKS = (
    "on_initialize",
    "on_event",
    "on_start",
    "on_update",
    "on_end",
    "on_calibration_start",
    "on_sequential_epoch_end",
    "on_calibration_end",
    "on_finalize",
)
ANSWERING = ("on_initialize", "on_finalize")

# What a callback did: came back, raised an Exception, or raised something that ends programs (KeyboardInterrupt).
Ending = Literal["returned", "raised", "interrupted"]


@dataclass(frozen=True)
class Settings:
    """What the recipe says of one modifier about time."""

    start: float | None = None
    end: float | None = None
    update: float | None = None


@dataclass(frozen=True)
class Flags:
    """The four flags of a modifier that everybody may read."""

    initialized: bool = False
    started: bool = False
    ended: bool = False
    finalized: bool = False


@dataclass(frozen=True)
class EventSeen:
    """What a callback is told about an event."""

    type: str
    index: float
    step: int
    has_loss: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """A callback that has to come next; without an event where it is given none."""

    modifier: int
    callback: str
    event: EventSeen | None = None


@dataclass(frozen=True)
class Deed:
    """What happened inside a callback: its end and answer, the hooks it made and removed, the modules it replaced."""

    ending: Ending = "returned"
    answer: object = None
    hooks_added: tuple[str, ...] = ()
    hooks_removed: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """The call is not allowed now: it raises and changes nothing."""


class CallFailed(Exception):
    """A callback went wrong, and the call ends with an error.

    Attributes:
        culprits: the modifiers at fault, in order.
        together: the errors come as a group.
        interrupted: it was no Exception but an interrupt, which nothing may hold up.
    """

    def __init__(self, culprits: Sequence[int], together: bool = False, interrupted: bool = False) -> None:
        """Name the modifiers at fault."""
        super().__init__(f"callbacks of {list(culprits)} failed")
        self.culprits = tuple(culprits)
        self.together = together
        self.interrupted = interrupted


Script = Generator[Expected, Deed, bool]


def upcoming(script: Script) -> tuple[tuple[int, str], ...]:
    """Return the callbacks that a call would bring if all went well: modifier and name, each once.

    Args:
        script: of a copy of the oracle, which moves.

    Returns:
        (modifier, callback) in the order in which they would come.
    """
    keys = []
    try:
        expected = next(script)
        while True:
            keys.append((expected.modifier, expected.callback))
            expected = script.send(Deed(answer=True))
    except (StopIteration, Refused, CallFailed):
        return tuple(dict.fromkeys(keys))


def refuse() -> Script:
    """The oracle's side of a call that has no other than to be refused."""
    yield from ()
    raise Refused


def exact(value: float) -> Fraction:
    """Return the simple fraction that a float stands for: 1/3 for 0.3333333333333333."""
    return Fraction(value).limit_denominator(10_000)


@dataclass
class World:
    """What the callbacks of one run change together: who stands where in the model, and what stood there at first."""

    modules: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, new: str, keep: bool) -> None:
        """Note that a module was replaced. Changes the world."""
        if keep:
            self.kept.setdefault(name, self.modules.get(name, "original"))
        self.modules[name] = new

    def bring_back(self) -> None:
        """Put everything kept back. Changes the world."""
        self.modules.update(self.kept)
        self.kept.clear()


class ModifierModel:
    """One modifier.

    Attributes:
        settings: what the recipe says.
        number: its place in the session.
        flags: where it stands.
        hooks: its live hooks, in the order in which they were made.
    """

    def __init__(self, settings: Settings, number: int = 0, world: World | None = None, keep: bool = False) -> None:
        """Start fresh, in a world that may be shared."""
        self.settings = settings
        self.number = number
        self.flags = Flags()
        self.hooks: list[str] = []
        self.world = world or World()
        self.keep = keep
        # The number of the update interval of the latest batch, and whether that batch is the first in it.
        self.interval: tuple[int | None, bool] = (None, False)

    def refuses(self, method: str) -> bool:
        """Say whether the modifier must refuse a call of `initialize`, `update_event` or `finalize` now."""
        return self.flags.finalized or self.flags.initialized == (method == "initialize")

    def initialize(self) -> Script:
        """Legal once. `on_initialize` says True or False; a modifier whose time has come at index 0 starts at once."""
        self._must(self.flags == Flags())
        try:
            answer = yield from self._answer("on_initialize")
            if not answer:
                self.hooks.clear()
                return False
            flags = Flags(initialized=True)
            if self._reached(Fraction(0)):
                yield from self._tell("on_start", EventSeen("BATCH_START", 0.0, 0))
                flags = replace(flags, started=True)
        except CallFailed:
            self.hooks.clear()
            raise
        self.flags = flags
        return True

    def update_event(self, event: EventSeen, index: Fraction) -> Script:
        """Legal between initialize and finalize. `on_event`, then what the event means for this modifier."""
        self._must(self.flags.initialized and not self.flags.finalized)
        before = self.flags, self.interval
        try:
            if event.type == "BATCH_START":
                self.interval = self._interval_at(index)
            yield from self._tell("on_event", event)
            yield from self._meaning(event, index)
        except CallFailed:
            self.flags, self.interval = before
            raise
        return True

    def finalize(self) -> Script:
        """Legal between initialize and finalize. `on_finalize` says True or False; after True no hook is left."""
        self._must(self.flags.initialized and not self.flags.finalized)
        answer = yield from self._answer("on_finalize")
        if answer:
            self.flags = replace(self.flags, finalized=True)
            self.hooks.clear()
        return answer

    def _meaning(self, event: EventSeen, index: Fraction) -> Generator[Expected, Deed, None]:
        if event.type in CALIBRATION_EVENTS:
            yield from self._tell("on_" + event.type.lower(), event)
            if event.type == "CALIBRATION_START":
                self.flags = replace(self.flags, started=True)
            if event.type == "CALIBRATION_END":
                self.flags = replace(self.flags, ended=True)
        elif event.type == "BATCH_START" and not self.flags.started and self._reached(index):
            yield from self._tell("on_start", event)
            yield from self._tell("on_update", event)
            self.flags = replace(self.flags, started=True)
        elif event.type == "BATCH_END" and self._active and self._over(index):
            yield from self._tell("on_end", event)
            yield from self._tell("on_update", event)
            self.flags = replace(self.flags, ended=True)
        elif self._active and (not self.settings.update or self.interval[1]):
            yield from self._tell("on_update", event)

    @property
    def _active(self) -> bool:
        return self.flags.started and not self.flags.ended

    def _reached(self, index: Fraction) -> bool:
        return self.settings.start is not None and exact(self.settings.start) <= index and not self._over(index)

    def _over(self, index: Fraction) -> bool:
        return self.settings.end is not None and index >= exact(self.settings.end)

    def _interval_at(self, index: Fraction) -> tuple[int | None, bool]:
        if not self.settings.update:
            return None, False
        number = floor((index - exact(self.settings.start or 0)) / exact(self.settings.update))
        return number, number != self.interval[0]

    def take(self, deed: Deed) -> None:
        """Note what was done to hooks and modules, in a callback or outside."""
        self.hooks += deed.hooks_added
        self.hooks = [hook for hook in self.hooks if hook not in deed.hooks_removed]
        for name, new in deed.replaced:
            self.world.put(name, new, self.keep)

    def _tell(self, callback: str, event: EventSeen | None) -> Generator[Expected, Deed, Deed]:
        deed = yield Expected(self.number, callback, event)
        self.take(deed)
        if deed.ending != "returned":
            raise CallFailed([self.number], interrupted=deed.ending == "interrupted")
        return deed

    def _answer(self, callback: str) -> Generator[Expected, Deed, bool]:
        deed = yield from self._tell(callback, None)
        if deed.answer is not True and deed.answer is not False:
            raise CallFailed([self.number])
        return deed.answer

    @staticmethod
    def _must(allowed: bool) -> None:
        if not allowed:
            raise Refused


# The model of a whole run: which moment may follow which, and what becomes of the run when a callback fails. See `oracle.py`.


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
