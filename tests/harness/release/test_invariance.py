"""Two ways to one prediction, where the checkpoint rounds activations: codes at a tie fall either way, and nothing else may."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM

from compressor import QuantizationModifier, oneshot
from compressor.model.checkpoints.format import unpacks_as_it_reads
from harness.release import invariance
from harness.release.candidate import Candidate
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome
from tests import tiny
from tests.harness.release.conftest import NUM_TOKENS, POLICY, Release, change_steps_on
from tests.harness.release.test_planted_faults import saved_otherwise

WAYS = {check.claim.name: check for check in invariance.CHECKS[:4]}
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def candidate_of(release: Release, inputs: dict[str, Any]) -> Candidate:
    """The checkpoint with rounded inputs, on kernels that sum in another order each time: embeddings move by a few roundings."""
    release.edit_json("config.json", lambda data: data["quantization_config"]["config_groups"]["group_0"].update(input_activations=inputs))
    rows = load_file(release.dataset)["input_ids"].tolist()
    found = Candidate(release.base, release.compressed, POLICY, rows, torch.device("cpu"), seed=0)
    generator = torch.Generator().manual_seed(0)

    def move(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 2.0**-18 * (torch.randint(0, 2, output.shape, generator=generator) * 2 - 1))

    found.wide_model.get_input_embeddings().register_forward_hook(move)  # type: ignore[operator]
    return found


def records(candidate: Candidate) -> list[CheckRecord]:
    return [check.record(candidate) for check in WAYS.values()]


@pytest.mark.parametrize("inputs", [PER_TOKEN, {**PER_TOKEN, "type": "float"}, {**PER_TOKEN, "num_bits": 4}], ids=["W8A8", "fp8", "int4"])
def test_codes_at_a_tie_fall_either_way_and_damage_nothing(release: Release, inputs: dict[str, Any]) -> None:
    candidate = candidate_of(release, inputs)
    schemes = [getattr(module, "quantization_scheme", None) for module in candidate.wide_model.modules()]
    found = records(candidate)
    assert all(record.outcome is Outcome.PASS for record in found), [record.summary for record in found]
    assert any("where activations are not rounded: those at a tie fall either way" in record.summary for record in found)
    assert [getattr(module, "quantization_scheme", None) for module in candidate.wide_model.modules()] == schemes


def test_fp4_which_is_unpacked_to_bfloat16_only_is_looked_at_in_float32(made: Release, tmp_path: Path) -> None:
    recipe = QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme="NVFP4")
    rows = load_file(made.dataset)["input_ids"]
    oneshot(str(made.base), recipe=recipe, dataset=rows[:4], output_dir=tmp_path / "fp4", progress=False)
    candidate = Candidate(made.base, tmp_path / "fp4", POLICY, rows.tolist(), torch.device("cpu"), seed=0)
    found = records(candidate)
    assert all(record.outcome is Outcome.PASS for record in found), [record.summary for record in found]
    assert {parameter.dtype for parameter in candidate.wide_model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:transformers 5.23 dequantizes a model with quantized experts")
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_experts_are_saved_again_as_transformers_dequantized_them(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.mixtral(num_hidden_layers=1, hidden_size=128, intermediate_size=128).save_pretrained(tmp_path / "base")
    recipe, rows = QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme=scheme), [list(range(16))] * 8
    oneshot(str(tmp_path / "base"), recipe=recipe, output_dir=tmp_path / "out", progress=False)
    candidate = Candidate(tmp_path / "base", tmp_path / "out", POLICY, rows, torch.device("cpu"), seed=0)
    (check,) = (check for check in invariance.CHECKS if check.claim is invariance.RELOAD)
    found = check.record(candidate)
    if scheme == "FP8_DYNAMIC" and not unpacks_as_it_reads():  # before 5.21 it goes on rounding inputs, which what it saves does not
        assert found.outcome is Outcome.FAIL and "logits are others" in found.summary
        return
    assert found.outcome is Outcome.PASS and "saved as floats, with save_original_format=False" in found.summary
    saved_otherwise(candidate, monkeypatch)
    assert check.record(candidate).outcome is Outcome.FAIL


def test_a_layer_that_rounds_a_token_by_what_stands_beside_it_is_named(release: Release) -> None:
    found = records(candidate_of(release, {**PER_TOKEN, "strategy": "tensor"}))
    assert any(record.outcome is Outcome.FAIL and "by what stands beside it (model.layers.0." in record.summary for record in found)


@pytest.mark.parametrize(
    ("factor", "of_weights_too", "outcome"), [(1, False, Outcome.PASS), (40, False, Outcome.FAIL), (1, True, Outcome.FAIL)]
)
def test_dtypes_may_part_by_what_rounding_moves_and_by_no_more(
    release: Release, factor: float, of_weights_too: bool, outcome: Outcome
) -> None:
    """As bfloat16 and float32 do with activations of 4 bits, of which each code that falls the other way is a large step."""
    candidate = candidate_of(release, {**PER_TOKEN, "num_bits": 4})
    candidate.policy = POLICY.model_copy(update={"generation": POLICY.generation.model_copy(update={"max_dtype_deviation": 5e-3})})
    layer: Any = candidate.model.get_submodule("model.layers.0.mlp.down_proj")

    def move(module: Any, given: Any, logits: torch.Tensor) -> torch.Tensor:
        is_rounding = layer.quantization_scheme.input_activations is not None
        return logits * (1 + 0.02 * factor) if is_rounding or of_weights_too else logits

    candidate.model.get_output_embeddings().register_forward_hook(move)  # type: ignore[operator]
    (check,) = (check for check in invariance.CHECKS if check.claim is invariance.DTYPE)
    record = check.record(candidate)
    assert record.outcome is outcome
    assert ("rounding activations moves no more than" in " ".join(record.findings)) is (factor > 1)


def test_padding_that_leaks_beside_rounding_is_seen_without_it(release: Release) -> None:
    candidate = candidate_of(release, PER_TOKEN)
    candidate.wide_model.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda module, given, output: output + 0.1 * output.mean((0, 1))
    )
    failed = {record.name for record in records(candidate) if record.outcome is Outcome.FAIL}
    assert failed >= {"invariance.padding_left", "invariance.padding_right", "invariance.batch"}


def test_a_cache_is_looked_at_around_the_sliding_window_and_up_to_the_last_position(made: Release) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=NUM_TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64, sliding_window=24, pad_token_id=0,
    )  # fmt: skip
    rows = load_file(made.dataset)["input_ids"].tolist()
    candidate, model = Candidate(made.base, made.compressed, POLICY, rows, torch.device("cpu"), seed=0), MistralForCausalLM(config).eval()
    candidate.base_model, candidate.wide_base, candidate.wide_model = model, model, copy.deepcopy(model)
    sound = WAYS["invariance.cache"].record(candidate)
    assert sound.outcome is Outcome.PASS and sound.evidence["longest cache"] == 63
    assert sound.summary.endswith(", on caches of up to 63 tokens; the model has 64 positions")
    change_steps_on(candidate.wide_model, lambda length: length == 24)
    assert WAYS["invariance.cache"].record(candidate).outcome is Outcome.FAIL
