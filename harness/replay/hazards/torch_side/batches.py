"""Hazards of batches: shapes, dtypes, strides, aliases, and what is no tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import BindError, EscapedTensorError, PlanStormError
from harness.replay.hazards.building_blocks import classify, stage, vectors
from harness.replay.hazards.registry import Hazard


def _rows(*counts: int) -> Any:
    return lambda number: vectors(number, counts[number % len(counts)])


def _transposed(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"x": batch["x"].t().contiguous().t()}


def _sometimes_transposed(number: int) -> dict[str, Tensor]:
    return _transposed(number) if number % 2 else vectors(number)


def _expanded(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"x": batch["x"][:1].expand(6, 8), "y": batch["y"]}


def _aliased(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"again": batch["x"]}


def _overlapping(number: int) -> dict[str, Tensor]:
    row = vectors(number)["x"].flatten()
    return {"x": row.as_strided((6, 8), (4, 1)), "y": vectors(number)["y"]}


def _add_aliased(model: nn.Module, batch: Any) -> Tensor:
    batch["again"].mul_(0.5)
    return classify(model, batch)


def _in_place(model: nn.Module, batch: Any) -> Tensor:
    batch["x"].clamp_(-1, 1)
    return classify(model, batch)


def _other_order(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return dict(reversed(batch.items())) if number % 2 else batch


def _with_number(number: int) -> dict[str, Any]:
    return vectors(number) | {"weight": 1.0}


def _with_changing_number(number: int) -> dict[str, Any]:
    return vectors(number) | {"weight": float(number)}


def _weighted(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * batch["weight"]


def _halved(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch if number % 2 else batch | {"x": batch["x"].bfloat16()}


def _as_float(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch | {"x": batch["x"].float()})


def _requires_grad(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"x": batch["x"].requires_grad_(True)}


def _nested(number: int) -> dict[str, Any]:
    batch = vectors(number)
    return {"parts": [batch["x"][:3], (batch["x"][3:], None)], "y": batch["y"], "name": "train"}


def _of_nested(model: nn.Module, batch: Any) -> Tensor:
    first, (second, _) = batch["parts"]
    return classify(model, {"x": torch.cat([first, second]), "y": batch["y"]})


def _sparse(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"x": batch["x"].to_sparse()}


def _of_sparse(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch | {"x": batch["x"].to_dense()})


class _Sample:
    """A thing that is no tensor and no constant."""

    weight = 2.0


def _with_object(number: int) -> dict[str, Any]:
    return vectors(number) | {"weight": _Sample()}


def _of_object(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * batch["weight"].weight


def _empty(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["x"])
    return logits.sum() / 6 + sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def _infinite(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch if number != 6 else batch | {"x": batch["x"].index_fill(0, torch.tensor([2]), float("nan"))}


def _signed_zero(number: int) -> dict[str, Tensor]:
    batch = vectors(number)
    return batch | {"x": batch["x"] * 0 * (-1) ** number + (0.0 if number % 3 else batch["x"])}


def _reads_grad_flag(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * (2.0 if batch["x"].requires_grad else 1.0)


class _Images(nn.Module):
    """Two convolutions, whose kernels follow the memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu()).mean((2, 3))
        return result


def _images(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, 8, 12, 12, generator=generator)
    return {"x": x.to(memory_format=torch.channels_last) if number % 2 else x, "y": vectors(number)["y"]}


_MALA, _NOTES = "mala-project/mala#496", "pytorch/pytorch#63269"
HAZARDS: tuple[Hazard, ...] = (
    Hazard("two_shapes", "batches of two shapes in turn", stage(), source=_MALA, batches=_rows(4, 6), steps=14),
    Hazard(
        "last_batch_smaller",
        "one smaller batch in between",
        stage(),
        source=_MALA,
        batches=lambda number: vectors(number, 2 if number == 6 else 6),
    ),
    Hazard(
        "one_row",
        "a batch of one row, which would broadcast into the buffers",
        stage(),
        source="NVIDIA/TransformerEngine: graphed callables, static inputs",
        batches=lambda number: vectors(number, 1 if number == 7 else 6),
        steps=9,
    ),
    Hazard(
        "every_shape",
        "each batch has a shape of its own",
        stage(),
        PlanStormError,
        "max_plans=8",
        "vllm-project/vllm#6214",
        batches=lambda number: vectors(number, number + 2),
        steps=12,
    ),
    Hazard("transposed", "batches that are not contiguous", stage(), source="csarofeen/pytorch#2098", batches=_transposed),
    Hazard(
        "other_strides",
        "the same shape in other strides",
        stage(),
        source="csarofeen/pytorch#2098",
        batches=_sometimes_transposed,
        steps=14,
    ),
    Hazard(
        "channels_last",
        "images in one memory format and in another",
        stage(model=_Images),
        source="csarofeen/pytorch#2098",
        batches=_images,
        steps=14,
    ),
    Hazard("expanded", "a batch that is one row, expanded", stage(), source="csarofeen/pytorch#2098", batches=_expanded),
    Hazard("overlapping", "rows of a batch that overlap in memory", stage(), source="csarofeen/pytorch#2098", batches=_overlapping),
    Hazard("aliased", "two names for one tensor of the batch", stage(), source="pytorch/pytorch#89145", batches=_aliased),
    Hazard(
        "aliased_write",
        "two names for one tensor, and the step writes through one",
        stage(loss_fn=_add_aliased),
        EscapedTensorError,
        "which belongs to the caller",
        "pytorch/pytorch#89145",
        batches=_aliased,
    ),
    Hazard(
        "input_written",
        "the step writes into its batch",
        stage(loss_fn=_in_place),
        EscapedTensorError,
        "which belongs to the caller",
        "pytorch/pytorch#89145",
    ),
    Hazard("other_order", "the same keys in another order", stage(), source=_NOTES, batches=_other_order, steps=14),
    Hazard("constant_number", "a Python number in the batch", stage(loss_fn=_weighted), source=_NOTES, batches=_with_number),
    Hazard(
        "changing_number",
        "a Python number in the batch that grows",
        stage(loss_fn=_weighted),
        PlanStormError,
        "max_plans=8",
        _NOTES,
        batches=_with_changing_number,
        steps=12,
    ),
    Hazard("two_dtypes", "batches of two dtypes in turn", stage(loss_fn=_as_float), source=_NOTES, batches=_halved, steps=14),
    Hazard(
        "requires_grad", "an input that requires its gradient", stage(), BindError, "requires its gradient", _NOTES, batches=_requires_grad
    ),
    Hazard(
        "requires_grad_read",
        "a loss that asks whether its input requires a gradient",
        stage(loss_fn=_reads_grad_flag),
        BindError,
        "requires its gradient",
        _NOTES,
        batches=_requires_grad,
    ),
    Hazard("nested", "lists, tuples, None and names in the batch", stage(loss_fn=_of_nested), source=_NOTES, batches=_nested),
    Hazard(
        "sparse_batch",
        "a sparse tensor in the batch",
        stage(loss_fn=_of_sparse),
        BindError,
        "layout",
        "pytorch/pytorch#118018",
        batches=_sparse,
    ),
    Hazard(
        "object_in_batch",
        "an object in the batch that is no constant",
        stage(loss_fn=_of_object),
        BindError,
        "is neither a tensor nor a constant",
        _NOTES,
        batches=_with_object,
    ),
    Hazard(
        "empty_batch",
        "batches without a row",
        stage(loss_fn=_empty),
        source=_MALA,
        batches=lambda number: vectors(number, 0 if number % 2 else 6),
        steps=14,
    ),
    Hazard("nan_in_batch", "NaN in one batch: equal payloads from there on", stage(), source="pytorch/pytorch#181723", batches=_infinite),
    Hazard("signed_zeros", "batches of zeros of both signs", stage(), source="pytorch/pytorch#181723", batches=_signed_zero),
)
