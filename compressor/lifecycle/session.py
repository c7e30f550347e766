"""One run over one model: sends events to the modifiers in the order that FOLLOWS allows, whole or not at all.

A call that the order does not allow raises LifecycleError and changes nothing. A callback that raises aborts the session: every hook
is removed, kept originals come back, and each modifier's flags are as before the call. Nothing here is global; a session is passed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import torch

from compressor.errors import FinalizeError, LifecycleError
from compressor.lifecycle.events import Call, Event, EventType, Moment, allowed_moments
from compressor.lifecycle.interface import Flags
from compressor.lifecycle.modifier import Modifier
from compressor.lifecycle.state import State


class Session:
    """The lifecycle of several modifiers on one model.

    Args:
        state: what the modifiers share.
        modifiers: in the order in which they get every event.
        steps_per_epoch: number of batches in an epoch; the index then counts epochs.

    Raises:
        LifecycleError: no modifier, something that is no modifier, or a steps_per_epoch that is no positive number.
    """

    def __init__(self, state: State, modifiers: Sequence[Modifier], steps_per_epoch: int | None = None) -> None:
        given: Sequence[object] = modifiers
        strangers = [type(modifier).__name__ for modifier in given if not isinstance(modifier, Modifier)]
        if strangers or not modifiers:
            what = ", ".join(strangers) or "an empty list"
            raise LifecycleError(f"session: {what} was given as modifiers; give at least one Modifier object")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise LifecycleError(f"session: steps_per_epoch={steps_per_epoch} is not positive; give the number of batches in an epoch")
        self.state = state
        self.modifiers = tuple(modifiers)
        self.steps_per_epoch = steps_per_epoch
        self._last: Moment = Call.CREATE
        self._past: set[Moment] = set()
        self._step = 0
        self._busy = threading.Lock()

    @property
    def last(self) -> Moment:
        """The last moment that the session went through."""
        return self._last

    @property
    def step(self) -> int:
        """Number of batches that have ended."""
        return self._step

    @property
    def index(self) -> float:
        """How far training has come: the step, or the fractional epoch where steps_per_epoch is known."""
        return self._index_at(self._step)

    def initialize(self) -> None:
        """Initialize every modifier, or none: after an error the model, the flags, the claims and the report are as before.

        Raises:
            LifecycleError: called at the wrong moment, or a modifier returned False.
        """
        with self._exclusive(Call.INITIALIZE):
            keep, flags = self.state.keep_originals, [modifier.flags for modifier in self.modifiers]
            bring_back = self.state.remember()
            # Whatever the run chose: a modifier that fails must not leave what those before it have replaced.
            self.state.keep_originals = True
            try:
                for modifier in self.modifiers:
                    if not modifier.initialize(self.state):
                        raise LifecycleError(f"{modifier.label}: on_initialize() returned False, so the session cannot run; leave it out")
            except BaseException:
                self._roll_back(flags)
                bring_back()
                raise
            finally:
                self.state.keep_originals = keep
            if not keep:
                self.state.forget_originals()
            self._commit(Call.INITIALIZE)

    def send(self, event_type: EventType, loss: torch.Tensor | None = None, modules: Sequence[str] = ()) -> None:
        """Send an event to every modifier, in order.

        Args:
            event_type: what happened.
            loss: the loss of the batch; for LOSS_CALCULATED, which needs it, and for nothing else.
            modules: dotted names of the subgraph's modules; for SEQUENTIAL_EPOCH_END only.

        Raises:
            LifecycleError: no event, an event that may not come now, or one without or with a foreign payload; nothing has changed.
        """
        if not isinstance(event_type, EventType):
            raise LifecycleError(
                f"session: {event_type!r} was sent, which is no event; send an EventType, and call initialize() and finalize()"
            )
        with self._exclusive(event_type):
            _check_payload(event_type, loss, modules)
            # The batch that ends counts for those who hear of it, and for the session once all of them have.
            step = self._step + (event_type is EventType.BATCH_END)
            event = Event(event_type, self._index_at(step), step, loss, tuple(modules))
            flags = [modifier.flags for modifier in self.modifiers]
            try:
                for modifier in self.modifiers:
                    modifier.update_event(self.state, event)
            except BaseException:
                self._roll_back(flags)
                self._commit(Call.ABORT)
                raise
            self._step = step
            self._commit(event_type)

    def finalize(self) -> None:
        """Finalize every modifier, also when some fail; after an error the session is aborted.

        Raises:
            FinalizeError: the errors of all modifiers that failed.
        """
        with self._exclusive(Call.FINALIZE):
            errors: list[Exception] = []
            try:
                for modifier in self.modifiers:
                    errors += self._finalize_error(modifier)
                if errors:
                    raise FinalizeError(f"session: {len(errors)} of {len(self.modifiers)} modifiers failed to finalize", errors)
            except BaseException:
                self._roll_back()
                self._commit(Call.ABORT)
                raise
            if not self.state.keep_originals:
                self.state.forget_originals(swapped=True)
            self._commit(Call.FINALIZE)

    def abort(self) -> None:
        """Give up, at any moment: remove every hook and put kept originals back. Changes the model.

        Raises:
            LifecycleError: called from inside a callback.
        """
        with self._exclusive(Call.ABORT):
            self._roll_back()
            self._commit(Call.ABORT)

    @contextmanager
    def hooks_disabled(self) -> Iterator[None]:
        """Put the hooks of all modifiers to sleep; contexts nest, and only the outermost exit wakes them.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            for modifier in self.modifiers:
                stack.enter_context(modifier.disable_hooks())
            yield

    @contextmanager
    def only_base_hooks(self) -> Iterator[None]:
        """Put the hooks of those modifiers to sleep that do not take the stream of the uncompressed model.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            for modifier in self.modifiers:
                if modifier.base_stream == "unused":
                    stack.enter_context(modifier.disable_hooks())
            yield

    def __enter__(self) -> Self:
        """Return the session; leaving the block by an exception aborts it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Abort on an exception; forget kept originals after a finalized run.

        Args:
            kind: type of the exception, or None.
            error: the exception, or None.
            trace: its traceback, or None.

        Raises:
            LifecycleError: the block ended without an exception in the middle of a run; it is aborted.
        """
        if kind is not None:
            self.abort()
        elif self._last is Call.FINALIZE:
            self.state.forget_originals(swapped=True)
        elif self._last not in (Call.CREATE, Call.ABORT):
            last = self._last
            self.abort()
            raise LifecycleError(f"session: the block was left after {last.name}, without finalize(); call finalize() or abort() first")

    def _index_at(self, step: int) -> float:
        return float(step) if self.steps_per_epoch is None else step / self.steps_per_epoch

    @contextmanager
    def _exclusive(self, moment: Moment) -> Iterator[None]:
        """Hold the session for one call that FOLLOWS allows; a call from inside a callback or from another thread is refused."""
        # Not waited for: a callback that drives its own session would wait for itself.
        if not self._busy.acquire(blocking=False):
            raise LifecycleError(f"session: {_spell(moment)} came while another call was running; callbacks must not drive their session")
        try:
            allowed = allowed_moments(self._last, self._past)
            if moment is not Call.ABORT and moment not in allowed:
                options = ", ".join(_spell(option) for option in allowed) or "nothing: create a new session"
                raise LifecycleError(f"session: {_spell(moment)} is not allowed after {_spell(self._last)}; allowed now: {options}")
            yield
        finally:
            self._busy.release()

    def _commit(self, moment: Moment) -> None:
        self._last = moment
        self._past.add(moment)

    def _roll_back(self, flags: Sequence[Flags] | None = None) -> None:
        for number, modifier in enumerate(self.modifiers):
            modifier.remove_hooks()
            if flags is not None:
                modifier.restore_flags(flags[number])
        self.state.restore_originals()

    def _finalize_error(self, modifier: Modifier) -> list[Exception]:
        try:
            done = modifier.finalize(self.state)
        except Exception as error:  # noqa: BLE001 - collected: finalize() raises it together with the others
            return [error]
        return [] if done else [LifecycleError(f"{modifier.label}: on_finalize() returned False; its work is not complete")]


def _spell(moment: Moment) -> str:
    return f"{moment.value}()" if isinstance(moment, Call) else moment.name


def _check_payload(event_type: EventType, loss: torch.Tensor | None, modules: Sequence[str]) -> None:
    if event_type is EventType.LOSS_CALCULATED and not isinstance(loss, torch.Tensor):
        raise LifecycleError(f"session: LOSS_CALCULATED was sent with loss={loss!r}; give the loss as a tensor")
    if event_type is not EventType.LOSS_CALCULATED and loss is not None:
        raise LifecycleError(f"session: {event_type.name} was sent with a loss; only LOSS_CALCULATED carries it")
    if event_type is not EventType.SEQUENTIAL_EPOCH_END and modules:
        raise LifecycleError(f"session: {event_type.name} was sent with modules; only SEQUENTIAL_EPOCH_END carries them")
    if isinstance(modules, str):
        raise LifecycleError(f"session: modules={modules!r} is one string; give a tuple of dotted names")
