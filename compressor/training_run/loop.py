"""The steps of a run, and what happens between them: evaluations, saved states, a loss that is no number, ctrl-C.

Nothing here changes what a step computes, so a run that was stopped at any moment and goes on from its last state gives the same bits.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.data import BlockOrder
from compressor.errors import CompressorError, NumericsError, OutOfMemoryError, ReplayError
from compressor.monitor import Monitor
from compressor.settings.verbs import StepSettings
from compressor.tracing.targets.out_of_memory import is_out_of_memory
from compressor.training import Trainer
from compressor.training_run.states import States


@dataclass
class Interrupt:
    """Whether the user has asked the run to stop."""

    asked: bool = False


class Loop:
    """Drives a trainer to the end of a run.

    Args:
        trainer: of the run.
        order: gives the batch of a step.
        held_out: the blocks to evaluate on; None: no evaluation.
        num_steps: length of the run.
        settings: of the run.
        states: where states are kept.
        shows: tell on standard error that ctrl-C was understood.
        monitor: is told every loss; None: nobody is.

    Attributes:
        losses: of all steps so far, those of an earlier run included.
        evaluations: step, held-out loss, and that of the averages by decay.
    """

    def __init__(
        self,
        trainer: Trainer,
        order: BlockOrder,
        held_out: BlockOrder | None,
        num_steps: int,
        settings: StepSettings,
        states: States,
        *,
        shows: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        self._trainer, self._order, self._held_out, self._num_steps = trainer, order, held_out, num_steps
        self._settings, self._states, self._shows = settings, states, shows
        self._monitor = monitor or Monitor()
        self._interrupt = Interrupt()
        self._told = False
        self._save_every = settings.save_interval(num_steps)
        notes = states.load_newest(trainer, num_steps) or {}
        self.losses: list[float] = list(notes.get("losses", []))
        self.evaluations: list[dict[str, Any]] = list(notes.get("evaluations", []))

    def run(self) -> None:
        """Make the steps that are left.

        Raises:
            NumericsError: a loss is NaN or infinite.
            OutOfMemoryError: memory ran out.
            ReplayError: the step cannot be captured or replayed.
            KeyboardInterrupt: ctrl-C; the state after the last whole step is kept.
        """
        trainer = self._trainer
        with _interruptible(self._interrupt, shows=self._shows):
            try:
                if not trainer.num_steps:
                    self._evaluate()
                trainer.fit(self._order, self._num_steps, each=self._after)
            except NumericsError as error:
                if not self._told:  # a modifier met the weights first
                    self._check_weights(trainer.num_steps + 1, error)
                raise
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, ReplayError):
                    if trainer.agreed_steps is not None:
                        self._states.drop_after(trainer.agreed_steps)
                    error.add_note(
                        f"at step {trainer.num_steps + 1}; --mode eager (mode='eager') makes the same steps without a capture, "
                        f"and {self._states.advice}"
                    )
                elif not isinstance(error, CompressorError) and is_out_of_memory(error):
                    raise self._out_of_memory(error) from error
                raise
            except KeyboardInterrupt as error:
                if not getattr(error, "__notes__", None):  # the second ctrl-C, in the midst of a step
                    error.add_note(f"stopped in the midst of step {trainer.num_steps + 1}; {self._states.advice}")
                raise

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model as it is now, and its averages.

        Returns:
            `loss`, and `ema` where averages are kept: decay to loss; in nats per token. Empty where there is nothing to evaluate on.
        """
        if self._held_out is None:
            return {}
        batches, weights = self._held_out.in_order()
        found: dict[str, Any] = {"loss": self._trainer.evaluate(batches, weights)}
        averages = self._trainer.step.averages
        if averages is not None:
            found["ema"] = {}
            for decay in averages.decays:
                with averages.applied(decay):
                    found["ema"][f"{decay:g}"] = self._trainer.evaluate(batches, weights)
        return found

    def _evaluate(self) -> None:
        if self._held_out is not None:
            self.evaluations.append({"step": self._trainer.num_steps, **self.evaluate()})
            self._monitor.end_step(self._trainer.num_steps, {"held_out_loss": self.evaluations[-1]["loss"]})

    def _after(self, number: int, loss: Tensor) -> None:
        """After each step."""
        value, done = loss.item(), number + 1
        if not math.isfinite(value):
            self._told = True
            raise NumericsError(self._no_number(done, value))
        self.losses.append(value)
        self._monitor.end_step(
            done, {"loss": value, "learning_rate": float(self._trainer.step.optimizer.param_groups[0].get("lr", math.nan))}
        )
        is_last = done == self._num_steps
        if is_last:  # before an evaluation, a quantizer or a modifier meets them
            self._check_weights(done)
        if is_last or (self._settings.eval_every and done % self._settings.eval_every == 0):
            self._evaluate()
        is_due = bool(self._save_every) and (is_last or done % self._save_every == 0)
        if is_due or self._interrupt.asked:
            self._save(done)
        if self._interrupt.asked and not is_last:
            error = KeyboardInterrupt()
            error.add_note(f"stopped after step {done} of {self._num_steps}; {self._states.advice}")
            raise error

    def _save(self, done: int) -> None:
        """Keep the state, unless what it holds is of no use."""
        self._check_weights(done)
        self._states.save(self._trainer, {"losses": self.losses, "evaluations": self.evaluations})

    def _check_weights(self, done: int, cause: BaseException | None = None) -> None:
        """Refuse weights that have diverged, though the loss does not show it yet."""
        broken = next((name for name, p in self._trainer.step.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
        if broken is not None:
            self._told = True
            raise NumericsError(f"step {done}: {broken} holds NaN or infinity, though the loss is a number; {self._remedy()}") from cause

    def _no_number(self, done: int, value: float) -> str:
        if done == 1:
            return f"step 1: the loss is {value} before any update; look at the model's weights and the data, or train without autocast"
        return f"step {done}: the loss is {value} (it was {self.losses[-1]:.4f} a step before); {self._remedy()}"

    def _remedy(self) -> str:
        start_over = f", remove {self._states.path} and start over" if self._states.path is not None else ""
        decay = f", a smaller weight_decay (it was {self._settings.weight_decay:g})" if self._settings.weight_decay else ""
        return (
            f"give a smaller learning_rate (it was {self._settings.learning_rate:g}){decay}, a longer warm-up (warmup_steps) or a smaller "
            f"clip_norm{start_over}"
        )

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        said = " ".join(str(error).split())[:160] or type(error).__name__
        return OutOfMemoryError(
            f"step {self._trainer.num_steps + 1}: memory ran out ({said}); take a smaller batch_size with a larger accumulate, "
            f"or a smaller max_seq_length, or mode='eager', which holds no captured step; {self._states.advice}"
        )


@contextmanager
def _interruptible(interrupt: Interrupt, *, shows: bool) -> Iterator[None]:
    """Let the first ctrl-C wait for the end of the step, so that a state can be kept; the second one stops at once."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield  # whoever runs this handles it in a way of their own
        return

    def ask(number: int, frame: Any) -> None:
        if interrupt.asked:
            signal.default_int_handler(number, frame)
        interrupt.asked = True
        if shows:
            print("\nstopping after this step; again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
