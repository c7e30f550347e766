"""Optimizers and learning rates that never need the host: fused kernels, and rates in tensors that change in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compressor.errors import UserInputError
from compressor.model.folder import one_line
from compressor.settings.kinds import FLAG, NUMBER, TENSOR, WHOLE, Kind
from compressor.settings.options import check_kind, checked
from compressor.training.guards.frozen_value import exact_text
from compressor.training.step.step import TrainStep

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Factor = Callable[[int], float]
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
_SPELLED = (bool, int, float, str, tuple, type(None))
_PARAMETERS = Kind(lambda value: isinstance(value, Iterable) and not isinstance(value, str | Tensor), "parameters, or groups of them")
_RATE = Kind(lambda value: NUMBER.holds(value) or (TENSOR.holds(value) and value.numel() == 1), "a number, or a tensor of one")


def _made(kind: Callable[..., Optimizer], params: Parameters, lr: float, **settings: Any) -> Optimizer:
    """Make an optimizer of torch, with a rate of its own for each group, on the device of its parameters; torch lets all share one tensor.

    The kernels of the CPU compute with a rate in double precision, and so a step is bitwise that of a rate given as a Python number;
    those of CUDA take float32 only.
    """
    rate = _rate(lr)
    try:
        groups = [{**one, "params": _listed(one["params"])} if isinstance(one, dict) else one for one in params]
        optimizer = kind(groups, lr=rate, fused=kind is not torch.optim.SGD or not any(map(_stands_still, groups)), **settings)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise UserInputError(f"{kind.__name__}: torch does not take this ({one_line(error)}); correct it") from error
    for group in optimizer.param_groups:
        device = next((one.device for one in group["params"]), torch.device("cpu"))
        group["lr"] = _rate(group["lr"]).to(device, torch.float64 if device.type == "cpu" else torch.float32)
    return optimizer


def refuse_float16(parameters: Iterable[Any], remedy: str) -> None:
    """Refuse to train by Adam what has no room for its second moments.

    Args:
        parameters: of a model; what is no tensor is left to torch.
        remedy: what to do.

    Raises:
        UserInputError: one is float16.
    """
    if any(isinstance(one, Tensor) and one.dtype == torch.float16 for one in parameters):
        raise UserInputError(
            "AdamW: weights are float16, in which eps and the squares of small gradients are 0, so that a step moves weights by far more "
            f"than the rate; {remedy}"
        )


def _listed(params: Any) -> Any:
    return list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else params


def _stands_still(given: Any) -> bool:
    """Whether torch's fused SGD leaves a parameter as it is: its kernel for 16 bits on the CPU does not write full vectors (up to 2.13)."""
    parts = given["params"] if isinstance(given, dict) else [given]
    named = [part[-1] if isinstance(part, tuple) and part else part for part in ([parts] if isinstance(parts, Tensor) else parts)]
    tensors = [one for one in named if isinstance(one, Tensor)]  # of anything else torch complains
    return any(one.device.type == "cpu" and one.dtype in (torch.bfloat16, torch.float16) for one in tensors)


def _rate(lr: Any) -> Tensor:
    check_kind("lr", lr, _RATE)
    if not 0 <= lr < math.inf:
        raise UserInputError(f"lr={lr} is no learning rate; give a finite number of 0 or more")
    return torch.as_tensor(lr, dtype=torch.float64).detach().clone()


@checked(
    params=_PARAMETERS,
    betas=Kind(lambda value: isinstance(value, list | tuple) and len(value) == 2, "two numbers"),
    eps=NUMBER,
    weight_decay=NUMBER,
)
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

    Raises:
        UserInputError: the rate is none, torch does not take a setting, or a parameter is float16.
    """
    made = _made(torch.optim.AdamW, params, lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=True)
    refuse_float16((one for group in made.param_groups for one in group["params"]), "keep them in float32 or bfloat16")
    return made


@checked(params=_PARAMETERS, momentum=NUMBER, weight_decay=NUMBER, nesterov=FLAG)
def sgd(params: Parameters, lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> torch.optim.SGD:
    """Make an SGD that a capture can hold; of parameters in 16 bits on the CPU its update stands behind what is captured.

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

    Raises:
        UserInputError: the rate is none, or torch does not take a setting.
    """
    return _made(torch.optim.SGD, params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


@checked(warmup_steps=WHOLE, num_steps=WHOLE, final_frac=NUMBER)
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
        return {"of": name, "peaks": self._peaks, "settings": [exact_text(one) for one in settings if isinstance(one, _SPELLED)]}

    def factor(self, step: int) -> float:
        """Return the factor of a step."""
        return self._factor(step)

    def set(self, step: int) -> None:
        """Set the rates of a step. Changes the optimizer's rates, those in tensors in place.

        Args:
            step: its number, from 0.

        Raises:
            UserInputError: the schedule gives no factor; the rates are as before.
        """
        factor = self._factor(step)
        check_kind(f"schedule({step})", factor, _RATE)
        if not 0 <= factor < math.inf:
            raise UserInputError(f"schedule({step}): {factor} is no factor of a learning rate; return a finite number of 0 or more")
        self.given = (step, factor)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=False):  # a group that came later has a rate of its own
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
