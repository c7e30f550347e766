"""The benchmark of quantization-aware training makes every model, and its verdict follows the intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import tiny
from tests.bench.qat import MODELS, PAIRS, main, verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer with tokens of its own."""

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny")
    tiny.llama(
        vocab_size=32,
        max_position_embeddings=16,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).to(torch.bfloat16).save_pretrained(path)
    for name in ("calibration", "heldout"):
        save_file({"input_ids": torch.randint(0, 32, (12, 16), dtype=torch.int32)}, path / f"{name}.safetensors")
    return path


@pytest.mark.nightly
def test_every_model_is_made_and_scored_on_all_sequences(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--model", str(folder), "--steps", "5", "--batch-size", "2", "--learning-rate", "0.01", "--json", str(tmp_path / "r")])
    result = json.loads((tmp_path / "r").read_text())
    assert set(result["mean_nats_per_token"]) == set(MODELS) and result["num_sequences"] == 12
    assert set(result["differences"]) == {f"{left}_minus_{right}" for left, right in PAIRS}
    assert len({round(loss, 9) for loss in result["mean_nats_per_token"].values()}) == len(MODELS)
    assert result["settings"]["steps"] == 5 and result["settings"]["learning_rate"] == 0.01
    assert code == (1 if verdict(result) else 0)
    text = capsys.readouterr().out
    assert all(words in text for words in MODELS.values())


def test_the_verdict_needs_both_intervals_below_zero() -> None:
    below, across = {"estimate": -0.2, "low": -0.3, "high": -0.1}, {"estimate": -0.1, "low": -0.3, "high": 0.1}
    assert verdict({"differences": {"qat_minus_rtn": below, "qat_minus_trained_rtn": below}}) == []
    (said,) = verdict({"differences": {"qat_minus_rtn": below, "qat_minus_trained_rtn": across}})
    assert "not better than float training, rounded to nearest: -0.1000 (-0.3000 to +0.1000)" in said
    assert len(verdict({"differences": {"qat_minus_rtn": across, "qat_minus_trained_rtn": across}})) == 2


def test_what_cannot_be_read_is_one_line_and_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "nowhere"), "--steps", "5", "--seed", "1"]) == 3
    assert capsys.readouterr().err.startswith("tests.bench.qat: error: ")
