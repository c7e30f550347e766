"""What a test sees of the golden store: `golden.check(name, tensors, ...)`.

A check only collects. What it wants to write lies in the cache folder as a candidate; the process that runs the whole session writes once,
at its end, and only for tests that passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from compressor.errors import UserInputError
from harness.errors import GoldenError
from harness.goldens.report import comparison_lines, golden_command
from harness.goldens.store.candidates import Candidate, CandidateFolder
from harness.goldens.store.encoding import as_tensors, describe, devices_of, encode, hash_inputs, hash_recipe
from harness.goldens.store.paths import relative_path, same_file
from harness.goldens.store.provenance import current_platform, nearest, versions
from harness.goldens.store.store import Answer, GoldenStore, GoldenVerdict, Question
from harness.tolerance import Tier, TierMap

Update = Literal["", "new", "failed", "all"]
_WRITES: Mapping[GoldenVerdict, tuple[Update, ...]] = {
    GoldenVerdict.MISSING: ("new", "failed", "all"),
    GoldenVerdict.INPUTS_DRIFTED: ("failed", "all"),
    GoldenVerdict.REGRESSED: ("failed", "all"),
    GoldenVerdict.LOOSENED: ("failed", "all"),
    GoldenVerdict.PASS: ("all",),
}


class GoldenMismatch(AssertionError):
    """A golden does not hold; the message says which verdict, by how much, and what to do."""


@dataclass(frozen=True)
class GoldenSettings:
    """What a session decides for all its tests.

    Attributes:
        root: folder of the goldens.
        cache: folder of the candidates.
        update: what is to be written at the end: nothing, `new`, `failed` or `all`.
        reason: why limits are loosened; empty for none.
        add_variant: this platform's own outputs go beside the others', also where the golden holds.
    """

    root: Path
    cache: Path
    update: Update = ""
    reason: str = ""
    add_variant: bool = False


class Golden:
    """The fixture `golden` of one test."""

    def __init__(self, settings: GoldenSettings, test: str) -> None:
        """Open the store for a test.

        Args:
            settings: of the session.
            test: id of the test, for provenance.
        """
        self.settings, self.test = settings, test
        self.is_over = False  # what it holds then, no report has any more
        self.outcomes: list[dict[str, Any]] = []
        self._store = GoldenStore(settings.root)
        self._folder = CandidateFolder(settings.cache)
        self._contents: dict[str, list[dict[str, Any]]] = {}
        self._written: set[str] = set()
        self._files: dict[str, str] = {}

    def check(
        self,
        name: str,
        tensors: Any,
        *,
        tier: Tier | Mapping[str, Tier] | None = None,
        elsewhere: Tier | Mapping[str, Tier] | None = None,
        inputs: Mapping[str, Any] | None = None,
        recipe: Any = None,
        seed: int | None = None,
        reason: str | None = None,
        decoys: Mapping[str, Tensor] | None = None,
        device: str | None = None,
    ) -> None:
        """Hold tensors against the golden of this name.

        Args:
            name: of the golden; slashes make folders.
            tensors: one tensor, or tensors by name.
            tier: how equal they must be: T0() to T4(...), or one by tensor name with "*" for all others; T0, bitwise, by default.
            elsewhere: the tier on another device, architecture or instruction set than the golden's; the same by default.
            inputs: what the tensors were computed from, by name; hashed, so that other inputs do not read as a regression.
            recipe: hashed too: a text, a path, JSON types, or a recipe object.
            seed: of everything random.
            reason: why the tier is not T0.
            decoys: tensors that must not pass, such as another layer's, by name.
            device: where the tensors were computed, if they lie elsewhere now.

        Raises:
            GoldenMismatch: outputs regressed, inputs drifted, the golden is missing, a limit was loosened, or lets decoys through.
            GoldenError: the store cannot be read, the golden's file is another golden's, the test is over, or the call makes no sense.
        """
        __tracebackhide__ = True
        if self.is_over:
            raise GoldenError(f"{name}: this golden is that of {self.test}, which is over; ask for the fixture in the test that checks")
        held = as_tensors(name, tensors)
        asked = Question(
            name=name,
            tensors=held,
            tier=TierMap.of(tier),
            elsewhere=None if elsewhere is None else TierMap.of(elsewhere),
            inputs=hash_inputs(name, inputs),
            recipe=hash_recipe(name, recipe),
            seed=seed,
            platform=current_platform(device or _one_device(name, tensors)),
            others=as_tensors(name, decoys) if decoys else {},
            reason=(reason or "").strip(),
        )
        answer = self._answer(asked)
        answer, writes = self._decide(asked, answer)
        if self.settings.update and (answer.ok or writes):
            self._hold_one_content(asked, answer, writes)
        if writes:
            self._record(name, answer, self._save(asked, answer))
            return
        kept = self._keep(asked, answer)
        self._record(name, answer, None)
        if not answer.ok:
            raise GoldenMismatch(self._message(name, answer) + kept)

    def inputs(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return inputs that are stored like a golden: random numbers that differ between machines, or data cut from elsewhere.

        Args:
            name: of the stored inputs.
            make: makes them, when they are stored for the first time; never called again after that.

        Returns:
            The tensors by name, the same on every machine.

        Raises:
            GoldenMismatch: they are not stored yet, and --golden-update was not given.
            GoldenError: the store cannot be read, or make() gives no tensors by name.
        """
        __tracebackhide__ = True
        self._claim_file(name)
        entry = self._store.find(name)
        platform = current_platform()
        if entry is not None:
            self._record(name, Answer(GoldenVerdict.PASS, "stored inputs"), None, kind="inputs")
            return self._store.load(entry, entry.variants[nearest(platform, [variant.platform for variant in entry.variants])])
        answer = Answer(GoldenVerdict.MISSING, f"there are no stored inputs {name!r} below {self.settings.root}")
        if not self.settings.update:
            self._record(name, answer, None, kind="inputs")
            raise GoldenMismatch(self._message(name, answer))
        made = make()
        if not isinstance(made, Mapping):
            raise GoldenError(f"inputs {name!r}: make() gave a {type(made).__name__}, not tensors by name; return {{'x': ...}}")
        held = as_tensors(name, made)
        asked = Question(name, held, TierMap.of(None), None, {}, None, None, platform, reason="stored inputs")
        self._hold_one_content(asked, answer, writes=True)
        self._record(name, answer, self._save(asked, answer), kind="inputs")
        return held

    def _answer(self, asked: Question) -> Answer:
        try:
            self._claim_file(asked.name)
            return self._store.check(asked)
        except UserInputError as error:
            self._outcome(asked.name, "unreadable", str(error))
            if isinstance(error, GoldenError):
                raise
            raise GoldenError(f"golden {asked.name!r}: {error}") from error

    def _claim_file(self, name: str) -> None:
        """Refuse two names of one test that would have one file."""
        owner = self._files.setdefault(relative_path(name), name)
        if owner != name:
            raise same_file(name, owner)

    def _decide(self, asked: Question, answer: Answer) -> tuple[Answer, bool]:
        """Whether the golden is to be written; limits that measure nothing, and loosened ones without a reason, never are."""
        lacks_variant = self.settings.add_variant and answer.ok and bool(answer.note)
        if self.settings.update not in _WRITES.get(GoldenVerdict.MISSING if lacks_variant else answer.verdict, ()):
            return answer, False
        refused = self._store.vacuous(asked)
        if refused is None and not self.settings.reason.strip():
            refused = self._store.loosened(asked)
        return (refused, False) if refused else (answer, True)

    def _hold_one_content(self, asked: Question, answer: Answer, writes: bool) -> None:
        """Refuse to write a golden that one test gives different contents, be one of them what is stored: the next run would fail."""
        content = self._candidate(asked, answer)[0].content()
        contents = self._contents.setdefault(asked.name, [])
        if content not in contents:
            contents.append(content)
        self._written |= {asked.name} if writes else set()
        if len(contents) > 1 and asked.name in self._written:
            raise GoldenError(f"golden {asked.name!r}: {self.test} gives it two different contents in one run; give each its own name")

    def _keep(self, asked: Question, answer: Answer) -> str:
        """Keep the tensors of a failed check for `harness golden diff`; a cache that cannot be written must not hide the failure."""
        if answer.ok:
            self._folder.drop(asked.name, self.test)
            return ""
        try:
            self._save(asked, answer)
        except GoldenError as error:
            return f"\nthe tensors could not be kept: {error}"
        return ""

    def _save(self, asked: Question, answer: Answer) -> Candidate:
        return self._folder.save(*self._candidate(asked, answer))

    def _candidate(self, asked: Question, answer: Answer) -> tuple[Candidate, bytes]:
        data = encode(asked.tensors)
        candidate = Candidate(
            name=asked.name,
            test=self.test,
            verdict=answer.verdict.value,
            summary=answer.summary,
            tier=asked.tier,
            elsewhere=asked.elsewhere,
            reason=asked.reason,
            inputs=asked.inputs,
            recipe=asked.recipe,
            seed=asked.seed,
            platform=asked.platform,
            versions=versions(),
            tensors={name: describe(tensor) for name, tensor in asked.tensors.items()},
            sha256=hashlib.sha256(data).hexdigest(),
            comparisons=tuple(comparison.to_dict() for comparison in answer.comparisons),
        )
        return candidate, data

    def _record(self, name: str, answer: Answer, candidate: Candidate | None, kind: str = "outputs") -> None:
        rows = [comparison.to_dict() for comparison in answer.comparisons]
        note = answer.note if answer.replaces_tier or not answer.ok else ""
        self._outcome(name, answer.verdict.value, answer.summary, note, rows, candidate.path if candidate else "", kind)

    def _outcome(
        self, name: str, verdict: str, summary: str, note: str = "", rows: Any = (), candidate: str = "", kind: str = "outputs"
    ) -> None:
        facts = {"name": name, "test": self.test, "verdict": verdict, "summary": summary, "note": note, "kind": kind}
        self.outcomes.append({**facts, "comparisons": [_plain(row) for row in rows if not row["ok"]], "candidate": candidate})

    def _message(self, name: str, answer: Answer) -> str:
        lines = [f"golden {name!r}: {answer.verdict.value}: {answer.summary}"]
        if answer.note:
            lines.append(answer.note)
        lines += comparison_lines([comparison.to_dict() for comparison in answer.comparisons if not comparison.ok])
        return "\n".join([*lines, *_next_steps(name, answer.verdict, self.settings.cache.parent)])


def _next_steps(name: str, verdict: GoldenVerdict, cache_dir: Path) -> list[str]:
    """What a reader can do about a verdict, one command a line."""
    if verdict is GoldenVerdict.MISSING:
        return ["write it: pytest --golden-update=new"]
    if verdict is GoldenVerdict.VACUOUS:
        return []
    reason = ["--reason", "..."] if verdict is GoldenVerdict.LOOSENED else []
    return [f"look: {golden_command('diff', name, cache_dir)}", f"accept: {golden_command('accept', name, cache_dir, *reason)}"]


def _one_device(name: str, tensors: Any) -> str:
    kinds = devices_of(tensors) or {"cpu"}
    if len(kinds) > 1:
        raise GoldenError(f"golden {name!r}: tensors lie on {sorted(kinds)}; say with device=... where they were computed")
    return kinds.pop()


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row in types that any channel between processes carries."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items() if key != "evidence"}
