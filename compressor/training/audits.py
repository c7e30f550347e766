"""When a plan is audited: densely at first, then by a share of time; and what that promises, in the words that are used everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_GAP, MAX_GAP = 64, 1000
SHARE = 0.03
PROMISE = (
    "what the guards see is refused at once; anything else that Python reads is found by the audit, if it stays changed, "
    f"at most {MAX_GAP:,} steps later"
)
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass
class Audits:
    """The audits of one plan: 1, 2, 4, ... 64 steps after its proof, then in 3 % of the time, at least 64 and at most 1,000 steps apart.

    The later gaps vary, so that what acts at every tenth step is met as well.

    Attributes:
        every: steps from one audit to the next; 0: none; None: as above.
        since: steps of the plan since the last one.
        gap: steps from the last one to the next.
        count: audits so far.
        agreed: number of the last step that was audited or proven; -1 before the first.
    """

    every: int | None = None
    since: int = 0
    gap: int = 1
    count: int = 0
    agreed: int = -1
    _end: float = 0.0

    def is_due(self) -> bool:
        """Say whether the next step is to be audited."""
        return self.every != 0 and self.since + 1 >= self.gap

    def proven(self, step: int, end: float) -> None:
        """Take note of the proof.

        Args:
            step: its number.
            end: the time when it was over, in seconds.
        """
        self.agreed, self.since, self._end, self.gap = step, 0, end, self.every or 1

    def audited(self, step: int, begin: float, end: float) -> None:
        """Take note of an audit, and choose the next one.

        Args:
            step: its number.
            begin: the time before it.
            end: the time after it.
        """
        usual = (begin - self._end) / max(1, self.since)
        longest = math.ceil(max(0.0, end - begin - usual) / (SHARE * max(usual, 1e-9)))
        varied = longest * (2 + 2 * (self.count * _GOLDEN % 1)) / 3
        self.gap = self.every or min(2 * self.gap if self.count else 1, max(MIN_GAP, math.ceil(varied)), MAX_GAP)
        self.agreed, self.since, self._end = step, 0, end
        self.count += 1

    def doubt(self, step: int) -> str:
        """Say what an audit that failed means for the steps before it.

        Args:
            step: its number.

        Returns:
            A sentence.
        """
        last = f"counted from 0, step {self.agreed} was the last that agreed"
        return f"{PROMISE}; {last}, and the {step - self.agreed - 1} after it may be wrong: go on from a state of before"
