"""The README of the reference model says what the records say, and a model that cannot judge is not accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.reference_model import readme
from tests.reference_model.readme import is_good_enough, main, render_readme

_TRAINING: dict[str, Any] = {
    "plan": {"seed": 7, "num_steps": 6000, "batch_size": 16, "seq_len": 256},
    "corpus": {"files": 1234, "held_out_files": 12, "bytes": 99, "sha256": "abc"},
    "tokens_trained": 24_576_000,
    "tokens_in_corpus": 30_000_000,
    "held_out": {"loss_nats_per_token": 2.34567, "bits_per_byte": 1.23456, "bytes_per_token": 3.1},
    "minutes": 61.5,
    "versions": {"python": "3.11", "torch": "2.13"},
    "machine": {"device": "cpu"},
}
_ARRAYS: dict[str, Any] = {
    "calibration": {"files": {"a.py": "1"}, "sequences": 128},
    "heldout": {"files": {"b.py": "2", "c.py": "3"}, "sequences": 256},
    "seq_len": 256,
    "files_sha256": "def",
}


def _quality(rtn: tuple[float, float, float], gptq: tuple[float, float, float]) -> dict[str, Any]:
    named = {"rtn_minus_base": rtn, "gptq_minus_rtn": gptq, "gptq_minus_base": (0.02, 0.01, 0.03)}
    return {
        "confidence": 0.95,
        "num_sequences": 256,
        "mean_nats_per_token": {"base": 2.0, "rtn": 2.05, "gptq": 2.02},
        "differences": {name: dict(zip(("estimate", "low", "high"), values, strict=True)) for name, values in named.items()},
    }


_GOOD = _quality((0.05, 0.04, 0.06), (-0.03, -0.04, -0.02))


@pytest.mark.parametrize(
    "fact", ["| 7 |", "24,576,000", "`abc`", "2.3457", "1.2346", "`def`", "| +0.0500 (+0.0400 to +0.0600) |", "61.5 minutes"]
)
def test_readme_holds_what_was_recorded(fact: str) -> None:
    assert fact in render_readme(_TRAINING, _ARRAYS, _GOOD)


@pytest.mark.parametrize(
    ("quality", "is_enough"),
    [
        (_GOOD, True),
        (_quality((0.05, -0.01, 0.11), (-0.03, -0.04, -0.02)), False),
        (_quality((0.05, 0.04, 0.06), (-0.03, -0.07, 0.01)), False),
        (_quality((0.05, 0.04, 0.06), (0.03, 0.02, 0.04)), False),
    ],
    ids=["both show", "rounding does not show", "GPTQ does not show", "GPTQ is worse"],
)
def test_a_model_judges_only_if_both_differences_show(quality: dict[str, Any], is_enough: bool) -> None:
    assert is_good_enough(quality) is is_enough


def test_command_writes_both_files_and_its_exit_code_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training.json").write_text(json.dumps(_TRAINING))
    (tmp_path / "arrays.json").write_text(json.dumps(_ARRAYS))
    for quality, code in ((_GOOD, 0), (_quality((0.0, -0.1, 0.1), (0.0, -0.1, 0.1)), 1)):
        monkeypatch.setattr(readme, "measure_quality", lambda folder, work_dir, quality=quality: quality)
        assert main([str(tmp_path)]) == code
        assert json.loads((tmp_path / "quality.json").read_text()) == quality
        assert (tmp_path / "README.md").read_text() == render_readme(_TRAINING, _ARRAYS, quality)


def test_missing_records_are_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "training.json: is missing" in error
    assert error.count("\n") == 1


def test_the_readme_in_the_repository_is_rendered_from_its_records(reference_model: Path) -> None:
    records = [json.loads((reference_model / name).read_text()) for name in ("training.json", "arrays.json", "quality.json")]
    assert (reference_model / "README.md").read_text() == render_readme(*records)
    assert is_good_enough(records[2])


def test_readme_says_which_code_made_the_steps() -> None:
    assert "These weights are older" in render_readme(_TRAINING, _ARRAYS, _GOOD)
    named = render_readme(_TRAINING | {"trainer": "compressor.training, mode replay"}, _ARRAYS, _GOOD)
    assert "The steps were made by compressor.training, mode replay." in named and "older" not in named
