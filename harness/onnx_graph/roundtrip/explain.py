"""Explain: which passes broke a contract, and the smallest set of skips that keeps it.

Skip lists are not monotone: skipping one pass lets another fire, so there is a search and not one answer. It is kept short by what the
optimizer says: only passes that changed something can be guilty, and skipping a pass changes what the next run says. Every pass of the
answer is checked by adding it back; what then breaks is the masked map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx

from compressor.errors import UserInputError
from harness.onnx_graph.contracts.base import Contract, ContractResult, Finding, Holding
from harness.onnx_graph.roundtrip.optimizers import OptimizerFailure, find_optimizer, run_optimizer
from harness.onnx_graph.skips.passes import effective_passes

if TYPE_CHECKING:
    from torch import nn


OPTIMIZER_OF = {"onnxsim": "onnxsim", "onnxoptimizer": "onnxoptimizer", "ort": "ort-all"}
"""Back ends of the search, and the optimizer that each stands for."""

_SUSPICIOUS = ("qkv", "attention", "gqa")
_NUM_SUSPECTS = 3
"""How many passes are tried one by one before the search halves sets."""


@dataclass(frozen=True)
class Explanation:
    """What an optimizer does to a contract, and what keeps it.

    Attributes:
        backend: the optimizer.
        version: of it.
        contract: name.
        default: what is found with nothing skipped.
        skips: the smallest set that keeps the contract; empty if it holds anyway, or nothing does.
        masked: pass to what is found when only this one of `skips` runs again.
        kept: whether the contract holds with `skips`.
        without_passes: what is found with every pass skipped; None where nobody had to look.
        num_calls: of the optimizer.
        seconds: inside of it.
    """

    backend: str
    version: str
    contract: str
    default: ContractResult
    skips: tuple[str, ...]
    masked: dict[str, ContractResult]
    kept: bool
    without_passes: ContractResult | None
    num_calls: int
    seconds: float

    def text(self) -> str:
        """Say it in a few lines."""
        effort = f"{self.num_calls} calls of {self.backend} {self.version}, {self.seconds:.2f} s"
        if self.default.holds:
            return f"{self.contract} holds with nothing skipped ({effort})"
        lines = [f"{self.contract} is {self.default.holding.value} with nothing skipped:", _indented(self.default)]
        if not self.kept:
            assert self.without_passes is not None
            if not self.num_calls:
                return "\n".join([*lines, "that is so before any optimizer has run, so no pass is to blame"])
            return "\n".join([*lines, "no set of skips keeps it; with every pass skipped:", _indented(self.without_passes), effort])
        lines.append(f"kept by skipping: {', '.join(self.skips)}")
        for name, result in self.masked.items():
            same = result.message == self.default.message
            lines.append(f"leave {name} out of the skips, and it is {result.holding.value}{', as with nothing skipped' if same else ':'}")
            lines += [] if same else [_indented(result)]
        return "\n".join([*lines, effort])

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON types."""
        return {
            "backend": self.backend,
            "version": self.version,
            "contract": self.contract,
            "default": self.default.to_dict(),
            "skips": list(self.skips),
            "masked": {name: result.to_dict() for name, result in self.masked.items()},
            "kept": self.kept,
            "num_calls": self.num_calls,
            "seconds": self.seconds,
        }


def explain(model: onnx.ModelProto, contract: Contract, backend: str = "onnxsim", module: nn.Module | None = None) -> Explanation:
    """Find the passes that break a contract.

    Args:
        model: as exported; not modified.
        contract: what must hold.
        backend: `onnxsim`, `onnxoptimizer` or `ort`.
        module: the exported module, for names.

    Returns:
        The smallest set of skips, and what each of them holds back.

    Raises:
        UserInputError: no such back end, or it is not installed.
    """
    if backend not in OPTIMIZER_OF:
        raise UserInputError(f"explain: {backend!r} has no passes that can be searched; choose from {', '.join(OPTIMIZER_OF)}")
    find_optimizer(OPTIMIZER_OF[backend])
    return _Search(model, contract, backend, module).run()


@dataclass
class _Trial:
    """One run of the optimizer."""

    result: ContractResult
    acted: tuple[str, ...] | None


@dataclass
class _Search:
    """All runs on one model; each set of skips is run once."""

    model: onnx.ModelProto
    contract: Contract
    backend: str
    module: nn.Module | None
    trials: dict[frozenset[str], _Trial] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self) -> Explanation:
        passes = effective_passes(self.backend)
        itself = self.contract.check(self.model, self.model, self.module)
        if not itself.holds:  # no optimizer is to blame
            spent = (len(self.trials), self.seconds)
            return Explanation(self.backend, passes.version, self.contract.name, itself, (), {}, False, itself, *spent)
        default = self._try(())
        skips: list[str] = []
        without = None if default.result.holds else self._search(skips, passes.effective)
        self._minimise(skips)
        kept = self._try(skips).result.holds
        masked = {name: self._try([other for other in skips if other != name]).result for name in skips} if kept else {}
        chosen = tuple(skips) if kept and not default.result.holds else ()
        spent = (len(self.trials), self.seconds)
        return Explanation(self.backend, passes.version, self.contract.name, default.result, chosen, masked, kept, without, *spent)

    def _search(self, skips: list[str], passes: Sequence[str]) -> ContractResult | None:
        """Add to `skips` until the contract holds; returns what is found with all passes skipped, if none of them is guilty."""
        while not (trial := self._try(skips)).result.holds:
            acted = passes if trial.acted is None else [name for name in trial.acted if name in passes]
            suspects = sorted((name for name in acted if name not in skips), key=_innocence)
            guilty = self._guilty_one(trial, skips, suspects[:_NUM_SUSPECTS]) or self._guilty_set(trial, skips, suspects)
            if not guilty:
                skips[:] = []
                return self._try(passes).result
            skips += guilty
        return None

    def _guilty_one(self, trial: _Trial, skips: list[str], suspects: Sequence[str]) -> list[str]:
        """A pass without which something else is found."""
        for name in suspects:
            if not _same(self._try([*skips, name]).result, trial.result):
                return [name]
        return []

    def _guilty_set(self, trial: _Trial, skips: list[str], suspects: list[str]) -> list[str]:
        """Halve the suspects as long as leaving a half out still changes what is found."""
        if not suspects or _same(self._try([*skips, *suspects]).result, trial.result):
            return []
        while len(suspects) > 1:
            middle = len(suspects) // 2
            halves = (suspects[:middle], suspects[middle:])
            smaller = next((half for half in halves if not _same(self._try([*skips, *half]).result, trial.result)), None)
            if smaller is None:
                return suspects  # only together do they change anything
            suspects = smaller
        return suspects

    def _minimise(self, skips: list[str]) -> None:
        """Take out what is not needed."""
        for name in list(skips):
            rest = [other for other in skips if other != name]
            if rest and self._try(rest).result.holds:
                skips.remove(name)

    def _try(self, skips: Sequence[str]) -> _Trial:
        key = frozenset(skips)
        if key not in self.trials:
            self.trials[key] = self._run(sorted(key))
        return self.trials[key]

    def _run(self, skips: Sequence[str]) -> _Trial:
        try:
            optimized = run_optimizer(self.model, OPTIMIZER_OF[self.backend], skips, log=True)
        except OptimizerFailure as error:
            finding = Finding(self.contract.name, Holding.NOT_ANALYSED, str(error))
            return _Trial(ContractResult((self.contract.name,), (finding,)), None)
        self.seconds += optimized.seconds
        return _Trial(self.contract.check(self.model, optimized.model, self.module), optimized.acted)


def _innocence(name: str) -> tuple[bool, bool]:
    """Sort key: what fuses attention first, then whatever fuses."""
    lower = name.lower()
    return not any(word in lower for word in _SUSPICIOUS), "fus" not in lower


def _same(one: ContractResult, other: ContractResult) -> bool:
    """Whether two runs found the same kind of damage in the same places; texts differ in names that each run makes up."""
    return _damage(one) == _damage(other)


def _damage(result: ContractResult) -> set[tuple[str, Holding, int, str, str]]:
    return {(found.contract, found.holding, found.block, found.role, _kind(found.text)) for found in result.findings}


def _kind(text: str) -> str:
    """The word in capitals or the verb that says what kind of damage it is."""
    return next((word for word in ("packed as", "absorbed by", "PARTLY_FUSED", "FUSED", "already") if word in text), "")


def _indented(result: ContractResult, limit: int = 6) -> str:
    lines = result.message.splitlines()
    more = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([*(f"  {line}" for line in lines[:limit]), *more])
