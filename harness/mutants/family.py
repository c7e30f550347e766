"""What a family of planted bugs is: the bugs, and those who must see them.

A new family is a module that holds a Family, and a line of the table that lists the families of a repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compressor.errors import UserInputError
from compressor.object_reference import own_names, resolve
from compressor.spelling import suggest
from harness.reporting.verdict import Verdict

if TYPE_CHECKING:
    from harness.mutants.patches import Mutant


TABLE = "tests.mutation.families:FAMILIES"
"""Where the families of a repository are listed, unless it says another place: name to `package.module:NAME`."""


class LookBroke(Exception):
    """A killer could not look; its message says what it met, such as `ValueError: no such column`."""


@dataclass(frozen=True)
class Killer:
    """One look at the code while a bug is planted.

    Attributes:
        name: of the check or machine; a machine may stand in a list several times, each time with more runs.
        look: says what is wrong, or None. An error that it raises says that it has broken, and not that it sees the bug.
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

    def looking(self, mutant: Mutant | None) -> Sequence[Killer]:
        """List those that look for a bug.

        Args:
            mutant: the bug; None for the control.

        Returns:
            The killers.

        Raises:
            UserInputError: the function that lists them fails.
        """
        try:
            return list(self.killers(mutant))
        except Exception as error:  # of whatever class: the family is the user's code
            what = mutant.name if mutant else "the control"
            raise UserInputError(f"{self.name}: who looks for {what} cannot be listed: {raised(error)}; repair `killers`") from error

    def chosen(self, names: Iterable[str] | None) -> list[Mutant]:
        """Find planted bugs by their names.

        Args:
            names: of the bugs; None for all.

        Returns:
            The bugs, in the order of the names.

        Raises:
            UserInputError: a name that none has.
        """
        wanted = list(self.mutants) if names is None else list(names)
        unknown = [name for name in wanted if name not in self.mutants]
        if unknown:
            raise UserInputError(f"mutants: there is no planted bug {unknown[0]!r}; {suggest(unknown[0], self.mutants)}")
        return [self.mutants[name] for name in wanted]


def raised(error: BaseException) -> str:
    """Say in a line what code of the user raised."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class Fate:
    """What became of one planted bug, or of the control.

    Attributes:
        mutant: the bug; None for the control.
        killed_by: what each check or machine that saw something says, by name.
        survived: those that looked and saw nothing, in order.
        machines: who draws at random.
        broken: what those raised that could not look, by name; who breaks has seen nothing.
    """

    mutant: Mutant | None
    killed_by: Mapping[str, str]
    survived: Sequence[str] = ()
    machines: frozenset[str] = field(default=frozenset())
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def only_machines(self) -> bool:
        """Machines saw it, after every check had looked and seen nothing."""
        return bool(self.killed_by) and set(self.killed_by) <= self.machines

    @property
    def verdict(self) -> Verdict:
        """A bug must be seen; without one all must be able to look, and see nothing."""
        is_well = bool(self.killed_by) if self.mutant else not self.killed_by and not self.broken
        return Verdict.PASS if is_well else Verdict.REGRESSION

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        said = {"name": self.mutant.name, "kind": self.mutant.kind, "wrong": self.mutant.wrong} if self.mutant else {"name": "control"}
        seen = {"killed_by": dict(self.killed_by), "survived": list(self.survived), "only_machines": self.only_machines}
        seen |= {"broken": dict(self.broken)}
        return said | seen


def listed_families(table: str = TABLE) -> Mapping[str, str]:
    """Read a table of families.

    Args:
        table: `package.module:NAME` or `path/to/file.py:NAME` of a mapping.

    Returns:
        Name of a family to where it is.

    Raises:
        UserInputError: there is no such table, or it is none.
    """
    found = resolve(table, "table of planted bugs", names=own_names, files=True).value
    if not isinstance(found, Mapping) or not found:
        raise UserInputError(f"{table}: this is no table of planted bugs; give a mapping from names to 'package.module:NAME'")
    return found


def find_family(name: str, table: str = TABLE) -> Family:
    """Import a family.

    Args:
        name: as in the table.
        table: see `listed_families`.

    Returns:
        The family.

    Raises:
        UserInputError: the table has no such name, or what it names is no family, or one without a bug.
    """
    families = listed_families(table)
    if name not in families:
        raise UserInputError(f"mutants: there is no family {name!r}; {suggest(name, families)}")
    family = resolve(families[name], "family of planted bugs", names=own_names, files=True).value
    if not isinstance(family, Family):
        raise UserInputError(f"{families[name]}: this is no family of planted bugs; give a harness.mutants.family.Family")
    if not family.mutants:
        raise UserInputError(f"{families[name]}: it has no planted bug, and where nothing is looked for nothing is seen; give it one")
    return family if family.name == name else replace(family, name=name)  # the table's name is the one that other processes ask for
