"""What carries out the steps of acts inside callbacks: hooks, replaced modules, and calls that the lifecycle must refuse there.

`hook KIND WHERE`         register a hook; after the kind `+kwargs` or `+always`
`unhook`, `unhook all`    take the oldest, or all, hooks of the modifier away
`replace WHERE`           put another layer there
`claim WHERE`             claim that layer, unless another modifier has, and write into the report
`reenter MOMENT`          call the session from inside its own call; must be refused
`thread MOMENT`           the same from another thread
`again METHOD`            call the modifier's own method; must be refused
`neighbour`               run another session over another model to its end, in another thread; must work
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from compressor.errors import LifecycleError
from compressor.lifecycle import EventType, Modifier, Session, State
from harness.lifecycle.driving.callback_recorder import Recorder
from harness.lifecycle.driving.driver import CompressorRun, call_modifier
from harness.lifecycle.driving.probes import Chain, Probe, token_linear

THREAD_SECONDS = 5


class ReentrantRun(Protocol):
    """A run that can be called again from inside."""

    recorder: Recorder
    state: State

    def initialize(self) -> object:
        """Initialize."""

    def send(self, event: str, has_loss: bool, modules: tuple[str, ...]) -> None:
        """Send an event."""

    def finalize(self) -> object:
        """Finalize."""

    def abort(self) -> None:
        """Give up."""


class Actor:
    """Carries out steps inside the callbacks of one run.

    Args:
        run: the run.
        session_class: what the neighbour runs.
    """

    def __init__(self, run: ReentrantRun, session_class: type[Session] = Session) -> None:
        self._run = run
        self._session_class = session_class
        self._num_replaced = 0
        self._handles: dict[int, list[RemovableHandle]] = {}

    def perform(self, step: str, owner: Modifier, state: State) -> None:
        """Carry out one step; see the head of this file.

        Args:
            step: in words.
            owner: the modifier whose callback is running.
            state: what the callback was given.
        """
        words = step.split()
        if words[0] == "hook":
            self._hook(words[1], words[2], owner, state)
        elif words[0] == "unhook":
            self._unhook(owner, everything=len(words) > 1)
        elif words[0] == "replace":
            self._num_replaced += 1
            token = f"new{self._num_replaced}"
            state.replace_module(words[1], token_linear(f"{words[1]}@{token}"))
            self._run.recorder.note_replaced(words[1], token)
        elif words[0] == "claim":
            state.report.add_fallback(words[1], "planned", owner.label)
            if words[1] not in state.claims:
                state.claim([words[1]], owner.label)
        elif words[0] == "neighbour":
            _in_thread(lambda: run_neighbour(self._session_class))
        else:
            self._reenter(words, owner)

    def _hook(self, kind_and_option: str, where: str, owner: Modifier, state: State) -> None:
        kind, _, option = kind_and_option.partition("+")
        options = {"with_kwargs": option == "kwargs", "always_call": option == "always"}
        num_arguments = 2 + (kind == "forward") + (option == "kwargs")

        def hook(*args: object) -> None:
            if len(args) != num_arguments:
                self._run.recorder.remarks.append(f"a {kind_and_option} hook was called with {len(args)} arguments, not {num_arguments}")

        handle = owner.register_hook(state.model.get_submodule(where), hook, kind, **options)  # type: ignore[arg-type]
        self._handles.setdefault(id(owner), []).append(handle)

    def _unhook(self, owner: Modifier, everything: bool) -> None:
        mine = self._handles.get(id(owner), [])
        if everything:
            owner.remove_hooks()
            mine.clear()
        elif mine:
            try:
                owner.remove_hooks([mine.pop(0)])
            except LifecycleError:  # the lifecycle took it away at a failure in between
                return

    def _reenter(self, words: list[str], owner: Modifier) -> None:
        """Make a call that must be refused, and remark it when it is not."""
        refused: list[bool] = []

        def attempt() -> None:
            try:
                self._call_again(words, owner)
            except LifecycleError:
                refused.append(True)

        if words[0] == "thread":
            _in_thread(attempt)
        else:
            attempt()
        if not refused:
            self._run.recorder.remarks.append(f"{type(owner).__name__}: '{' '.join(words)}' inside a callback was not refused")

    def _call_again(self, words: list[str], owner: Modifier) -> None:
        if words[0] == "again":
            call_modifier(owner, words[1], self._run.state)
        elif words[1] in EventType.__members__:
            self._run.send(words[1], words[1] == "LOSS_CALCULATED", ())
        else:
            getattr(self._run, words[1].lower())()


def run_neighbour(session_class: type[Session]) -> None:
    """Run another session over another model to its end, with a hook that must fire.

    Args:
        session_class: the session to drive.

    Raises:
        AssertionError: the other session did not go as it must.
    """
    model = Chain()
    run = CompressorRun(model, [Probe()], session_class=session_class)
    modifier = run.modifiers[0]
    run.initialize()
    run.send("CALIBRATION_START")
    modifier.register_hook(model.first, _silent, "forward_pre")
    with torch.no_grad():
        model(torch.ones(1, 2))
    run.send("CALIBRATION_END")
    run.finalize()
    if len(run.recorder.fired) != 1 or not modifier.finalized:
        raise AssertionError("a session in another thread did not work beside this one")


def _silent(*args: object) -> None:
    """A hook that changes nothing."""


def _in_thread(call: Callable[[], None]) -> None:
    """Run something in another thread and wait; what it raises is raised here."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True, name="harness")
    thread.start()
    thread.join(timeout=THREAD_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"a call from another thread did not come back within {THREAD_SECONDS} s")
    if errors:
        raise errors[0]
