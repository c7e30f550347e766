"""What fusing Q, K and V costs a quantizer that has one scale for the fused weight: decibels per role and block.

One scale must cover the largest of the three, and the smallest, mostly V, pays for it. The weights are those of a graph with separate
projections, quantized to integers with one symmetric scale per tensor: once each for itself, once the three side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.errors import UserInputError
from compressor.numerics import QuantizationArgs, fake_quantize
from compressor.numerics.observers import weight_qparams
from harness.errors import HarnessError
from harness.onnx_graph.census.baseline import RoleWeight, take_baseline
from harness.onnx_graph.census.census import ROLES, Status
from harness.onnx_graph.graph.run_session import sqnr_db


@dataclass(frozen=True)
class RoleCost:
    """One projection of one block.

    Attributes:
        block: index.
        role: `q`, `k` or `v`.
        module: name.
        own_db: SQNR with a scale of its own.
        shared_db: SQNR with one scale over Q, K and V.
    """

    block: int
    role: str
    module: str
    own_db: float
    shared_db: float

    @property
    def cost_db(self) -> float:
        """What sharing costs: nothing where both are exact, as of zeros."""
        return 0.0 if self.own_db == self.shared_db else self.own_db - self.shared_db

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        fixed = {"block": self.block, "role": self.role, "module": self.module}
        return {**fixed, "own_db": self.own_db, "shared_db": self.shared_db, "cost_db": self.cost_db}


def fusing_cost(model: Any, num_bits: int = 8) -> list[RoleCost]:
    """Quantize the projections of every block, apart and together.

    Args:
        model: path, bytes or ModelProto, with separate projections.
        num_bits: of the integer codes.

    Returns:
        Three rows per block, in the order of the graph. Of cross-attention only those that take inputs of one width can be fused; one that
        is alone loses nothing.

    Raises:
        UserInputError: the model cannot be read, or a projection holds NaN or infinity; it is named.
        HarnessError: no block has three projections of its own, so there is nothing to measure.
    """
    baseline = take_baseline(model)
    separate = [block for block in baseline.census.blocks if block.status is Status.SEPARATE]
    if not separate:
        raise HarnessError(
            "fusing cost: no block has three projections of its own, so there is nothing to fuse; give the model as exported"
        )
    args = QuantizationArgs(num_bits=num_bits, strategy="tensor")
    return [row for block in separate for row in _costs(baseline.of_block(block.index), args)]


def _costs(weights: Sequence[RoleWeight], args: QuantizationArgs) -> Iterator[RoleCost]:
    for one in weights:
        if not np.isfinite(one.projection.matrix_IO).all():
            where = f"fusing cost: block {one.block}, {one.role} ({one.module})"
            raise UserInputError(f"{where}: holds NaN or infinity, for which there is no scale; repair the model")
    for one in weights:
        matrix, fused = one.projection.matrix_IO, [other for other in weights if other.projection.shape[0] == one.projection.shape[0]]
        start = sum(other.projection.shape[1] for other in fused[: fused.index(one)])
        together = np.concatenate([other.projection.matrix_IO for other in fused], axis=1)
        shared = _rounded(together, args)[:, start : start + matrix.shape[1]]
        yield RoleCost(one.block, one.role, one.module, sqnr_db(matrix, _rounded(matrix, args)), sqnr_db(matrix, shared))


def summary(rows: list[RoleCost]) -> dict[str, dict[str, float]]:
    """Mean and worst cost per role.

    Args:
        rows: of all blocks.

    Returns:
        Role to `mean_db` and `worst_db`.
    """
    costs = {role: [row.cost_db for row in rows if row.role == role] for role in ROLES}
    return {role: {"mean_db": float(np.mean(values)), "worst_db": float(max(values))} for role, values in costs.items()}


def draw_costs(rows: list[RoleCost], path: Path, title: str) -> None:
    """Draw the cost of every projection.

    Args:
        rows: of all blocks.
        path: an .svg or .png file; replaced.
        title: of the figure.
    """
    from matplotlib.figure import Figure

    from harness.reporting.plots import save_figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    blocks = sorted({row.block for row in rows})
    for offset, (role, colour) in enumerate(zip(ROLES, ("#4c72b0", "#dd8452", "#55a868"), strict=True)):
        heights = [row.cost_db for row in rows if row.role == role]
        axes.bar([block + 0.27 * (offset - 1) for block in range(len(blocks))], heights, width=0.25, label=role.upper(), color=colour)
    axes.set_xticks(range(len(blocks)), [str(block) for block in blocks])
    axes.set_xlabel("attention block")
    axes.set_ylabel("SQNR lost [dB]")
    axes.set_title(title)
    axes.legend(ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, "fusing-cost")


def _rounded(matrix: np.ndarray, args: QuantizationArgs) -> np.ndarray:
    weight = torch.from_numpy(np.ascontiguousarray(matrix))
    rounded: np.ndarray = fake_quantize(weight, weight_qparams(weight, args), args).numpy()
    return rounded
