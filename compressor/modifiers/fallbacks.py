"""Counting of modules that a simpler algorithm had to take over: none unless the recipe allows it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PrivateAttr

from compressor.errors import CalibrationError, ResumeError
from compressor.lifecycle import Modifier, State
from compressor.lifecycle.state import StageValue


def kept_number(memory: Mapping[str, StageValue], name: str) -> int:
    """Read a number of what a stage has kept.

    Args:
        memory: of the stage.
        name: of the number.

    Returns:
        It.

    Raises:
        ResumeError: it is not there, or no number.
    """
    number = memory.get(name)
    if not isinstance(number, int):
        raise ResumeError(f"{name}: the run folder holds {number!r}, no number; remove the run folder to start over")
    return number


class WithFallbacks(Modifier):
    """A modifier whose modules may fall back.

    Attributes:
        fallback_budget: how many modules may fall back to a simpler algorithm before the run is an error.
    """

    fallback_budget: int = Field(default=0, ge=0)

    _num_fallbacks: int = PrivateAttr(default=0)

    def forget_fallbacks(self) -> None:
        """Start to count."""
        self._num_fallbacks = 0

    def fallbacks_so_far(self) -> dict[str, StageValue]:
        """Return what must outlive a stage."""
        return {"num_fallbacks": self._num_fallbacks}

    def restore_fallbacks(self, memory: Mapping[str, StageValue]) -> None:
        """Go on counting from where an earlier run was.

        Args:
            memory: what `fallbacks_so_far` gave.

        Raises:
            ResumeError: it holds no number.
        """
        self._num_fallbacks = kept_number(memory, "num_fallbacks")

    def fall_back(self, state: State, name: str, kind: str, detail: str) -> None:
        """Count a fallback to a simpler algorithm; beyond the budget it is an error.

        Args:
            state: of the run; its report gets the fallback.
            name: dotted module name.
            kind: short name of the kind of fallback.
            detail: what happened, as half a sentence.

        Raises:
            CalibrationError: the budget of the recipe is spent.
        """
        state.report.add_fallback(name, kind, detail)
        self._num_fallbacks += 1
        if self._num_fallbacks > self.fallback_budget:
            raise CalibrationError(
                f"{name}: {detail}; the recipe allows fallback_budget={self.fallback_budget} such modules: "
                "repair the cause, ignore the module, or raise fallback_budget"
            )
