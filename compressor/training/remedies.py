"""What to write instead of something common that no capture can hold: code that errors print, and that the tests take from them and run."""

from __future__ import annotations

from collections.abc import Collection
from textwrap import indent

from torch import Tensor, nn

_OTHER_MODELS = """\
# What a step writes belongs to its model, as a mean teacher does:
both = torch.nn.ModuleDict({"student": student, "teacher": teacher})
step = TrainStep(both, loss_fn, optimizer)  # of student.parameters()
# A second optimizer, as of a GAN, is a second step, and each trainer makes its own:
both = torch.nn.ModuleDict({"generator": generator, "discriminator": discriminator})
first = Trainer(TrainStep(both, loss_of_discriminator, optimizer_of_discriminator), mode)
second = Trainer(TrainStep(both, loss_of_generator, optimizer_of_generator), mode)
"""
_KEPT = """\
def loss_without_trace(model, batch):  # give it to TrainStep instead of loss_fn
    loss = loss_fn(model, batch)
    {lets_go}
    return loss
"""
_STATE = """\
# The next step reads it, so it is state, which belongs into a buffer.
model.register_buffer("state_of_{name}", torch.zeros({shape}, dtype={dtype}, device="{device}"))  # what the first step starts from

def loss_with_state(model, batch):  # give it to TrainStep instead of loss_fn
    {holder}.{name} = model.state_of_{name}.clone()
    loss = loss_fn(model, batch)
    model.state_of_{name}.copy_({holder}.{name})
    {holder}.{name} = None
    return loss
"""
_PRUNED = """\
class Masked(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight):
        return weight * self.mask


module = model.get_submodule("{module}")  # before the optimizer is made
mask = module.{name}_mask.clone()
torch.nn.utils.prune.remove(module, "{name}")
torch.nn.utils.parametrize.register_parametrization(module, "{name}", Masked(mask))
"""
_NORMED = """\
module = model.get_submodule("{module}")  # before the optimizer is made
torch.nn.utils.remove_{norm}(module, "{name}")
torch.nn.utils.parametrizations.{norm}(module, "{name}")
"""
_CUMULATIVE = """\
class CumulativeBatchNorm(torch.nn.BatchNorm1d):  # or 2d, 3d; instead of momentum=None
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        var, mean = torch.var_mean(x.detach(), [0, *range(2, x.dim())])
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, 1 / self.num_batches_tracked)
        self.running_var.lerp_(var, 1 / self.num_batches_tracked)
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
"""
# Hooks that set a tensor anew in every forward, by the module that defines them.
_BY_HOOK = {
    "torch.nn.utils.prune": _PRUNED,
    "torch.nn.utils.weight_norm": _NORMED.replace("{norm}", "weight_norm"),
    "torch.nn.utils.spectral_norm": _NORMED.replace("{norm}", "spectral_norm"),
}


def for_other_models() -> str:
    """Return what to write where a step writes into another model, or with another optimizer."""
    return _shown(_OTHER_MODELS)


def for_batch_norm() -> str:
    """Return what to write instead of a batch norm without a momentum, which reads how many batches it has seen."""
    return _shown(_CUMULATIVE)


def for_kept(module: nn.Module, name: str, key: str, is_read: bool) -> str:
    """Return what to write where a module keeps a tensor of the step.

    Args:
        module: the module.
        name: its dotted name.
        key: the attribute.
        is_read: the step has read what was kept by the step before.

    Returns:
        Lines of code, below a message.
    """
    for hook in module._forward_pre_hooks.values():
        code = _BY_HOOK.get(type(hook).__module__)
        if code is not None:
            return _shown(code.format(module=name, name=key))
    holder = f'model.get_submodule("{name}")' if name else "model"
    value = module.__dict__.get(key)
    if is_read:
        if not isinstance(value, Tensor):
            return ""
        return _shown(_STATE.format(holder=holder, name=key, shape=list(value.shape), dtype=value.dtype, device=value.device))
    is_container = isinstance(value, Collection) and hasattr(value, "clear")
    return _shown(_KEPT.format(lets_go=f"{holder}.{key}.clear()" if is_container else f"{holder}.{key} = None"))


def _shown(code: str) -> str:
    return "\n" + indent(code.rstrip("\n"), "    ")
