"""Linear layers that are more than linear: a router that is a subclass of nn.Linear also chooses experts, and no quantized layer does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import TargetError
from compressor.model.folder import some

_TOLERANCE = 0.05  # relative; coarse, because a forward that does something else is off by far more


def check_fast_paths(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse layers whose weights torch reads past them: its fast path through a transformer layer, which only inference takes.

    Args:
        model: not modified.
        names: dotted names of the targets.

    Raises:
        TargetError: names them, and says what to do.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return
    found = [name for name in names if _is_read_past(model.get_submodule(name.rpartition(".")[0]))]
    if found:
        raise TargetError(
            f"{some(found)}: nn.TransformerEncoderLayer reads the weights of {len(found)} targets past them where it may take torch's fast "
            "path, and a quantized layer has no such weight; call torch.backends.mha.set_fastpath_enabled(False), here and where the "
            "compressed model runs, or ignore them"
        )


def _is_read_past(parent: nn.Module) -> bool:
    if not isinstance(parent, nn.TransformerEncoderLayer):
        return False
    attention: Any = parent.self_attn
    return bool(attention.batch_first and parent.activation_relu_or_gelu)


def check_linear_forwards(modules: Mapping[str, nn.Module]) -> None:
    """Refuse targets whose own forward computes something else than a product with their weight.

    Args:
        modules: targets by dotted name; not modified.

    Raises:
        TargetError: names them, and says what to do.
    """
    odd = {name: type(module).__name__ for name, module in modules.items() if isinstance(module, nn.Linear) and not _is_linear(module)}
    if odd:
        kinds = ", ".join(sorted(set(odd.values())))
        raise TargetError(
            f"{some(odd)}: {len(odd)} targets of class {kinds} are linear layers whose forward does more than multiply, which a quantized "
            f"layer would leave out; add {kinds} to ignore"
        )


@torch.no_grad()
def _is_linear(module: nn.Linear) -> bool:
    """Run a forward that is not torch's own on two random rows."""
    if type(module).forward is nn.Linear.forward:
        return True
    weight = module.weight
    rows = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
        weight.device, weight.dtype
    )
    try:
        given: object = type(module).forward(module, rows)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False
    expected = nn.functional.linear(rows, weight, module.bias)
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return False
    if weight.is_meta:
        return True
    return torch.allclose(given.float(), expected.float(), rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.float().abs().max()))
