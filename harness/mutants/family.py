"""What a family of planted bugs is: the bugs, and those who must see them.

A new family is a line of FAMILIES and a module with a FAMILY.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compressor.errors import UserInputError

if TYPE_CHECKING:
    from harness.mutants.patches import Mutant


# Each family, and the module that holds it, as FAMILY or under the name behind the colon; it is imported when it is asked for.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "lifecycle": "tests.mutation.lifecycle.family",
        "quantizers": "tests.mutation.numerics.family:QUANTIZERS",
        "packers": "tests.mutation.numerics.family:PACKERS",
        "observers": "tests.mutation.numerics.family:OBSERVERS",
        "layers": "tests.mutation.numerics.family:LAYERS",
        "solvers": "tests.mutation.numerics.family:SOLVERS",
        "transforms": "tests.mutation.transforms",
        "goldens": "tests.mutation.goldens",
        "checkpoints": "tests.mutation.checkpoints",
        "replay": "tests.mutation.replay",
    }
)


@dataclass(frozen=True)
class Killer:
    """One look at the code while a bug is planted.

    Attributes:
        name: of the check or machine; a machine may stand in a list several times, each time with more runs.
        look: says what is wrong, or None.
        is_machine: it draws at random, and so comes after everything that does not.
    """

    name: str
    look: Callable[[], str | None]
    is_machine: bool = False


@dataclass(frozen=True)
class Family:
    """Bugs of one kind of code.

    Attributes:
        name: as on the command line.
        mutants: the bugs by name.
        killers: all that look for a bug, the cheapest first and machines last; for None, for the control: code without any bug.
    """

    name: str
    mutants: Mapping[str, Mutant]
    killers: Callable[[Mutant | None], Sequence[Killer]]

    def chosen(self, names: Iterable[str] | None) -> list[Mutant]:
        """Find planted bugs by their names.

        Args:
            names: of the bugs; None for all.

        Returns:
            The bugs, in the order of the names.

        Raises:
            UserInputError: a name that none has.
        """
        from compressor.arguments import suggest

        wanted = list(self.mutants) if names is None else list(names)
        unknown = [name for name in wanted if name not in self.mutants]
        if unknown:
            raise UserInputError(f"mutants: there is no planted bug {unknown[0]!r}; {suggest(unknown[0], self.mutants)}")
        return [self.mutants[name] for name in wanted]


@dataclass(frozen=True)
class Fate:
    """What became of one planted bug, or of the control.

    Attributes:
        mutant: the bug; None for the control.
        killed_by: what each check or machine that saw something says, by name.
        survived: those that looked and saw nothing, in order.
    """

    mutant: Mutant | None
    killed_by: Mapping[str, str]
    survived: Sequence[str] = ()
    machines: frozenset[str] = field(default=frozenset())

    @property
    def only_machines(self) -> bool:
        """Machines saw it, after every check had looked and seen nothing."""
        return bool(self.killed_by) and set(self.killed_by) <= self.machines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        said = {"name": self.mutant.name, "kind": self.mutant.kind, "wrong": self.mutant.wrong} if self.mutant else {"name": "control"}
        seen = {"killed_by": dict(self.killed_by), "survived": list(self.survived), "only_machines": self.only_machines}
        return said | seen


def find_family(name: str) -> Family:
    """Import a family.

    Args:
        name: one of FAMILIES.

    Returns:
        The family.
    """
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(importlib.import_module(module), attribute or "FAMILY")
    return family
