"""Hazards of autograd: own functions, second derivatives, hooks, checkpointing, and modes that surround the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compressor.errors import EscapedTensorError, HostReadError, PointerDriftError
from compressor.training import Trainer
from harness.replay.hazards.building_blocks import at, classify, stage
from harness.replay.hazards.registry import Hazard


class _Rounded(torch.autograd.Function):
    """Rounds, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round."""
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Pass the gradient where the value lies in a range."""
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 2)


class _Remembers(torch.autograd.Function):
    """Keeps a Python number from forward to backward, as buggy quantizers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Remember the largest value."""
        ctx.largest = float(x.detach().abs().max())
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Scale by it."""
        return gradients[0] / ctx.largest


def _penalized(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    loss = classify(model, {"x": x, "y": batch["y"]})
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _twice(model: nn.Module, batch: Any) -> Tensor:
    loss = classify(model, batch)
    loss.backward(retain_graph=True)
    return loss


def _no_grad_part(module: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.std() + module.first.weight.norm()
    return h / scale


def _inference_part(module: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        noise = torch.ones_like(h) * 0.1
    return h + noise.clone()


def _hooked(module: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return h


def _kept_gradient(module: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(module.gradients.append)
    return h


def _retained(module: Any, h: Tensor) -> Tensor:
    h.retain_grad()
    module.kept = h
    return h


def _hooks_of_all_kinds(module: Any) -> None:
    module.first.weight.register_hook(lambda grad: grad * 0.5)
    module.last.weight.register_post_accumulate_grad_hook(_clamp)
    module.last.register_full_backward_hook(lambda inner, into, out: (into[0] * 0.5,))
    module.first.register_forward_pre_hook(lambda inner, args: (args[0] * 2,))


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.1, 0.1)


def _none_in_hook(module: Any) -> None:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    module.last.weight.register_post_accumulate_grad_hook(drop)


def _drop_gradients(module: nn.Module) -> None:
    module.zero_grad(set_to_none=True)


def _checkpointed(reentrant: bool) -> Any:
    def middle(module: Any, h: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda z: z.relu() * z.sigmoid(), h, use_reentrant=reentrant, preserve_rng_state=False)
        return result

    return middle


def _forward_mode(module: Any, h: Tensor) -> Tensor:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h.detach(), torch.ones_like(h))
        tangent = forward_ad.unpack_dual(dual.tanh()).tangent
    return h + tangent.detach()


def _vmapped(module: Any, h: Tensor) -> Tensor:
    result: Tensor = torch.func.vmap(lambda row: row * row.sum())(h)
    return result


def _parametrized(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.last)


def _spectral(module: Any) -> None:
    nn.utils.parametrizations.spectral_norm(module.last)


def _unused(module: Any) -> None:
    module.unused = nn.Linear(4, 4)


def _anomaly(trainer: Trainer) -> None:
    torch.autograd.set_detect_anomaly(True, check_nan=False)


def _saved(module: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x.float()):
        return h * h.sigmoid()


_DOCS = "torch docs: notes/autograd"
HAZARDS: tuple[Hazard, ...] = (
    Hazard("own_function", "an autograd.Function with a straight-through gradient", stage(lambda m, h: _Rounded.apply(h)), source=_DOCS),
    Hazard(
        "number_in_context",
        "an autograd.Function that keeps float(tensor) for its backward",
        stage(lambda m, h: _Remembers.apply(h)),
        HostReadError,
        "reads a tensor",
        "torch docs: notes/extending",
    ),
    Hazard("double_backward", "a penalty on the gradient of the input", stage(loss_fn=_penalized), source=_DOCS),
    Hazard("backward_twice", "backward with retain_graph inside the loss function", stage(loss_fn=_twice), source=_DOCS),
    Hazard("no_grad_part", "a part without gradients", stage(_no_grad_part), source=_DOCS),
    Hazard("inference_part", "a part in inference mode", stage(_inference_part), source="torch docs: notes/autograd, inference mode"),
    Hazard("detached", "detach and a straight-through estimator", stage(lambda m, h: h + (h.round() - h).detach()), source=_DOCS),
    Hazard("tensor_hook", "a hook on an activation's gradient", stage(_hooked), source=_DOCS),
    Hazard(
        "kept_gradient",
        "a hook that collects gradients of an activation",
        stage(_kept_gradient, prepare=lambda m: setattr(m, "gradients", [])),
        EscapedTensorError,
        "attribute 'gradients' of the model",
        "NVIDIA/TransformerEngine#2937",
    ),
    Hazard(
        "retained_gradient",
        "retain_grad of an activation that the module keeps",
        stage(_retained, prepare=lambda m: setattr(m, "kept", None)),
        EscapedTensorError,
        "attribute 'kept' of the model",
        "pytorch/pytorch#114844",
        may_leave=("attribute:kept",),
    ),
    Hazard(
        "hooks_of_all_kinds",
        "hooks on weights, on layers, before and after",
        stage(prepare=_hooks_of_all_kinds),
        source="NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "none_in_hook",
        "a hook that sets a gradient to None after accumulation, as fused optimizers do",
        stage(prepare=_none_in_hook),
        PointerDriftError,
        "grad:last.weight",
        "pytorch/torchtitan#4659",
        may_leave=("grad:",),
    ),
    Hazard(
        "none_in_loss",
        "zero_grad(set_to_none=True) inside the loss function",
        stage(loss_fn=lambda model, batch: _dropped(model, batch)),
        EscapedTensorError,
        "grad:first.weight",
        "pytorch/torchtitan#4659",
        may_leave=("grad:",),
    ),
    Hazard("checkpointing", "gradient checkpointing without dropout", stage(_checkpointed(False)), source="pytorch/pytorch#162504"),
    Hazard(
        "checkpointing_reentrant",
        "gradient checkpointing of the reentrant kind",
        stage(_checkpointed(True)),
        source="pytorch/pytorch#162504",
    ),
    Hazard("forward_mode", "forward-mode derivatives", stage(_forward_mode), source="torch docs: forward-mode AD"),
    Hazard("vmap", "vmap over rows", stage(_vmapped), source="torch docs: torch.func"),
    Hazard("weight_norm", "a parametrized weight", stage(prepare=_parametrized), source="torch docs: parametrizations"),
    Hazard(
        "spectral_norm",
        "spectral norm, which moves its vectors in every forward",
        stage(prepare=_spectral),
        source="torch docs: parametrizations",
    ),
    Hazard(
        "unused_parameter",
        "a parameter that the loss does not reach; it still decays",
        stage(prepare=_unused),
        source="deepmodeling/deepmd-kit#6001",
    ),
    Hazard("saved_tensors_hooks", "saved tensors are packed in bfloat16", stage(_saved), source=_DOCS),
    Hazard("anomaly_mode", "anomaly mode is switched on while a plan is in use", stage(before=at(6, _anomaly)), source=_DOCS),
)


def _dropped(model: nn.Module, batch: Any) -> Tensor:
    _drop_gradients(model)
    return classify(model, batch)
