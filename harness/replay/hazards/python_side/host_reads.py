"""Hazards of the host: values that Python reads from a tensor, and shapes that depend on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressor.errors import DynamicShapeError, HostReadError
from harness.replay.hazards.building_blocks import stage
from harness.replay.hazards.registry import Hazard

_NOTES = "torch docs: notes/cuda, CUDA graphs, constraints"


def _printed(module: Any, h: Tensor) -> Tensor:
    line = f"mean {h.mean()}"  # for a log
    return h if line else -h


def _loss_of_the_hard(model: Any, batch: Any) -> Tensor:
    logits = model(batch["x"])
    hard = logits.max(1).values < 0.5
    return cross_entropy(logits[hard], batch["y"][hard])


def _sizes_from_data(module: Any, h: Tensor) -> Tensor:
    return h[: int((h[:, 0] > 0).sum()) + 1].mean(0) + h


def _repeated(module: Any, h: Tensor) -> Tensor:
    counts = (h[:, 0] > 0).long() + 1
    return h + torch.repeat_interleave(h, counts, dim=0).mean(0)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "item",
        "an activation is scaled by .item()",
        stage(lambda m, h: h * h.mean().item()),
        HostReadError,
        "_local_scalar_dense",
        "pytorch/pytorch#63269",
    ),
    Hazard(
        "float_of_tensor", "float() of a tensor", stage(lambda m, h: h * float(h.detach().std())), HostReadError, "host_reads.py", _NOTES
    ),
    Hazard(
        "int_of_tensor", "a slice as long as int() of a tensor says", stage(_sizes_from_data), HostReadError, "_local_scalar_dense", _NOTES
    ),
    Hazard(
        "bool_of_tensor", "`if tensor:`", stage(lambda m, h: h if h.sum() > 0 else -h), HostReadError, "reads a tensor on the host", _NOTES
    ),
    Hazard(
        "tolist",
        ".tolist() of an activation",
        stage(lambda m, h: h * h.detach()[0].tolist()[0]),
        HostReadError,
        "tolist",
        "NVIDIA/apex#1522",
    ),
    Hazard("numpy", ".numpy() of an activation", stage(lambda m, h: h * float(h.detach().numpy()[0, 0])), HostReadError, "numpy", _NOTES),
    Hazard("printed", "an activation is spelled for a log", stage(_printed), HostReadError, "reads a tensor", "pytorch/pytorch#61880"),
    Hazard(
        "torch_equal",
        "torch.equal decides",
        stage(lambda m, h: h * (1.5 if torch.equal(h, h) else 1.0)),
        HostReadError,
        "aten.equal",
        _NOTES,
    ),
    Hazard(
        "allclose",
        "torch.allclose decides",
        stage(lambda m, h: h * (1.5 if torch.allclose(h, h) else 1.0)),
        HostReadError,
        "aten.allclose",
        _NOTES,
    ),
    Hazard("nonzero", "nonzero()", stage(lambda m, h: h + h.nonzero().sum()), DynamicShapeError, "aten.nonzero", "pytorch/pytorch#63269"),
    Hazard(
        "masked_select",
        "masked_select()",
        stage(lambda m, h: h + h.masked_select(h > 0).mean()),
        DynamicShapeError,
        "aten.masked_select",
        _NOTES,
    ),
    Hazard(
        "boolean_index",
        "the loss of the hard examples alone",
        stage(loss_fn=_loss_of_the_hard),
        DynamicShapeError,
        "shape depends on data",
        _NOTES,
    ),
    Hazard("unique", "unique()", stage(lambda m, h: h + h.detach().sign().unique().sum()), DynamicShapeError, "unique", _NOTES),
    Hazard(
        "repeat_interleave", "repeat_interleave() with counts in a tensor", stage(_repeated), DynamicShapeError, "repeat_interleave", _NOTES
    ),
    Hazard(
        "where_one_argument",
        "torch.where with a condition alone",
        stage(lambda m, h: h + torch.where(h > 0)[0].sum()),
        DynamicShapeError,
        "nonzero",
        _NOTES,
    ),
    Hazard(
        "bincount",
        "bincount(), as long as its largest value",
        stage(lambda m, h: h * torch.bincount((h[:, 0] > 0).long()).sum()),
        DynamicShapeError,
        "bincount",
        _NOTES,
    ),
    Hazard(
        "masked_write", "values under a mask are replaced, in place", stage(lambda m, h: h.clone().masked_fill_(h > 1, 1.0)), source=_NOTES
    ),
    Hazard("where_three_arguments", "torch.where with both values", stage(lambda m, h: torch.where(h > 0, h, 0.1 * h)), source=_NOTES),
)
