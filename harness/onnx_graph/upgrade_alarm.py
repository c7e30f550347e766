"""The upgrade alarm: pass lists are goldens per release, and a list that nobody has seen is tried on a small zoo before it is trusted.

An optimizer that gains a pass changes what a skip list protects, without a word. So the list in force is kept with its hash for each
release; where it is new, `explain` runs again and says whether the skips that a team relies on still hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UserInputError
from compressor.model.atomic_file import whole_file
from harness.onnx_graph.contracts import Contract
from harness.onnx_graph.explain import OPTIMIZER_OF, explain
from harness.onnx_graph.optimizers import OptimizerFailure, optimize
from harness.onnx_graph.passes import PassList, effective_passes
from harness.onnx_graph.small_zoo import small_zoo

DEFAULT_PATH = Path("golden/onnx_passes.json")


@dataclass(frozen=True)
class Trial:
    """What a new list does to one graph of the zoo.

    Attributes:
        graph: its name.
        holds: under the skips that are relied on.
        message: what is broken; empty if it holds.
        needed: the smallest set of skips that keeps it.
    """

    graph: str
    holds: bool
    message: str
    needed: tuple[str, ...]


@dataclass(frozen=True)
class Alarm:
    """One optimizer, against what is known of it.

    Attributes:
        passes: as they are in force here.
        state: `known`, `new release` or `changed` (a release whose list is another than the one on record).
        compared_with: the release that the changes are counted from; empty if none is on record.
        added: passes that are in force now and were not.
        removed: the other way round.
        reordered: the same passes in another order.
        trials: on the zoo; empty where the list is known.
    """

    passes: PassList
    state: str
    compared_with: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reordered: bool
    trials: tuple[Trial, ...]

    @property
    def breaks(self) -> bool:
        """Whether the skips that are relied on no longer hold."""
        return any(not trial.holds for trial in self.trials)

    def text(self) -> str:
        """Say it in a few lines."""
        head = f"{self.passes.backend} {self.passes.version}: {len(self.passes.effective)} passes, {self.passes.sha256[:12]}, {self.state}"
        if self.state == "known":
            return head
        lines = [head + (f", compared with {self.compared_with}" if self.compared_with else ", nothing to compare with")]
        changes = (("new", self.added), ("gone", self.removed)) if self.compared_with else ()
        lines += [f"  {word}: {', '.join(names)}" for word, names in changes if names]
        lines += ["  the same passes in another order"] if self.reordered else []
        for trial in self.trials:
            needed = f"needs {', '.join(trial.needed)}" if trial.needed else "needs no skip"
            lines.append(f"  {trial.graph}: {'holds' if trial.holds else 'BROKEN: ' + trial.message.splitlines()[0]}; {needed}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the alarm as JSON types."""
        trials = [{"graph": one.graph, "holds": one.holds, "message": one.message, "needed": list(one.needed)} for one in self.trials]
        fixed = {"state": self.state, "compared_with": self.compared_with, "reordered": self.reordered, "breaks": self.breaks}
        return {**self.passes.to_dict(), **fixed, "added": list(self.added), "removed": list(self.removed), "trials": trials}


Records = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Backend to release to what `PassList.to_dict` wrote."""


def read_records(path: Path) -> Records:
    """Read the goldens.

    Args:
        path: may be missing: then nothing is known.

    Returns:
        The records.

    Raises:
        UserInputError: it is no such file.
    """
    if not path.exists():
        return {}
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if not _is_record(records):
            raise ValueError("optimizers, their releases, and the passes in force are expected")
    except (ValueError, OSError) as error:
        raise UserInputError(
            f"{path}: this is no record of passes ({error}); restore it, or remove it and accept the lists again"
        ) from error
    result: Records = records
    return result


def check_passes(records: Records, backend: str, contract: Contract, skips: Sequence[str]) -> Alarm:
    """Compare the passes in force with those on record, and try them where they are new.

    Args:
        records: as read.
        backend: `onnxsim`, `onnxoptimizer` or `ort`.
        contract: what the skips are relied on for.
        skips: those that are relied on; names that the optimizer does not know are left out.

    Returns:
        What was found.

    Raises:
        UserInputError: the optimizer is not installed.
    """
    passes = effective_passes(backend)
    releases = records.get(backend, {})
    record = releases.get(passes.version)
    if record is not None and record["sha256"] == passes.sha256:
        return Alarm(passes, "known", passes.version, (), (), False, ())
    compared = passes.version if record is not None else max(releases, key=_release, default="")
    before = tuple(releases[compared]["effective"]) if compared else ()
    added = tuple(name for name in passes.effective if name not in before)
    removed = tuple(name for name in before if name not in passes.effective)
    reordered = bool(before) and not added and not removed
    trials = tuple(_try(name, backend, contract, [skip for skip in skips if skip in passes.known]) for name in small_zoo())
    return Alarm(passes, "new release" if record is None else "changed", compared, added, removed, reordered, trials)


def _is_record(records: Any) -> bool:
    if not isinstance(records, dict) or not all(isinstance(releases, dict) for releases in records.values()):
        return False
    entries = [record for releases in records.values() for record in releases.values()]
    return all(isinstance(one, dict) and isinstance(one.get("effective"), list) and isinstance(one.get("sha256"), str) for one in entries)


def accept(path: Path, alarms: Sequence[Alarm]) -> None:
    """Put the lists in force on record.

    Args:
        path: of the goldens; written whole or not at all.
        alarms: what was found.
    """
    records = {backend: dict(releases) for backend, releases in read_records(path).items()}
    for alarm in alarms:
        record = {"effective": list(alarm.passes.effective), "sha256": alarm.passes.sha256}
        records.setdefault(alarm.passes.backend, {})[alarm.passes.version] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _try(graph: str, backend: str, contract: Contract, skips: Sequence[str]) -> Trial:
    model = small_zoo()[graph]()
    try:
        result = contract.check(model, optimize(model, OPTIMIZER_OF[backend], skips))
    except OptimizerFailure as error:
        return Trial(graph, False, str(error), ())
    return Trial(graph, result.holds, result.message, explain(model, contract, backend).skips)


def _release(version: str) -> tuple[int, ...]:
    """Sort releases by their numbers."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
