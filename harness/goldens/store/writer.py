"""Write goldens: all of them or none, only with a reason where a limit is loosened, and never two tests' into one file. No torch.

`accept` decides what the manifests become and hands files and manifests to one transaction. Whatever fails, the folders are as before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.atomic import stage, write_whole
from harness.errors import GoldenError
from harness.goldens.store.candidates import Candidate
from harness.goldens.store.listing import state_of_file
from harness.goldens.store.manifest import GoldenEntry, Manifest, Variant, check_not_elsewhere, find_entry, read_manifest
from harness.goldens.store.paths import MANIFEST, deletion, file_name, folder_of
from harness.goldens.store.provenance import nearest, today
from harness.tolerance import TierMap


@dataclass(frozen=True)
class Acceptance:
    """What `accept` did.

    Attributes:
        written: a line for each golden that changed.
        unchanged: names of goldens that are as the candidate wants them already.
    """

    written: tuple[str, ...]
    unchanged: tuple[str, ...]


def accept(root: Path, candidates: Sequence[Candidate], *, reason: str = "", add_variant: bool = False) -> Acceptance:
    """Make candidates the goldens, all or none.

    Args:
        root: of the store.
        candidates: one per golden.
        reason: why; needed where a limit is loosened.
        add_variant: keep what other platforms accepted, and add this platform's beside it; else it replaces them.

    Returns:
        What was done.

    Raises:
        GoldenError: two candidates for one golden or one file, a stored file that is damaged, a loosening without a reason, or a folder
            that cannot be written; nothing was written.
    """
    names = [candidate.name for candidate in candidates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        tests = sorted(candidate.test for candidate in candidates if candidate.name == twice[0])
        raise GoldenError(f"golden {twice[0]!r}: is written by {' and by '.join(tests)}; nothing was written; give each test its own name")
    with locked(root):
        return _accept(root, candidates, reason, add_variant)


def _accept(root: Path, candidates: Sequence[Candidate], reason: str, add_variant: bool) -> Acceptance:
    manifests: dict[Path, Manifest] = {}
    files: dict[Path, bytes | None] = {}
    written, unchanged = [], []
    for candidate in candidates:
        folder = root / folder_of(candidate.name)
        manifest = manifests.get(folder) or read_manifest(folder)
        old = find_entry(root, candidate.name, manifest)
        if old is not None:
            _check_undamaged(folder, old)
        new, line = _next_entry(old, candidate, reason.strip(), add_variant)
        if new is None:
            unchanged.append(candidate.name)
            continue
        _check_no_orphan(folder, old, new)
        kept = {variant.file for variant in new.variants}
        files |= {folder / variant.file: None for variant in (old.variants if old else ()) if variant.file not in kept}
        files |= {folder / variant.file: candidate.data() for variant in new.variants if variant.sha256 == candidate.sha256}
        manifests[folder] = manifest.with_entries({candidate.name: new})
        written.append(line)
    replace_files(files, manifests.values())
    return Acceptance(tuple(written), tuple(unchanged))


def _next_entry(old: GoldenEntry | None, new: Candidate, reason: str, add_variant: bool) -> tuple[GoldenEntry | None, str]:
    own = Variant(new.platform, file_name(new.name), new.sha256, new.tensors, new.versions)
    if not (reason or new.reason.strip() or (old and old.reason.strip())) and _is_loose(new):
        raise GoldenError(
            f"golden {new.name!r}: {new.tier} asks less than every bit (T0), and nobody says why; nothing was written; "
            'give reason="..." in the test (harness golden accept: --reason "...")'
        )
    if old is None:
        made = {"date": today(), "what": "created", "reason": reason or new.reason}
        return _entry(new, new.reason or reason, (made,), (own,)), f"{new.name}: created, {new.tier}"
    same_source = (old.inputs, old.recipe, old.seed) == (new.inputs, new.recipe, new.seed)
    same_limits = (old.tier.to_dict(), _limits(old.elsewhere)) == (new.tier.to_dict(), _limits(new.elsewhere))
    here = old.variants[nearest(new.platform, [variant.platform for variant in old.variants])]
    same_data = (here.sha256, dict(here.tensors)) == (new.sha256, dict(new.tensors)) and (not add_variant or here.platform == new.platform)
    if same_source and same_limits and same_data and old.reason == (new.reason or old.reason):
        return None, ""
    steps = _steps(old, new, reason, same_source, same_data)
    variants: tuple[Variant, ...] = (own,)
    if same_data and same_source:
        variants = old.variants
    elif add_variant:
        if not same_source:
            raise GoldenError(
                f"golden {new.name!r}: inputs, recipe or seed differ from the other platforms'; replace it instead of adding a variant"
            )
        variants = _with_variant(old, own)
        steps = [{**step, "what": f"variant for {own.platform}"} if step["what"] == "outputs changed" else step for step in steps]
    was_loosened = any(step["what"].endswith("loosened") for step in steps)
    why = new.reason or (reason if was_loosened else "") or old.reason  # the session's reason is that of the limits it loosens
    entry = _entry(new, why, (*old.history, *steps), variants)
    return entry, f"{new.name}: {', '.join(step['what'] for step in steps)}, {new.tier}"


def _is_loose(new: Candidate) -> bool:
    tiers = [tier for tier in (new.tier, new.elsewhere) if tier is not None]
    return any(tier.loosened(TierMap.of(None), new.tensors) for tier in tiers)


def _limits(tier: object) -> object:
    return tier.to_dict() if hasattr(tier, "to_dict") else None


def _entry(new: Candidate, reason: str, history: tuple[Mapping[str, str], ...], variants: tuple[Variant, ...]) -> GoldenEntry:
    return GoldenEntry(new.name, new.tier, new.elsewhere, reason, new.inputs, new.recipe, new.seed, new.test, history, variants)


def _steps(old: GoldenEntry, new: Candidate, reason: str, same_source: bool, same_data: bool) -> list[dict[str, str]]:
    """Say what changes, as lines of the golden's history; refuse a loosening without a reason."""
    common = {"date": today(), "reason": reason or new.reason}
    steps = []
    if not same_source:
        steps.append({**common, "what": "inputs changed"})
    if not same_data:
        steps.append({**common, "what": "outputs changed"})
    names = dict.fromkeys([*old.variants[0].tensors, *new.tensors])
    pairs = {"tier": (old.tier, new.tier), "elsewhere": (old.elsewhere or old.tier, new.elsewhere or new.tier)}
    for word, (before, after) in pairs.items():
        if before.to_dict() == after.to_dict():
            continue
        is_loosening = bool(after.loosened(before, names))
        if is_loosening and not reason:
            raise GoldenError(
                f"golden {new.name!r}: {word} would be loosened from {before} to {after} without a reason; nothing was written; "
                'say why with --golden-reason "..." (harness golden accept: --reason "...")'
            )
        steps.append({**common, "what": f"{word} {'loosened' if is_loosening else 'tightened'}", "from": str(before), "to": str(after)})
    return steps or [{**common, "what": "reason changed"}]


def _with_variant(old: GoldenEntry, own: Variant) -> tuple[Variant, ...]:
    for place, variant in enumerate(old.variants):
        if variant.platform == own.platform:
            return (*old.variants[:place], replace(own, file=variant.file), *old.variants[place + 1 :])
    file = file_name(old.name, str(own.platform))
    taken = next((variant.platform for variant in old.variants if variant.file == file), None)
    if taken:
        raise GoldenError(f"golden {old.name!r}: its file {file} for {own.platform} is that for {taken}; nothing was written; replace it")
    return (*old.variants, replace(own, file=file))


def _check_undamaged(folder: Path, old: GoldenEntry) -> None:
    """What is accepted is a change, and from a file that is not the stored one nobody can tell it."""
    for variant in old.variants:
        state = state_of_file(folder, variant)
        if state != "ok":
            anew = f"delete the golden with `{deletion(old.name)}` and write it with `pytest --golden-update=new`"
            raise GoldenError(
                f"{folder / variant.file}: golden {old.name!r}: {state}; nothing was written; take both from one version, or {anew}"
            )


def _check_no_orphan(folder: Path, old: GoldenEntry | None, new: GoldenEntry) -> None:
    listed = {variant.file for variant in old.variants} if old else set()
    for variant in new.variants:
        if variant.file not in listed and (folder / variant.file).exists():
            raise GoldenError(
                f"{folder / variant.file}: is not in {MANIFEST}; nothing was written; take the manifest back, or delete the file"
            )


def remove(root: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Delete goldens with their files and entries, all or none.

    Args:
        root: of the store.
        names: of goldens.

    Returns:
        The names.

    Raises:
        GoldenError: one does not exist, or a folder cannot be written; nothing was deleted.
    """
    wanted = sorted(set(names))
    files: dict[Path, bytes | None] = {}
    manifests: dict[Path, Manifest] = {}
    with locked(root):
        for name in wanted:
            folder = root / folder_of(name)
            manifest = manifests.get(folder) or read_manifest(folder)
            if name not in manifest.goldens:
                check_not_elsewhere(root, name)
                raise GoldenError(f"golden {name!r}: does not exist below {root}; nothing was deleted")
            files |= {folder / variant.file: None for variant in manifest.goldens[name].variants}
            manifests[folder] = manifest.without({name})
        replace_files(files, manifests.values())
    return tuple(wanted)


def replace_files(files: Mapping[Path, bytes | None], manifests: Iterable[Manifest]) -> None:
    """Write files, then their manifests, then delete what no manifest lists any more; undo everything if a step fails.

    Args:
        files: content by path; None deletes.
        manifests: to write; an empty one is deleted.

    Raises:
        GoldenError: a step failed; everything is as before.
    """
    texts = {manifest.path: manifest.to_text().encode() if manifest.goldens else None for manifest in manifests}
    order = [*((path, data) for path, data in files.items() if data is not None), *texts.items()]
    order += [(path, None) for path, data in files.items() if data is None]
    staged: dict[Path, Path] = {}
    before: dict[Path, bytes | None] = {}
    path = Path()
    try:
        for path, data in order:
            if data is not None:
                staged[path] = stage(path, data)
        for path, data in order:
            before[path] = path.read_bytes() if path.exists() else None
            if data is not None:
                staged[path].replace(path)
                del staged[path]
            elif before[path] is not None:
                path.unlink()
    except BaseException as error:
        _undo(before, staged)
        if isinstance(error, OSError):
            raise GoldenError(f"{path}: cannot be written ({error.strerror}); nothing was written; make the folder writable") from error
        raise


def _undo(before: Mapping[Path, bytes | None], staged: Mapping[Path, Path]) -> None:
    for partial in staged.values():
        with suppress(OSError):
            partial.unlink()
    for path, data in before.items():
        with suppress(OSError):
            if data is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != data:
                write_whole(path, data)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one process write at a time, where the system can lock a folder.

    Args:
        root: of the store; it is made.

    Yields:
        Nothing, while this process alone may write.

    Raises:
        GoldenError: the folder cannot be made.
    """
    try:
        import fcntl
    except ImportError:  # Windows: two runs that update one store at once are on their own there
        yield
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise GoldenError(f"{root}: cannot be written ({error.strerror}); nothing was written; make the folder writable") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
