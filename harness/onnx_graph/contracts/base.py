"""Contracts: what must still hold of a graph after an optimizer, by role, and where it does not, what was lost and where it went.

Combine them with `&`. A contract that cannot be decided (no attention at all, a block whose roles are not clear) is NOT_ANALYSED, which
is never a pass: structure, content and numbers each miss damage that the others see, and only together they see all of it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import onnx

from compressor.errors import UserInputError
from harness.errors import ContractViolation
from harness.onnx_graph.census.baseline import Baseline, take_baseline
from harness.onnx_graph.census.census import Block, Census, census
from harness.onnx_graph.contracts.counterparts import counterparts
from harness.onnx_graph.graph.reading import read_graph
from harness.reporting.text import printable
from harness.reporting.verdict import Verdict

if TYPE_CHECKING:
    from torch import nn


class Holding(StrEnum):
    """What a contract found."""

    HOLDS = "holds"
    VIOLATED = "violated"
    NOT_ANALYSED = "not analysed"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked."""
        return {Holding.HOLDS: Verdict.PASS, Holding.VIOLATED: Verdict.REGRESSION}.get(self, Verdict.INCONCLUSIVE)


@dataclass(frozen=True)
class Finding:
    """One place where a contract does not hold.

    Attributes:
        contract: its name.
        holding: VIOLATED or NOT_ANALYSED.
        text: block, role, module, what was expected and what was found.
        block: index; -1 where the finding is about the whole graph.
        role: `q`, `k`, `v`, or empty.
    """

    contract: str
    holding: Holding
    text: str
    block: int = -1
    role: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON types."""
        return {
            "contract": self.contract,
            "holding": self.holding.value,
            "text": self.text,
            "block": self.block,
            "role": self.role,
        }


@dataclass(frozen=True)
class ContractResult:
    """What one or several contracts found.

    Attributes:
        contracts: their names.
        findings: every place where one does not hold.
        notes: facts beside: what was compared, and with what numbers.
    """

    contracts: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def holding(self) -> Holding:
        """VIOLATED beats NOT_ANALYSED beats HOLDS."""
        found = {finding.holding for finding in self.findings}
        return next((one for one in (Holding.VIOLATED, Holding.NOT_ANALYSED) if one in found), Holding.HOLDS)

    @property
    def holds(self) -> bool:
        """Whether every contract holds."""
        return self.holding is Holding.HOLDS

    @property
    def message(self) -> str:
        """All findings, a line each, then the notes."""
        return "\n".join(map(printable, [*(f"{finding.contract}: {finding.text}" for finding in self.findings), *self.notes]))

    def raise_unless_holds(self) -> None:
        """Fail a test.

        Raises:
            ContractViolation: it does not hold, or could not be analysed.
        """
        if not self.holds:
            raise ContractViolation(f"{' & '.join(self.contracts)}: {self.holding.value}\n{self.message}")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return {
            "contracts": list(self.contracts),
            "holding": self.holding.value,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, eq=False)
class Pair:
    """A graph before and after an optimizer, with what several contracts want to know worked out once.

    Attributes:
        before: as exported.
        after: as optimized.
        module: the exported module, for names.
    """

    before: onnx.ModelProto
    after: onnx.ModelProto
    module: nn.Module | None = None
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def baseline(self) -> Baseline:
        """Roles and weights before."""
        return take_baseline(self.before, self.module)

    @functools.cached_property
    def census_after(self) -> Census:
        """Blocks after."""
        return census(self.after)

    @functools.cached_property
    def counterparts(self) -> dict[int, Block]:
        """Index of a block before to the block after."""
        return counterparts(self.baseline, self.census_after)


class Contract(ABC):
    """Something that must hold of a graph after an optimizer."""

    @property
    def name(self) -> str:
        """As in reports and on the command line."""
        return type(self).__name__

    @abstractmethod
    def findings(self, pair: Pair) -> list[Finding]:
        """Look for places where the contract does not hold.

        Args:
            pair: before and after.

        Returns:
            None if it holds everywhere.
        """

    @property
    def parts(self) -> tuple[Contract, ...]:
        """The contracts that this one is combined from."""
        return (self,)

    def check(self, before: Any, after: Any, module: nn.Module | None = None) -> ContractResult:
        """Compare two graphs.

        Args:
            before: path, bytes or ModelProto.
            after: the same.
            module: the module that was exported; gives the projections their names.

        Returns:
            What was found.

        Raises:
            UserInputError: one of the models cannot be read.
        """
        pair = Pair(read_graph(before), read_graph(after), module)
        found = tuple(finding for part in self.parts for finding in part.findings(pair))
        return ContractResult(tuple(part.name for part in self.parts), found, tuple(pair.notes))

    def __and__(self, other: object) -> Contract:
        """Combine: both must hold."""
        if not isinstance(other, Contract):
            what = f"the class {other.__name__}" if isinstance(other, type) else repr(other)
            raise UserInputError(f"contract: {self.name} & {what} combines no two contracts; give an object, such as RoleWeights()")
        return AllOf((*self.parts, *other.parts))

    def violated(self, text: str, block: int = -1, role: str = "") -> Finding:
        """Make a finding that the contract is broken."""
        return Finding(self.name, Holding.VIOLATED, text, block, role)

    def not_analysed(self, text: str, block: int = -1, role: str = "") -> Finding:
        """Make a finding that the contract could not be decided."""
        return Finding(self.name, Holding.NOT_ANALYSED, text, block, role)


class AllOf(Contract):
    """Several contracts, all of which must hold."""

    def __init__(self, parts: Sequence[Contract]) -> None:
        """Combine.

        Args:
            parts: at least one.

        Raises:
            UserInputError: none.
        """
        if not parts:
            raise UserInputError("contract: none was given, and nothing to check is never a pass; name one, `separate-qkv` for example")
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple[Contract, ...]:
        """The contracts."""
        return self._parts

    @property
    def name(self) -> str:
        """All names."""
        return " & ".join(part.name for part in self._parts)

    def findings(self, pair: Pair) -> list[Finding]:
        """Look at all parts.

        Args:
            pair: before and after.

        Returns:
            Their findings, one part after the other.
        """
        return [finding for part in self._parts for finding in part.findings(pair)]
