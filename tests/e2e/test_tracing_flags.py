"""Every flag of tracing changes what it says it changes, and the engines give the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli.main import main
from compressor.entrypoints.oneshot import oneshot
from compressor.errors import TargetError, UserInputError

GPTQ = "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W4A16, ignore: [lm_head]}}}"


class Flags:
    """Runs `compressor oneshot` on the tiny model; returns the digest of the weights."""

    def __init__(self, model: Path, tokens: Path, folder: Path) -> None:
        self.model, self.tokens, self.folder, self.count = model, tokens, folder, 0

    def __call__(self, *flags: str) -> str:
        self.count += 1
        out = self.folder / f"out{self.count}"
        given = ["oneshot", str(self.model), "--recipe", GPTQ, "--dataset", str(self.tokens), "--output-dir", str(out), "--quiet", "--json"]
        assert main([*given, "--num-calibration-samples", "4", *flags]) == 0
        return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def flags(llama_dir: Path, tokens_file: Path, tmp_path: Path) -> Flags:
    return Flags(llama_dir, tokens_file, tmp_path)


def test_both_engines_give_the_same_bytes(flags: Flags) -> None:
    two = ("--passes", "two")
    assert flags("--engine", "graph", *two) == flags("--engine", "suspend") == flags("--engine", "auto", "--verify", "all", *two)
    assert flags("--engine", "graph") == flags("--verify", "all") != flags("--engine", "suspend")


def test_error_propagation_can_be_switched_off(flags: Flags) -> None:
    without = flags("--no-propagate-error", "--verify", "off")
    assert without != flags() and without == flags("--no-propagate-error", "--engine", "suspend")


def test_leaves_and_variants_reach_the_tracer(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    plain = flags()
    assert flags("--leaf", "transformers.masking_utils:create_causal_mask", "--max-variants", "1") == plain
    given = [
        "oneshot",
        str(flags.model),
        "--recipe",
        GPTQ,
        "--dataset",
        str(flags.tokens),
        "--output-dir",
        str(flags.folder / "no"),
        "--quiet",
    ]
    assert main([*given, "--engine", "graph", "--leaf", "transformers.masking_utils:no_such"]) == 1
    assert "names no function" in capsys.readouterr().err and not (flags.folder / "no").exists()
    with pytest.raises(SystemExit):
        main([*given, "--max-variants", "0"])


def test_a_choice_that_would_do_nothing_is_refused(llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match="verify: 'all' was given, but the basic pipeline traces nothing"):
        oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, pipeline="basic", verify="all")
    with pytest.raises(UserInputError, match="engine: 'graphs' does not exist"):
        oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, engine="graphs")  # type: ignore[arg-type]


def test_the_record_is_json_whatever_the_engine(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    flags("--engine", "suspend")
    assert json.loads(capsys.readouterr().out)["pipeline"] == "sequential"
