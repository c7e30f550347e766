"""Plant bugs and let everybody look, on all cores: the cheapest first, up to the first who sees it.

Machines stand last in a family's list. So where one of them is the first to see a bug, every check has looked before and seen nothing:
that a bug dies only in a state machine is not a claim but what the run has shown.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace

from harness.mutants.family import TABLE, Family, Fate, Killer, LookBroke, find_family, raised
from harness.mutants.patches import Mutant


def fate_of(family: Family, mutant: Mutant | None, all_checks: bool = False) -> Fate:
    """Plant a bug, and let checks and machines look.

    Args:
        family: of the bug.
        mutant: the bug, which is taken out again; None for the control.
        all_checks: go on after the first who sees it.

    Returns:
        Who saw it, and who looked in vain.
    """
    killers = family.looking(mutant)
    killed_by: dict[str, str] = {}
    survived: dict[str, None] = {}
    broken: dict[str, str] = {}
    with mutant.planted() if mutant else nullcontext():
        for killer in killers:
            if killer.name in killed_by:
                continue
            try:
                seen = killer.look()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a bug makes of the code that looks
                told = str(error) if isinstance(error, LookBroke) else raised(error)
                if mutant is None or not mutant.raises or not told.startswith(mutant.raises):
                    broken[killer.name] = told
                    continue
                seen = f"raised {told}"
            if seen is None:
                survived[killer.name] = None
                continue
            survived.pop(killer.name, None)
            killed_by[killer.name] = seen
            if not all_checks:
                break
    return Fate(mutant, killed_by, tuple(survived), frozenset(killer.name for killer in killers if killer.is_machine), broken)


def hunt(
    family: Family, mutants: Sequence[Mutant | None], all_checks: bool = False, jobs: int = 1, table: str = TABLE
) -> Iterator[tuple[int, Fate]]:
    """Look for several bugs, in several processes.

    Args:
        family: of the bugs.
        mutants: the bugs; None for the control.
        all_checks: as in `fate_of`.
        jobs: processes; 1 looks in this one.
        table: that lists the family, for other processes.

    Yields:
        The place of a bug in the list and its fate, as they become known.
    """
    if jobs == 1:
        for number, mutant in enumerate(mutants):
            yield number, fate_of(family, mutant, all_checks)
        return
    # A fresh interpreter: a fork of a process in which torch has started threads may never come back.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare) as pool:
        running = {
            pool.submit(_fate_elsewhere, table, family.name, mutant.name if mutant else None, all_checks): number
            for number, mutant in sorted(enumerate(mutants), key=lambda pair: not _is_long(pair[1], family.looking(pair[1])))
        }
        try:
            for done in as_completed(running):
                number = running[done]
                yield number, replace(done.result(), mutant=mutants[number])
        finally:
            pool.shutdown(cancel_futures=True)


def _is_long(mutant: Mutant | None, killers: Sequence[Killer]) -> bool:
    """The control, and what only a machine is known to see, takes longest and so begins first."""
    return mutant is None or mutant.killer in {killer.name for killer in killers if killer.is_machine}


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)


def _fate_elsewhere(table: str, family_name: str, name: str | None, all_checks: bool) -> Fate:
    """In a worker: a fate without its bug, whose patches may hold functions that do not travel."""
    family = find_family(family_name, table)
    return replace(fate_of(family, family.mutants[name] if name else None, all_checks), mutant=None)
