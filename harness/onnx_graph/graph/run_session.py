"""Run graphs in onnxruntime under a declared policy, and compare what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnx_ir as ir

from compressor.errors import UserInputError
from harness.errors import HarnessError
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.view import RANDOM, GraphView, label, load_graph
from harness.reporting.text import plain_text

# How close two arrays are, in the one measure that limits are stated in.


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to noise ratio.

    Args:
        expected: the signal.
        actual: the same shape, else the result is minus infinity.

    Returns:
        10 log10(sum expected^2 / sum (expected - actual)^2) in dB; infinite for equal arrays.
    """
    if expected.shape != actual.shape:
        return -np.inf
    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(expected.astype(np.float64) - actual).sum())
    if not np.isfinite(noise):
        return -np.inf
    return np.inf if noise == 0 else float(10 * np.log10(max(signal, np.finfo(np.float64).tiny) / noise))


# Two arrays that one output gave before and after: how far apart they are, or why that says nothing.

_SLICE_MARGIN_DB = 60.0
_BYTES_OF_AN_ID = 4
_SLICE_FLOOR = 1e-10
"""Share of the mean power of an output: a slice weaker than this is held against it, for rounding leaves noise in what is nearly zero."""


@dataclass(frozen=True)
class OutputRow:
    """One output compared.

    Attributes:
        name: of the output, as the first graph has it.
        max_abs: largest absolute difference; infinite where the two cannot be subtracted.
        sqnr_db: signal to noise; infinite for equal outputs.
        weakest_db: the same of the slice, along any axis, that is worst: what is small beside something large is seen here.
        others: share of the values that are others, where a value is an id, a place or a truth value and none is near another.
        changed: what differs beside the numbers, in words; else empty.
        unknown: why the comparison is no evidence, in words; else empty.
    """

    name: str
    max_abs: float
    sqnr_db: float
    weakest_db: float = np.inf
    others: float = 0.0
    changed: str = ""
    unknown: str = ""

    def wrong(self, limit_db: float) -> bool:
        """Whether the output is another one.

        Args:
            limit_db: that the whole output must reach; a slice may lie 60 dB below it. Of ids as many may be others as rounding at that
                limit lets ties fall the other way: 1 in 31,623 at 90 dB, 1 in 56 at 35 dB.

        Returns:
            True if it must not pass.
        """
        is_far = not self.sqnr_db >= limit_db or not self.weakest_db >= limit_db - _SLICE_MARGIN_DB
        return bool(self.changed) or self.others > _ties(limit_db) or (is_far and not self.others)

    def text(self, limit_db: float) -> str:
        """Return one line, for people.

        Args:
            limit_db: as for `wrong`.

        Returns:
            The output, what was found, and the limit.
        """
        if self.changed or self.unknown:
            return f"output {self.name}: {self.changed or self.unknown}"
        if self.others:
            return f"output {self.name}: {self.others:.3%} of the values are others, limit {_ties(limit_db):.3%}"
        numbers = f"max abs {self.max_abs:.3g}, SQNR {self.sqnr_db:.1f} dB, limit {limit_db:.0f} dB"
        weak = self.weakest_db < limit_db - _SLICE_MARGIN_DB
        worst = f"; its weakest slice has {self.weakest_db:.1f} dB, limit {limit_db - _SLICE_MARGIN_DB:.0f} dB" if weak else ""
        return f"output {self.name}: {numbers}{worst}"


def _ties(limit_db: float) -> float:
    """The share of ids that may be others under a limit: the amplitude of its noise."""
    return float(10.0 ** (-limit_db / 20))


def output_row(name: str, expected: np.ndarray, actual: np.ndarray) -> OutputRow:
    """Compare.

    Args:
        name: of the output.
        expected: before.
        actual: after.

    Returns:
        What was found.
    """
    changed = _kind_changed(expected, actual)
    if changed:
        return OutputRow(name, np.inf, -np.inf, changed=changed)
    if not _is_number(expected):
        if np.array_equal(expected, actual):
            same = expected.size > 1 and bool((expected == expected.flat[0]).all())
            return OutputRow(
                name, 0.0, np.inf, unknown=f"nothing was compared: output {name} is {expected.flat[0]!r} everywhere" if same else ""
            )
        return OutputRow(name, np.inf, -np.inf, changed=f"{int((expected != actual).sum())} of {expected.size} values changed")
    unknown = _no_evidence(name, expected)
    before, after = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(before) & np.isfinite(after)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if odd := int((~finite & ~same).sum()):
        return OutputRow(name, np.inf, -np.inf, changed=f"NaN or infinite in one of the graphs only, or of another sign, at {odd} places")
    before, after = np.where(finite, before, 0), np.where(finite, after, 0)
    max_abs = float(np.abs(before - after).max()) if before.size else 0.0
    others = float((before != after).mean()) if before.size and _is_id(expected) else 0.0
    return OutputRow(name, max_abs, sqnr_db(before, after), _weakest_db(before, after), others, unknown="" if max_abs else unknown)


def _kind_changed(expected: np.ndarray, actual: np.ndarray) -> str:
    if expected.shape != actual.shape:
        return f"shape {list(expected.shape)} became {list(actual.shape)}"
    return f"{expected.dtype} became {actual.dtype}" if expected.dtype != actual.dtype else ""


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _is_id(array: np.ndarray) -> bool:
    """Tokens, places, counts and truth values; integers of one or two bytes are codes, which are rounded like numbers."""
    return array.dtype.kind == "b" or (array.dtype.kind in "iu" and array.dtype.itemsize >= _BYTES_OF_AN_ID)


def _no_evidence(name: str, expected: np.ndarray) -> str:
    """Say why equal outputs are no evidence. One number or truth value has nothing to differ from."""
    if expected.size == 0:
        return f"nothing was compared: output {name} is empty"
    values = expected.astype(np.float64)
    if np.isnan(values).all():
        return f"nothing was compared: output {name} is NaN everywhere"
    lone = expected.size == 1 and (bool(values.any()) or expected.dtype.kind == "b")
    if not lone and (values == values.flat[0]).all():
        return f"nothing was compared: output {name} is constant, {values.flat[0]:.6g} everywhere"
    return ""


def _weakest_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to noise of the worst slice along any axis; each is held at least against a small share of the mean power."""
    worst = np.inf
    power, noise = np.square(expected), np.square(expected - actual)
    if not noise.any():
        return worst
    floor = _SLICE_FLOOR * float(power.mean())
    for axis in range(expected.ndim):
        others = tuple(one for one in range(expected.ndim) if one != axis)
        signals, noises = np.maximum(power.mean(axis=others), floor), noise.mean(axis=others)
        ratios = signals[noises > 0] / noises[noises > 0]
        worst = min(worst, float(10 * np.log10(max(ratios.min(), np.finfo(np.float64).tiny))))
    return worst


_DROPOUT_INPUTS = 3


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


def run_graph(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], policy: Policy) -> list[np.ndarray]:
    """Run a graph.

    Args:
        model: not modified.
        inputs: by name; those that the graph does not have are left out.
        policy: how.

    Returns:
        Its outputs in order.

    Raises:
        UserInputError: it has an input that is not given.
        HarnessError: onnxruntime cannot load or run it.
    """
    return Session(model, policy).run(inputs)


class Session:
    """A graph in onnxruntime, to run it several times.

    Attributes:
        names: of its inputs.
    """

    def __init__(self, model: onnx.ModelProto, policy: Policy) -> None:
        """Load it.

        Args:
            model: not modified.
            policy: how.

        Raises:
            HarnessError: onnxruntime cannot load it.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, policy.level)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(model, path, save_as_external_data=model.ByteSize() > 2**30)
            try:
                self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # the exceptions of onnxruntime share no other base class
                raise _refused(error) from error
        self.names = {one.name for one in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run it.

        Args:
            inputs: by name; those that the graph does not have are left out.

        Returns:
            Its outputs in order.

        Raises:
            UserInputError: it has an input that is not given.
            HarnessError: onnxruntime cannot run it.
        """
        _check_names(self.names, inputs)
        try:
            found: list[np.ndarray] = self._session.run(None, {name: one for name, one in inputs.items() if name in self.names})
        except Exception as error:  # as above
            raise _refused(error) from error
        return found


def _refused(error: Exception) -> HarnessError:
    return HarnessError(f"onnxruntime: it cannot run the graph: {plain_text(str(error))[:300]}")


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
    names = [value.name for value in before.graph.output]
    return output_rows(names, run_graph(before, inputs, POLICIES["golden"]), run_graph(after, inputs, policy))


def output_rows(names: Sequence[str], expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> list[OutputRow]:
    """Compare what two graphs gave.

    Args:
        names: of the outputs.
        expected: before.
        actual: after.

    Returns:
        One row per output, in order.

    Raises:
        HarnessError: another number of outputs.
    """
    if len(expected) != len(actual):
        raise HarnessError(f"outputs: {len(expected)} before and {len(actual)} after cannot be compared; keep the graph's outputs")
    return [output_row(name, np.asarray(one), np.asarray(other)) for name, one, other in zip(names, expected, actual, strict=True)]


def random_operators(model: onnx.ModelProto) -> list[str]:
    """Find what draws random numbers, also inside of subgraphs and functions: two runs of such a graph differ.

    Args:
        model: not modified.

    Returns:
        Operators with their names.
    """
    view = GraphView(load_graph(model))
    return [f"{node.op_type} {label(node)}" for node in view.model.graph.all_nodes() if _draws(view, node)]


def _draws(view: GraphView, node: ir.Node) -> bool:
    if node.op_type != "Dropout" or len(node.inputs) < _DROPOUT_INPUTS or (mode := node.inputs[2]) is None:
        return node.op_type in RANDOM
    ratio = Constants(view).of(node.inputs[1])
    held = Constants(view).of(mode)
    return (held is None or bool(held.any())) and (ratio is None or bool(ratio.any()))


def _check_names(names: set[str], inputs: Mapping[str, np.ndarray]) -> None:
    missing = sorted(names - set(inputs))
    if missing:
        given = ", ".join(inputs) or "none"
        raise UserInputError(
            f"inputs: the graph asks for {', '.join(missing)}, and the inputs are {given}; an input was renamed, or a weight became one: "
            "keep the inputs of the exported graph"
        )
