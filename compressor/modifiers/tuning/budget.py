"""How long and how fast is trained, on what, and which state is kept: the best on sequences that no step has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from compressor.errors import NumericsError
from compressor.model.evaluation import check_trainable
from compressor.modifiers.tuning.base_outputs import BaseOutputs
from compressor.modifiers.tuning.gradients import saved_values_checked
from compressor.modifiers.tuning.sequences import Split

_BETAS = (0.9, 0.99)  # of Adam; a hundred steps are too few for a memory of a thousand


@dataclass(frozen=True)
class Budget:
    """What may be spent.

    Attributes:
        steps: of the optimizer, at most.
        batch_size: sequences in a step.
        lr: move of a step at the peak.
        warmup: steps in which the rate rises.
        every: steps between two measurements.
        patience: measurements without a better state, after which the end has come.
        seed: of the split and of the order.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int
    every: int
    patience: int
    seed: int

    def rate(self, step: int) -> float:
        """Learning rate of a step: up in a line, down along a cosine to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        before: error on held-out sequences at the start.
        after: of the state that is kept.
        best_step: steps behind which that state was measured; 0 where nothing was better than the start.
        steps: that were run.
        trained_before: mean error on the first sequences that were trained on, as they were met.
        trained_after: on the last ones.
    """

    before: float
    after: float
    best_step: int
    steps: int
    trained_before: float
    trained_after: float


class Movable(Protocol):
    """What a training moves: scales, or rotations."""

    def tensors(self) -> list[Tensor]:
        """Return what moves, for an optimizer."""

    def copies(self) -> list[Tensor]:
        """Return copies of it."""

    def restore(self, copies: list[Tensor]) -> None:
        """Take it back to copies."""

    def tried(self) -> AbstractContextManager[None]:
        """Let the model compute with what has moved for the duration; a backward adds to the gradients."""


def tune(
    moves: Movable, base: BaseOutputs, model: nn.Module, split: Split, budget: Budget, tell: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Move what moves towards the base. Changes the moves, not the model.

    Args:
        moves: of the model; afterwards at the best state, or at the start.
        base: what is aimed at.
        model: compressed, in evaluation mode.
        split: of the sequences.
        budget: what may be spent.
        tell: called after each step, with the errors so far.

    Returns:
        What came of it.

    Raises:
        NumericsError: the compressed model is NaN or infinitely far from the base before anything has moved.
        UserInputError: the model was made under torch.inference_mode.
    """
    check_trainable((*model.named_parameters(), *model.named_buffers()))
    optimizer = torch.optim.Adam(moves.tensors(), lr=budget.lr, betas=_BETAS, eps=1e-10)
    batch_size = min(budget.batch_size, len(split.trained))
    batches = _batches(split.trained, batch_size, budget.seed)
    with frozen(model):
        before = best = _held_out(moves, base, split)
        if not math.isfinite(before):
            raise NumericsError(
                f"{base.where}: {base.measure} of the compressed model is {before}, though the base's outputs are finite; check what the "
                "modifiers before it have made of the model"
            )
        kept, best_step, misses, step = moves.copies(), 0, 0, 0
        losses: list[float] = []
        while step < budget.steps and misses < budget.patience:
            for group in optimizer.param_groups:
                group["lr"] = budget.rate(step)
            with moves.tried(), saved_values_checked(base.where, is_first=step == 0):
                losses.append(base.backward(next(batches)))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % budget.every == 0 or step == budget.steps:
                now = _held_out(moves, base, split)
                misses += 1
                if now < best:  # never for NaN
                    best, best_step, misses, kept = now, step, 0, moves.copies()
            tell(f"held out {before:.3g} -> {best:.3g}")
        moves.restore(kept)
    few = max(1, min(len(losses), len(split.trained) // batch_size))
    return Outcome(before, best, best_step, step, sum(losses[:few]) / few, sum(losses[-few:]) / few)


def _held_out(moves: Movable, base: BaseOutputs, split: Split) -> float:
    with torch.no_grad(), moves.tried():
        return base.error(split.held_out)


def _batches(numbers: list[int], size: int, seed: int) -> Iterator[list[int]]:
    """All sequences in a drawn order, again and again."""
    generator = torch.Generator().manual_seed(seed + 1)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += [numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist()]
        yield waiting[:size]
        waiting = waiting[size:]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Ask for no gradient of what the model itself holds. Changes the flags meanwhile.

    Args:
        model: whole, or a part of it.

    Yields:
        Nothing.
    """
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
