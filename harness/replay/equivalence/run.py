"""One training run in one mode: a fresh instance from a fixed seed, step by step, with what an observer outside can see of it."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from compressor.errors import ReplayError, UserInputError
from compressor.numerics.precision import KERNEL_SETTINGS, float32_precisions, set_float32_precisions
from compressor.random_state import RandomState
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.training_state import TrainingState, state_of

Between = Callable[[int, Trainer], None]
Batches = Iterable[Any] | Callable[[int], Any]


@dataclass(frozen=True)
class Subject:
    """A training step, and what happens to it between steps.

    Attributes:
        step: the step, or a trainer whose settings are kept; its mode is set anew.
        before_step: called before every step with its number and the trainer: to change rates, evaluate, freeze layers.
    """

    step: TrainStep | Trainer
    before_step: Between | None = None


Made = Subject | TrainStep | Trainer | tuple[nn.Module, Callable[[nn.Module, Any], Tensor], torch.optim.Optimizer]
Factory = Callable[[], Made]


@dataclass(frozen=True)
class Plot:
    """What every mode runs.

    Attributes:
        factory: makes a fresh instance.
        batches: of the steps, in order and then again from the first; or a function of the step's number.
        num_steps: steps of a run.
        seed: all generators start from it, before the factory is called.
        before_step: as that of a Subject, for factories that give none.
    """

    factory: Factory
    batches: Sequence[Any] | Callable[[int], Any]
    num_steps: int
    seed: int = 0
    before_step: Between | None = None

    def batch(self, number: int) -> Any:
        """Copy the batch of a step, so that a run that writes into it changes nobody else's; views of one storage stay so.

        Args:
            number: of the step.

        Returns:
            The copy.

        Raises:
            UserInputError: a tensor of it belongs to a graph.
        """
        found = self.batches(number) if callable(self.batches) else self.batches[number % len(self.batches)]
        try:
            return copy.deepcopy(found)
        except RuntimeError as error:
            raise UserInputError(f"batch {number}: it cannot be copied ({error}); give tensors that belong to no graph") from error

    def open(self, mode: str) -> tuple[Trainer, Between | None]:
        """Make a fresh instance.

        Args:
            mode: eager, capture or replay.

        Returns:
            A trainer that has made no step, and what happens between its steps.
        """
        made = self.factory()
        before_step = self.before_step
        if isinstance(made, Subject):
            before_step, made = made.before_step or before_step, made.step
        if isinstance(made, tuple) and len(made) == 3:
            made = TrainStep(*made)
        if isinstance(made, TrainStep):
            made = Trainer(made, audit_every=0)  # every state is compared here anyway, and audits would leave few replays to compare
        given: object = made
        if not isinstance(given, Trainer) or given.num_steps:
            what = f"a trainer that has made {given.num_steps} steps" if isinstance(given, Trainer) else type(given).__name__
            what += f" of {len(given)}" if isinstance(given, tuple) else ""
            raise UserInputError(
                f"factory: it returned {what}; return a fresh TrainStep, Trainer, Subject, or a tuple (model, loss_fn, optimizer)"
            )
        made.mode = mode  # type: ignore[assignment]
        return made, before_step


@dataclass(frozen=True)
class Moment:
    """What could be seen of one step.

    Attributes:
        number: of the step, from 0.
        action: what the trainer says that it did.
        loss: what it returned.
        num_forwards: modules whose forward ran in Python meanwhile: none in a replay.
        seconds: it took.
        trainer: of the run.
        batch: as it is after the step.
    """

    number: int
    action: str
    loss: Tensor
    num_forwards: int
    seconds: float
    trainer: Trainer
    batch: Any

    def state(self) -> TrainingState:
        """Collect the state after the step."""
        return state_of(self.trainer.step, self.loss, self.batch)


@dataclass
class Refusal(Exception):
    """A step that the trainer refused, or that broke.

    Attributes:
        number: of the step.
        error: what it raised.
        changed: names of what is not as it was before the call.
        trainer: of the run.
    """

    number: int
    error: Exception
    changed: list[str] = field(default_factory=list)
    trainer: Trainer | None = None

    @property
    def is_named(self) -> bool:
        """The trainer refused with one of its own errors."""
        return isinstance(self.error, ReplayError)

    def __str__(self) -> str:
        """Name the step and the error."""
        return f"step {self.number}: {type(self.error).__name__}: {self.error}"


def rehearse(plot: Plot, mode: str) -> Iterator[Moment]:
    """Run in one mode, from the seed; the generators and settings of torch are the caller's again after the run.

    Args:
        plot: what to run.
        mode: eager, capture or replay.

    Yields:
        Each step as it has been made.

    Raises:
        Refusal: a step raised.
    """
    with _surroundings(plot.seed):
        trainer, before_step = plot.open(mode)
        for number in range(plot.num_steps):
            if before_step is not None:
                before_step(number, trainer)
            batch = plot.batch(number)
            trainer.step.allocate_gradients()  # a step begins so in every mode
            before = state_of(trainer.step, batch=batch).digests() if mode != "eager" else {}
            begin = time.perf_counter()
            try:
                with _forwards(trainer) as forwards:
                    loss = trainer.train_step(batch)
            except Exception as error:  # the step is the subject's, and raises what it likes
                after = state_of(trainer.step, batch=batch).digests()
                changed = [name for name in before if before[name] != after.get(name) and not _is_set_before(name)]
                raise Refusal(number, error, changed, trainer) from error
            seconds = time.perf_counter() - begin
            yield Moment(number, trainer.last_action, loss, len(forwards), seconds, trainer, batch)


def _is_set_before(name: str) -> bool:
    """Rates of a schedule and what modifiers do at BATCH_START are set before the step begins, and set again by the next call."""
    return name.endswith(".lr") or name.startswith("modifier")


@contextmanager
def _forwards(trainer: Trainer) -> Iterator[list[None]]:
    """Count forward calls of modules, of whatever model, as soon as there is a plan that could be replayed."""
    seen: list[None] = []
    if not trainer.plans:
        yield seen
        return
    plain = nn.Module._call_impl

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(None)
        return plain(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "_call_impl", counted):  # a hook of all modules would be seen by the guards
        yield seen


@contextmanager
def _surroundings(seed: int) -> Iterator[None]:
    """Seed every generator, and leave generators and settings as they were, whatever a run does to them."""
    generators = RandomState.current(foreign=True, devices="all")
    settings = torch.get_default_dtype(), torch.get_num_threads(), float32_precisions()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    grad, anomaly, environment = torch.is_grad_enabled(), torch.is_anomaly_enabled(), dict(os.environ)
    kernels = [(read(), read, write) for read, write in KERNEL_SETTINGS.values()]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        generators.restore()
        torch.set_default_dtype(settings[0])
        torch.set_num_threads(settings[1])
        set_float32_precisions(settings[2])
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)
        for allowed, read, write in kernels:
            if read() != allowed:
                write(allowed)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
