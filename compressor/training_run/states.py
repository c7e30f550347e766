"""The run folder of a training: what the run is, and its last two states.

lock                        held while a run works here
run.json                    what the result depends on, so that no other run goes on from these states
state-00000120.safetensors  the whole state after 120 steps
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.atomic import own_names, partial_path, real_path, remove, whole_file
from compressor.errors import ModelError, OutputError, ResumeError
from compressor.json_text import from_json, to_json
from compressor.pipelines.journal.fingerprint import Fingerprint, changes, digest
from compressor.pipelines.journal.run_folder import RunFolder
from compressor.training import Trainer, load_training, save_training

_FORMAT = 1
_RUN, _LOCK = "run.json", "lock"
_OWN_NAMES = own_names(_LOCK, r"run\.json|state-\d+\.safetensors")
_KEPT = 2


class States:
    """The states of a run; this one, without a folder, keeps none.

    Attributes:
        token: part of the name of the folder that the checkpoint is written to before it is whole; None for a random one.
        path: the run folder; None where nothing is kept.
        resumed: where the run went on, in words; None where it began at the beginning.
    """

    token: str | None = None
    path: Path | None = None
    resumed: str | None = None

    def load_newest(self, trainer: Trainer, num_steps: int) -> dict[str, Any] | None:
        """Bring a trainer to the newest whole state.

        Args:
            trainer: not yet used; changed.
            num_steps: length of the run, for the words.

        Returns:
            The notes of that state; None where there is none.
        """
        del trainer, num_steps
        return None

    def save(self, trainer: Trainer, notes: Mapping[str, Any]) -> None:
        """Keep the state between two steps.

        Args:
            trainer: the trainer.
            notes: what comes back with it; JSON types.
        """

    def drop_after(self, num_steps: int) -> None:
        """Remove states of later steps, which an audit has put in doubt.

        Args:
            num_steps: of the last state that is sound.
        """

    def finish(self) -> None:
        """Remove what was kept, after the result is safe."""

    @property
    def advice(self) -> str:
        """How to go on after the run has stopped."""
        return "nothing was kept, so the run begins anew; name an output_dir or run_dir to keep its states"


class FolderStates(States):
    """The states of a run that this process has locked.

    Args:
        folder: locked.
        run: what the result depends on.
        token: see States.
    """

    def __init__(self, folder: RunFolder, run: Fingerprint, token: str) -> None:
        self._folder, self.token, self.path = folder, token, folder.path
        self._of_this_run = {"run": digest(run)}

    def load_newest(self, trainer: Trainer, num_steps: int) -> dict[str, Any] | None:
        """Bring a trainer to the newest whole state; one that is damaged, or of another run, is left out, and named.

        Args:
            trainer: not yet used; changed.
            num_steps: length of the run, for the words.

        Returns:
            The notes of that state; None where there is none.

        Raises:
            ResumeError: there are states, and none of them is whole.
        """
        damaged: list[str] = []
        for path in reversed(_states(self._folder.path)):
            try:
                notes = load_training(trainer, path, self._of_this_run)
            except ResumeError as error:
                damaged.append(str(error).rpartition("; ")[0])  # its remedy is for who chose the file
                continue
            left_out = f" ({damaged[0]})" if damaged else ""
            self.resumed = f"resumed after step {trainer.num_steps} of {num_steps}{left_out}"
            return {key: value for key, value in notes.items() if key not in self._of_this_run}
        if damaged:
            raise ResumeError(
                f"{self._folder.path}: none of its states can be taken ({'; '.join(damaged)}); remove that folder and give the same "
                "command to start over"
            )
        return None

    def save(self, trainer: Trainer, notes: Mapping[str, Any]) -> None:
        """Keep the state between two steps, and the one before it.

        Args:
            trainer: the trainer.
            notes: what comes back with it; JSON types.
        """
        save_training(trainer, self._folder.path / f"state-{trainer.num_steps:08d}.safetensors", {**notes, **self._of_this_run})
        for path in _states(self._folder.path)[:-_KEPT]:
            remove(path)

    def drop_after(self, num_steps: int) -> None:
        """Remove states of later steps, which an audit has put in doubt.

        Args:
            num_steps: of the last state that is sound.
        """
        for path in _states(self._folder.path):
            if _steps_of(path) > num_steps:
                remove(path)

    def finish(self) -> None:
        """Remove the folder."""
        _clear(self._folder.path)
        self._folder.remove()

    @property
    def advice(self) -> str:
        """How to go on after the run has stopped."""
        states = _states(self._folder.path)
        if not states:
            return "no state was saved yet, so the run begins anew"
        return f"{_steps_of(states[-1])} steps are kept in {self.path}; give the same with --resume (resume=True) to go on"


def _steps_of(state: Path) -> int:
    return int(state.stem.partition("-")[2])


def check_states_dir(run_dir: str | Path, *, resume: bool, source: str | Path | None, output_dir: Path | None) -> Path:
    """Refuse a run folder that cannot be used, before the work starts.

    Args:
        run_dir: the folder; need not exist.
        resume: whether a run in it is to go on.
        source: folder of the model; None for a model from memory.
        output_dir: where the checkpoint will be; None where none is written.

    Returns:
        The absolute path.

    Raises:
        OutputError: it is no folder, holds something else, or lies in a folder that must stay as it is.
        ResumeError: it holds a run that is not to be resumed.
    """
    path = real_path(run_dir, "run_dir")
    if source is not None and path.is_relative_to(real_path(source, "model", ModelError)):
        raise OutputError(f"{path}: the run folder lies in the folder of the model; name one outside of it")
    if output_dir is not None and (path.is_relative_to(output_dir) or output_dir.is_relative_to(path)):
        raise OutputError(f"{path}: run folder and output folder ({output_dir}) lie one in the other; name two that do not")
    if not path.exists():
        return path
    try:
        strangers = [entry.name for entry in sorted(path.iterdir()) if _OWN_NAMES.fullmatch(entry.name) is None]
    except OSError as error:
        raise OutputError(f"{path}: cannot be used as run folder ({error.strerror}); name a new folder") from error
    if strangers:
        raise OutputError(f"{path}: is no run folder of a training, for it holds {strangers[0]}; move that away, or name a new folder")
    if not resume:
        _refuse_to_overwrite(path)
    return path


@contextmanager
def opened(path: Path | None, run: Fingerprint, *, resume: bool, output_dir: Path | None) -> Iterator[States]:
    """Hold a run folder while a run works.

    Args:
        path: what `check_states_dir` returned; None keeps nothing.
        run: what the result depends on.
        resume: go on where an earlier run stopped; where there is none, begin at the beginning.
        output_dir: where the checkpoint will be.

    Yields:
        The states.

    Raises:
        ResumeError: another run works in the folder, or it holds one that is not to be resumed, or a different one.
        CheckpointError: the folder cannot be written.
    """
    if path is None:
        yield States()
        return
    folder = RunFolder(path)
    folder.create()
    try:
        if not resume:
            _refuse_to_overwrite(path)
        first = _read_run(path) if resume else None
        if first is None:
            _clear(path)
            first = {"format": _FORMAT, "fingerprint": run, "token": secrets.token_hex(4)}
            with whole_file(path / _RUN) as partial:
                partial.write_text(to_json(first), encoding="utf-8")
        _check_same_run(path, first, run)
        if output_dir is not None:  # what a kill during the writing of the checkpoint has left
            shutil.rmtree(partial_path(output_dir, first["token"]), ignore_errors=True)
        yield FolderStates(folder, run, first["token"])
    finally:
        if path.exists():
            if not _states(path):
                _clear(path)
            folder.give_up()


def _states(path: Path) -> list[Path]:
    return sorted(entry for entry in path.glob("state-*.safetensors")) if path.exists() else []


def _clear(path: Path) -> None:
    """Remove what a run has left, what names it last."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == _RUN) if path.exists() else []:
        if entry.name != _LOCK and _OWN_NAMES.fullmatch(entry.name):
            remove(entry)


def _refuse_to_overwrite(path: Path) -> None:
    states = _states(path)
    if states:
        steps = int(states[-1].stem.partition("-")[2])
        raise ResumeError(
            f"{path}: holds a training that did not end ({steps} steps are made); continue it with --resume (resume=True), "
            "or remove the folder to start over"
        )


def _read_run(path: Path) -> dict[str, Any] | None:
    file = path / _RUN
    if not file.exists():
        if _states(path):
            raise ResumeError(f"{file}: is gone, though states are there; restore the file, or remove {path} to start over")
        return None
    try:
        first = from_json(file.read_text(encoding="utf-8"))
        known = isinstance(first, dict) and first["format"] == _FORMAT and isinstance(first["fingerprint"], dict) and bool(first["token"])
    except (ValueError, KeyError, OSError) as error:
        raise ResumeError(f"{file}: cannot be read ({error}); remove {path} to start over") from error
    if not known:
        raise ResumeError(f"{file}: was written by another version of this package; finish the run with that one, or remove {path}")
    return dict(first)


def _check_same_run(path: Path, first: Mapping[str, Any], run: Fingerprint) -> None:
    different = changes(first["fingerprint"], run)
    if different:
        raise ResumeError(
            f"{path}: holds another run and cannot be resumed with this one: {'; '.join(different)}; "
            "give what was given before, or remove the folder to start over"
        )
