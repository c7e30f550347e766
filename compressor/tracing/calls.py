"""What a module call does inside a forward that can pause: waits at a target, counts at a watched module, else runs as always.

`nn.Module.__call__`, `__setattr__` and `register_buffer` are patched for the process while a run is open. Python looks a call up on the
class, so no lighter way catches every call; outside of the paused forwards the patches do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from greenlet import GreenletExit
from torch import nn

from compressor.errors import CalibrationError, TracingError
from compressor.tracing.isolation import ModuleValues, copy_arguments, run_shielded
from compressor.tracing.sample import Sample, running_sample

# Watched modules by name: True where a hook needs the module's output, False where its input is enough.
Watched = Mapping[str, bool]

_PATCHED = threading.Lock()  # the patches are process-wide, so only one run can be open
_NO_REWIND = 'paused forwards cannot go back; use pipeline="basic" or other sequential targets'


class _Enough(BaseException):
    """Ends a calibration call whose watched modules have all been seen; no `except Exception` of a model may catch it."""


class CallRouter:
    """Knows targets and watched modules, and decides about every module call of a paused forward.

    Attributes:
        calibrated: targets that have had a calibration pass.
        closed: targets whose statistics are complete.
        values: what the forwards have set on modules.
    """

    def __init__(self, model: nn.Module, targets: Collection[str], quiet: Callable[[], AbstractContextManager[None]]) -> None:
        """Learn the targets; nothing is patched yet.

        Args:
            model: the model.
            targets: dotted names.
            quiet: context in which a calibrated target is called for real.
        """
        self.calibrated: set[str] = set()
        self.closed: set[str] = set()
        self.values = ModuleValues()
        self._model = model
        self._quiet = quiet
        self._stage_of: dict[str, str] = {}  # watched module -> the closed target that it was calibrated in
        self._target_names = WeakKeyDictionary({model.get_submodule(name): name for name in targets})
        self._watched_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._isolated: WeakSet[nn.Module] = WeakSet()
        self._call: Callable[..., Any] = nn.Module.__call__

    def watch(self, names: Collection[str]) -> None:
        """Count calls of these modules, and of those known from before, as they are now in the model.

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
        known = set(self._watched_names.values()).intersection(names)
        self._stage_of |= dict.fromkeys(known, target)
        self.watch(known)

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
        # What hooks store on hooked modules, or on observers below them, are statistics of all samples, not values of one.
        hooked = {below for module in self._watched_names for below in module.modules()}
        self._isolated = WeakSet(module for module in self._model.modules() if module not in hooked)
        self._call = nn.Module.__call__
        plain = {name: getattr(nn.Module, name) for name in ("__call__", "__setattr__", "register_buffer")}
        try:
            self._patch(plain["__setattr__"], plain["register_buffer"])
            yield
        finally:
            for name, function in plain.items():
                setattr(nn.Module, name, function)
            self.values.undo({})
            _PATCHED.release()

    def _patch(self, plain_set: Callable[..., None], plain_buffer: Callable[..., None]) -> None:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            sample = running_sample()
            if sample is None:
                return self._call(module, *args, **kwargs)
            self._note_call(sample, module)
            target = self._target_to_pause_at(sample, module)
            if target is None:
                return self._call(module, *args, **kwargs)
            return self._call_target(sample, target, args, kwargs)

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            sample = running_sample()
            if sample is not None and module in self._isolated and not isinstance(value, nn.Module | nn.Parameter):
                self.values.note(module, name)
            plain_set(module, name, value)

        def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            sample = running_sample()
            if sample is not None and module in self._isolated:
                self.values.note(module, name)
            plain_buffer(module, name, *args, **kwargs)

        for attribute, function in {"__call__": call, "__setattr__": set_attribute, "register_buffer": register_buffer}.items():
            setattr(nn.Module, attribute, function)

    def _note_call(self, sample: Sample, module: nn.Module) -> None:
        """Count calls of watched modules inside targets; refuse a call that no statistics will ever see."""
        name = self._watched_names.get(module)
        if name is None:
            return
        stage = self._stage_of.get(name)
        if stage is not None and sample.inside != stage:
            raise CalibrationError(
                f"{name}: batch {sample.index} calls it outside {stage or 'the model'}, the sequential target that it was calibrated in, "
                f"and after that, so its statistics miss this call; {_NO_REWIND}"
            )
        if sample.inside is not None:
            sample.calls[name] += 1

    def _target_to_pause_at(self, sample: Sample, module: nn.Module) -> str | None:
        target = self._target_names.get(module)
        if target is None or sample.inside is not None:
            return None
        if sample.closing:
            raise GreenletExit
        if target not in self.closed:
            return target
        if target in self.calibrated:
            raise TracingError(
                f"{target or 'the model'}: batch {sample.index} calls this sequential target again after its stage, so its statistics "
                f"would miss this call; {_NO_REWIND}"
            )
        return None

    def _call_target(self, sample: Sample, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait at a target; call it for calibration as often as asked, then for real. Runs inside the sample."""
        was_cut = False
        while not sample.pause(target):
            with _inside(sample, target):
                was_cut = self._trial_call(sample, target, args, kwargs)
        assumed = sample.calls
        quiet = self._quiet if target in self.calibrated else nullcontext
        with _inside(sample, target), quiet():
            output = self._call(self._model.get_submodule(target), *args, **kwargs)
        if was_cut and sample.calls != assumed:
            _complain(sample, target, assumed)
        return output

    def _trial_call(self, sample: Sample, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Call a target without consequences; say whether the call was cut short."""
        args, kwargs = copy_arguments((args, kwargs), self._model)
        module = self._model.get_submodule(target)
        before = self.values.view()
        try:
            run_shielded(lambda: self._call(module, *args, **kwargs))
        except _Enough:
            return True
        finally:
            self.values.undo(before)
        return False


@contextlib.contextmanager
def cutting(model: nn.Module, watched: Watched) -> Iterator[None]:
    """End calibration calls once each watched module has been seen; works through hooks behind all that are there already.

    Args:
        model: the model; carries the hooks for the duration.
        watched: the modules to wait for.

    Yields:
        Nothing.
    """

    def see(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            del args
            sample = running_sample()
            if sample is not None:
                sample.unseen.discard(name)
                if not sample.unseen:
                    raise _Enough

        return hook

    with ExitStack() as hooks:
        for name, needs_output in watched.items():
            module = model.get_submodule(name)
            handle = module.register_forward_hook(see(name)) if needs_output else module.register_forward_pre_hook(see(name))
            hooks.callback(handle.remove)
        yield


@contextlib.contextmanager
def _inside(sample: Sample, target: str) -> Iterator[None]:
    sample.inside, sample.calls = target, Counter()
    try:
        yield
    finally:
        sample.inside = None


def _complain(sample: Sample, target: str, assumed: Counter[str]) -> None:
    odd = sorted(name for name in assumed.keys() | sample.calls.keys() if assumed[name] != sample.calls[name])
    told = ", ".join(f"{name} {sample.calls[name]}x instead of {assumed[name]}x" for name in odd)
    raise CalibrationError(
        f"{target or 'the model'}: batch {sample.index} calls {told}, unlike the first batch, so the calibration pass, which stopped "
        'early, missed calls; use pipeline="basic" or ignore these modules'
    )
