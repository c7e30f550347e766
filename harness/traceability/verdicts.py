"""What the audit says about one subject: a finding for every run, and the worst of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import nn

from harness.reporting.verdict import Verdict
from harness.traceability.batches import Batch

LEVELS = ("layer", "inferred", "linear")


class Finding(StrEnum):
    """What became of one run, the worst last."""

    OK = "ok"
    REFUSED = "refused"
    CRASH = "crash"
    SILENT = "SILENT"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked: to refuse by name is right, too."""
        return Verdict.REGRESSION if self in (Finding.SILENT, Finding.CRASH) else Verdict.PASS


@dataclass(frozen=True)
class Subject:
    """What is audited: a fresh model and its batches, the first of which is traced.

    Attributes:
        name: of the architecture or toy.
        build: makes the model, the same every time.
        batches: variant to batch.
        layers: class names of its layers.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: Mapping[str, Batch]
    layers: tuple[str, ...] = ()


@dataclass
class Row:
    """The verdict about one subject at one level with one engine.

    Attributes:
        subject: its name.
        level: layer, inferred or linear.
        engine: that was asked for.
        used: that ran; auto chooses.
        checks: run to what became of it, and why.
        targets: names of the sequential targets.
        num_stages: stages of the run over all batches.
        seconds: all of it.
    """

    subject: str
    level: str
    engine: str
    used: str = ""
    checks: dict[str, tuple[Finding, str]] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    num_stages: int = 0
    seconds: float = 0.0

    @property
    def finding(self) -> Finding:
        """The worst of all checks."""
        order = list(Finding)
        return max((finding for finding, _ in self.checks.values()), key=order.index, default=Finding.CRASH)

    @property
    def detail(self) -> str:
        """The first check that is as bad as the worst, and why."""
        worst = self.finding
        return "" if worst is Finding.OK else next(f"{name}: {why}" for name, (one, why) in self.checks.items() if one is worst)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        checks = {name: {"finding": finding.value, "detail": why} for name, (finding, why) in self.checks.items()}
        return {
            "subject": self.subject,
            "targets": self.level,
            "engine": self.engine,
            "used": self.used,
            "finding": self.finding.value,
            "detail": self.detail,
            "checks": checks,
            "num_targets": len(self.targets),
            "num_stages": self.num_stages,
            "seconds": round(self.seconds, 3),
        }
