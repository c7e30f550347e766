"""Several processes share the predictions of `validate`, and each gets the report of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.validation import compare
from tests.compressor.distributed import rank_jobs
from tests.harness.validation.conftest import Workspace


def validated(folder: Path, base: str, compressed: str, dataset: str) -> dict[str, Any]:
    """What `validate` finds, two sequences at once."""
    del folder
    compare.LOGITS_AT_ONCE = 2 * 64 * 96
    report = compare.validate(base, compressed, dataset).to_dict()
    return {name: value for name, value in report.items() if name != "run"}


def test_ranks_find_what_one_process_finds(
    workspace: Workspace, pristine: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "LOGITS_AT_ONCE", compare.LOGITS_AT_ONCE)  # put back afterwards
    given = (str(workspace.base), str(pristine("W4A16")), str(workspace.dataset))
    alone = validated(tmp_path, *given)
    codes, (first, second), _ = rank_jobs.run(validated, 2, tmp_path / "ranks", *given)
    assert codes == [0, 0] and first == second == json.loads(json.dumps(alone))
    codes, told, _ = rank_jobs.run(validated, 2, tmp_path / "gone", str(tmp_path / "nowhere"), *given[1:])
    assert codes == [0, 0] and sum("nowhere" in one["text"] and one["error"] == "ModelError" for one in told) >= 1
