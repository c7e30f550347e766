"""Optimizers and learning rates that never need the host: fused kernels, and rates in tensors that change in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import UserInputError
from compressor.training.step.step import TrainStep

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Factor = Callable[[int], float]
_SPELLED = (bool, int, float, str, tuple, type(None))


def _rate(lr: float) -> Tensor:
    if not 0 <= lr < math.inf:
        raise UserInputError(f"lr={lr} is no learning rate; give a finite number of 0 or more")
    return torch.tensor(lr, dtype=torch.float64)


def _own_rates(optimizer: torch.optim.Optimizer) -> None:
    """Give each group a rate of its own, on the device of its parameters; torch lets all groups share one tensor.

    The kernels of the CPU compute with a rate in double precision, and so a step is bitwise that of a rate given as a Python number;
    those of CUDA take float32 only.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64).clone().to(device, dtype)


def adamw(
    params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """Make an AdamW that a capture can hold.

    Args:
        params: parameters or groups.
        lr: the learning rate; it becomes a tensor.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled decay.

    Returns:
        The optimizer.
    """
    optimizer = torch.optim.AdamW(params, lr=_rate(lr), betas=betas, eps=eps, weight_decay=weight_decay, fused=True, capturable=True)
    _own_rates(optimizer)
    return optimizer


def sgd(params: Parameters, lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> torch.optim.SGD:
    """Make an SGD that a capture can hold.

    With a momentum, torch's fused kernel wants all parameters of a group to get their first gradient in the same step; heads that batches
    take in turns belong into groups of their own.

    Args:
        params: parameters or groups.
        lr: the learning rate; it becomes a tensor.
        momentum: share of the last update that stays.
        weight_decay: added to the gradient.
        nesterov: look ahead along the momentum.

    Returns:
        The optimizer.
    """
    optimizer = torch.optim.SGD(params, lr=_rate(lr), momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True)
    _own_rates(optimizer)
    return optimizer


def warmup_cosine(warmup_steps: int, num_steps: int, final_frac: float = 0.0) -> Factor:
    """Return a factor of the learning rate: linear warm-up, then cosine down to a share of the peak.

    Args:
        warmup_steps: steps of the warm-up, >= 0.
        num_steps: length of the run.
        final_frac: the share at its end.

    Returns:
        Step number, from 0, to factor.

    Raises:
        UserInputError: the warm-up is as long as the run.
    """
    if not 0 <= warmup_steps < num_steps:
        raise UserInputError(f"warmup_steps={warmup_steps} does not fit num_steps={num_steps}; give fewer, and at least 0")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (num_steps - warmup_steps))
        return final_frac + (1 - final_frac) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


class RateSchedule:
    """Sets the learning rates of an optimizer between steps, in place.

    Args:
        step: its rates are those of its optimizer now, the peak; where a capture holds the update, they must be tensors.
        factor: step number to factor of the peak.

    Attributes:
        given: the last step that it was asked for, and its factor.

    Raises:
        UserInputError: a rate is a Python number, which a capture would freeze.
    """

    def __init__(self, step: TrainStep, factor: Factor) -> None:
        groups = step.optimizer.param_groups
        for number, group in enumerate(groups):
            if step.update_is_captured and not isinstance(group["lr"], Tensor):
                raise UserInputError(
                    f"optimizer group {number}: lr={group['lr']} is a Python number, which a capture freezes; "
                    "make the optimizer with adamw() or sgd() of compressor.training, or give lr as a tensor"
                )
        self._optimizer, self._peaks = step.optimizer, [float(group["lr"]) for group in groups]
        self._factor = factor
        self.given: tuple[int, float] | None = None

    @property
    def description(self) -> dict[str, Any]:
        """What tells the schedule from another one, in JSON types: its name, the peaks, and the plain values that it holds."""
        function, settings = self._factor, []
        while isinstance(function, partial):
            settings += [*function.args, *function.keywords.items()]
            function = function.func
        code = getattr(function, "__code__", None)
        cells = getattr(function, "__closure__", None) or ()
        settings += [
            *(code.co_consts[1:] if code else ()),
            *(cell.cell_contents for cell in cells),
            *getattr(function, "__dict__", {}).items(),
        ]
        name = getattr(function, "__name__", type(function).__name__)
        return {"of": name, "peaks": self._peaks, "settings": [repr(one) for one in settings if isinstance(one, _SPELLED)]}

    def factor(self, step: int) -> float:
        """Return the factor of a step."""
        return self._factor(step)

    def set(self, step: int) -> None:
        """Set the rates of a step. Changes the optimizer's rates, those in tensors in place.

        Args:
            step: its number, from 0.
        """
        factor = self._factor(step)
        self.given = (step, factor)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=False):  # a group that came later has a rate of its own
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
