"""One forward that can pause: a greenlet, and everything that must travel with it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn, overrides
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.utils import _python_dispatch as dispatch

from compressor.data.collate import Batch, batch_to, call_model
from compressor.tracing.targets.sample_state import ModuleValues, TorchState, View

# Modes of torch that code of Python is called by, which are stacks of the thread: those there are, and how one is put on and taken off.
_STACKS: tuple[tuple[Any, Any, Any], ...] = (
    (overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode),
    (dispatch._get_current_dispatch_mode_stack, dispatch._push_mode, dispatch._pop_mode),
)


class Sample(greenlet):
    """The plain forward of one batch.

    Attributes:
        index: number of the batch.
        at: target that the forward waits for; None while it runs, before it starts and after its end.
        inside: target that runs at the moment.
        closing: the forward is being ended; it must not pause any more.
        replays: None for a forward that pauses; else the one target whose calls it repeats from the start, without a pause.
        hush: keeps hooks asleep outside of the target that is replayed.
        stray: target that was called from another thread while this forward ran.
        output: what the forward returned.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        index: int,
        device: torch.device | None,
        values: ModuleValues,
        foreign: bool = False,
        *,
        replays: str | None = None,
        start: TorchState | None = None,
    ) -> None:
        """Prepare; nothing runs before `advance`.

        Args:
            model: the model.
            batch: not modified; copied when the forward starts.
            index: number of the batch.
            device: of the model; None leaves the batch where it is.
            values: what forwards set on modules.
            foreign: the random states of Python and numpy belong to the forward, too.
            replays: the target whose calls it repeats.
            start: the state to begin in; None takes that of the moment.
        """
        super().__init__()
        self.index = index
        self.at: str | None = None
        self.inside: str | None = None
        self.closing = False
        self.replays = replays
        self.hush = ExitStack()
        self.stray: str | None = None
        self.output: Any = None
        # Context variables that a forward sets are its own, as in a thread.
        self.gr_context = contextvars.copy_context()
        self._model, self._device, self._values = model, device, values
        self._batch: Batch | None = batch
        self._torch_state = start
        self._foreign = foreign
        self._view: View = {}
        self._entered_modes: list[list[Any]] = [[] for _ in _STACKS]  # while it is paused: those that it is inside of
        self._outer_inference: Any = None  # while it is paused: the guard under which it left the inference mode that it is in

    def run(self) -> Any:
        """Run the forward; the body of the greenlet."""
        batch, self._batch = self._batch, None
        assert batch is not None
        with torch.no_grad():
            return call_model(self._model, batch if self._device is None else batch_to(batch, self._device))

    def advance(self, propagate: bool) -> None:
        """Run on to the next pause, or to the end. Called from outside.

        Args:
            propagate: what `pause` returns.
        """
        self.at = None
        with self._entered():
            returned = self.switch() if self._batch is not None else self.switch(propagate)
        if self.dead:
            self.output = returned

    def pause(self, target: str) -> bool:
        """Wait at a target. Called from inside the forward.

        Args:
            target: dotted name.

        Returns:
            True to call the target for real and go on, False to call it for calibration.
        """
        self.at = target
        return bool(self.parent.switch())

    def escape(self, error: Exception) -> NoReturn:
        """Raise an error in the caller of `advance`, past every handler of the model. Called from inside the forward.

        Args:
            error: what is wrong.

        Raises:
            GreenletExit: when the forward is ended afterwards.
        """
        # Past `except Exception` in the model, which would take it for a failure of its own.
        self.parent.throw(type(error), error, error.__traceback__)  # else it ends where it was thrown
        raise GreenletExit

    def kill(self) -> None:
        """End the forward where it stands; its `finally` blocks and context managers run."""
        self.closing, self.at, self._batch = True, None, None
        if not self.dead:
            with self._entered():
                self.throw(GreenletExit)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Exchange what belongs to the thread for what belongs to this forward."""
        outside, is_inference = TorchState.current(foreign=self._foreign), torch.is_inference_mode_enabled()
        self.parent = getcurrent()
        # Inference mode is a stack of the thread: a forward that paused inside of it finds it again.
        if self._outer_inference is not None:
            _exit_inference_mode(self._outer_inference)
            self._outer_inference = None
        if self._torch_state is not None:
            self._torch_state.restore()
        self._values.restore(self._view)
        depths = [len(stack()) for stack, _, _ in _STACKS]
        for (_, push, _), modes in zip(_STACKS, self._entered_modes, strict=True):
            for mode in modes:
                push(mode)
        try:
            yield
        finally:
            self._entered_modes = [[pop() for _ in stack()[depth:]][::-1] for (stack, _, pop), depth in zip(_STACKS, depths, strict=True)]
            self._torch_state = TorchState.current(foreign=self._foreign)
            self._view = {} if self.dead else self._values.view()
            if torch.is_inference_mode_enabled() != is_inference:
                self._outer_inference = _enter_inference_mode(is_inference)
            outside.restore()


def running_sample() -> Sample | None:
    """Return the forward that runs this code, if one does."""
    current = getcurrent()
    return current if isinstance(current, Sample) else None
