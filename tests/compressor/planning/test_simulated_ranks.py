"""What eight ranks would gain, by the code that shares out the solvers and a machine of known speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from compressor import oneshot, plan
from compressor.distributed import ranks
from compressor.planning import planner, stages
from compressor.planning.estimate import Speed
from tests import tiny

RECIPE = {"quant_modifiers": {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "mode": "fast"}}}
_LAYER = {"num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 32000, "dtype": "bfloat16", "max_position_embeddings": 2048}
DENSE = tiny.config("llama", hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, architectures=["LlamaForCausalLM"], **_LAYER)
EXPERTS = tiny.config(
    "qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_key_value_heads=4,
    num_experts=64,
    architectures=["Qwen3MoeForCausalLM"],
    **_LAYER,
)
# Products of float32 and of bfloat16, a column, an element of it: a CPU, and a device whose products gain far more than its columns.
CPU, DEVICE = Speed(28e9, 28e9, 6e-6, 1e-9), Speed(5e13, 4e14, 2e-5, 1e-12)


@pytest.mark.parametrize(
    ("config", "speed", "passes"),
    [(DENSE, CPU, "one"), (DENSE, CPU, "two"), (EXPERTS, CPU, "one"), (EXPERTS, DEVICE, "one"), (EXPERTS, DEVICE, "two")],
    ids=["dense, cpu, one", "dense, cpu, two", "experts, cpu, one", "experts, device, one", "experts, device, two"],
)
def test_eight_ranks_are_six_and_a_half_times_as_fast(
    config: PreTrainedConfig, speed: Speed, passes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device solvers bound a layer of experts: shared out in turns, and not by their cost, they would give 5.7 at most."""
    monkeypatch.setattr(planner, "measure_speed", lambda *_: speed)
    config.save_pretrained(tmp_path)
    made = plan(tmp_path, recipe=RECIPE, num_calibration_samples=512, max_seq_length=2048, ranks=8, passes=passes)
    assert made.alone_seconds is not None
    traced = made.estimate.stages[0].seconds  # by every rank, which weighs more beside two layers than beside many
    assert 6.5 <= (made.alone_seconds - traced) / (made.estimate.seconds - traced) <= 8


def test_a_run_shares_solvers_out_by_the_costs_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"hidden_size": 32, "intermediate_size": 96, "moe_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny.qwen3_moe(num_hidden_layers=1, num_experts_per_tok=4, **size).save_pretrained(tmp_path)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}}
    common: dict[str, Any] = {"recipe": {"quant_modifiers": {"GPTQModifier": {"config_groups": {"0": group}, "ignore": ["lm_head"]}}}}
    common |= {"max_seq_length": 8, "passes": "two"}

    def noting(place: Any) -> list[list[float]]:
        noted: list[list[float]] = []
        share_out = ranks.share_out

        def noted_first(costs: Sequence[float], size: int) -> list[int]:
            noted.append(sorted(costs))
            return share_out(costs, size)

        monkeypatch.setattr(place, "share_out", noted_first)
        return noted

    planned, ran = noting(stages), noting(ranks)
    plan(tmp_path, num_calibration_samples=8, **common)
    oneshot(tmp_path, dataset=torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0)), **common)
    assert any(len(costs) == 2 + 2 * 4 and min(costs) > 0 for costs in ran)  # q, k and v; o; and of each expert gate and up, and down
    assert [costs for costs in ran if any(costs)] == [costs for costs in planned if any(costs)][: len(ran)]
