"""A recorder in the place of every callback: it notes what came, and makes callbacks misbehave where a plan says so.

A modifier is recorded by giving the object a subclass of its own class, whose callbacks run through the recorder. Nothing else about it
changes, and the author of a modifier needs no base class of the harness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.driving.torch_settings import modes_aside
from harness.lifecycle.oracle import CALLBACKS, Deed, Ending, EventSeen, Expected
from harness.lifecycle.process_state import ModulesMayDraw

OWN = "(its own)"
"""In an act: answer with what the modifier's own code returned."""

UNKNOWN = object()

AnyModifier = TypeVar("AnyModifier", bound=Modifier)


class PlannedError(Exception):
    """What a callback raises because the harness told it to."""


class PlannedInterrupt(KeyboardInterrupt):
    """The same for something that is no Exception."""


@dataclass(frozen=True)
class Act:
    """What one callback is made to do.

    Attributes:
        steps: small things to do before the modifier's own code, in words that the run's `perform` knows.
        ending: return, raise an Exception, or raise a KeyboardInterrupt.
        skip_own: raise before the modifier's own code instead of after it.
        answer: what to return in place of the modifier's own answer.
    """

    steps: tuple[str, ...] = ()
    ending: Ending = "returned"
    skip_own: bool = False
    answer: object = OWN


Acts = Mapping[tuple[int, str], Act]


@dataclass(frozen=True)
class Entry:
    """One callback that came.

    Attributes:
        seen: which, and with what event.
        deed: what happened in it.
        error: what it raised.
        planned: the error was raised by the harness, not by the modifier's own code.
    """

    seen: Expected
    deed: Deed
    error: BaseException | None = None
    planned: bool = False


@dataclass
class _Frame:
    modifier: int
    hooks_added: list[str] = field(default_factory=list)
    hooks_removed: list[str] = field(default_factory=list)
    replaced: list[tuple[str, str]] = field(default_factory=list)


class Recorder:
    """Notes the callbacks of all modifiers of one run.

    Attributes:
        entries: the callbacks since `begin`.
        remarks: what was wrong inside callbacks, one line each.
        fired: the recorded hooks that have run since `begin`, in order.
        draws: where the callbacks since `begin` drew random numbers for anything but a new module.
        loss: what is being sent with an event; the callbacks must get this very tensor. UNKNOWN where nobody has said.
        running: the callback that is running now, for the report of one that hangs.
        perform: carries out a step of an act; set by the run.
        on_begin: told whenever a new call begins, so that a time limit counts from there.
    """

    def __init__(self) -> None:
        """Start with nothing recorded and nothing planned."""
        self.entries: list[Entry] = []
        self.remarks: list[str] = []
        self.fired: list[str] = []
        self.draws: list[str] = []
        self.loss: object = UNKNOWN
        self.running: str | None = None
        self.perform: Callable[[str, Modifier, State], None] = _perform_nothing
        self.on_begin: Callable[[], None] = _do_nothing
        self._acts: Acts = {}
        self._frames: list[_Frame] = []
        self._num_hooks = 0
        self._names: dict[Any, tuple[int, str]] = {}

    def begin(self, acts: Acts | None = None) -> None:
        """Forget what was recorded, and plan acts for the callbacks to come."""
        self.entries, self.remarks, self.fired, self.draws, self._acts = [], [], [], [], acts or {}
        self.on_begin()

    def run(self, number: int, callback: str, owner: Modifier, own: Callable[..., Any], state: State, event: tuple[Event, ...]) -> Any:
        """Stand in for one callback.

        Args:
            number: of the modifier in its run.
            callback: its name.
            owner: the modifier.
            own: the modifier's own code.
            state: the argument of every callback.
            event: the event, where the callback gets one.

        Returns:
            What the plan or the modifier's own code answers.
        """
        if self._frames and self._frames[-1].modifier == number:
            return own(state, *event)  # called by the modifier itself, not by the lifecycle
        if event and self.loss is not UNKNOWN and event[0].loss is not self.loss:
            self.remarks.append(f"{type(owner).__name__}.{callback} did not get the loss that was sent, but {event[0].loss}")
        act = self._acts.get((number, callback), Act())
        frame, error, answer = _Frame(number), None, None
        settings, brought, before = _settings(state), _brought(event), self.running
        self._frames.append(frame)
        self.running = f"{type(owner).__name__}.{callback}"
        planned = False
        try:
            for step in act.steps:
                self.perform(step, owner, state)
            if not act.skip_own:
                answer = self._own(own, state, event)
            answer = answer if act.answer is OWN else act.answer
            if act.ending != "returned":
                planned = True
                raise (PlannedError if act.ending == "raised" else PlannedInterrupt)(f"planned in {self.running}")
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._frames.pop()
            self.running = before
            self._note(Expected(number, callback, _seen(event)), frame, answer, error, planned)
            self.remarks += [f"{type(owner).__name__}.{callback} changed state.{name}" for name in _changed(settings, _settings(state))]
            if _brought(event) != brought:
                self.remarks.append(f"{type(owner).__name__}.{callback} wrote into event.loss, which others read, too; change a copy")
        return answer

    def _own(self, own: Callable[..., Any], state: State, event: tuple[Event, ...]) -> Any:
        mode = ModulesMayDraw()
        try:
            with mode:
                return own(state, *event)
        finally:
            self.draws += mode.draws

    def outside(self, number: int, step: str, owner: Modifier, state: State) -> Deed:
        """Carry out a step outside of any callback, as a modifier may when it is asked from elsewhere.

        Args:
            number: of the modifier.
            step: as in an act.
            owner: the modifier.
            state: of the run.

        Returns:
            What was done.
        """
        frame = _Frame(number)
        self._frames.append(frame)
        try:
            self.perform(step, owner, state)
        finally:
            self._frames.pop()
        return Deed(hooks_added=tuple(frame.hooks_added), hooks_removed=tuple(frame.hooks_removed))

    def name_hook(self, number: int, where: str) -> str:
        """Return a name for a new hook, and note that the running callback made it."""
        name = f"{number}.{self._num_hooks} {where}"
        self._num_hooks += 1
        if self._frames and self._frames[-1].modifier == number:
            self._frames[-1].hooks_added.append(name)
        return name

    def note_handle(self, number: int, handle: Any, name: str) -> None:
        """Remember which hook of which modifier a handle stands for."""
        self._names[handle] = number, name

    def note_removed(self, number: int, handles: Iterable[Any] | None) -> None:
        """Note that the running callback took hooks away; all of its modifier where `handles` is None."""
        if self._frames and self._frames[-1].modifier == number:
            names = [self._names[handle] for handle in (self._names if handles is None else handles) if handle in self._names]
            self._frames[-1].hooks_removed += [name for owner, name in names if owner == number]

    def note_replaced(self, name: str, token: str) -> None:
        """Note that the running callback replaced a module."""
        self._frames[-1].replaced.append((name, token))

    def _note(self, seen: Expected, frame: _Frame, answer: object, error: BaseException | None, planned: bool) -> None:
        ending: Ending = "returned" if error is None else "raised" if isinstance(error, Exception) else "interrupted"
        deed = Deed(ending, answer, tuple(frame.hooks_added), tuple(frame.hooks_removed), tuple(frame.replaced))
        self.entries.append(Entry(seen, deed, error, planned))


def record(modifier: AnyModifier, recorder: Recorder, number: int) -> AnyModifier:
    """Make a modifier run its callbacks through a recorder. Changes the modifier.

    Args:
        modifier: fresh.
        recorder: of the run.
        number: of the modifier in the run.

    Returns:
        The same object.
    """
    object.__setattr__(modifier, "__class__", recorded_class(type(modifier)))
    modifier._recorder, modifier._number = recorder, number  # type: ignore[attr-defined]
    return modifier


@functools.lru_cache(maxsize=256)
def recorded_class(cls: type[Modifier]) -> type[Modifier]:
    """Return the subclass that a recorded modifier of a class has: what the modifier finds as `type(self)`.

    Args:
        cls: of the modifier.

    Returns:
        The same one for every modifier of the class.
    """

    def register_hook(
        self: Any,
        module: Any,
        fn: Callable[..., Any],
        kind: str,
        with_kwargs: bool = False,
        always_call: bool = False,
        prepend: bool = False,
    ) -> Any:
        recorder: Recorder = self._recorder
        name = recorder.name_hook(self._number, f"{kind}{'+always' * always_call} {getattr(module, 'token', type(module).__name__)}")

        def noted(*args: Any, **kwargs: Any) -> Any:
            recorder.fired.append(name)
            return fn(*args, **kwargs)

        handle = super(recorded, self).register_hook(module, noted, kind, with_kwargs=with_kwargs, always_call=always_call, prepend=prepend)
        recorder.note_handle(self._number, handle, name)
        return handle

    def remove_hooks(self: Any, handles: Iterable[Any] | None = None) -> None:
        given = None if handles is None else list(handles)
        super(recorded, self).remove_hooks(given)
        self._recorder.note_removed(self._number, given)

    body: dict[str, Any] = {"register_hook": register_hook, "remove_hooks": remove_hooks}
    body |= {callback: _recorded_callback(callback, cls) for callback in CALLBACKS}
    body |= {"_recorder": None, "_number": 0, "__annotations__": {"_recorder": Any, "_number": int}}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    recorded: type[Modifier] = metaclass(cls.__name__, (cls,), body)
    return recorded


def _recorded_callback(callback: str, cls: type[Modifier]) -> Callable[..., Any]:
    def method(self: Any, state: State, *event: Event) -> Any:
        own = getattr(super(type(self), self), callback)  # bound as Python does: a static method gets no self
        return self._recorder.run(self._number, callback, self, own, state, event)

    return functools.wraps(getattr(cls, callback))(method)


def _seen(event: tuple[Event, ...]) -> EventSeen | None:
    if not event:
        return None
    one: object = event[0]
    if not isinstance(one, Event):
        return EventSeen(f"no event but {one!r}", 0.0, 0)
    return EventSeen(one.type.name, one.index, one.step, one.loss is not None, tuple(one.modules))


@modes_aside()
def _brought(event: tuple[Event, ...]) -> object:
    """What an event brings for all to read, by its values, and whether it still leads to gradients."""
    losses = [getattr(one, "loss", None) for one in event]
    return freeze(losses), [getattr(loss, "requires_grad", False) for loss in losses]


def _settings(state: State) -> dict[str, object]:
    """What a callback may use and fill, but neither replace nor add to."""
    return dict(vars(state))


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [name for name in {**before, **after} if name not in before or name not in after or before[name] is not after[name]]


def _do_nothing() -> None:
    """Nobody wants to know."""


def _perform_nothing(step: str, owner: Modifier, state: State) -> None:
    raise NotImplementedError(step)
