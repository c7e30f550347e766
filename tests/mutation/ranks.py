"""Planted bugs in what several processes share, against two ranks that start with the bug; sound ranks say what one process says."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.mutants.family import Family, Killer
from harness.mutants.patches import Edit, Mutant, Table, bug
from tests.compressor.distributed import rank_jobs

_SIZE = 2


def planted(folder: Path, name: str | None, work: str, *given: Any) -> Any:
    """What a rank does, with a bug or without."""
    job = getattr(rank_jobs, work)
    if name is None:
        return job(folder, *given)
    with FAMILY.mutants[name].planted():
        return job(folder, *given)


def _run(size: int, name: str | None, work: str, *given: Any) -> tuple[list[int | None], list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        codes, results, _ = rank_jobs.run(planted, size, Path(folder) / "ranks", name, work, *given)
    return codes, results


@functools.cache
def _alone() -> Any:
    return _run(1, None, "talk")[1][0]


def _talks(name: str | None) -> str | None:
    """Each rank is told what all say, and sums have the bits of one process."""
    codes, results = _run(_SIZE, name, "talk")
    if codes != [0] * _SIZE or any(one is None or "error" in one for one in results):
        return f"the ranks end with {codes}: {results}"
    wanted = {
        "ranks": [0, 1],
        "halves": [3.0, 9.0],
        "first": 0,
        "solved": [[0, 1], [1, 0], [2, 1]],
        "union": ["all", "only 0", "only 1"],
        "everywhere": _alone()["everywhere"],
    }
    for rank, told in enumerate(results):
        owned = _alone()["owned"] if rank == _SIZE - 1 else None
        different = [key for key, value in (wanted | {"owned": owned}).items() if told[key] != value]
        if different:
            return f"rank {rank} is told another {different[0]}"
    return None


def _fails(how: str, kind: str, name: str | None) -> str | None:
    """The one that is left is told which rank has failed, and who tells the user."""
    codes, (left, _) = _run(_SIZE, name, "fail", how)
    if codes[0] != 0 or left is None:
        return f"the rank that is left ends with {codes[0]}"
    if not left["text"].startswith("rank 1 of 2: ") or kind not in left["text"]:
        return f"it says {left['text']!r}"
    return None if left["mine"] is (how != "raises") else f"it {'tells' if left['mine'] else 'does not tell'} the user"


_LOOKS = {
    "ranks.talk": _talks,
    "ranks.raises": partial(_fails, "raises", "a planted error"),
    "ranks.killed": partial(_fails, "is killed", "was killed, or ended without a word"),
}


def _bug(name: str, wrong: str, killer: str, where: str, old: str, new: str) -> Mutant:
    return bug(name, "ranks", wrong, f"ranks.{killer}", Edit(f"compressor.{where}", old, new))


def _balanced(middle: Mapping[Any, int]) -> Mapping[Any, int]:
    return {(0, 2): 1, (2, 4): 3, (4, 6): 5, (6, 8): 7, (0, 4): 2, (4, 8): 6, (0, 8): 4}


_RANKS, _WATCH = "distributed.ranks:Ranks.", "distributed.watch:Watch."
MUTANTS: Sequence[Mutant] = (
    _bug("parts_left_out", "the last parts of the samples are nobody's", "talk", _RANKS + "counts", "// NUM_PARTS", "// (NUM_PARTS - 1)"),
    _bug(
        "cheapest_first", "the cheapest problem is given out first", "talk", "distributed.ranks:share_out", "-costs[place]", "costs[place]"
    ),
    _bug("loads_forgotten", "all problems fall to one rank", "talk", "distributed.ranks:share_out", "+= costs[place]", "+= 0.0"),
    _bug("own_sum_only", "sums of other ranks are left out", "talk", _RANKS + "_added", "in enumerate(held) for", "in [(0, held[0])] for"),
    _bug("sum_kept_by_owner", "a sum for all stays with its owner", "talk", _RANKS + "add_up", "if owner is None:\n", "if False:\n"),
    bug(
        "another_tree",
        "ranks",
        "the parts are added in a balanced tree",
        "ranks.talk",
        Table("compressor.numerics.part_sums:_MIDDLE", _balanced),
    ),
    _bug(
        "union_of_first",
        "texts of other ranks are forgotten",
        "talk",
        _RANKS + "union",
        "for own in self.gather(list(values))",
        "for own in self.gather(list(values))[:1]",
    ),
    _bug(
        "wrong_rank",
        "the rank that has failed is called by another number",
        "raises",
        _WATCH + "_error",
        "{told['rank']} of",
        "{self._rank} of",
    ),
    _bug("all_tell", "every rank tells the user", "raises", _WATCH + "_error", 'told["teller"] == self._rank', "True"),
    _bug(
        "none_tells", "no rank tells the user of one that was killed", "killed", _WATCH + "_error", 'told["teller"] == self._rank', "False"
    ),
    _bug("silent_failure", "a rank that fails does not say so", "raises", _WATCH + "fail", "if self._failure is None:", "if False:"),
    _bug(
        "taken_for_left",
        "a rank that was killed is taken for one that is done",
        "killed",
        _WATCH + "_look",
        'state == "-" and',
        "False and",
    ),
)


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    """Looks whose ranks plant the bug themselves: they are processes of their own."""
    return [Killer(name, partial(look, None if mutant is None else mutant.name)) for name, look in _LOOKS.items()]


FAMILY = Family("ranks", {mutant.name: mutant for mutant in MUTANTS}, _killers)
