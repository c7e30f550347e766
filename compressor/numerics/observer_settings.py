"""Which observers there are, and their settings: how the range of a tensor is found."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from compressor.errors import SchemeError

# Every observer name that a recipe may use -> what it does here. In llm-compressor they differ in how they average batches; ours never do.
OBSERVER_KINDS: dict[str, Literal["minmax", "mse"]] = {
    "minmax": "minmax",
    "memoryless_minmax": "minmax",
    "static_minmax": "minmax",
    "mse": "mse",
    "memoryless_mse": "mse",
}


# Beyond these a search would not end, or every error would be infinite.
_LARGEST = {"grid": 10_000.0, "norm": 16.0}


@dataclasses.dataclass(frozen=True)
class MSESettings:
    """Settings of the MSE observer, which tries the full range times 1, 1 - 1/grid, 1 - 2/grid ... and keeps the one with the least error.

    Attributes:
        maxshrink: the largest share of the range that may be cut off, in (0, 1].
        grid: candidates per unit of shrinkage; maxshrink * grid candidates are tried.
        norm: exponent of the absolute error, > 0; 2 gives the mean squared error.
        patience: a group stops after this many candidates in a row without gain; None searches the whole grid.
    """

    maxshrink: float = 0.20
    grid: float = 100.0
    norm: float = 2.4
    patience: int | None = None

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> MSESettings:
        """Check a recipe's observer_kwargs.

        Args:
            kwargs: name -> number.

        Returns:
            The settings, defaults filled in.

        Raises:
            SchemeError: an unknown name, or a number out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in kwargs.items():
            if name not in names:
                raise SchemeError(f"observer_kwargs: {name!r} is not a setting of the mse observer; {suggest(name, names)}")
            if name == "patience" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf") or (name == "patience" and int(value) != value):
                raise SchemeError(f"observer_kwargs: {name}={value!r} is not a positive number; leave it out for the default")
            if name in _LARGEST and value > _LARGEST[name]:
                raise SchemeError(f"observer_kwargs: {name}={value!r} is above {_LARGEST[name]:g}; leave it out for the default")
        settings = cls(**kwargs)
        if settings.maxshrink > 1 or settings.maxshrink * settings.grid < 1:
            raise SchemeError(
                f"observer_kwargs: maxshrink={settings.maxshrink} with grid={settings.grid} leaves nothing to search; "
                "maxshrink must be at most 1 and maxshrink * grid at least 1"
            )
        return settings


def suggest(name: str, known: Sequence[str]) -> str:
    """Say what may have been meant by a name that does not exist.

    Args:
        name: what was given.
        known: the names that exist.

    Returns:
        Half a sentence for the end of an error message.
    """
    nearest = difflib.get_close_matches(name, known, n=1)
    listed = "one of " + ", ".join(known)
    return f"did you mean {nearest[0]!r}? ({listed})" if nearest else f"use {listed}"
