"""The contracts about operators and numbers: domains, and what the graph computes under a policy of running it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx

from compressor.errors import UserInputError
from harness.errors import HarnessError
from harness.onnx_graph.contracts.base import Contract, Finding, Pair
from harness.onnx_graph.graph.drawn_inputs import example_inputs, full_size_inputs, id_limits, nudged, other_inputs
from harness.onnx_graph.graph.run_session import POLICIES, OutputRow, Session, output_rows, random_operators
from harness.onnx_graph.graph.view import load_graph


class AllowedDomains(Contract):
    """Operators come from these domains only. By default those of the graph as it was exported, and the standard one."""

    def __init__(self, domains: Collection[str] | None = None) -> None:
        """Choose the domains.

        Args:
            domains: `com.microsoft` for example; the standard domain is always allowed.
        """
        self._domains = None if domains is None else frozenset(domains)

    def findings(self, pair: Pair) -> list[Finding]:
        """Look at every node, also inside of subgraphs and functions.

        Args:
            pair: before and after.

        Returns:
            One finding per domain and operator that is not allowed.
        """
        allowed = {"", "ai.onnx"} | (_domains(pair.before).keys() if self._domains is None else self._domains)
        used = _domains(pair.after)
        return [
            self.violated(f"{name}::{operator} is used {count} times, and only {', '.join(sorted(allowed - {''}))} are allowed")
            for name, operators in used.items()
            if name not in allowed
            for operator, count in operators.items()
        ]


_ROUNDING_MARGIN_DB = 20.0
"""What a graph that rounds in another order may be worse than one whose inputs moved by one rounding: ten times the amplitude."""
_LEAST_DB = 20.0
"""Below it the exported graph decides nothing itself."""


class NumericEqual(Contract):
    """Both graphs compute the same on the same inputs, within the limit of a policy.

    `golden` runs onnxruntime with its optimizations off, so that only the graphs differ; `deploy` runs it as it is deployed, with the wider
    limit that its integer kernels need (source: measured, see the README of this room).

    Inputs are drawn several times: masks whole and with other holes in every row, flags true and false, everything else anew. What the
    exported graph refuses keeps its first values, and a note names what had the same values throughout. Under `golden` all floats are
    large at once in one more drawing, where rounding grows: the limit is then what inputs that moved by one rounding leave, less 20 dB.
    Outputs are compared in their order: a name that moved to another output is a violation, a new name is a note, for exporters number
    outputs that nobody names.

    An output that is constant, NaN everywhere, empty or drawn at random is no evidence; another type or shape, or NaN elsewhere, is a
    violation. An error passes if it has less than a billionth of an output's energy and less than a thousandth (3 % in amplitude) of each
    slice along an axis that it lies in; at 35 dB less than 1/3000, and a small slice may be wrong altogether. Of ids, places and truth
    values (integers of 4 bytes or more) one in 31,623 may be another, at 35 dB one in 56: ties that fall the other way.
    """

    def __init__(self, policy: str = "golden", inputs: Mapping[str, np.ndarray] | None = None, seed: int = 0) -> None:
        """Choose how to run.

        Args:
            policy: `golden` or `deploy`.
            inputs: by name; drawn from `seed` where they are not given.
            seed: of drawn inputs.

        Raises:
            UserInputError: no such policy.
        """
        if policy not in POLICIES:
            raise UserInputError(f"NumericEqual: there is no policy {policy!r}; choose from {', '.join(POLICIES)}")
        self._policy, self._inputs, self._seed = POLICIES[policy], inputs, seed

    @property
    def name(self) -> str:
        """With the policy."""
        return f"NumericEqual({self._policy.name})"

    def findings(self, pair: Pair) -> list[Finding]:
        """Run both.

        Args:
            pair: before and after.

        Returns:
            One finding per output beyond the limit.
        """
        drawn = [f"{when} {', '.join(random[:3])}" for when, random in _random(pair) if random]
        if drawn:
            return [self.not_analysed(f"the graph draws random numbers, so two runs differ: {'; '.join(drawn)}; export it for inference")]
        if changed := _interface_changed(pair):
            return [self.violated(text) for text in changed]
        drawings = self._drawings(pair)
        after = Session(pair.after, self._policy)
        names = [value.name for value in pair.before.graph.output]
        rows = [output_rows(names, expected, after.run(inputs)) for inputs, expected in drawings]
        for name, *values in zip(names, *(expected for _, expected in drawings), strict=True):
            if len(values) > 1 and all(np.array_equal(values[0], other, equal_nan=values[0].dtype.kind == "f") for other in values[1:]):
                pair.notes.append(f"{self.name}: output {name} did not change with the inputs that were drawn, so it says little of them")
        judged = [self._judge(pair, list(several)) for several in zip(*rows, strict=True)]
        found = [finding for finding in judged if finding is not None] or self._at_full_size(pair, drawings[0][0], after)
        return [*self._renamed(pair), *found]

    def _drawings(self, pair: Pair) -> list[tuple[Mapping[str, np.ndarray], list[np.ndarray]]]:
        """Inputs, and what the exported graph makes of them. Of a drawing that it refuses, what it takes is kept."""
        before = Session(pair.before, POLICIES["golden"])
        first = self._inputs if self._inputs is not None else example_inputs(pair.before, self._seed)
        drawings = [(first, before.run(first))]
        if self._inputs is not None:
            return drawings
        for other in other_inputs(pair.before, first, self._seed):
            drawings.append(_accepted(before, first, other))
        for name, rows in id_limits(pair.before).items():
            used = len(np.unique(np.concatenate([one[name].ravel() for one, _ in drawings]))) if name in first else rows
            if used < rows:
                pair.notes.append(f"{self.name}: {name} named {used} of {rows:,} rows of its table; the others were not looked at")
        same = [name for name, one in first.items() if one.size and all(np.array_equal(one, other[name]) for other, _ in drawings)]
        if same:
            pair.notes.append(f"{self.name}: this was not seen in full: {', '.join(same)} had the same values throughout")
        return drawings

    def _at_full_size(self, pair: Pair, first: Mapping[str, np.ndarray], after: Session) -> list[Finding]:
        """All floats large at once. Rounding grows there, so the limit is what inputs that moved by one rounding leave, less a margin."""
        large = full_size_inputs(pair.before, first, self._seed)
        if large is None or self._inputs is not None or self._policy is not POLICIES["golden"]:
            return []
        before = Session(pair.before, self._policy)
        try:
            expected, moved = before.run(large), before.run(nudged(large, self._seed))
        except HarnessError:
            pair.notes.append(f"{self.name}: inputs that are all large were not looked at; the exported graph refuses them")
            return []
        names = [value.name for value in pair.before.graph.output]
        rounding, rows = output_rows(names, expected, moved), output_rows(names, expected, after.run(large))
        found = []
        for own, row in zip(rounding, rows, strict=True):
            limit = min(self._policy.min_sqnr_db, own.sqnr_db - _ROUNDING_MARGIN_DB)
            if own.changed or limit < _LEAST_DB:
                pair.notes.append(f"{self.name}: output {own.name} says nothing where all inputs are large: rounding decides it")
            elif row.wrong(limit):
                found.append(self.violated(f"{row.text(limit)}, where all inputs are large"))
        return found

    def _judge(self, pair: Pair, rows: Sequence[OutputRow]) -> Finding | None:
        """One output on every drawing. One that says nothing on some is judged by the others."""
        limit = self._policy.min_sqnr_db
        wrong = next(
            (f"{row.text(limit)}{f', on drawing {at} of {len(rows)}' * (at > 1)}" for at, row in enumerate(rows, 1) if row.wrong(limit)), ""
        )
        if wrong:
            return self.violated(wrong)
        told = [row for row in rows if not row.unknown]
        if not told:
            return self.not_analysed(rows[0].unknown)
        pair.notes.append(f"{self.name}: {min(told, key=lambda row: row.sqnr_db).text(limit)}")
        return None

    def _renamed(self, pair: Pair) -> list[Finding]:
        """Outputs are compared in their order. A name that means another output now is damage; a new one may be an exporter's number."""
        names = [[value.name for value in one.graph.output] for one in (pair.before, pair.after)]
        pairs = [(was, now) for was, now in zip(*names, strict=True) if was != now]
        new = [f"output {was} is named {now} now, and programs that fetch it by name break" for was, now in pairs if was not in names[1]]
        pair.notes.extend(f"{self.name}: {text}" for text in new)
        return [self.violated(f"output {was}: {now} is found in its place") for was, now in pairs if was in names[1]]


def _accepted(
    graph: Session, first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> tuple[Mapping[str, np.ndarray], list[np.ndarray]]:
    """Run on other inputs; where the graph refuses them, on those of the others that it takes one by one."""
    try:
        return other, graph.run(other)
    except HarnessError:
        kept, outputs = dict(first), graph.run(first)
    for name, array in other.items():
        try:
            outputs = graph.run(kept | {name: array})
        except HarnessError:
            continue
        kept[name] = array
    return kept, outputs


def _interface_changed(pair: Pair) -> list[str]:
    """Outputs that came or went, and inputs of another type or size: who runs the graph would notice before any number differs."""
    outputs = [[value.name for value in one.graph.output] for one in (pair.before, pair.after)]
    if len(outputs[0]) != len(outputs[1]):
        found = [f"output {name} is gone" for name in outputs[0] if name not in outputs[1]]
        found += [f"output {name} is new" for name in outputs[1] if name not in outputs[0]]
        return found or [f"{len(outputs[0])} outputs became {len(outputs[1])}"]
    inputs = [{value.name: value.type.tensor_type for value in one.graph.input} for one in (pair.before, pair.after)]
    both = [(f"input {name}", inputs[0][name], now) for name, now in inputs[1].items() if name in inputs[0]]
    kind = onnx.TensorProto.DataType.Name
    types = [f"{what}: {kind(was.elem_type)} became {kind(now.elem_type)}" for what, was, now in both if was.elem_type != now.elem_type]
    return types or [f"{what}: {_shown(was)} became {_shown(now)}" for what, was, now in both if _takes_less(_sizes(was), _sizes(now))]


Sizes = Sequence[int | str | None]


def _sizes(kind: onnx.TypeProto.Tensor) -> Sizes | None:
    """What is declared: a length, a name, or None for whatever it is; of an unknown rank nothing is."""
    if not kind.HasField("shape"):
        return None
    return [(one.dim_value if one.HasField("dim_value") and one.dim_value >= 0 else one.dim_param or None) for one in kind.shape.dim]


def _shown(kind: onnx.TypeProto.Tensor) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in _sizes(kind) or ())}]"


def _takes_less(was: Sizes | None, now: Sizes | None) -> bool:
    """What ran before does not run now: another rank, or a length that was another one or open."""
    if was is None or now is None:
        return now is not None
    return len(was) != len(now) or any(isinstance(size, int) and size != before for before, size in zip(was, now, strict=True))


def _random(pair: Pair) -> list[tuple[str, list[str]]]:
    return [("as exported", random_operators(pair.before)), ("as optimized", random_operators(pair.after))]


def _domains(model: onnx.ModelProto) -> dict[str, dict[str, int]]:
    """Domain to operator to count."""
    found: dict[str, dict[str, int]] = {}
    for node in load_graph(model).graph.all_nodes():
        operators = found.setdefault("" if node.domain == "ai.onnx" else node.domain, {})
        operators[node.op_type] = operators.get(node.op_type, 0) + 1
    return found
