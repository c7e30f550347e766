"""The verb `harness golden`: look at differences, accept them, find what no test uses, and tell where a golden comes from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from compressor.settings.kinds import FilePath, Flag, Text, Texts
from compressor.settings.options import Option, Settings
from harness.errors import GoldenError
from harness.goldens.store.paths import CACHE_DIR, USAGE_FILE
from harness.reporting.text import aligned
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Actions, Command

if TYPE_CHECKING:
    from harness.goldens.store.candidates import Candidate
    from harness.goldens.store.manifest import GoldenEntry


_MAX_TIER = 50
"""Characters of the column of tiers."""


class GoldenSettings(Settings):
    """Where goldens lie, and how what was found is printed."""

    golden_dir: Annotated[FilePath | None, Option(metavar="DIR")] = None
    """Folder of the goldens (default: the last run's, else golden)."""
    cache_dir: Annotated[FilePath, Option(metavar="DIR")] = Path(CACHE_DIR)
    """Folder of what the last runs left."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the result as JSON."""


class FailedSettings(GoldenSettings):
    """Which failed checks are meant."""

    names: Annotated[Texts, Option(positional=True, nargs="*", metavar="NAME")] = ()
    """Goldens, as the tests call them (default: all that failed)."""


class DiffSettings(FailedSettings):
    """How differences are shown."""

    html: Annotated[FilePath | None, Option(metavar="FILE")] = None
    """Write a page with a heat map of each difference."""


class AcceptSettings(FailedSettings):
    """How outputs become goldens."""

    reason: Annotated[str, Option(metavar="TEXT")] = ""
    """Why limits are loosened; kept in the manifest."""
    variant: Annotated[Flag, Option()] = False
    """Add this platform's own outputs beside the others'."""


class PruneSettings(GoldenSettings):
    """Which goldens go."""

    names: Annotated[Texts, Option(positional=True, nargs="*", metavar="NAME")] = ()
    """Delete these, used or not (with --delete)."""
    delete: Annotated[Flag, Option()] = False
    """Delete what is unused; without it, only list it."""


class WhySettings(GoldenSettings):
    """Which golden is asked for."""

    name: Annotated[Text, Option(positional=True, metavar="NAME")]
    """Golden, as the test calls it."""


def _root(settings: GoldenSettings) -> Path:
    """The folder of goldens: as asked, else that of the last run, which stood at the root of the project."""
    from harness.goldens.store.listing import read_usage

    if settings.golden_dir:
        root: Path = settings.golden_dir
    else:
        root = settings.cache_dir.parent / (read_usage(settings.cache_dir / USAGE_FILE) or {}).get("golden_dir", "golden")
    return root


def _candidates(settings: FailedSettings) -> list[Candidate]:
    """The candidates that are asked for; a name that is none is an error."""
    from harness.goldens.store.candidates import CandidateFolder

    found = list(CandidateFolder(settings.cache_dir / "golden").all())
    missing = [name for name in settings.names if name not in {candidate.name for candidate in found}]
    if missing:
        held = ", ".join(sorted({candidate.name for candidate in found})) or "none at all"
        where = f"no failed check of it is on record (there are: {held})"
        raise GoldenError(f"golden {missing[0]!r}: {where}; run its test first, which says what mends a golden that cannot be read")
    return [candidate for candidate in found if not settings.names or candidate.name in settings.names]


def _diff(settings: DiffSettings) -> Verdict:
    from harness.goldens.differences import Difference, difference_of
    from harness.goldens.page import write_page
    from harness.goldens.store.listing import read_usage

    found: list[Difference] = [difference_of(_root(settings), candidate) for candidate in _candidates(settings)]
    found = [difference for difference in found if not difference.ok]
    if settings.html:
        write_page(settings.html, found)
    _print(settings, [difference.to_dict() for difference in found], [line for difference in found for line in difference.lines()])
    if found:
        return Verdict.REGRESSION
    if read_usage(settings.cache_dir / USAGE_FILE) is None:
        print(f"{settings.cache_dir}: no run of the tests is on record; run pytest first", file=sys.stderr)
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def _accept(settings: AcceptSettings) -> Verdict:
    from harness.goldens.store.candidates import CandidateFolder
    from harness.goldens.store.store import GoldenVerdict
    from harness.goldens.store.writer import accept

    _refuse_ci("accept")
    candidates = _candidates(settings)
    vacuous = [candidate for candidate in candidates if candidate.verdict == GoldenVerdict.VACUOUS.value]
    if vacuous:
        raise GoldenError(f"golden {vacuous[0].name!r}: {vacuous[0].summary}; such a limit is never accepted")
    done = accept(_root(settings), candidates, reason=settings.reason, add_variant=settings.variant)
    folder = CandidateFolder(settings.cache_dir / "golden")
    for candidate in candidates:
        folder.drop(candidate.name, candidate.test)
    lines = [f"written: {line}" for line in done.written] + [f"unchanged: {name}" for name in done.unchanged]
    _print(settings, {"written": list(done.written), "unchanged": list(done.unchanged)}, lines or ["nothing to accept"])
    return Verdict.PASS


def _refuse_ci(action: str) -> None:
    from harness.goldens.store.provenance import ci_variable

    ci = ci_variable()
    if ci:
        raise GoldenError(f"golden {action}: is refused, because {ci} is set and a CI machine never writes goldens; run it locally")


def _rename(settings: GoldenSettings) -> Verdict:
    from harness.goldens.store.renaming import rename

    _refuse_ci("rename")
    done = rename(_root(settings))
    _print(settings, {"renamed": list(done)}, [f"renamed: {line}" for line in done] or ["every name is right already"])
    return Verdict.PASS


def _prune(settings: PruneSettings) -> Verdict:
    from harness.goldens.store.listing import read_usage, unused_goldens
    from harness.goldens.store.writer import remove

    root = _root(settings)
    if settings.delete:
        _refuse_ci("prune --delete")
    unused, unsure = list[str](settings.names), list[str]()
    if settings.names and not settings.delete:
        raise GoldenError("golden prune: names were given without --delete, which would do nothing; give both")
    if not settings.names:
        usage = read_usage(settings.cache_dir / USAGE_FILE)
        if usage is None or not usage["complete"]:
            why = "; ".join(usage["gaps"]) if usage else "no run is on record"
            print(f"{root}: which goldens no test uses cannot be known ({why}); run pytest on all tests first", file=sys.stderr)
            return Verdict.INCONCLUSIVE
        unused, unsure = unused_goldens(root, usage)
    deleted = list(remove(root, unused)) if settings.delete and unused else []
    lines = [f"{'deleted' if deleted else 'unused'}: {name}" for name in unused]
    lines += [f"kept: {name}: its test was skipped or failed, so whether it is used cannot be known" for name in unsure]
    _print(settings, {"unused": [] if settings.names else unused, "deleted": deleted, "unknown": unsure}, lines or ["every golden is used"])
    return Verdict.REGRESSION if unused and not deleted else Verdict.PASS


def _why(settings: WhySettings) -> Verdict:
    from harness.goldens.store.listing import explain, find

    entry: GoldenEntry = find(_root(settings), settings.name)
    data, lines = explain(entry)
    _print(settings, data, lines)
    return Verdict.PASS


def _list(settings: GoldenSettings) -> Verdict:
    from harness.goldens.store.listing import state_of_goldens

    rows = state_of_goldens(_root(settings))
    headings = ("golden", "tensors", "bytes", "tier", "platforms", "state")
    cells = [
        (row["name"], str(row["tensors"]), f"{row['bytes']:,}", _short(row["tier"]), ", ".join(row["platforms"]), row["state"])
        for row in rows
    ]
    total = sum(row["bytes"] for row in rows)
    table = aligned([headings, *cells]) if cells else []
    _print(settings, rows, [*table, f"{len(rows)} goldens, {total:,} bytes"])
    return Verdict.PASS if all(row["state"] == "ok" for row in rows) else Verdict.REGRESSION


def _short(tier: str) -> str:
    """The tiers of many tensors would push the other columns out of sight; --json and `why` have them all."""
    return tier if len(tier) <= _MAX_TIER else tier[: _MAX_TIER - 3] + "..."


def _print(settings: GoldenSettings, data: Any, lines: Sequence[str]) -> None:
    from compressor.json_text import to_json

    sys.stdout.write(to_json(data) if settings.as_json else "".join(f"{line}\n" for line in lines))


_ACTIONS = {
    "diff": Command(
        "show how the last failed checks differ from their goldens, tensor by tensor",
        DiffSettings,
        _diff,
        exit_codes("nothing differs from its golden", "something does", "no run of the tests is on record"),
    ),
    "accept": Command(
        "make the outputs of failed checks the goldens",
        AcceptSettings,
        _accept,
        exit_codes("accepted, or nothing to accept") + "; a limit loosened without a reason is bad input, and nothing is written",
    ),
    "prune": Command(
        "find goldens that no test used in the last complete run",
        PruneSettings,
        _prune,
        exit_codes("every golden is used, or the unused ones were deleted", "some are unused", "no complete run knows"),
    ),
    "why": Command(
        "tell where a golden comes from: machine, versions, inputs, and every loosening with its reason",
        WhySettings,
        _why,
        exit_codes("told"),
    ),
    "rename": Command(
        "give files that an older harness named the names that this one gives; no golden changes",
        GoldenSettings,
        _rename,
        exit_codes("renamed, or every name is right already")
        + "; two goldens that would have one file are bad input, and nothing is renamed",
    ),
    "list": Command(
        "list every golden, and hold its file against the manifest",
        GoldenSettings,
        _list,
        exit_codes("every golden can be read", "a file is missing, in no manifest, or differs from its own"),
    ),
}

COMMAND = Actions("differences from golden outputs: look, accept, prune, explain", _ACTIONS)
