"""llm-compressor behind the interface that the harness drives, so that its lifecycle can be held against the same contract.

The library is never a dependency: it is imported when a run is opened. Two things are made comparable here, and nothing else. It refuses a
call by ValueError where the contract says RuntimeError, so a refusal is passed on as a LifecycleError. And its events are built without a
step (0.14), so what a callback is told about an event is taken from what the adapter sent: the search then finds what follows from that,
modifiers that never start and never end, and not at every single event that the number is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from compressor.errors import LifecycleError
from harness.errors import HarnessError
from harness.lifecycle.driving.callback_recorder import Recorder
from harness.lifecycle.driving.compare import CLAUSES, Clause
from harness.lifecycle.driving.driver import Run
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.probes import Chain
from harness.lifecycle.machines.session_machine import Stage
from harness.lifecycle.machines.strategies import Setup
from harness.lifecycle.oracle import CALLBACKS, Flags, SessionModel, Settings

PACKAGE = "llmcompressor"
PROBE = "Probe"
OWN = "QuantizationModifier"


def open_llm_compressor_run(modifier: str, settings: Settings) -> Run:
    """Open a run of llm-compressor over a fresh model of two linear layers.

    Args:
        modifier: Probe, which does nothing of its own, or QuantizationModifier, which is asked for static FP8.
        settings: its times.

    Returns:
        The run.

    Raises:
        HarnessError: llm-compressor is not installed here.
    """
    _require()
    if modifier == OWN:
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return LlmCompressorRun(Chain(), [QuantizationModifier(scheme="FP8", targets=["Linear"], **asdict(settings))])
    return LlmCompressorRun(Chain(), [_probe_class()(**asdict(settings))])


def llm_compressor_stage(clauses: Collection[Clause] = CLAUSES) -> Stage:
    """Return what the session machine needs to drive probes in llm-compressor's sessions at random.

    Args:
        clauses: the clauses of the contract that count; a breach of any other ends an example without a verdict.

    Returns:
        The stage.

    Raises:
        HarnessError: llm-compressor is not installed here.
    """
    from hypothesis import strategies as st

    _require()

    def open_run(setup: Setup) -> CheckedRun:
        modifiers = [_probe_class()(**asdict(settings)) for settings in setup.settings]
        run = LlmCompressorRun(Chain(), modifiers, setup.steps_per_epoch)
        return CheckedRun(run, SessionModel(setup.settings, setup.steps_per_epoch), clauses=clauses)

    steps = st.sampled_from(("hook forward_pre first", "hook forward second", "unhook all"))
    return Stage(open_run, lambda run: run.model(torch.ones(1, 2)), kinds=(steps,))


def llm_compressor_versions() -> dict[str, str]:
    """Return the versions of what is driven, by package.

    Returns:
        Package to version.

    Raises:
        HarnessError: llm-compressor is not installed here.
    """
    _require()
    return {name: version(name) for name in (PACKAGE, "compressed-tensors", "transformers", "torch")}


class LlmCompressorRun:
    """A run of llm-compressor's modifiers in one of its sessions.

    Args:
        model: the model; it will change.
        modifiers: fresh, in order; they become recorded.
        steps_per_epoch: what the session is told.
    """

    features = frozenset({"leave"})

    def __init__(self, model: nn.Module, modifiers: Sequence[Any], steps_per_epoch: int | None = None) -> None:
        from llmcompressor.core.session_functions import create_session

        self.model = model
        self.recorder = Recorder()
        self.recorder.perform = self._perform
        self.modifiers = list(modifiers)
        for number, modifier in enumerate(self.modifiers):
            plain: Any = type(modifier)
            object.__setattr__(modifier, "__class__", _recorded_class(plain))
            modifier._run, modifier._number = self, number
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.event: tuple[str, bool, tuple[str, ...]] = ("BATCH_START", False, ())
        self._context = create_session()
        self.session = self._context.__enter__()

    def initialize(self) -> None:
        """Begin."""
        self._call(lambda: self.session.initialize(recipe=self.modifiers, model=self.model, steps_per_epoch=self.steps_per_epoch))

    def send(self, event: str, has_loss: bool = False, modules: tuple[str, ...] = ()) -> None:
        """Send an event with its step, which is all that the library lets a caller say about the index.

        Args:
            event: its name.
            has_loss: send a loss with it.
            modules: names of modules to send with it.
        """
        from llmcompressor.core import EventType

        step = self.step + (event == "BATCH_END")
        options: dict[str, Any] = {"global_step": step}
        if has_loss:
            options["loss"] = torch.tensor(0.5)
        if event == "SEQUENTIAL_EPOCH_END":
            options["modules"] = [self.model.get_submodule(name) for name in modules]
        before, self.event, self.step = self.step, (event, has_loss, modules), step
        try:
            self._call(lambda: self.session.event(EventType[event], **options))
        except BaseException:
            self.step = before
            raise

    def finalize(self) -> None:
        """End."""
        self._call(self.session.finalize)

    def abort(self) -> None:
        """Refuse: the library has no such call.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("llm-compressor: a session cannot be aborted; the feature is not offered")

    def leave(self, error: BaseException | None) -> None:
        """Leave the `with create_session()` block of the run.

        Args:
            error: the exception by which it is left, or None.
        """
        try:
            self._context.__exit__(type(error) if error else None, error, None)
        except BaseException as raised:
            if raised is not error:  # a context manager made from a generator raises what it is told of
                raise

    def call_modifier(self, number: int, method: str) -> None:
        """Call a method of one modifier, past the session.

        Args:
            number: of the modifier.
            method: initialize, update_event or finalize.
        """
        from llmcompressor.core import Event, EventType

        event = (Event(type_=EventType.BATCH_START),) if method == "update_event" else ()
        getattr(self.modifiers[number], method)(self.session.state, *event)

    def hooks_disabled(self, number: int | None = None) -> AbstractContextManager[None]:
        """Put all hooks to sleep.

        Args:
            number: ignored; the library knows no other way.

        Returns:
            The context.
        """
        del number
        from llmcompressor.modifiers.utils.hooks import HooksMixin

        context: AbstractContextManager[None] = HooksMixin.disable_hooks()
        return context

    def flags(self) -> list[Flags]:
        """Return where every modifier stands."""
        return [Flags(*(bool(getattr(one, f"{field.name}_")) for field in fields(Flags))) for one in self.modifiers]

    def standing(self) -> tuple[str, int, float]:
        """Return the last moment, which the library does not tell, the step and the index."""
        return "", self.step, self.step / (self.steps_per_epoch or 1)

    def shared(self) -> Mapping[str, object]:
        """Return nothing: the state of this library is not compared."""
        return {}

    def _call(self, call: Callable[[], object]) -> None:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                call()
        except ValueError as error:
            if any(entry.error is not None for entry in self.recorder.entries):
                raise  # it comes from a callback
            raise LifecycleError(str(error)) from error

    def _perform(self, step: str, owner: Any, state: Any) -> None:
        """Carry out a step inside a callback: `hook KIND WHERE` or `unhook all`."""
        words = step.split()
        if words[0] == "hook":
            owner.register_hook(state.model.get_submodule(words[2]), lambda *seen: None, words[1])
        elif step == "unhook all":
            owner.remove_hooks()
        else:
            raise NotImplementedError(step)


def _require() -> None:
    """Refuse to go on without the library, and turn off its log, which a search would print thousands of times."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise HarnessError(f"lifecycle: {PACKAGE} is not installed in this environment; run this with an interpreter that has it")
    with contextlib.redirect_stdout(sys.stderr):  # its log starts here, and would go between our results
        logger = importlib.import_module(f"{PACKAGE}.logger").logger
    for package in (PACKAGE, "compressed_tensors"):
        logger.disable(package)


@functools.lru_cache(maxsize=1)
def _probe_class() -> Any:
    from llmcompressor.modifiers import Modifier

    def on_initialize(self: Any, state: Any, **options: Any) -> bool:
        return True

    body = {"__module__": __name__, "on_initialize": on_initialize}
    return types.new_class(PROBE, (Modifier,), exec_body=lambda namespace: namespace.update(body))


@functools.lru_cache(maxsize=8)
def _recorded_class(cls: Any) -> Any:
    """Return a subclass whose callbacks and hooks go through the recorder of the run in `_run`."""

    def register_hook(self: Any, target: nn.Module, hook: Callable[..., Any], hook_type: str, **options: Any) -> Any:
        recorder: Recorder = self._run.recorder
        name = recorder.name_hook(self._number, f"{hook_type} {getattr(target, 'token', type(target).__name__)}")

        def noted(*args: Any, **kwargs: Any) -> Any:
            recorder.fired.append(name)
            return hook(*args, **kwargs)

        handle = super(recorded, self).register_hook(target, noted, hook_type, **options)
        recorder.note_handle(self._number, handle, name)
        return handle

    def remove_hooks(self: Any, handles: Iterable[Any] | None = None) -> None:
        given = None if handles is None else set(handles)
        super(recorded, self).remove_hooks(given)
        self._run.recorder.note_removed(self._number, given)

    body: dict[str, Any] = {callback: _recorded_callback(callback, cls) for callback in CALLBACKS}
    body |= {"register_hook": register_hook, "remove_hooks": remove_hooks}
    body |= {"_run": None, "_number": 0, "__annotations__": {"_run": Any, "_number": int}}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    recorded: Any = types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
    return recorded


def _recorded_callback(callback: str, cls: Any) -> Callable[..., Any]:
    from compressor.lifecycle import Event, EventType

    def method(self: Any, state: Any, *args: Any, **options: Any) -> Any:
        run: LlmCompressorRun = self._run
        name, has_loss, modules = run.event
        told: tuple[Event, ...] = ()
        if callback not in ("on_initialize", "on_finalize"):
            _, step, index = run.standing()
            told = (Event(EventType[name], index, step, torch.tensor(0.5) if has_loss else None, modules),)

        def own(*seen: object) -> Any:
            return getattr(cls, callback)(self, state, *args, **options)

        return run.recorder.run(self._number, callback, self, own, state, told)

    return method
