"""The lifecycle contract once more, as a model to compare with: written from its text, importing neither compressor nor torch.

A call is a generator. It yields each callback that has to come next, as an `Expected`, and is sent the `Deed` that really happened in
it; it returns what the call answers, or raises Refused (the call is illegal, nothing may have changed) or CallFailed (a callback went
wrong). So the model decides what comes when and what it leads to, and never what a callback does.

Numbers are exact: an index is a fraction of integers, and a setting is the simple fraction that its float stands for.
This file holds the model of one modifier; `oracle_session.py` builds that of a run on it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor

from harness.lifecycle.terms import CALIBRATION_EVENTS, Deed, EventSeen, Expected, Flags, Settings


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
