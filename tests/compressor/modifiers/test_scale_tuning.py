"""Scales and norms are trained towards the uncompressed model, on other sequences than those that judge; codes stay"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)

from compressor import load_compressed, oneshot
from compressor.algorithms.scale_tuning import FixedCodes, divergence, move_gradient, moved_scale, scaled_weight, sum_by_scale
from compressor.errors import CalibrationError, NumericsError, RecipeError, SchemeError, TracingError
from compressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from compressor.modifiers.scale_tuning import ScaleTuningModifier
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.nn import QuantizedLayer
from compressor.numerics import QuantizationArgs, dequantize, quantize, weight_qparams
from tests import tiny

INT3 = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 16}
TOKENS = torch.randint(0, 96, (64, 32), generator=torch.Generator().manual_seed(5))
FORMATS: dict[str, dict[str, Any]] = {
    "groups": {"num_bits": 3, "group_size": 16},
    "asymmetric": {"num_bits": 4, "group_size": 16, "symmetric": False},
    "channels": {"num_bits": 4, "strategy": "channel"},
    "tensor": {"num_bits": 4, "strategy": "tensor"},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
}


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return tiny.llama(vocab_size=96, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2).to(dtype).eval()


def recipe(
    weights: dict[str, Any] | None = None, quantizer: str = "GPTQModifier", ignore: Any = ("lm_head",), **tuning: Any
) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": weights or INT3}}
    chosen = {"steps": 16, "lr": 1e-2, "batch_size": 8, "held_out_frac": 0.25, **tuning}
    return {quantizer: {"ignore": list(ignore), "config_groups": groups}, "ScaleTuningModifier": chosen}


def only(quantizer: dict[str, Any]) -> dict[str, Any]:
    return {name: settings for name, settings in quantizer.items() if name != "ScaleTuningModifier"}


def note_of(result: Any) -> str:
    return next(note for note in result.report.notes if note.startswith("ScaleTuningModifier"))


def held_out(note: str) -> tuple[float, float]:
    before, _, after = note.partition("KL(base || compressed) ")[2].split()[:3]
    return float(before), float(after)


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {name: layer.codes().float() for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def kl(base: nn.Module, model: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        return float(divergence(base(ids).logits.flatten(0, 1), model(ids).logits.flatten(0, 1)).mean())


def test_the_model_comes_closer_to_its_base_and_codes_stay() -> None:
    plain = oneshot(llama(), recipe=only(recipe()), dataset=TOKENS).model
    tuned = oneshot(llama(), recipe=recipe(), dataset=TOKENS)
    before, after = held_out(note_of(tuned))
    assert after < before
    assert kl(llama(), tuned.model, TOKENS) < 0.95 * kl(llama(), plain, TOKENS)
    assert all(torch.equal(one, other) for one, other in zip(codes(plain).values(), codes(tuned.model).values(), strict=True))
    moved = {name for name, record in tuned.report.modules.items() if record.details.get("tuned", 0) > 0}
    assert {"model.norm", "model.layers.0.mlp.up_proj", "model.layers.1.input_layernorm"} <= moved
    assert {name for name, one in tuned.model.named_parameters() if one.requires_grad} >= {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_scales_of_its_own_is_trained(name: str) -> None:
    tuned = oneshot(llama(), recipe=recipe(FORMATS[name], "QuantizationModifier", tune_norms=name != "groups"), dataset=TOKENS)
    before, after = held_out(note_of(tuned))
    assert after < before
    assert any("layers" in module and "proj" in module and "tuned" in record.details for module, record in tuned.report.modules.items())


def test_what_is_measured_at_the_end_is_what_is_stored(tmp_path: Path) -> None:
    llama(torch.bfloat16).save_pretrained(tmp_path / "base")
    result = oneshot(tmp_path / "base", recipe=recipe(), dataset=TOKENS, output_dir=tmp_path / "out", seed=3)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    judges = TOKENS[sorted(order[:16])]
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert kl(base, load_compressed(tmp_path / "out"), judges) == pytest.approx(held_out(note_of(result))[1], rel=2e-2)


@pytest.mark.nightly
def test_nothing_changes_where_nothing_improves() -> None:
    plain = oneshot(llama(), recipe=only(recipe()), dataset=TOKENS).model
    spoilt = oneshot(llama(), recipe=recipe(lr=0.5, steps=40, evaluate_every=5, patience=2, batch_size=1, seed=1), dataset=TOKENS[:4])
    plain = oneshot(llama(), recipe=only(recipe()), dataset=TOKENS[:4]).model
    assert "nothing was changed; it stopped early" in note_of(spoilt)
    assert "10 of 40 steps" in note_of(spoilt)
    ours, theirs = spoilt.model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not any("tuned" in record.details for record in spoilt.report.modules.values())


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_both_engines_and_a_second_run_give_the_same_bytes(engine: str) -> None:
    first, second = (oneshot(llama(), recipe=recipe(steps=6), dataset=TOKENS, engine=engine) for _ in range(2))
    assert first.report.to_dict() == second.report.to_dict()
    assert all(
        torch.equal(one, other) for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    )


@pytest.mark.nightly
def test_padding_counts_nowhere() -> None:
    rows = [{"input_ids": row[: 20 + index % 11].tolist()} for index, row in enumerate(TOKENS)]
    padded = oneshot(llama(), recipe=recipe(steps=16), dataset=rows, batch_size=8)
    apart = oneshot(llama(), recipe=recipe(steps=16), dataset=rows, batch_size=1)
    assert held_out(note_of(padded)) == pytest.approx(held_out(note_of(apart)), rel=1e-2)


def test_a_step_has_at_most_the_sequences_there_are() -> None:
    results = [oneshot(llama(), recipe=recipe(steps=4, batch_size=size), dataset=TOKENS[:8]) for size in (6, 10**9)]
    assert "4 of 4 steps of 6 sequences" in note_of(results[1]) and note_of(results[0]) == note_of(results[1])


def test_copies_of_what_judges_are_not_trained_on() -> None:
    """Else a state that learnt the judges by heart would be the best one."""
    note = note_of(oneshot(llama(), recipe=recipe(steps=4), dataset=TOKENS[:4].repeat(3, 1)))
    found = re.search(r"on (\d+) that were trained on", note)
    assert found is not None and 0 < int(found[1]) <= 12 - 3 - 2, note
    with pytest.raises(CalibrationError, match="its 8 sequences are copies of the 2 that are held out, and nothing is left"):
        oneshot(llama(), recipe=recipe(steps=4), dataset=TOKENS[:1].repeat(8, 1))


@pytest.mark.parametrize("learned", [ScaleTuningModifier(steps=4), SpinQuantModifier(rotations=["R1"], learnable=True, steps=4)], ids=type)
def test_sequences_that_count_no_token_judge_nothing(learned: Any) -> None:
    def rows(*counted: int) -> DataLoader[Any]:
        rows = [{"input_ids": TOKENS[row : row + 1], "loss_mask": torch.full((1, 32), int(row in counted))} for row in range(8)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def made(data: DataLoader[Any]) -> str:
        group = {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 16, "strategy": "group"}}
        quantizing = QuantizationModifier(config_groups={"g": group}, ignore=["lm_head"])
        own = learned.model_copy(deep=True)
        recipe = [own, quantizing] if isinstance(own, SpinQuantModifier) else [quantizing, own]
        return " ".join(oneshot(llama(), recipe=recipe, dataset=data).report.notes)

    for counted in [(0, 1), (3, 6), (5, 7)]:
        note = made(rows(*counted))
        assert "held-out sequence" in note and not re.search(r"(base.*|model) 0 -> 0|below 0 on", note), note
    with pytest.raises(CalibrationError, match="8 batches hold 1 sequences that can be cut out and count a token, and one is held out"):
        made(rows(4))


@pytest.mark.parametrize("quantized_head", [False, True])
def test_heads_may_be_quantized_or_tied(quantized_head: bool) -> None:
    tied = tiny.opt(vocab_size=96, num_attention_heads=2, max_position_embeddings=32, init_std=0.2)
    model, ignore = (llama(), ()) if quantized_head else (tied, ("lm_head",))
    before, after = held_out(note_of(oneshot(model, recipe=recipe(ignore=ignore), dataset=TOKENS)))
    assert after < before


def test_experts_are_trained_one_by_one() -> None:
    torch.manual_seed(0)
    config = tiny.config("qwen3_moe", vocab_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=32)
    config.initializer_range = 0.2
    result = oneshot(Qwen3MoeForCausalLM(config).eval(), recipe=recipe(ignore=("lm_head", "re:.*mlp.gate$")), dataset=TOKENS)
    before, after = held_out(note_of(result))
    assert after < before
    assert "tuned" in result.report.modules["model.layers.1.mlp.experts.3.down_proj"].details
    assert "tuned" in result.report.modules["model.layers.0.self_attn.q_norm"].details


def test_an_encoder_is_judged_by_its_last_hidden_states() -> None:
    bert = tiny.bert(vocab_size=96, num_attention_heads=2, initializer_range=0.2)
    result = oneshot(bert, recipe=recipe(quantizer="QuantizationModifier", ignore=()), dataset=TOKENS)
    assert "squared error of the output" in note_of(result)
    assert "best after step" in note_of(result)


def test_what_cannot_be_trained_is_refused_before_any_batch_runs() -> None:
    with pytest.raises(RecipeError, match="no modifier before it quantizes weights"):
        oneshot(llama(), recipe={"ScaleTuningModifier": {}}, dataset=TOKENS)
    with pytest.raises(SchemeError, match="MX format, whose scales, powers of two, cannot be trained"):
        oneshot(
            llama(),
            recipe={"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "MXFP4A16"}, "ScaleTuningModifier": {}},
            dataset=TOKENS,
        )
    with pytest.raises(RecipeError, match=r"q_proj \(one of 14\) is quantized by a modifier behind it; let it stand last"):
        oneshot(llama(), recipe=dict(reversed(recipe().items())), dataset=TOKENS)
    with pytest.raises(CalibrationError, match="1 sequence was given; give at least 2"):
        oneshot(llama(), recipe=recipe(), dataset=TOKENS[:1])
    with pytest.raises(RecipeError, match="held_out_frac"):
        ScaleTuningModifier(held_out_frac=1.0)


@pytest.mark.parametrize("learned", ["scales", "rotations"])
def test_a_base_whose_outputs_are_no_numbers_is_nothing_to_aim_at(learned: str) -> None:
    model, ids = llama(), torch.where(TOKENS == 95, 0, TOKENS)
    ids[41, 3] = 95  # one token of one sequence
    with torch.no_grad():
        model.model.embed_tokens.weight[95, 7] = torch.nan
    rounding = QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": INT3}}, ignore=["lm_head"])
    modifiers = [rounding, ScaleTuningModifier(steps=1)] if learned == "scales" else [SpinQuantModifier(learnable=True), rounding]
    with pytest.raises(NumericsError, match=r"\[.\]: the uncompressed model gives NaN or infinity on batch \d+ of the calibration data"):
        oneshot(model, recipe=modifiers, dataset=ids)


def test_a_compiled_layer_is_refused_in_our_words() -> None:
    model: Any = tiny.llama()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}}}
    recipe = [GPTQModifier(config_groups=groups, ignore=["lm_head"]), ScaleTuningModifier(steps=2)]
    with pytest.raises(TracingError, match=r"layers\.0: is compiled, .* give the model as it was before torch.compile"):
        oneshot(model, recipe=recipe, dataset=torch.randint(64, (8, 16)))


@pytest.mark.nightly
def test_logits_behind_a_soft_cap_are_kept_whole() -> None:
    gemma = tiny.gemma2(
        vocab_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2, final_logit_softcapping=5.0
    )
    result = oneshot(gemma.eval(), recipe=recipe(steps=8), dataset=TOKENS)
    assert f"{64 * 32 * 96 * 4 / 1e6:.1f} MB of base outputs" in note_of(result)
    assert f"{64 * 32 * 32 * 4 / 1e6:.1f} MB of base outputs" in note_of(oneshot(llama(), recipe=recipe(steps=4), dataset=TOKENS))


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_of_scales_are_those_of_the_plain_formula(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    qparams = weight_qparams(weight, args, "w", torch.tensor([50.0]) if args.has_global_scale else None)
    found = quantize(weight, qparams, args)
    stored = torch.float8_e4m3fn if args.has_global_scale else torch.bfloat16
    fixed = FixedCodes(found, qparams, args, None, stored, torch.float32, 0.5)
    move = torch.full_like(qparams.scale, 0.1, dtype=torch.float32)
    value = scaled_weight(move, fixed)
    assert torch.equal(value, dequantize(found, qparams._replace(scale=moved_scale(move, fixed)), args))
    assert torch.equal(scaled_weight(torch.zeros_like(move), fixed), dequantize(found, qparams, args))
    slope = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    expected = 0.5 * sum_by_scale(slope * value, tuple(move.shape), args)
    assert torch.allclose(move_gradient(slope, move, fixed), expected, rtol=1e-4, atol=1e-3)


def test_columns_in_an_order_of_their_own_are_summed_by_their_group() -> None:
    values, groups = torch.arange(12.0).reshape(2, 6), torch.tensor([1, 0, 1, 0, 2, 2], dtype=torch.int32)
    args = QuantizationArgs(num_bits=4, group_size=2, actorder="group")
    assert sum_by_scale(values, (2, 3), args, groups).tolist() == [[4.0, 2.0, 9.0], [16.0, 14.0, 21.0]]


def test_the_checkpoint_says_what_was_trained(tmp_path: Path) -> None:
    llama(torch.bfloat16).save_pretrained(tmp_path / "base")
    oneshot(tmp_path / "base", recipe=recipe(), dataset=TOKENS, output_dir=tmp_path / "out")
    base, out = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert not torch.equal(base["model.norm.weight"], out["model.norm.weight"])
    assert torch.equal(base["lm_head.weight"], out["lm_head.weight"])


class Root(nn.Module):
    """A norm that does not call itself one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LN(nn.LayerNorm):
    pass


class Gain(nn.Module):
    """A norm with vectors of other names, and something inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma, self.beta, self.act = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.gamma) * self.act(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + self.beta


class Shift(nn.Module):
    """Not a norm: it adds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.beta


class Slope(Root):
    """Not a norm: its weight scales what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.weight)


class OfTokens(nn.Sequential):
    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = super().forward(input_ids)
        return found


@pytest.mark.parametrize(("act", "num_norms"), [(Root, 2), (LN, 2), (Gain, 2), (Slope, 1), (Shift, 1)])
def test_norms_are_told_by_what_they_do(act: Any, num_norms: int) -> None:
    torch.manual_seed(0)
    norm = act(16)
    model = OfTokens(nn.Embedding(96, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), norm, nn.Linear(16, 16)).eval()
    groups = {"g": {"targets": ["Linear"], "weights": INT3}}
    recipe = [QuantizationModifier(config_groups=groups), ScaleTuningModifier(steps=8, lr=0.02)]
    before = [one.detach().clone() for one in norm.parameters()]
    note = note_of(oneshot(model, recipe=recipe, dataset=TOKENS))
    assert f"sequences for scales of 3 layers and {num_norms} norm" in note
    moved = [not torch.equal(now, then) for now, then in zip(model[4].parameters(), before, strict=True)]
    assert all(moved) if num_norms == 2 else not any(moved)
