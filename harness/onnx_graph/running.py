"""Run graphs in onnxruntime under a declared policy, on inputs drawn from a seed, and compare what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

from compressor.errors import HarnessError, UserInputError
from harness.onnx_graph.similarity import sqnr_db
from harness.spelling import plain_text

_DEFAULT_DIMENSION = 2
_DEFAULT_LENGTH = 7


@dataclass(frozen=True)
class Policy:
    """How a graph is run, and how close two runs must be.

    Attributes:
        name: `golden` or `deploy`.
        level: onnxruntime's optimization level.
        min_sqnr_db: limit on signal to noise of every output.
    """

    name: str
    level: str
    min_sqnr_db: float


POLICIES: Mapping[str, Policy] = {
    "golden": Policy("golden", "ORT_DISABLE_ALL", 90.0),
    "deploy": Policy("deploy", "ORT_ENABLE_ALL", 35.0),
}


@dataclass(frozen=True)
class OutputRow:
    """One output compared.

    Attributes:
        name: of the output, as the first graph has it.
        max_abs: largest absolute difference; infinite for different shapes.
        sqnr_db: signal to noise; infinite for equal outputs.
    """

    name: str
    max_abs: float
    sqnr_db: float


def example_inputs(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw inputs that a graph accepts.

    Masks are ones, ids stay within the tables that they index, symbolic dimensions of one name have one size. Drawn with integers only,
    which are the same on every machine.

    Args:
        model: not modified.
        seed: of the draw.

    Returns:
        Name to array.

    Raises:
        UserInputError: an input has no shape or a type that cannot be drawn; pass inputs.
    """
    draw = np.random.default_rng(seed)
    held = {tensor.name for tensor in model.graph.initializer}
    limits = _id_limits(model)
    sizes: dict[str, int] = {}
    return {value.name: _draw(value, draw, limits.get(value.name), sizes) for value in model.graph.input if value.name not in held}


def run_graph(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], policy: Policy) -> list[np.ndarray]:
    """Run a graph.

    Args:
        model: not modified.
        inputs: by name; those that the graph does not have are left out.
        policy: how.

    Returns:
        Its outputs in order.

    Raises:
        HarnessError: onnxruntime cannot load or run it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, policy.level)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path, save_as_external_data=model.ByteSize() > 2**30)
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = {one.name for one in session.get_inputs()}
            outputs: list[np.ndarray] = session.run(None, {name: array for name, array in inputs.items() if name in names})
        except Exception as error:  # the exceptions of onnxruntime share no other base class
            raise HarnessError(f"onnxruntime: it cannot run the graph: {plain_text(str(error))[:300]}") from error
    return outputs


def compare_outputs(before: onnx.ModelProto, after: onnx.ModelProto, inputs: Mapping[str, np.ndarray], policy: Policy) -> list[OutputRow]:
    """Run two graphs on the same inputs.

    Args:
        before: the reference; always run with optimizations off.
        after: run under the policy.
        inputs: by name.
        policy: how `after` is run.

    Returns:
        One row per output of `before`, in order.

    Raises:
        HarnessError: one of them cannot be run, or they have another number of outputs.
    """
    expected = run_graph(before, inputs, POLICIES["golden"])
    actual = run_graph(after, inputs, policy)
    if len(expected) != len(actual):
        raise HarnessError(f"outputs: {len(expected)} before and {len(actual)} after cannot be compared; keep the graph's outputs")
    names = [value.name for value in before.graph.output]
    return [_row(name, np.asarray(one), np.asarray(other)) for name, one, other in zip(names, expected, actual, strict=True)]


def _row(name: str, expected: np.ndarray, actual: np.ndarray) -> OutputRow:
    if expected.shape != actual.shape:
        return OutputRow(name, np.inf, -np.inf)
    same = np.where(np.isnan(expected) & np.isnan(actual), 0, expected.astype(np.float64) - actual) if expected.size else np.zeros(1)
    return OutputRow(name, float(np.abs(same).max()), sqnr_db(expected, actual))


def _draw(value: onnx.ValueInfoProto, draw: np.random.Generator, limit: int | None, sizes: dict[str, int]) -> np.ndarray:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise UserInputError(f"input {value.name}: it is no tensor of known rank, so no example can be drawn; pass inputs")
    shape = [_size(dimension, axis, sizes) for axis, dimension in enumerate(kind.shape.dim)]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    array: Any
    if "mask" in value.name or dtype == np.bool_:
        array = np.ones(shape)
    elif np.issubdtype(dtype, np.integer):
        array = draw.integers(0, limit or 2, shape)
    else:  # in [-2, 2), in steps that every floating type holds exactly
        array = draw.integers(-128, 128, shape) / 64
    return np.asarray(array).astype(dtype)


def _size(dimension: Any, axis: int, sizes: dict[str, int]) -> int:
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value)
    default = _DEFAULT_DIMENSION if axis == 0 else _DEFAULT_LENGTH
    return sizes.setdefault(dimension.dim_param, default) if dimension.dim_param else default


def _id_limits(model: onnx.ModelProto) -> dict[str, int]:
    """Input to the number of rows of the smallest table that it indexes."""
    rows = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    limits: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in rows:
            limits[node.input[1]] = min(limits.get(node.input[1], rows[node.input[0]]), rows[node.input[0]])
    return limits
