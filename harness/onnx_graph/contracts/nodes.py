"""The contracts about operators and numbers: domains, and what the graph computes under a policy of running it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from compressor.errors import UserInputError
from harness.onnx_graph.contracts.base import Contract, Finding, Pair
from harness.onnx_graph.graph.run_session import POLICIES, compare_outputs, example_inputs, random_operators
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


class NumericEqual(Contract):
    """Both graphs compute the same on the same inputs, within the limit of a policy.

    `golden` runs onnxruntime with its optimizations off, so that only the graphs differ; `deploy` runs it as it is deployed, with the wider
    limit that its integer kernels need (source: measured, see the README of this room).

    An output that is constant, NaN everywhere, empty or drawn at random is no evidence; another type or shape, or NaN elsewhere, is a
    violation. An error passes if it has less than a billionth of an output's energy and less than a thousandth (3 % in amplitude) of each
    slice along an axis that it lies in; at 35 dB less than 1/3000, and a small slice may be wrong altogether.
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
        inputs = self._inputs if self._inputs is not None else example_inputs(pair.before, self._seed)
        found, limit = [], self._policy.min_sqnr_db
        for row in compare_outputs(pair.before, pair.after, inputs, self._policy):
            if row.wrong(limit):
                found.append(self.violated(row.text(limit)))
            elif row.unknown:
                found.append(self.not_analysed(row.unknown))
            else:
                pair.notes.append(f"{self.name}: {row.text(limit)}")
        return found


def _random(pair: Pair) -> list[tuple[str, list[str]]]:
    return [("as exported", random_operators(pair.before)), ("as optimized", random_operators(pair.after))]


def _domains(model: onnx.ModelProto) -> dict[str, dict[str, int]]:
    """Domain to operator to count."""
    found: dict[str, dict[str, int]] = {}
    for node in load_graph(model).graph.all_nodes():
        operators = found.setdefault("" if node.domain == "ai.onnx" else node.domain, {})
        operators[node.op_type] = operators.get(node.op_type, 0) + 1
    return found
