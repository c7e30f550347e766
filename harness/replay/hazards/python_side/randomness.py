"""Hazards of randomness: what a step draws, from where, and whether a replay draws the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from compressor.errors import GuardDriftError, UntrackedRandomnessError
from compressor.training import Trainer
from harness.replay.hazards.building_blocks import at, stage
from harness.replay.hazards.registry import Hazard


def _seed_inside(module: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return h + torch.randn_like(h)


def _fork(module: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn_like(h)
    return h + noise


def _state_back(module: Any, h: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(h)
    torch.set_rng_state(state)
    return h + noise


def _own_generator(module: Any) -> None:
    module.generator = torch.Generator().manual_seed(5)


def _from_own(module: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=module.generator)


def _checkpointed_dropout(module: Any, h: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda z: dropout(z.relu(), 0.5, training=True), h, use_reentrant=False)
    return result


def _rate(number: int, trainer: Trainer) -> None:
    trainer.step.model.drop.p = 0.1 + 0.05 * number  # type: ignore[union-attr]


def _draw_outside(number: int, trainer: Trainer) -> None:
    torch.rand(number + 1)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "dropout", "dropout draws anew in every step", stage(lambda m, h: dropout(h, 0.5, training=True)), source="pytorch/pytorch#84614"
    ),
    Hazard(
        "noise",
        "randn_like, bernoulli and randint in a step",
        stage(lambda m, h: h + torch.randn_like(h) * torch.bernoulli(torch.full_like(h, 0.5)) + torch.randint(0, 3, (16,))),
        source="pytorch/pytorch#84614",
    ),
    Hazard(
        "permutation",
        "rows are shuffled by randperm",
        stage(lambda m, h: h + h[torch.randperm(len(h))]),
        source="torch docs: notes/randomness",
    ),
    Hazard(
        "in_place_random",
        "normal_ and exponential_ on a fresh tensor",
        stage(lambda m, h: h + torch.empty_like(h).normal_() - torch.empty_like(h).exponential_()),
        source="NVIDIA/apex#1025",
    ),
    Hazard(
        "multinomial",
        "sampling by multinomial",
        stage(lambda m, h: h + h[torch.multinomial(torch.ones(6), 6)[: len(h)]]),
        source="torch docs: notes/randomness",
    ),
    Hazard(
        "manual_seed", "manual_seed in the step", stage(_seed_inside), UntrackedRandomnessError, "manual_seed", "pytorch/pytorch#170535"
    ),
    Hazard(
        "fork_rng",
        "fork_rng around a draw",
        stage(_fork),
        UntrackedRandomnessError,
        "moved by something that is no operator",
        "pytorch/pytorch#170535",
    ),
    Hazard(
        "rng_state_back",
        "a draw is taken back by set_rng_state",
        stage(_state_back),
        UntrackedRandomnessError,
        "no operator",
        "Dao-AILab/flash-attention#166",
    ),
    Hazard(
        "checkpointed_dropout",
        "gradient checkpointing with dropout, which sets generators back",
        stage(_checkpointed_dropout),
        UntrackedRandomnessError,
        "checkpointing",
        "pytorch/pytorch#162504",
    ),
    Hazard(
        "python_random",
        "a number from Python's random",
        stage(lambda m, h: h * random.random()),
        UntrackedRandomnessError,
        "module random",
        "torch docs: notes/randomness",
    ),
    Hazard(
        "numpy_random",
        "a number from numpy.random",
        stage(lambda m, h: h * float(np.random.rand())),
        UntrackedRandomnessError,
        "numpy.random",
        "torch docs: notes/randomness",
    ),
    Hazard(
        "numpy_generator",
        "a number from a numpy Generator of the module",
        stage(lambda m, h: h * float(m.numbers.random()), prepare=lambda m: setattr(m, "numbers", np.random.default_rng(0))),
        UntrackedRandomnessError,
        "attribute 'numbers' of the model, a Generator",
        "torch docs: notes/randomness",
    ),
    Hazard(
        "python_generator",
        "a number from a random.Random of the module",
        stage(lambda m, h: h * m.numbers.random(), prepare=lambda m: setattr(m, "numbers", random.Random(0))),
        UntrackedRandomnessError,
        "attribute 'numbers' of the model, a Random",
        "torch docs: notes/randomness",
    ),
    Hazard(
        "own_generator", "a torch.Generator that the module holds", stage(_from_own, prepare=_own_generator), source="pytorch/pytorch#63269"
    ),
    Hazard(
        "rate_over_time",
        "a dropout rate that rises with the step",
        stage(before=_rate),
        GuardDriftError,
        "module drop was p=",
        "pytorch/pytorch#84614",
    ),
    Hazard(
        "rate_changed_once",
        "another dropout rate from step 6 on",
        stage(before=at(6, lambda t: setattr(t.step.model.drop, "p", 0.5))),
        GuardDriftError,
        "p=0.2 and is now 0.5",
        "pytorch/pytorch#84614",
    ),
    Hazard(
        "drawn_between_steps", "the data loader draws between steps", stage(before=_draw_outside), source="torch docs: notes/randomness"
    ),
    Hazard(
        "seeded_between_steps",
        "manual_seed between steps, as on resuming",
        stage(before=at(6, lambda t: torch.manual_seed(9))),
        source="torch docs: notes/randomness",
    ),
)
