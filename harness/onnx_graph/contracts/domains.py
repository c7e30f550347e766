"""The contract about the domains of operators."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from compressor.settings.kinds import NAMES
from compressor.settings.options import checked
from harness.onnx_graph.contracts.base import Contract, Finding, Pair
from harness.onnx_graph.graph.local_functions import calls
from harness.onnx_graph.graph.reading import load_graph


class AllowedDomains(Contract):
    """Operators come from these domains only. By default those of the graph as it was exported, and the standard one."""

    @checked(domains=NAMES)
    def __init__(self, domains: Collection[str] | None = None) -> None:
        """Choose the domains.

        Args:
            domains: `com.microsoft` for example; the standard domain is always allowed.

        Raises:
            UserInputError: they are no list of names.
        """
        self._domains = None if domains is None else frozenset(domains)

    def findings(self, pair: Pair) -> list[Finding]:
        """Look at every node, also inside of subgraphs and functions, and at the calls of these.

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


def _domains(model: onnx.ModelProto) -> dict[str, dict[str, int]]:
    """Domain to operator to count. A local function is an operator, too, which not every runtime knows, beside those in it."""
    found: dict[str, dict[str, int]] = {}
    inside = ((node.domain, node.op_type) for node in load_graph(model).graph.all_nodes())
    for domain, operator in (*inside, *((node.domain, node.op_type) for node in calls(model))):
        operators = found.setdefault("" if domain == "ai.onnx" else domain, {})
        operators[operator] = operators.get(operator, 0) + 1
    return found
