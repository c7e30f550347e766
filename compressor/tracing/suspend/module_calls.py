"""What a module call does inside a forward that can pause: waits at a target, is looked at in a watched module, else runs as always.

`nn.Module.__call__`, `__setattr__` and `register_buffer` are patched for the process while a run is open. Python looks a call up on the
class, so no lighter way catches every call; outside of the paused forwards the patches do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from greenlet import GreenletExit
from torch import Tensor, nn

from compressor.errors import CalibrationError, CompressorError, TracingError
from compressor.random_state import RandomState
from compressor.tracing.suspend.paused_forward import Sample, running_sample
from compressor.tracing.suspend.standstill import StandstillWatch
from compressor.tracing.targets.order import missed_call
from compressor.tracing.targets.running import hooks_around
from compressor.tracing.targets.sample_state import ModuleValues, SetByForwards, copy_arguments, noting_cached_properties, run_shielded

# Targets that are called repeatedly can be calibrated only if the weights of finished targets stay as the samples met them.

_Print = dict[tuple[nn.Module, str], tuple[Tensor, int]]


class FixedWeights:
    """Remembers the weights of targets, and tells when they have been replaced or written to."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._prints: dict[str, _Print] = {}

    def fix(self, target: str, module: nn.Module) -> None:
        """Remember the weights of a target when the samples run on through it.

        Args:
            target: dotted name.
            module: the target as it is now.
        """
        self._prints[target] = _print(module)

    def check(self, model: nn.Module, own: Collection[tuple[nn.Module, str]], targets: Collection[str] | None = None) -> None:
        """Compare weights with what they were.

        Args:
            model: the model.
            own: module and name of what forwards set there themselves, each of them its own.
            targets: dotted names; None takes all that are remembered.

        Raises:
            TracingError: they have changed.
        """
        for target in self._prints if targets is None else targets:
            now, before = _print(model.get_submodule(target)), self._prints[target]
            places = {*now, *before}.difference(own)
            if any(place not in now or place not in before or _differs(now[place], before[place]) for place in places):
                raise TracingError(
                    f"{target or 'the model'}: its weights changed after the samples had run on, but some target is called repeatedly and "
                    'needs forwards with the weights of then; use propagate_error=True, pipeline="basic" or other sequential targets'
                )


def _differs(now: tuple[Tensor, int], before: tuple[Tensor, int]) -> bool:
    return now[0] is not before[0] or now[1] != before[1]


def _print(module: nn.Module) -> _Print:
    return {
        (below, name): (tensor, 0 if tensor.is_inference() else tensor._version)
        for below in module.modules()
        for name, tensor in (*below.named_parameters(recurse=False), *below.named_buffers(recurse=False))
    }


_PATCHED = threading.Lock()  # the patches are process-wide, so only one run can be open
_NO_REWIND = 'paused forwards cannot go back; use pipeline="basic" or other sequential targets'


class CallRouter:
    """Knows targets and watched modules, and decides about every module call of a paused forward.

    Attributes:
        repeated: targets that a forward calls more than once, and that are calibrated by forwards that run again from the start.
        foreign: forwards draw random numbers from Python or numpy.
        advancing: the forward that runs at the moment.
        calibrated: targets that have had a calibration pass.
        closed: targets whose statistics are complete.
        values: what the forwards have set on modules.
        covered: repeated target to the samples whose calls its statistics hold.
        weights: of the repeated targets' runs: what may not change any more.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Collection[str],
        quiet: Callable[[], AbstractContextManager[None]],
        keeping: Collection[str],
        set_by_forwards: Collection[str] = (),
    ) -> None:
        """Learn the targets, by dotted names; nothing is patched yet.

        A calibrated target is called for real in `quiet`. What hooks store on the modules in `keeping`, or on observers below them, are
        statistics of all samples, not values of one, but for the names in `set_by_forwards`.
        """
        self._keeping, self._set_by_forwards = keeping, SetByForwards(model, set_by_forwards)
        self.repeated: frozenset[str] = frozenset()
        self.foreign = False
        self.advancing: Sample | None = None
        self.calibrated: set[str] = set()
        self.closed: set[str] = set()
        self.values = ModuleValues()
        self.covered: dict[str, set[int]] = {}
        self.weights = FixedWeights()
        self._standstill = StandstillWatch()
        self._model = model
        self._quiet = quiet
        self._stage_of: dict[str, str] = {}  # watched module -> the closed target that it was calibrated in
        self._target_names = WeakKeyDictionary({model.get_submodule(name): name for name in targets})
        self._watched_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._isolated: WeakSet[nn.Module] = WeakSet()
        self._hooks_of_model: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()  # those from before the run
        self._call: Callable[..., Any] = nn.Module.__call__

    def watch(self, names: Collection[str]) -> None:
        """Look at calls of these modules, and of those known from before, as they are now in the model.

        Args:
            names: dotted names.
        """
        wanted = {*names, *self._watched_names.values()}
        for name, module in self._model.named_modules():
            if name in wanted:
                self._watched_names[module] = name
            else:  # a module that its successor took in counts under the name of the successor only
                self._watched_names.pop(module, None)

    def close(self, target: str, names: Collection[str]) -> None:
        """Take the statistics of a target for complete: from now on its watched modules may be called inside it only.

        Args:
            target: dotted name.
            names: modules inside it.
        """
        self.closed.add(target)
        module = self._model.get_submodule(target)
        self._target_names[module] = target  # a modifier may have replaced it, or put a module around it; forwards may hold either one
        if self.repeated:
            self.weights.fix(target, module)
        known = set(self._watched_names.values()).intersection(names)
        self._stage_of |= dict.fromkeys(known, target)
        self.watch(known)

    def advance(self, sample: Sample, propagate: bool) -> None:
        """Let a forward run on to its next pause, or to its end.

        Args:
            sample: the forward.
            propagate: what its pause returns.

        Raises:
            TracingError: meanwhile a target was called from another thread, or the forward waits for ever.
        """
        self.advancing = sample
        try:
            with self._standstill.turn(sample):
                sample.advance(propagate)
        finally:
            self.advancing = None
            if sample.stray is not None:
                raise TracingError(
                    f"{sample.stray or 'the model'}: batch {sample.index} calls this sequential target from a thread of its own, where the "
                    'forward cannot pause; use pipeline="basic" or other sequential targets'
                )

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Patch nn.Module for the duration.

        Yields:
            Nothing.

        Raises:
            TracingError: another run is open in this process.
        """
        if not _PATCHED.acquire(blocking=False):
            raise TracingError("suspend: another suspended run is open in this process; end it before starting one")
        hooked = {below for name in self._keeping for below in self._model.get_submodule(name).modules()}
        self._isolated = WeakSet(module for module in self._model.modules() if module not in hooked)
        self.values.keep_generators(self._isolated)
        self._hooks_of_model = WeakKeyDictionary({module: hooks_around(module) for module in self._model.modules()})
        self._call = nn.Module.__call__
        plain = {name: getattr(nn.Module, name) for name in ("__call__", "__setattr__", "register_buffer", "__delattr__")}
        try:
            self._patch(plain["__setattr__"], plain["register_buffer"], plain["__delattr__"])
            with noting_cached_properties(self._note_value), self._standstill.watching():
                yield
        finally:
            for name, function in plain.items():
                setattr(nn.Module, name, function)
            self.values.undo({})
            _PATCHED.release()

    def _patch(self, plain_set: Callable[..., None], plain_buffer: Callable[..., None], plain_delete: Callable[..., None]) -> None:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            sample = running_sample()
            if sample is None:
                self._note_stray_call(module)
                return self._call(module, *args, **kwargs)
            return self._route(sample, module, args, kwargs)

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if not isinstance(value, nn.Module | nn.Parameter):
                self._note_value(module, name)
            plain_set(module, name, value)

        def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            self._note_value(module, name)
            plain_buffer(module, name, *args, **kwargs)

        def delete(module: nn.Module, name: str) -> None:
            self._note_value(module, name)
            plain_delete(module, name)

        patches = {"__call__": call, "__setattr__": set_attribute, "register_buffer": register_buffer, "__delattr__": delete}
        for attribute, function in patches.items():
            setattr(nn.Module, attribute, function)

    def _note_value(self, module: nn.Module, name: str) -> None:
        if running_sample() is not None and (module in self._isolated or (module, name) in self._set_by_forwards):
            self.values.note(module, name)

    def _route(self, sample: Sample, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a call inside a forward is for: wait, be looked at, or just be made."""
        if sample.replays is not None:
            return self._call_in_replay(sample, module, args, kwargs)
        self._note_call(sample, module)
        target = self._target_of(sample, module)
        if target is None:
            return self._call(module, *args, **kwargs)
        if target in self.closed:
            return self._call_for_real(sample, target, args, kwargs)
        return self._call_target(sample, target, args, kwargs)

    def _note_stray_call(self, module: nn.Module) -> None:
        """Remember that a target was called outside of the greenlet of the forward that runs; nobody could pause there."""
        if self.advancing is not None and module in self._target_names:
            self.advancing.stray = self._target_names[module]

    def _note_call(self, sample: Sample, module: nn.Module) -> None:
        """Refuse a call of a watched module that no statistics will ever see."""
        name = self._watched_names.get(module)
        is_repeated = sample.inside is None and self._target_names.get(module) in self.repeated
        if name is None or is_repeated:  # a repeated target is calibrated with all its calls
            return
        stage = self._stage_of.get(name)
        if stage is not None and sample.inside != stage:
            sample.escape(CalibrationError(missed_call(name, stage, sample.index)))

    def _target_of(self, sample: Sample, module: nn.Module) -> str | None:
        target = self._target_names.get(module)
        if target is None or sample.inside is not None:
            return None
        if sample.closing:
            raise GreenletExit
        if target in self.closed and target in self.calibrated and target not in self.repeated:
            sample.escape(
                TracingError(
                    f"{target or 'the model'}: batch {sample.index} calls this sequential target again after its stage, so its statistics "
                    f"would miss this call; {_NO_REWIND}"
                )
            )
        return target

    def _call_target(self, sample: Sample, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait at a target; call it for calibration as often as asked, then for real. Runs inside the sample."""
        # Each pause that asks for calibration calls the target on copies; the one that does not ends the wait.
        while not sample.pause(target):
            with _inside(sample, target):
                self._trial_call(sample, target, args, kwargs)
        return self._call_for_real(sample, target, args, kwargs)

    def _call_for_real(self, sample: Sample, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a target for real."""
        # A target that is called repeatedly: the calls after its stage are in its statistics, if this batch was replayed.
        if target in self.closed and target in self.covered:
            self._check_covered(sample, target)
        quiet = self._quiet if target in self.calibrated else nullcontext
        with _inside(sample, target), quiet():
            return self._call(self._model.get_submodule(target), *args, **kwargs)

    def _check_covered(self, sample: Sample, target: str) -> None:
        """A later call of a repeated target must be in its statistics already, and must meet the weights that the first call met."""
        if sample.index not in self.covered[target]:
            sample.escape(
                TracingError(
                    f"{target or 'the model'}: batch {sample.index} calls this sequential target after its stage, unlike the batches that "
                    f"were looked at before, so its statistics miss this call; {_NO_REWIND}"
                )
            )
        try:
            self.weights.check(self._model, self.values.noted(), [target])
        except TracingError as error:
            sample.escape(error)

    def _call_in_replay(self, sample: Sample, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module in a forward that runs again from the start, with hooks awake inside the replayed target only."""
        if sample.inside is not None or self._target_names.get(module) != sample.replays:
            return self._call(module, *args, **kwargs)
        sample.hush.close()
        try:
            with _inside(sample, str(sample.replays)):
                return self._call(module, *args, **kwargs)
        except CompressorError as error:
            sample.escape(error)
        finally:
            sample.hush.enter_context(self._quiet())

    def _trial_call(self, sample: Sample, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a target without consequences."""
        try:
            self._call_copy(target, args, kwargs)
        except CompressorError as error:
            sample.escape(error)
        except Exception as error:  # noqa: BLE001 - the model's own code decides what it raises, and which of it its callers handle
            if not self._raises_without_hooks(error, target, args, kwargs):
                sample.escape(error)

    def _call_copy(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = copy_arguments((args, kwargs), self._model)
        module = self._model.get_submodule(target)
        before, state = self.values.view(), RandomState.current(foreign=self.foreign)
        try:
            run_shielded(lambda: self._call(module, *args, **kwargs))
        finally:
            self.values.undo(before)
            state.restore()

    def _raises_without_hooks(self, error: Exception, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the target itself raised that, so that it will raise again in the real call, where its caller may handle it."""
        try:
            with self._quiet(), self._hooks_of_model_alone(target):
                self._call_copy(target, args, kwargs)
        except Exception as again:  # noqa: BLE001 - see above
            return type(again) is type(error) and _raised_at(again) == _raised_at(error)
        return False

    @contextlib.contextmanager
    def _hooks_of_model_alone(self, target: str) -> Iterator[None]:
        """Take away hooks that were registered during the run: they have seen this sample, and would see it a second time."""
        tables = [
            (table, dict(table), self._hooks_of_model.get(module, frozenset()))
            for module in self._model.get_submodule(target).modules()
            for table in (module._forward_pre_hooks, module._forward_hooks)
        ]
        try:
            for table, held, own in tables:
                for number in held.keys() - own:
                    del table[number]
            yield
        finally:
            for table, held, _ in tables:
                table.clear()
                table.update(held)


def _raised_at(error: Exception) -> tuple[object, int]:
    """Code and line in which an error began."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (None, 0) if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)


@contextlib.contextmanager
def _inside(sample: Sample, target: str) -> Iterator[None]:
    sample.inside = target
    try:
        yield
    finally:
        sample.inside = None
