"""Published recipes of llm-compressor give every module what llm-compressor gives it, on a small model of their architecture.

What llm-compressor gives was recorded from it, by `published/record.py`. Where it is something else here, it stands here.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import CompressorError, SparseGPTModifier, load_compressed, load_recipe, oneshot
from compressor.errors import SchemeError, TargetError
from compressor.mappings import find_pairs
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import MODALITIES, reads, sample_batches
from compressor.modifiers.schemes.targets import SchemeTargets
from compressor.nn import QuantizedLinear
from compressor.nn.experts import usual_name
from harness.traceability.architectures import draw_weights
from tests.compressor.recipe.published.record import RESOLUTIONS, args_text, build, collapsed, published, recipe_of, scheme_text, starred

RECORDED: dict[str, Any] = {one["recipe"]: one for one in json.loads(RESOLUTIONS.read_text(encoding="utf-8"))["resolved"]}
ENTRIES: dict[str, Any] = {entry["of"][0]: entry for entry in published()["recipes"]}

# A plain name in `ignore` that names nothing is an error here: the head that was meant to stay is called otherwise, and is quantized there.
GROUPED = "DeepseekV4GroupedLinear"
REFUSED = {
    "multimodal_audio/qwen2_audio": (
        r"ignore 'language_model.lm_head' matches no module \(nearest: lm_head\)",
        {"ignore": ["re:audio_tower.*"]},
    ),
    "quantization_w8a8_fp8/whisper_example": ("ignore 'lm_head' matches no module", {"ignore": ["proj_out"]}),
    "quantization_w8a8_fp8/nemotron_3_5_lightning_example": (
        r"'backbone\\\\.embeddings' matches no module .* 'backbone.norm_f' matches no module",
        {"ignore": ["re:.*_latent_proj.*", "re:.*mixer.gate\\..*", "lm_head"]},
    ),
    "quantizing_moe/deepseek_v4_example": (
        f"class {GROUPED} are linear layers whose forward does more than multiply",
        {"ignore": [GROUPED]},
    ),
    "quantizing_moe/deepseek_v4_mixed_mxfp4_mxfp8": (f"add {GROUPED} to ignore", {"ignore": [GROUPED]}),
    "quantizing_moe/deepseek_v4_pro_example": (f"add {GROUPED} to ignore", {"ignore": [GROUPED]}),
}
MORE_HERE = {
    "awq/step3p5_example": {"model.language_model.layers.*.mlp.experts.*"},  # whose experts are not taken apart there
    # `actorder: group` is refused there.
    "tests/llmcompressor/transformers/compression/recipes/new_quant_actorder_group": {"model.layers.*.self_attn", "model.layers.*.mlp"},
}
FEWER_HERE = {name: "o_a_proj" for name, (_, settings) in REFUSED.items() if settings == {"ignore": [GROUPED]}}
FEWER_HERE["quantization_w8a8_fp8/whisper_example"] = "proj_out"


@functools.cache
def skeleton(name: str) -> nn.Module:
    with torch.device("meta"):
        model = build(name)
    with unfused_experts(model, hold=False):
        return model


def resolved(entry: dict[str, Any]) -> dict[str, dict[str, str]]:
    model = skeleton(entry["model"])
    schemes: dict[str, str] = {}
    pruned: dict[str, str] = {}
    for modifier in load_recipe(recipe_of(entry)).modifiers:
        if isinstance(modifier, SchemeTargets):
            schemes |= {name: scheme_text(scheme) for name, scheme in modifier.resolve(model).items()}
            schemes |= {name: f"input_activations {args_text(modifier.kv_format)}" for name in modifier.kv_targets(model, modifier.ignore)}
        elif isinstance(modifier, SparseGPTModifier):
            pruned |= dict.fromkeys(modifier.prunable(model), f"{modifier.sparsity} {modifier.mask_structure}")
    return {"schemes": schemes, "pruned": pruned}


def as_there(model: nn.Module, name: str) -> str:
    """What llm-compressor calls a module: projections of experts have one name there, and Qwen3-Omni others in its transformers 5.17."""
    usual = usual_name(model.get_submodule(name))
    called = name if usual is None else f"{name.rpartition('.')[0]}.{usual}"
    is_renamed = type(model).__name__.startswith("Qwen3OmniMoeThinker")
    return (
        re.sub(r"^model[.](language_model|(?=audio_tower|visual))", lambda found: "model" * bool(found[1]), called)
        if is_renamed
        else called
    )


def table(entry: dict[str, Any], kind: str) -> set[tuple[str, str, str]]:
    """What a modifier of ours makes of which module, as it is recorded."""
    model = skeleton(entry["model"])
    found = {as_there(model, name): what for name, what in resolved(entry)[kind].items()}
    return rows(collapsed(found, [as_there(model, name) for name, _ in model.named_modules() if name]))


def rows(recorded: dict[str, list[str]]) -> set[tuple[str, str, str]]:
    split = [(what, text.partition(": ")) for what, texts in recorded.items() for text in texts]
    return {(what, parent, leaf) for what, (parent, _, leaves) in split for leaf in leaves.split(" ")}


def test_every_recipe_is_recorded() -> None:
    assert list(ENTRIES) == list(RECORDED)
    assert sum(len(rows(one.get("schemes", {}))) for one in RECORDED.values()) > 1400


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in REFUSED])
def test_every_module_gets_what_llm_compressor_gives_it(name: str) -> None:
    ours = table(ENTRIES[name], "schemes")
    theirs = rows(RECORDED[name].get("schemes", {}))
    assert theirs <= ours
    assert {starred(parent) for _, parent, _ in ours - theirs} == MORE_HERE.get(name, set())
    assert table(ENTRIES[name], "pruned") == rows(RECORDED[name].get("pruned", {}))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_the_same_when_the_advice_is_followed(name: str) -> None:
    message, settings = REFUSED[name]
    with pytest.raises(CompressorError, match=message):
        resolved(ENTRIES[name])
    if settings is not None:
        ((modifier, given),) = ENTRIES[name]["modifiers"].items()
        theirs = rows(RECORDED[name]["schemes"])
        ours = table({**ENTRIES[name], "modifiers": {modifier: given | settings}}, "schemes")
        assert ours == {row for row in theirs if row[2] != FEWER_HERE.get(name)}


# Readers of a norm that llm-compressor leaves out: it divides the norm, and not the columns of the router that reads it.
ROUTER = {"qwen3_next": {"model.layers.*.mlp.gate"}}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe", "qwen3_next", "qwen3_5"])
def test_scales_move_where_llm_compressor_moves_them(architecture: str) -> None:
    torch.manual_seed(0)
    model = build(architecture)
    draw_weights(model, 0)
    with unfused_experts(model, hold=False):
        found = find_pairs(model, {"input_ids": torch.arange(3, 15)[None]}, torch.device("cpu"))
    recorded = [RECORDED[name].get("scales", {}) for name, entry in ENTRIES.items() if entry["model"] == architecture]
    pairs = {row for scales in recorded for row in rows(scales)}
    assert pairs
    for readers, parent, leaf in pairs:
        ours = [pair for name, pair in found.by_source.items() if f"{parent}.{leaf}" in (name, starred(name))]
        assert ours
        for pair in ours:
            more = {starred(reader) for reader in pair.readers} ^ set(readers.split(", "))
            assert more == (ROUTER.get(architecture, set()) if leaf == "post_attention_layernorm" else set())


def _turned(transforms: list[dict[str, Any]], model: nn.Module) -> set[tuple[str, str, str]]:
    """Norms, whose weights become neutral, aside: only products have rows and columns that are turned."""
    found: dict[str, dict[str, str]] = {"weight_output": {}, "weight_input": {}, "input": {}}
    for turn in (turn for one in transforms for turn in one["turns"]):
        online = ["input"] if "online" in turn else []
        for where, names in (("weight_output", turn["writers"]), *((where, turn["readers"]) for where in ("weight_input", *online))):
            found[where] |= {name: where for name in names if model.get_submodule(name).weight.ndim == 2}
    names = [as_there(model, name) for name, _ in model.named_modules() if name]
    return {row for one in found.values() for row in rows(collapsed({as_there(model, name): where for name, where in one.items()}, names))}


# The published script first puts routers of linear layers into the model, whose `gate.linear` is turned; here it is turned as it is.
LINEAR_ROUTER = {"transform/spinquant_cohere2_moe_example": {("weight_input", "model.layers.*.mlp", "gate")}}


@pytest.mark.parametrize("name", [name for name, one in RECORDED.items() if "turned" in one])
def test_rotations_turn_what_llm_compressor_turns(name: str) -> None:
    torch.manual_seed(0)
    model = build(ENTRIES[name]["model"])
    draw_weights(model, 0)
    (modifier,) = (one for one in ENTRIES[name]["modifiers"] if one != "QuantizationModifier")
    recipe = {"quant_modifiers": {modifier: ENTRIES[name]["modifiers"][modifier]}}
    report = oneshot(model, recipe=recipe, dataset=[list(range(3, 15))], device="cpu").report
    ours = _turned(report.transforms, skeleton(ENTRIES[name]["model"]))
    assert ours == rows(RECORDED[name]["turned"]) | LINEAR_ROUTER.get(name, set())


# Architectures that none of llm-compressor's tables knows: LayerNorm and ReLU; attention beside the MLP; norms that multiply by 1 + weight;
# no gate and an activation with weights of its own; experts, with norms of queries and keys.
SIZE = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "eos_token_id": 2}
UNKNOWN: dict[str, dict[str, Any]] = {
    "OPT": {**SIZE, "ffn_dim": 256, "word_embed_proj_dim": 128},
    "Phi": {**SIZE, "intermediate_size": 256},
    "Nemotron": {**SIZE, "intermediate_size": 256, "num_key_value_heads": 1, "head_dim": 64},
    "Apertus": {**SIZE, "intermediate_size": 256, "num_key_value_heads": 1},
    "FlexOlmo": {**SIZE, "intermediate_size": 128, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0},
}
RUN = (
    "big_models_with_sequential_onloading/llama3.3_70b",
    "transform/spinquant_example",
    "awq/llama_example",
    "tests/llmcompressor/transformers/compression/recipes/sparse_24_fp8",
    "transform/quip_example",
    "awq/fp8_block_llama_example",
    "imatrix/llama3_nvfp4_imatrix_example",
    "quantization_w4a16/llama3_ddp_example",
    "quantization_kv_cache/llama3_fp8_kv_example",
    "quantization_w4a16_fp4/nvfp4/llama3_nvfp4_expanded_mse_example",
)
# FlexOlmo's layers have norms behind them and none in front: nothing there takes a scale, or lets a rotation pass.
UNFIT = {
    ("FlexOlmo", "big_models_with_sequential_onloading/llama3.3_70b"): "no scale can move into a layer that is quantized",
    ("FlexOlmo", "transform/spinquant_example"): "post_attention_layernorm adds to the hidden states what it multiplies",
}
# For a change each architecture runs one recipe, of another kind each; by night all.
RUNS = [
    pytest.param(kind, name, marks=() if number == place else pytest.mark.nightly)
    for place, kind in enumerate(UNKNOWN)
    for number, name in enumerate(RUN)
]


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_a_recipe_runs_on_an_architecture_that_no_table_knows(kind: str, name: str) -> None:
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**UNKNOWN[kind])).eval()
    draw_weights(model, 0)
    rows = torch.randint(3, 60, (8, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model(rows).logits
    recipe = recipe_of(ENTRIES[name])
    if (kind, name) in UNFIT:
        with pytest.raises(TargetError, match=UNFIT[kind, name]):
            oneshot(model, recipe=recipe, dataset=rows, device="cpu")
        return
    report = oneshot(model, recipe=recipe, dataset=rows, device="cpu").report
    with unfused_experts(model, hold=False):
        linears = {name for name, one in model.named_modules() if isinstance(one, nn.Linear | QuantizedLinear)} - {"lm_head"}
    assert linears <= {name for name, record in report.modules.items() if record.scheme}
    assert bool(report.transforms) == any(word in str(recipe) for word in ("AWQ", "SmoothQuant", "SpinQuant", "QuIP"))
    with torch.inference_mode():
        difference = model(rows).logits - before
    print(kind, name, float(difference.norm() / before.norm()))
    assert float(difference.norm() / before.norm()) < 1


# Refused for a checkpoint, which transformers with compressed-tensors would not load, before any data flow; they run in memory.
PACKED_EMBEDDINGS = "embed_tokens: transformers reads packed embeddings only where all modules have one scheme"
IN_MEMORY = {
    "quantization_non_uniform/quantization_int4_int8": "asymmetric packed weights stand beside another scheme, and transformers reads",
    "tests/e2e/recipes/actorder/recipe_w4a16_actorder_group": "compressed-tensors no longer reads such files",
    "tests/llmcompressor/transformers/compression/recipes/new_quant_actorder_group": "compressed-tensors no longer reads such files",
    "tests/llmcompressor/transformers/compression/recipes/new_quant_simple": PACKED_EMBEDDINGS,
}
PRUNED_LATE = "tests/sparsity/sparsegpt/recipes/quant_and_sparse"


def followed(name: str) -> dict[str, Any]:
    """The entry of a recipe, with the advice of its error, and with few steps where it learns."""
    entry = json.loads(json.dumps(ENTRIES[name]))
    if name in REFUSED:
        (given,) = entry["modifiers"].values()
        given |= REFUSED[name][1] or {}
    for stage in entry.get("recipe", {"": {"": entry.get("modifiers", {})}}).values():
        for learned in (group["AutoRoundModifier"] for group in stage.values() if "AutoRoundModifier" in group):
            learned["iters"] = min(2, learned.get("iters", 2))
    return entry


def loaded(name: str) -> nn.Module:
    """A model as loaders make it: parameters in bfloat16, and buffers in what their code asks for."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build(name)
    finally:
        torch.set_default_dtype(torch.float32)
    draw_weights(model, 0)
    for name, parameter in model.named_parameters():  # as a loader has them
        if any(kept in name for kept in model._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.float()
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if getattr(config, "use_cache", False):
            config.use_cache = False
    with TemporaryDirectory() as folder:  # Gemma 4 computes what no file holds in float32, whatever the default is
        model.save_pretrained(folder)
        asked = dict(type(model).from_pretrained(folder, dtype="auto").named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(asked[name])
    return model


def logits(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        return [model(**batch).logits for batch in batches]


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != PRUNED_LATE])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of readers that pass over experts or rotations
@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # Mllama of transformers 5.17 says so of its own call
def test_a_recipe_runs_with_all_that_its_model_reads_and_is_read_back(name: str, tmp_path: Path) -> None:
    entry, out = followed(name), tmp_path / "out"
    model = loaded(entry["model"])
    batches = [one for modality in MODALITIES if reads(model, modality) for one in sample_batches(model, modality).batches]
    before = logits(model, batches)
    every = not entry["model"].startswith("llama4")  # whose experts are handed zeros in place of tokens of others
    settings = {"dataset": DataLoader(batches, batch_size=None), "calibrate_all_experts": every, "device": "cpu"}
    if name in IN_MEMORY:
        with pytest.raises(SchemeError, match=IN_MEMORY[name]):
            oneshot(model, recipe=recipe_of(entry), output_dir=out, **settings)
    report = oneshot(model, recipe=recipe_of(entry), output_dir=None if name in IN_MEMORY else out, **settings).report
    weighed = {one for one, what in resolved(entry)["schemes"].items() if what.startswith("weights")}
    done = {one for one, record in report.modules.items() if record.scheme}
    assert weighed <= done or "REAPPruningModifier" in entry.get("modifiers", ())  # which has the last of four experts fall away
    after = logits(model, batches)
    assert all(bool(now.isfinite().all()) for now in after)
    assert not all(torch.equal(now, then) for now, then in zip(after, before, strict=True))
    if name not in IN_MEMORY:
        compressed = "quantization_config" in json.loads((out / "config.json").read_text(encoding="utf-8"))
        read = load_compressed(out, device="cpu", model_class=type(model)) if compressed else type(model).from_pretrained(out, dtype="auto")
        assert all(torch.equal(theirs, ours) for theirs, ours in zip(logits(read, batches), after, strict=True))


def test_pruning_behind_quantization_of_the_same_layer_is_refused() -> None:
    with pytest.raises(CompressorError, match=r"q_proj is quantized by GPTQModifier\[0\] before it is pruned"):
        oneshot(loaded("llama"), recipe=recipe_of(ENTRIES[PRUNED_LATE]), dataset=[list(range(3, 15))], device="cpu")


def test_sound_that_a_recipe_needs_and_images_do_not_give_is_asked_for() -> None:
    """Its script gives Qwen3-Omni images alone, and leaves its audio tower among the targets."""
    model, entry = loaded("qwen3_omni"), ENTRIES["multimodal_vision/qwen3_omni_example"]
    images = DataLoader(sample_batches(model, "vision").batches, batch_size=None)
    with pytest.raises(CompressorError, match=r"model.audio_tower.layers.0, .*: no batch calls these .*; give data"):
        oneshot(model, recipe=recipe_of(entry), dataset=images, device="cpu")
