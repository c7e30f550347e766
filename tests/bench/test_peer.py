"""The comparison with a peer: fair turns, the ratio's direction, honest failures; with --peer-python, one real run of both."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from compressor.errors import UserInputError
from harness.errors import HarnessError
from tests import tiny
from tests.bench import drive, peer

_QUIET = Console(quiet=True)
# Stands in for the driver: says what it was asked, and gives the peer twice our time.
_FAKE_DRIVER = """
import json, os, sys
from pathlib import Path
job, settings_file, result_file = sys.argv[1:]
settings = json.loads(Path(settings_file).read_text())
with open(Path(settings_file).parent / "turns.txt", "a") as turns:
    print(job, os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"], "PYTHONPATH" in os.environ, file=turns)
if job == "score":
    offset = {"model": 0.0, "ours": 0.01, "peer": 0.03}[Path(settings["model"]).name]
    result = {"losses": [1.0 + offset + 0.001 * index for index in range(16)]}
else:
    seconds = {name: 2.0 if job == "peer" else 1.0 for name in ("total", "load", "data", "compress", "save")}
    result = {"seconds": seconds, "rss_peak_bytes": 3_000_000, "rss_over_start_bytes": 1_000_000, "versions": {"torch": "2"}}
Path(result_file).write_text(json.dumps(result))
"""


@pytest.fixture
def plan(tmp_path: Path) -> peer.BenchPlan:
    """A plan whose inputs exist; this interpreter plays the peer's."""
    for name in ("model", "work"):
        (tmp_path / name).mkdir()
    for name in ("recipe.yaml", "calibration.safetensors", "heldout.safetensors"):
        (tmp_path / name).touch()
    inputs = [tmp_path / name for name in ("model", "recipe.yaml", "calibration.safetensors", "heldout.safetensors")]
    return peer.BenchPlan(*inputs, peer_python=Path(sys.executable), num_samples=4, seq_len=16, rounds=3, num_threads=1)


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fake_drive.py"
    path.write_text(textwrap.dedent(_FAKE_DRIVER))
    monkeypatch.setattr(peer, "DRIVER", path)
    return path


def test_libraries_take_turns_and_get_equal_threads(plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path) -> None:
    peer.run_benchmark(plan, tmp_path / "work", _QUIET)
    turns = [line.split() for line in (tmp_path / "work" / "turns.txt").read_text().splitlines()]
    assert [turn[0] for turn in turns] == ["ours", "peer", "peer", "ours", "ours", "peer", "score", "score", "score"]
    assert {turn[1] for turn in turns} == {"1"}
    assert {turn[0]: turn[-1] for turn in turns} == {"ours": "True", "peer": "False", "score": "False"}


def test_ratio_above_one_means_that_the_peer_took_more(plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path) -> None:
    result = peer.run_benchmark(plan, tmp_path / "work", _QUIET)
    rows = {row["name"]: row for row in result["quantities"]}
    assert rows["whole run"]["peer_over_ours"] == 2.0
    assert rows["peak memory over start"]["peer_over_ours"] == 1.0
    assert rows["peak memory"]["median"] == {"ours": 3.0, "peer": 3.0}
    assert len(rows["whole run"]["ours"]) == 3


def test_losses_are_compared_sequence_by_sequence(plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path) -> None:
    loss = peer.run_benchmark(plan, tmp_path / "work", _QUIET)["loss"]
    difference = loss["differences"]["ours_minus_peer"]
    # The sequences differ among each other but the pairs do not: a paired interval is a point.
    assert difference["estimate"] == pytest.approx(-0.02)
    assert difference["low"] == pytest.approx(-0.02)
    assert difference["high"] == pytest.approx(-0.02)
    assert loss["num_sequences"] == 16


def test_the_medians_ignore_one_disturbed_round() -> None:
    quantity = peer.Quantity("whole run", "s", ours=(1.0, 9.0, 1.0), peer=(3.0, 3.0, 30.0))
    assert quantity.ratio == 3.0


def test_a_failing_run_shows_its_last_lines(plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path) -> None:
    fake_driver.write_text("print('on the way')\nraise SystemExit('no such scheme')")
    with pytest.raises(HarnessError, match=r"ours exited with 1(.|\n)*no such scheme"):
        peer.run_benchmark(plan, tmp_path / "work", _QUIET)


@pytest.mark.parametrize("name", ["model", "recipe", "calibration", "heldout", "peer_python"])
def test_missing_inputs_are_named_before_the_first_run(plan: peer.BenchPlan, tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {**vars(plan), name: tmp_path / "nowhere"}
    with pytest.raises(UserInputError, match=f"{name} .*nowhere does not exist"):
        peer.run_benchmark(peer.BenchPlan(**values), tmp_path / "work", _QUIET)
    assert not list((tmp_path / "work").iterdir())


def _arguments(plan: peer.BenchPlan, output_dir: Path) -> list[str]:
    names = ("model", "recipe", "calibration", "heldout", "peer_python", "num_samples", "seq_len", "rounds", "num_threads", "device")
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(plan, name))) for name in names]
    return [word for pair in [*pairs, ("--output-dir", str(output_dir))] for word in pair]


def test_command_writes_json_and_shows_every_row(
    plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert peer.main(_arguments(plan, tmp_path / "out")) == 0
    result = json.loads((tmp_path / "out" / "peer.json").read_text())
    assert result["plan"]["model"] == "model"
    assert str(tmp_path) not in json.dumps(result)
    shown = capsys.readouterr().out
    for row in result["quantities"]:
        assert row["name"] in shown
    assert "ours minus peer" in shown


def test_an_existing_result_is_kept(plan: peer.BenchPlan, fake_driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "peer.json").write_text("measured before")
    assert peer.main(_arguments(plan, tmp_path / "out")) == 3
    assert "exists; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "peer.json").read_text() == "measured before"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with token arrays beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.llama(vocab_size=96, hidden_size=128, intermediate_size=256, pad_token_id=0, dtype="bfloat16").to(torch.bfloat16).save_pretrained(
        folder / "model"
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0"))
    # The peer insists on a tokenizer, though the samples are tokens already.
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(folder / "model")
    for name, num_sequences in (("calibration", 16), ("heldout", 12)):
        save_file({"input_ids": torch.randint(0, 96, (num_sequences, 32), dtype=torch.int32)}, folder / f"{name}.safetensors")
    return folder


def test_score_is_the_mean_next_token_loss_of_each_sequence(tiny_model: Path) -> None:
    settings = {"model": str(tiny_model / "model"), "heldout": str(tiny_model / "heldout.safetensors"), "device": "cpu"}
    losses = drive.score(settings)["losses"]
    model = LlamaForCausalLM.from_pretrained(tiny_model / "model")
    ids = load_file(tiny_model / "heldout.safetensors")["input_ids"].long()
    with torch.no_grad():
        expected = model(input_ids=ids[10:11], labels=ids[10:11]).loss.item()
    assert len(losses) == 12
    assert losses[10] == pytest.approx(expected, abs=2e-3)


@pytest.mark.peer
def test_both_libraries_compress_one_tiny_model(tiny_model: Path, peer_python: Path, repo_root: Path, tmp_path: Path) -> None:
    plan = peer.BenchPlan(
        model=tiny_model / "model",
        recipe=repo_root / "golden" / "reference" / "recipe.yaml",
        calibration=tiny_model / "calibration.safetensors",
        heldout=tiny_model / "heldout.safetensors",
        peer_python=peer_python,
        num_samples=16,
        seq_len=32,
        rounds=1,
        num_threads=1,
    )
    result = peer.run_benchmark(plan, tmp_path, _QUIET)
    assert result["versions"]["peer"]["llmcompressor"]
    for library in ("ours", "peer"):
        assert result["runs"][library][0]["seconds"]["compress"] > 0
        assert (tmp_path / library / "model.safetensors").is_file()
        assert abs(result["loss"]["differences"][f"{library}_minus_base"]["estimate"]) < 0.05
