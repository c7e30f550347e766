"""Commits of a repository, each in a working tree of its own: the user's is neither changed nor needed clean."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from compressor.errors import UserInputError
from harness.errors import HarnessError

Mark = Literal["good", "bad", "skip"]
_MAX_FILES, _HASHED_BYTES = 10_000, 1 << 20
_SUBMODULE = "160000 "  # mode of its entry in a tree of git
_NO_COMMON = 1  # exit code of git merge-base where two commits have no common one
_ONLY_SKIPPED = 2  # exit code of git bisect where no other commit is left


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        revision: 40 hexadecimal digits.
        author: name.
        date: YYYY-MM-DD.
        subject: first line of its message.
    """

    revision: str
    author: str
    date: str
    subject: str

    def __str__(self) -> str:
        """Short enough for a line."""
        return f"{self.revision[:12]} {self.date} {self.author}: {self.subject}"


class Repository:
    """A git repository, by the folder on top of it."""

    def __init__(self, folder: Path) -> None:
        """Find the repository of a folder.

        Args:
            folder: in it.

        Raises:
            UserInputError: there is none, or no git.
        """
        try:
            self.top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        except HarnessError as error:
            raise UserInputError(f"{folder}: lies in no git repository ({error}); give a config, or run, inside of one") from error

    def commit(self, revision: str, where: str) -> Commit:
        """Look a commit up.

        Args:
            revision: as git takes it.
            where: who names it, for errors.

        Returns:
            The commit.

        Raises:
            UserInputError: there is none of that name here.
        """
        try:
            named = _git(self.top, "rev-parse", "--verify", "--quiet", "--end-of-options", revision)  # which may be words of a message
            line = _git(self.top, "log", "-1", "--format=%H%x00%an%x00%as%x00%s", f"{named}^{{commit}}", "--")
        except HarnessError as error:
            raise UserInputError(f"{where}: {revision!r} is no commit of {self.top}; fetch it, or name another") from error
        return Commit(*line.split("\0"))

    def num_between(self, good: str, bad: str) -> int:
        """Count the commits that may be the first bad one."""
        return int(_git(self.top, "rev-list", "--count", f"{good}..{bad}"))

    def told_apart_by(self, revision: str, good: Sequence[str]) -> list[str]:
        """Say which commits make one the first bad one: for each of its parents the last one that is, or that has, this parent.

        Args:
            revision: the first bad one.
            good: revisions that were seen to be good, in the order in which git asked.

        Returns:
            Those of them.
        """
        parents = _git(self.top, "rev-list", "--parents", "-n1", revision).split()[1:]
        last = (next((one for one in reversed(good) if self._has(one, parent)), None) for parent in parents)
        return list(dict.fromkeys(one for one in last if one is not None))

    def _has(self, revision: str, ancestor: str) -> bool:
        """Whether a commit is another one, or comes after it."""
        return _git(self.top, "merge-base", ancestor, revision, allowed=(_NO_COMMON,)) == ancestor

    @contextmanager
    def tree(self, revision: str, folder: Path, *, with_files: bool = True) -> Iterator[Path]:
        """Give a working tree of a commit, which is gone afterwards.

        Args:
            revision: the commit.
            folder: where; what a process that was killed left there is cleared away.
            with_files: whether its files are checked out; else git alone works in it.

        Yields:
            The folder.
        """
        self._clear(folder)
        try:
            # forced, because git still knows the tree that lay in a folder whose parent somebody removed
            _git(self.top, "worktree", "add", "--force", "--detach", "--quiet", "--no-checkout", str(folder), revision)
            with ExitStack() as parts:
                if with_files:
                    _git(folder, "-c", "core.sparseCheckout=false", "reset", "--hard", "--quiet")  # the user's may be a part of the commit
                    for name, part_revision in self._submodules(revision):
                        parts.enter_context(Repository(self.top / name).tree(part_revision, folder / name))
                yield folder
        finally:
            self._clear(folder)

    def _submodules(self, revision: str) -> Iterator[tuple[str, str]]:
        """Path and commit of each submodule of a commit that is at hand; others are empty folders, as in the user's tree."""
        for line in _git(self.top, "ls-tree", "-r", "-z", "--full-tree", revision).split("\0"):
            kind, _, name = line.partition("\t")
            if kind.startswith(_SUBMODULE) and (self.top / name / ".git").exists():
                yield name, kind.split()[-1]

    def _clear(self, folder: Path) -> None:
        if folder.exists():
            _git(self.top, "worktree", "remove", "--force", str(folder), allowed=range(256))
            shutil.rmtree(folder, ignore_errors=True)

    def at(self, path: Path, tree: Path) -> Path:
        """Return a path as it is in a working tree; what no commit holds (a model, data) is taken from where it is.

        Args:
            path: absolute.
            tree: of a commit.

        Returns:
            The path in the tree where there is one, else the path.

        Raises:
            UserInputError: the commit lacks it, and others hold it: what lies there now is another commit's.
        """
        resolved = path.resolve()
        if not resolved.is_relative_to(self.top):
            return path
        name = resolved.relative_to(self.top)
        if (tree / name).exists():
            return tree / name
        if self.holds(path):
            raise UserInputError(f"{name}: is not in this commit, and what lies there now is another one's; compare commits that have it")
        return path

    def folder_at(self, path: Path, tree: Path) -> Path:
        """Return where a command runs in a working tree, however it was started.

        Args:
            path: absolute, a folder.
            tree: of a commit; a folder that no commit holds is made in it.

        Returns:
            The folder in the tree; the path itself where that lies outside of the repository.

        Raises:
            UserInputError: as `at`.
        """
        resolved = path.resolve()
        if self.holds(path) or not resolved.is_relative_to(self.top):
            return self.at(path, tree)
        made = tree / resolved.relative_to(self.top)
        made.mkdir(parents=True, exist_ok=True)
        return made

    def holds(self, path: Path) -> bool:
        """Return whether a path, or something below it, is tracked: trees have their own."""
        resolved = path.resolve()
        return resolved.is_relative_to(self.top) and bool(_git(self.top, "ls-files", "--", str(resolved.relative_to(self.top))))

    def first_uncommitted(self, besides: Sequence[Path]) -> str:
        """Name a file that is another one in the working tree than in its commit, or that no commit holds.

        Args:
            besides: paths that do not count, nor what lies in them; nor do files that git ignores.

        Returns:
            The first one, relative to the top; empty where there is none.

        Raises:
            HarnessError: git cannot tell.
        """
        asked = (("diff", "--name-only", "-z", "HEAD"), ("ls-files", "--others", "--exclude-standard", "-z"))
        names = sorted(name for words in asked for name in _git(self.top, *words).split("\0") if name)
        top, left_out = self.top.resolve(), [path.resolve() for path in besides]
        return next((name for name in names if not any((top / name).is_relative_to(one) for one in left_out)), "")


def files_of(paths: Iterable[Path]) -> list[tuple[str, int, str]]:
    """Look at files, to see later whether they are what they were.

    Args:
        paths: of files and folders that are there.

    Returns:
        Path and bytes of each, and a digest, or of more than a megabyte the time of its last change; of folders what lies in them at any
        depth, but no more than 10,000 files in all.
    """
    files = [file for path in sorted(paths) for file in islice(_files_in(path), _MAX_FILES) if file.is_file()]
    return [(str(file), file.stat().st_size, _mark(file)) for file in files[:_MAX_FILES]]


def _files_in(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, inner, names in os.walk(path):
        inner.sort()
        yield from (Path(folder) / name for name in sorted(names))


def _mark(file: Path) -> str:
    """What a copy with an old date or a touch does not change; the time is that of the inode, which nobody can set."""
    found = file.stat()
    is_small = found.st_size <= _HASHED_BYTES and os.access(file, os.R_OK)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if is_small else f"{found.st_mtime_ns} {found.st_ctime_ns}"


class Bisection:
    """git's search for the first bad commit. It checks nothing out: what a measurement left in a tree would stop it, or decide the next."""

    def __init__(self, tree: Path, good: str, bad: str) -> None:
        """Begin, with the first commit that git wants to know about.

        Args:
            tree: a working tree of its own, which needs no files.
            good: a commit.
            bad: another.

        Raises:
            HarnessError: git cannot search between them.
        """
        self.tree = tree
        _git(tree, "bisect", "start", "--no-checkout", bad, good)

    @property
    def first_bad(self) -> tuple[str, ...]:
        """The first bad commit; several where those between could not be measured; none while the search goes on."""
        log = _git(self.tree, "bisect", "log")
        found = re.findall(r"^# first bad commit: \[(\w+)\]", log, re.MULTILINE)
        return tuple(found or re.findall(r"^# possible first bad commit: \[(\w+)\]", log, re.MULTILINE))

    @property
    def revision(self) -> str:
        """The commit that git wants to know about."""
        return _git(self.tree, "rev-parse", "BISECT_HEAD")

    def mark(self, word: Mark) -> None:
        """Say what the commit is, and go on to the next one.

        Args:
            word: good, bad, or skip where that cannot be told.

        Raises:
            HarnessError: git gives up: where the two ends parted, it was bad already.
        """
        _git(self.tree, "bisect", word, allowed=(_ONLY_SKIPPED,))


def _git(folder: Path, *arguments: str, allowed: Collection[int] = ()) -> str:
    """Run git; hooks of the user's have no business in trees of ours, and variables that a hook sets would name one tree."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HarnessError(f"git: cannot be started in {folder} ({error.strerror}); install it, or name another folder") from error
    if done.returncode and done.returncode not in allowed:
        told = " ".join((done.stderr or done.stdout).split()) or "it says nothing"
        raise HarnessError(f"git {' '.join(arguments[:2])}: exit code {done.returncode}: {told}")
    return done.stdout.strip()
