"""`compressor oneshot` on a mixture of experts: the flag that shows every expert all tokens, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.cli.main import main
from tests import tiny


def test_calibrate_all_experts_gives_every_expert_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        tiny.mixtral(hidden_size=128, intermediate_size=128, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    save_file({"input_ids": torch.arange(60, dtype=torch.int32).reshape(3, 20)}, tmp_path / "tokens.safetensors")
    recipe = "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W4A16, ignore: [lm_head], fallback_budget: 99}}}"
    fixed = ["oneshot", str(tmp_path / "model"), "--recipe", recipe, "--dataset", str(tmp_path / "tokens.safetensors"), "--quiet"]
    tokens = {}
    for name, flags in (("routed", []), ("all", ["--calibrate-all-experts"])):
        capsys.readouterr()
        assert main([*fixed, "--output-dir", str(tmp_path / name), "--json", *flags]) == 0
        modules = json.loads(capsys.readouterr().out)["modules"]
        tokens[name] = [record["num_tokens"] for module, record in modules.items() if module.endswith(".w1")]
    assert sum(tokens["routed"]) == 2 * 60 and len(tokens["routed"]) == 4
    assert tokens["all"] == [60] * 4
    assert main([*fixed, "--output-dir", str(tmp_path / "text")]) == 0
    assert "note: 1 x MixtralExperts taken apart into linear layers of 4 experts" in capsys.readouterr().out
