"""The baseline: which module and which weight each role of each block has, taken before anything is optimized.

Names do not survive export and optimizing, structure alone does not see swapped or transposed weights. So every projection is known by
its content, a fingerprint of the matrix in the orientation in which it is used, and is found again by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.onnx_graph.census.census import ROLES, Block, Census, Status, census
from harness.onnx_graph.census.projections import Projection, fingerprint

if TYPE_CHECKING:
    from torch import nn


_MATRIX = 2
_SHARE = 0.05
"""Of a weight's energy that quantizing it may cost: that of 3 bits. Another weight of its size is at 2."""


@dataclass(frozen=True, eq=False)
class RoleWeight:
    """One projection as it was.

    Attributes:
        block: index of its block.
        kind: `self` or `cross`.
        role: `q`, `k` or `v`.
        module: dotted name of the module, or the best name that the graph gives.
        projection: the layer.
    """

    block: int
    kind: str
    role: str
    module: str
    projection: Projection

    @property
    def where(self) -> str:
        """Block, role and module, for a message."""
        return f"block {self.block} ({self.kind}) {self.role.upper()} = {self.module}"


@dataclass(frozen=True, eq=False)
class Baseline:
    """All projections of a model before optimizing.

    Attributes:
        census: of that model.
        weights: by (block, role); blocks that are not SEPARATE have the roles that are clear.
    """

    census: Census
    weights: dict[tuple[int, str], RoleWeight]

    def of_block(self, index: int) -> list[RoleWeight]:
        """Return the projections of one block, in the order of the roles."""
        return [self.weights[index, role] for role in ROLES if (index, role) in self.weights]

    def named(self, mark: str) -> RoleWeight | None:
        """Find a projection by its fingerprint; None if no or several roles have it."""
        found = [one for one in self.weights.values() if one.projection.fingerprint == mark]
        return found[0] if len(found) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the baseline as JSON types."""
        rows = [
            {"block": one.block, "kind": one.kind, "role": one.role, "module": one.module, "fingerprint": one.projection.fingerprint}
            for one in self.weights.values()
        ]
        return {"num_blocks": len(self.census.blocks), "weights": rows}


def take_baseline(model: Any, module: nn.Module | None = None) -> Baseline:
    """Read roles, modules and weights of a model as it was exported.

    Args:
        model: path, bytes or ModelProto.
        module: the module that was exported; its weights give the projections their names. Without it the names in the graph serve.

    Returns:
        The baseline.

    Raises:
        UserInputError: the model cannot be read.
    """
    names = _module_names(module)
    found = census(model)
    weights = {}
    for block in found.blocks:
        for role in ROLES:
            projection = block.projection(role)
            if projection is not None:
                name = names.get(projection.fingerprint) or _name_in_graph(projection)
                weights[block.index, role] = RoleWeight(block.index, block.kind, role, name, projection)
    return Baseline(found, weights)


def _module_names(module: nn.Module | None) -> dict[str, str]:
    """Fingerprint to dotted name, for modules with a weight of rank 2 and other parameters of that rank.

    A weight that two modules share has no name of its own.
    """
    if module is None:
        return {}
    from transformers.pytorch_utils import Conv1D

    names: dict[str, str] = {}
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if weight is not None and _is_matrix(weight):
            matrix = weight.detach().float().cpu().reshape(weight.shape[:2]).numpy()
            mark = fingerprint(matrix if isinstance(part, Conv1D) else np.ascontiguousarray(matrix.T))
            names[mark] = f"{names[mark]} or {name}" if mark in names else name
    for name, parameter in module.named_parameters():  # used by its module in the one orientation or the other
        if _is_matrix(parameter) and name.rpartition(".")[2] != "weight":
            matrix = parameter.detach().float().cpu().reshape(parameter.shape[:2]).numpy()
            for one in (matrix, np.ascontiguousarray(matrix.T)):
                names.setdefault(fingerprint(one), name)
    return names


def _is_matrix(weight: Any) -> bool:
    """Whether a weight has rank 2, as that of a convolution over single places has."""
    shape = tuple(getattr(weight, "shape", ()))
    return len(shape) >= _MATRIX and math.prod(shape) == math.prod(shape[:_MATRIX])


def _name_in_graph(projection: Projection) -> str:
    """The parameter's name where the exporter kept it, else that of the node."""
    for value in projection.node.inputs:
        if value is not None and value.name and value.name.endswith(".weight"):
            return value.name.removesuffix(".weight")
    return projection.name


def packed_in(matrix_IO: np.ndarray, block: Block) -> str:
    """Say where a projection that is no layer of its own any more can be found.

    Args:
        matrix_IO: the projection as it was.
        block: as it is now.

    Returns:
        For example `columns 768:1536 of MatMul_12 [768, 2304]`; empty if it is in none of the block's layers.
    """
    for layer in {id(one.node): one for layers in block.projections.values() for one in layers}.values():
        if columns := columns_of(layer.matrix_IO, matrix_IO):
            return f"{columns} of {layer.op} {layer.name} [{layer.shape[0]}, {layer.shape[1]}]"
    return ""


def columns_of(whole_IO: np.ndarray, part_IO: np.ndarray) -> str:
    """Say which columns of a weight another one is, also where one of them was quantized.

    Args:
        whole_IO: the weight.
        part_IO: a narrower one.

    Returns:
        For example `columns 768:1536`; empty if it is none, or as wide.
    """
    width, columns = part_IO.shape[1], whole_IO.shape[1]
    if len(whole_IO) != len(part_IO) or columns <= width:
        return ""
    starts = range(0, columns - width + 1, max(1, np.gcd(width, columns)))
    found = (start for start in starts if _is_close(whole_IO[:, start : start + width], part_IO))
    return next((f"columns {start}:{start + width}" for start in found), "")


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one matrix is the other, also where one of them was quantized."""
    return bool(np.square(one - other, dtype=np.float64).sum() <= _SHARE * np.square(other, dtype=np.float64).sum())


def describe(block: Block) -> str:
    """Say what a block is now, in a few words."""
    if block.status is Status.ABSORBED:
        return f"absorbed by {block.operator} {block.anchor}"
    layers = {id(one.node): f"{one.op} {one.name} [{one.shape[0]}, {one.shape[1]}]" for role in ROLES for one in block.projections[role]}
    return f"{block.status.value}: {'; '.join(filter(None, [', '.join(layers.values()), block.note])) or 'no linear layer'}"
