"""Attention itself as a target: calibrated, computed with, written, read by transformers and by this project, planned and inspected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor import CompressorError, GPTQModifier, QuantizationModifier, load_compressed, oneshot
from compressor.cli.main import main
from compressor.errors import ModelError, SchemeError, TargetError
from compressor.model.loading.load import quiet_transformers
from compressor.nn.attention.kv_cache import attention_modules
from harness.traceability.architectures import zoo

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "pad_token_id": 0},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "XGLM": {"attention_heads": 4, "d_model": 32, "num_layers": 1, "ffn_dim": 32},
    "DeepseekV2": {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                   "first_k_dense_replace": 2},
}  # fmt: skip
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8 heads": {**FP8, "strategy": "attn_head"},
    "int8 heads, shifted": {"num_bits": 8, "strategy": "attn_head", "symmetric": False},
    "int8 tokens": {"num_bits": 8, "strategy": "token", "dynamic": True},
}
INT4 = {"targets": ["re:.*self_attn..*_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}
IDS = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(0))


def model_of(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind]})
    with quiet_transformers():
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits
        return found


def groups(args: dict[str, Any], target: str = "LlamaAttention", **others: Any) -> dict[str, Any]:
    return {"config_groups": {"attention": {"targets": [target], "input_activations": args}, **others}}


@pytest.mark.parametrize(
    ("kind", "args", "weights", "engine"),
    [
        ("Llama", "fp8", False, "auto"),
        ("Llama", "fp8 heads", True, "suspend"),
        ("Llama", "int8 heads, shifted", True, "graph"),
        ("Llama", "int8 tokens", False, "auto"),
        ("Qwen3Moe", "fp8 heads", True, "auto"),
    ],
)
@pytest.mark.filterwarnings("ignore:keys and values with the strategy 'token':UserWarning", "ignore:.* stay floats and are stored fused")
def test_what_is_written_is_read_alike(kind: str, args: str, weights: bool, engine: Any, tmp_path: Path) -> None:
    model = model_of(kind)
    before, names = logits(model), list(model.state_dict())
    recipe = GPTQModifier(**groups(FORMATS[args], f"{kind}Attention", **({"w": INT4} if weights else {})))
    result = oneshot(model, recipe=recipe, dataset=list(IDS), pipeline="sequential", engine=engine, output_dir=tmp_path / "out")
    ours = logits(model)
    assert not torch.equal(ours, before)
    assert torch.equal(logits(load_compressed(tmp_path / "out")), ours)
    with quiet_transformers():
        assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()), ours)
    assert not [note for note in result.report.notes if "transformers does not" in note]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    own = config["config_groups"]["group_1" if weights else "group_0"]
    assert own["targets"] == [f"{kind}Attention"] and own["weights"] is None and own["format"] == "dense"
    assert (config["kv_cache_scheme"] is None) == (args == "int8 heads, shifted")
    added = {name.rpartition(".")[2] for name in model.state_dict().keys() - set(names) if "_proj" not in name}
    parts = ("scale",) if FORMATS[args].get("symmetric", True) else ("scale", "zero_point")
    assert added == (set() if "tokens" in args else {f"{part}_{what}" for part in "qkv" for what in parts})


@pytest.mark.parametrize("name", ["zamba", "granitemoe"])
def test_blocks_of_one_weight_and_experts_of_other_names_are_read_back(name: str, tmp_path: Path) -> None:
    architecture = zoo()[name]
    model, ids = architecture.build(), architecture.batches()["same"]["input_ids"]
    (kind,) = {type(module).__name__ for module in attention_modules(model).values()}
    oneshot(model, recipe=QuantizationModifier(**groups(FP8, kind)), dataset=list(ids), output_dir=tmp_path / "out")
    again = load_compressed(tmp_path / "out", device="cpu")
    with torch.inference_mode():
        # Experts are fused in memory and apart when loaded, whose products some kernels (of AVX2) add up in another order.
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_the_scale_of_queries_is_that_of_real_tokens_after_rotary_embedding(strategy: str) -> None:
    model = model_of(dtype=torch.float32)
    rows = [IDS[0], IDS[1, :5]]
    attention = model.model.layers[1].self_attn
    largest = torch.zeros(4)

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query = attention.q_proj(kwargs["hidden_states"]).view(1, -1, 4, 8).transpose(1, 2)
        turned, _ = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        torch.maximum(largest, turned.abs().amax((0, 2, 3)), out=largest)

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        for row in rows:
            model(row[None])
    handle.remove()
    oneshot(model, recipe=QuantizationModifier(**groups({**FP8, "strategy": strategy})), dataset=rows, batch_size=2)
    attention = model.model.layers[1].self_attn
    expected = largest if strategy == "attn_head" else largest.max()
    assert torch.allclose(attention.q_scale.flatten(), expected / 448, rtol=1e-5)
    assert attention.q_scale.shape == ((4, 1, 1) if strategy == "attn_head" else (1,))
    assert attention.k_scale.shape == ((2, 1, 1) if strategy == "attn_head" else (1,))


BY_HEADS = FORMATS["fp8 heads"]
REFUSED: dict[str, tuple[str, dict[str, Any], type[CompressorError], str]] = {
    "some layers": ("Llama", groups(FP8, "re:.*0.self_attn$"), TargetError, r"leave out model.layers.1.self_attn; attention is"),
    "linear layers as well": ("Llama", groups(FP8, "re:.*self_attn"), TargetError, r"q_proj \(Linear\).*as well.*or the scheme"),
    "ignored": ("Llama", {**groups(FP8), "ignore": ["LlamaAttention"]}, TargetError, "in all attention modules or in none"),
    "no dispatch": ("XGLM", groups(FP8, "XGLMAttention"), TargetError, "multiply queries and keys themselves.*kv_cache_scheme"),
    "latents": ("DeepseekV2", groups(BY_HEADS, "DeepseekV2Attention"), SchemeError, r"k: has 1 heads, and readers count 4"),
    "nothing": ("Llama", groups(FP8, "OPTAttention"), TargetError, "leave out model.layers.0.self_attn, model.layers.1.self_attn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    kind, settings, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        oneshot(model_of(kind), recipe=QuantizationModifier(**settings), dataset=list(IDS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (groups({**FP8, "strategy": "token", "dynamic": False}), "strategy='token'"),
        (groups({"num_bits": 8, "strategy": "group", "group_size": 16}), r"inputs alone of \['LlamaAttention'\]: strategy='group'"),
        (groups({**FP8, "num_bits": 4, "scale_dtype": "torch.uint8"}), "NVFP4|MX"),
        ({**groups(FP8), "kv_cache_scheme": {"num_bits": 8}}, "were given several formats"),
        ({**groups(FP8), "weight_observer": "mse"}, "weight_observer: 'mse' was given without a scheme for weights"),
        ({**groups(FP8), "targets": ["re:.*mlp"]}, "beside schemes that name their own"),
    ],
)
def test_formats_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationModifier(**settings)


def test_eager_attention_is_said_to_be_unread(tmp_path: Path) -> None:
    model = model_of()
    model.set_attn_implementation("eager")
    eager = "does not run LlamaForCausalLM with quantized queries where attention is eager"
    by_token = "one scale for each sequence and head, of all tokens of a forward"
    with pytest.warns(UserWarning, match=eager), pytest.warns(UserWarning, match=by_token):
        oneshot(model, recipe=QuantizationModifier(**groups(FORMATS["int8 tokens"])), output_dir=tmp_path / "out")
    with pytest.warns(UserWarning, match="attn_implementation='sdpa'"), pytest.warns(UserWarning, match=by_token):
        model.save_pretrained(tmp_path / "again")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert written[0] == written[1]


def test_a_run_that_stops_leaves_attention_as_it_was() -> None:
    model = model_of()
    before, config = logits(model), model.config
    with pytest.raises(SchemeError):
        broken = {"attention": groups(FORMATS["fp8 heads"])["config_groups"]["attention"]}
        config.num_key_value_heads = 3
        oneshot(model, recipe=QuantizationModifier(config_groups=broken), dataset=list(IDS))
    config.num_key_value_heads = 2
    assert all(module.config is config for module in attention_modules(model).values())
    assert torch.equal(logits(model), before)


def test_it_is_planned_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of().save_pretrained(tmp_path / "base")
    recipe = {"q_modifiers": {"QuantizationModifier": groups(FP8)}}
    assert main(["plan", str(tmp_path / "base"), "--recipe", json.dumps(recipe)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "queries, keys and values of 2 attention modules are quantized (float8 tensor, static)" in shown
    oneshot(tmp_path / "base", recipe=recipe, dataset=list(IDS), output_dir=tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "queries, keys and values: float8 tensor" in " ".join(capsys.readouterr().out.split())


def test_inputs_of_other_layers_alone_are_not_read(tmp_path: Path) -> None:
    oneshot(model_of(), recipe=QuantizationModifier(**groups(FP8)), dataset=list(IDS), output_dir=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantizes the inputs of \['Linear'\] and no weights"):
        load_compressed(tmp_path / "out")
