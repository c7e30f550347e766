"""What another version has written into a journal is refused in our words, whatever it lacks; nothing of it is lost"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor.pipelines.journal.journal
from compressor import oneshot
from compressor.errors import ResumeError
from compressor.pipelines.journal.run_folder import Lines
from tests import tiny

INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group"}
GROUPS = {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}}
TWO = {"SparseGPTModifier": {"sparsity": 0.5, "ignore": ["lm_head"]}, "GPTQModifier": GROUPS}
# Of these each one is free to be there or not.
FREE = {"details", "fingerprint"}


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of every object within, but of what is free."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            if key not in FREE:
                yield from keys(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:1]):
            yield from keys(inner, (*path, number))


def without(entries: list[dict[str, Any]], path: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The lines, and one key less."""
    changed = copy.deepcopy(entries)
    inner: Any = changed
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return changed


def write(journal: Path, entries: list[dict[str, Any]]) -> None:
    lines = Lines.create(journal, entries[0])
    for entry in entries[1:]:
        lines.append(entry)


def test_a_line_of_oneshot_that_lacks_any_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))

    def go(run: Path, **changes: Any) -> Any:
        return oneshot(copy.deepcopy(model), recipe=TWO, dataset=ids, run_dir=run, **changes)

    def stopped(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compressor.pipelines.journal.journal.Journal, "finish", stopped)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run")
    monkeypatch.undo()
    entries = Lines.read(tmp_path / "run" / "journal.jsonl").entries
    assert {entry["kind"] for entry in entries} == {"run", "stage", "end"}
    for path in [(number, *path) for number in (0, 1, len(entries) - 1) for path in keys(entries[number])]:
        copied = tmp_path / "copied"
        shutil.copytree(tmp_path / "run", copied)
        write(copied / "journal.jsonl", without(entries, path))
        with pytest.raises(
            ResumeError, match=r"another version of this package; finish the run with that one|no number|was .* and is"
        ) as told:
            go(copied, resume=True)
        assert (copied / "stage-0000.safetensors").exists(), told
        shutil.rmtree(copied)
    assert go(tmp_path / "run", resume=True).resumed is not None
