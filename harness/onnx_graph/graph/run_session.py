"""Run graphs in onnxruntime under a declared policy, and compare what comes out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from compressor.errors import UserInputError
from harness.errors import HarnessError
from harness.onnx_graph.graph.added_masks import as_added
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import RANDOM, GraphView, label
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
"""Share of the mean power of the slices that differ: a weaker one is held against it, for rounding leaves noise in what is nearly zero."""
_FILL, _FILL_GAP = 1000.0, 100.0
"""What a mask fills in is at least so large, and so many times larger than all that is smaller. Its energy says nothing of the rest."""


class Limit(NamedTuple):
    """How near an output must come: signal to noise of the whole, and of its weakest slice, in dB."""

    whole: float
    slices: float

    @classmethod
    def of(cls, whole: float) -> Limit:
        """Return the limit whose slices may be a million times weaker."""
        return cls(whole, whole - _SLICE_MARGIN_DB)


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

    def wrong(self, limit: Limit) -> bool:
        """Whether the output is another one.

        Args:
            limit: that it must reach. Of ids as many may be others as rounding at the limit of the whole lets ties fall the other way: 1 in
                31,623 at 90 dB, 1 in 56 at 35 dB.

        Returns:
            True if it must not pass.
        """
        is_far = not self.sqnr_db >= limit.whole or not self.weakest_db >= limit.slices
        return bool(self.changed) or self.others > _ties(limit.whole) or (is_far and not self.others)

    def text(self, limit: Limit) -> str:
        """Return one line, for people.

        Args:
            limit: as for `wrong`.

        Returns:
            The output, what was found, and the limit.
        """
        if self.changed or self.unknown:
            return f"output {self.name}: {self.changed or self.unknown}"
        if self.others:
            return f"output {self.name}: {self.others:.3%} of the values are others, limit {_ties(limit.whole):.3%}"
        numbers = f"max abs {self.max_abs:.3g}, SQNR {self.sqnr_db:.1f} dB, limit {limit.whole:.0f} dB"
        weak = self.weakest_db < limit.slices
        worst = f"; its weakest slice has {self.weakest_db:.1f} dB, limit {limit.slices:.0f} dB" if weak else ""
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
    sqnr, weakest = (min(values) for values in zip(*_judged_apart(before, after), strict=True))
    return OutputRow(name, max_abs, sqnr, weakest, others, unknown="" if max_abs else unknown)


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


def _judged_apart(before: np.ndarray, after: np.ndarray) -> Iterator[tuple[float, float]]:
    """Signal to noise of the whole and of the weakest slice, of what was computed and of what masks filled in by itself."""
    bounds = _fills(np.abs(before))
    group = np.digitize(np.abs(before), bounds)
    for number in range(len(bounds) + 1):
        one, other = (np.where(group == number, array, 0) for array in (before, after))
        unit = float(np.abs(one).max(initial=0)) or 1.0  # the square of a large float64 is infinite
        yield sqnr_db(one / unit, other / unit), _weakest_db(one / unit, other / unit)


def _fills(sizes: np.ndarray) -> list[float]:
    """The smallest magnitude of each fill: far above all that is smaller, and the same at two places at least, as computed ones are not."""
    levels = np.unique(sizes[sizes > 0])
    starts = levels[1:][levels[1:] >= np.maximum(_FILL_GAP * levels[:-1], _FILL)]
    found = []
    for start, end in zip(starts, np.append(starts, np.inf)[1:], strict=True):
        members = sizes[(sizes >= start) & (sizes < end)]
        if 2 * np.unique(np.log(members).round(2)).size <= members.size:
            found.append(float(start))
    return found


def _weakest_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to noise of the worst slice along any axis; each is held at least against a small share of the power of those that differ."""
    worst = np.inf
    power, noise = np.square(expected), np.square(expected - actual)
    if not noise.any():
        return worst
    for axis in range(expected.ndim):
        others = tuple(one for one in range(expected.ndim) if one != axis)
        noises = noise.mean(axis=others)
        signals = power.mean(axis=others)[noises > 0]
        ratios = np.maximum(signals, _SLICE_FLOOR * signals.mean()) / noises[noises > 0]
        worst = min(worst, float(10 * np.log10(max(ratios.min(), np.finfo(np.float64).tiny))))
    return worst


_DROPOUT_INPUTS = 3


@dataclass(frozen=True)
class Policy:
    """How a graph is run, and how close two runs must be.

    Attributes:
        name: `golden` or `deploy`.
        level: onnxruntime's optimization level.
        limit: of every output.
    """

    name: str
    level: str
    limit: Limit


POLICIES: Mapping[str, Policy] = {
    "golden": Policy("golden", "ORT_DISABLE_ALL", Limit.of(90.0)),
    "deploy": Policy("deploy", "ORT_ENABLE_ALL", Limit.of(35.0)),
}


class GraphRefused(HarnessError):
    """onnxruntime cannot load a graph, or not run it on what it was given.

    Attributes:
        graph: which one.
        is_unknown: it has no kernel for an operator here, or knows no such version of ONNX yet, which says nothing of the graph.
    """

    def __init__(self, error: Exception, graph: str, task: str, remedy: str = "") -> None:
        """Say why.

        Args:
            error: of onnxruntime.
            graph: which one.
            task: what it cannot do.
            remedy: what helps where it has no kernel; empty where nobody knows.
        """
        words = plain_text(str(error))
        self.graph, self.is_unknown = graph, any(one in words for one in _NOT_KNOWN)
        reason = _NOISE.sub("", words).strip(" .")[:400]
        super().__init__(f"onnxruntime: {graph} cannot {task}: {reason}{f'; {remedy}' if remedy and self.is_unknown else ''}")


_OF_BF16 = "it holds bfloat16, which few kernels of a CPU take; export in float32 to compare numbers"
_NOT_KNOWN = (
    *("NOT_IMPLEMENTED", "is not a registered function/op", "No corresponding Numpy type"),
    *("Current official support for domain", "Unsupported model IR version"),
)
_NOISE = re.compile(  # where in its own source, and in which of its own words, onnxruntime fails
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed: ?|Non-zero status code returned while |Name:'' |Status Message: "
    r"|(?:/\S+/)?\w+\.(?:h|cc|cpp):\d+ (?:.* was false\. )?|(?:void )?onnxruntime::[\w:]+\([^()]*\) "
)


def run_graph(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], policy: Policy) -> list[Any]:
    """Run a graph.

    Args:
        model: not modified.
        inputs: by name; those that the graph does not have are left out.
        policy: how.

    Returns:
        Its outputs in order: arrays, or what `arrays_of` takes apart.

    Raises:
        UserInputError: it has an input that is not given.
        GraphRefused: onnxruntime cannot load or run it.
    """
    return Session(model, policy).run(inputs)


class Session:
    """A graph in onnxruntime, to run it several times.

    Attributes:
        names: of its inputs.
    """

    def __init__(self, model: onnx.ModelProto, policy: Policy, name: str = "the graph", added: Collection[str] = ()) -> None:
        """Load it.

        Args:
            model: not modified.
            policy: how.
            name: what errors call it.
            added: masks that it adds to scores, and that `run` is nevertheless given as ones and zeros.

        Raises:
            GraphRefused: onnxruntime cannot load it.
        """
        import onnxruntime

        self._name, self._added = name, frozenset(added)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, policy.level)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(model, path, save_as_external_data=model.ByteSize() > 2**30)
            try:
                self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # the exceptions of onnxruntime share no other base class
                raise GraphRefused(error, name, "be loaded", _OF_BF16 if _is_bf16(model) else "") from error
        self.names = {one.name for one in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[Any]:
        """Run it.

        Args:
            inputs: by name; those that the graph does not have are left out.

        Returns:
            Its outputs in order: arrays, or what `arrays_of` takes apart.

        Raises:
            UserInputError: it has an input that is not given.
            GraphRefused: onnxruntime cannot run it.
        """
        _check_names(self.names, inputs)
        try:
            taken = {name: one for name, one in inputs.items() if name in self.names}
            found: list[Any] = self._session.run(None, {name: as_added(one) if name in self._added else one for name, one in taken.items()})
        except Exception as error:  # as above
            given = ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items() if name in self.names)
            raise GraphRefused(error, self._name, f"run on {given or 'no inputs'}") from error
        return found


def _is_bf16(model: onnx.ModelProto) -> bool:
    return any(one.data_type == onnx.TensorProto.BFLOAT16 for one in model.graph.initializer)


def compare_outputs(before: onnx.ModelProto, after: onnx.ModelProto, inputs: Mapping[str, np.ndarray], policy: Policy) -> list[OutputRow]:
    """Run two graphs on the same inputs.

    Args:
        before: the reference; always run with optimizations off.
        after: run under the policy.
        inputs: by name.
        policy: how `after` is run.

    Returns:
        One row per array of each output of `before`, in order.

    Raises:
        HarnessError: one of them cannot be run, or they have another number of outputs.
    """
    names = [value.name for value in before.graph.output]
    return [
        row for rows in output_rows(names, run_graph(before, inputs, POLICIES["golden"]), run_graph(after, inputs, policy)) for row in rows
    ]


def arrays_of(output: Any) -> list[np.ndarray]:
    """Take an output apart.

    Args:
        output: of a session.

    Returns:
        A tensor itself, the elements of a sequence, keys and values of a map; of an optional without a value none.
    """
    if isinstance(output, Mapping):
        return [np.asarray(list(output)), np.asarray(list(output.values()))]
    if isinstance(output, list):
        return [array for one in output for array in arrays_of(one)]
    return [] if output is None else [np.asarray(output)]


def output_rows(names: Sequence[str], expected: Sequence[Any], actual: Sequence[Any]) -> list[list[OutputRow]]:
    """Compare what two graphs gave.

    Args:
        names: of the outputs.
        expected: before.
        actual: after.

    Returns:
        For every output, in order, a row per array of it; one row where their number differs, or where there is none.

    Raises:
        HarnessError: another number of outputs.
    """
    if len(expected) != len(actual):
        raise HarnessError(f"outputs: {len(expected)} before and {len(actual)} after cannot be compared; keep the graph's outputs")
    return [_rows(name, arrays_of(one), arrays_of(other)) for name, one, other in zip(names, expected, actual, strict=True)]


def _rows(name: str, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> list[OutputRow]:
    if len(expected) != len(actual):
        return [OutputRow(name, np.inf, -np.inf, changed=f"{len(expected)} arrays in it became {len(actual)}")]
    if not expected:
        return [OutputRow(name, 0.0, np.inf, unknown=f"nothing was compared: output {name} is empty")]
    numbers = [f"[{place}]" for place in range(len(expected))] if len(expected) > 1 else [""]
    return [output_row(f"{name}{number}", *pair) for number, *pair in zip(numbers, expected, actual, strict=True)]


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
