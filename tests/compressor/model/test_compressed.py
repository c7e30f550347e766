"""load_compressed gives back what was compressed: the same logits as transformers, in a quarter of the memory."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM

from compressor import QuantizationModifier, load_compressed, oneshot
from compressor.errors import CheckpointError, ModelError, SchemeError, TargetError
from compressor.model.checkpoints.format import unpacks_as_it_reads
from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.loading.empty import load_empty
from compressor.model.loading.load import load_model, quiet_transformers
from compressor.nn import QuantizedEmbedding, QuantizedLayer, QuantizedLinear
from harness.traceability.architectures import zoo
from tests import tiny

BF16_ONLY = {"NVFP4", "MXFP4", "MXFP4XFP8", "MXFP8"}
# test_roundtrip.py writes and reads the other presets, module by module.
RUNS = [
    *(
        (name, torch.bfloat16)
        for name in ("W4A16", "W4A8", "W4A4", "W4AFP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16", *sorted(BF16_ONLY))
    ),
    *((name, torch.float16) for name in ("FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16", *sorted(BF16_ONLY))),
    ("W4A16", torch.float64),
]


def recipe(scheme: str | None, targets: tuple[str, ...] = ("Linear",), **settings: Any) -> dict[str, Any]:
    schemes = {} if scheme is None else {"scheme": scheme, "targets": list(targets), "ignore": ["lm_head"]}
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {**schemes, **settings}}}}


def transformers_logits(folder, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
        model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        assert not any(info.values()), info
        return model.eval()(ids).logits


def check_transformers(result: Any, folder: Path, ids: Tensor, ours: Tensor, older: str) -> None:
    """transformers reads a checkpoint alike; or, before 5.21 only, it stops, and the run has said so in such words."""
    said = [note for note in result.report.notes if re.search(rf"transformers does not (load|run) .*{older}", note)]
    if said and not unpacks_as_it_reads():
        with pytest.raises((AttributeError, RuntimeError)):
            transformers_logits(folder, ids)
        return
    assert not said and torch.equal(transformers_logits(folder, ids), ours)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.filterwarnings("ignore:transformers does not (load|run)")  # before 5.21, as check_transformers says
@pytest.mark.parametrize(("preset", "dtype"), RUNS)
def test_a_recipe_gives_a_checkpoint_that_all_read_alike(preset, dtype, make_model, token_ids, tmp_path):
    model = make_model("llama", dtype=dtype, intermediate_size=256)
    data = [row for row in token_ids]
    if dtype == torch.float16 and preset in BF16_ONLY:
        with pytest.raises(SchemeError, match="transformers unpacks this format to bfloat16"):
            oneshot(model, recipe=recipe(preset), dataset=data, output_dir=tmp_path / "out")
        return
    result = oneshot(model, recipe=recipe(preset), dataset=data, output_dir=tmp_path / "out")
    ours = logits(model, token_ids)
    loaded = load_compressed(tmp_path / "out")
    assert torch.equal(logits(loaded, token_ids), ours)
    check_transformers(result, tmp_path / "out", token_ids, ours, "it unpacks .* to bfloat16")
    assert {name: layer.scheme.compression_format for name, layer in loaded.named_modules() if isinstance(layer, QuantizedLayer)} == {
        name: layer.scheme.compression_format for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)
    }


def test_siblings_share_their_global_scale(make_model, token_ids, tmp_path):
    model = make_model("llama", intermediate_size=256)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(4)  # as drawn, its largest may be that of up_proj
    oneshot(model, recipe=recipe("NVFP4"), dataset=list(token_ids), output_dir=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(model.config.num_hidden_layers):
        for group in (("self_attn", "q_proj", "k_proj", "v_proj"), ("mlp", "gate_proj", "up_proj")):
            for key in ("weight_global_scale", "input_global_scale"):
                values = {float(stored[f"model.layers.{layer}.{group[0]}.{name}.{key}"]) for name in group[1:]}
                assert len(values) == 1
    down, up = (float(stored[f"model.layers.0.mlp.{name}_proj.weight_global_scale"]) for name in ("down", "up"))
    assert down != up


@pytest.mark.filterwarnings("ignore:transformers does not (load|run)")  # before 5.21, as check_transformers says
@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP8A16"])
@pytest.mark.parametrize("targets", [("Embedding",), ("Linear", "Embedding")])
def test_quantized_embeddings_are_read_alike(preset, targets, make_model, token_ids, tmp_path):
    model = make_model("llama", intermediate_size=256)
    result = oneshot(model, recipe=recipe(preset, targets), output_dir=tmp_path / "out")
    loaded = load_compressed(tmp_path / "out")
    assert isinstance(loaded.model.embed_tokens, QuantizedEmbedding)
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    check_transformers(result, tmp_path / "out", token_ids, logits(model, token_ids), "'Embedding' object has no attribute 'weight'")


def test_packed_embeddings_beside_quantized_inputs_are_refused_before_the_run(make_model, tmp_path):
    settings = {"scheme": {"W4A16": ["Embedding"], "W8A8": ["Linear"]}, "ignore": ["lm_head"]}
    mixed = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": settings}}}
    with pytest.raises(SchemeError, match=r"embed_tokens: transformers reads packed embeddings only where all modules have one scheme"):
        oneshot(make_model("llama"), recipe=mixed, output_dir=tmp_path / "out")


def test_gpt2_is_compressed_in_memory_and_not_for_transformers(token_ids, tmp_path):

    model = tiny.gpt2(n_embd=128, n_layer=1, vocab_size=128, bos_token_id=None, eos_token_id=None).eval()
    plain = logits(model, token_ids % 128)
    with pytest.raises(SchemeError, match="no quantized form of Conv1D"):
        oneshot(model, recipe=recipe("W4A16", ("Conv1D",), ignore=[]), output_dir=tmp_path / "refused")
    oneshot(model, recipe=recipe("W4A16", ("Conv1D",), ignore=[]))
    schemes = {name: layer.scheme for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(schemes) == 4 and not torch.equal(logits(model, token_ids % 128), plain)
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    assert torch.equal(logits(load_compressed(folder), token_ids % 128), logits(model, token_ids % 128))


KV = {
    "fp8": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True},
    "int8 heads": {"num_bits": 8, "strategy": "attn_head", "symmetric": False},
    "fp8 tokens": {"type": "float", "strategy": "token", "dynamic": True},
}


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("scheme", [None, "W4A16", "FP8"])
def test_a_kv_cache_scheme_is_calibrated_written_and_read_alike(kv, scheme, make_model, token_ids, tmp_path):
    model = make_model("llama")
    before = logits(model, token_ids)
    modules = dict(model.named_modules())
    by_token = pytest.warns(UserWarning, match="one scale for each sequence and head") if kv == "fp8 tokens" else nullcontext()
    with by_token:
        oneshot(model, recipe=recipe(scheme, kv_cache_scheme=KV[kv]), dataset=list(token_ids), output_dir=tmp_path / "out")
    ours = logits(model, token_ids)
    assert not torch.equal(ours, before)
    assert torch.equal(transformers_logits(tmp_path / "out", token_ids), ours)
    assert torch.equal(logits(load_compressed(tmp_path / "out"), token_ids), ours)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert written["strategy"] == KV[kv]["strategy"] and written["num_bits"] == 8
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {key: value for key, value in stored.items() if key.endswith(("k_scale", "v_scale"))}
    assert len(scales) == (0 if KV[kv].get("dynamic") else 2 * model.config.num_hidden_layers)
    assert dict(model.named_modules()).keys() == modules.keys()


def test_the_calibrated_scale_is_that_of_the_keys_without_padding(make_model):
    model = make_model("llama", dtype=torch.float32)
    seen = {}

    def keep(module, args, output):
        seen["k"] = output

    ids = torch.arange(12).reshape(2, 6)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 3:] = 0
    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(keep)
    with torch.inference_mode():
        model(ids, attention_mask=mask)
    handle.remove()
    values = seen["k"][mask.bool()]
    oneshot(
        model,
        recipe=recipe(None, kv_cache_scheme={"num_bits": 8, "strategy": "tensor"}),
        dataset=[ids[0], ids[1, :3]],
        batch_size=2,
    )
    found = model.model.layers[0].self_attn.v_scale
    assert torch.allclose(found, values.abs().max() / 127.5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "preset", "noted"), [
    ("Falcon", "W4A16", True), ("Falcon", "W4A16_ASYM", not unpacks_as_it_reads()), ("Mamba", "W4A16", True), ("Llama", "W4A16", False)
])  # fmt: skip
def test_a_class_that_cannot_read_its_own_checkpoint_is_said_before_the_run(kind, preset, noted, token_ids, tmp_path):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = oneshot(model, recipe=recipe(preset, ignore=["lm_head", "re:.*(x_proj|dt_proj)"][: 2 if kind == "Mamba" else 1]),
                         output_dir=tmp_path / "out")  # fmt: skip
    said = [note for note in result.report.notes if "transformers does not load quantized layers" in note]
    assert bool(said) is noted
    assert bool([one for one in caught if "does not load quantized layers" in str(one.message)]) is noted
    ids = token_ids % 128
    assert torch.equal(logits(load_compressed(tmp_path / "out"), ids), logits(model, ids))
    if noted:
        with pytest.raises(AttributeError, match="has no attribute 'weight'"):
            transformers_logits(tmp_path / "out", ids)
    else:
        assert torch.equal(transformers_logits(tmp_path / "out", ids), logits(model, ids))


@pytest.mark.filterwarnings("ignore:transformers does not load quantized layers")
@pytest.mark.parametrize(("name", "owner"), [("gemma3_vision", "SiglipVisionModel"), ("siglip", "SiglipTextModel"), ("llava", "")])
def test_a_tower_that_cannot_read_its_layers_is_said_as_its_class(name, owner, tmp_path):
    """Each model inside of a model fills what is its own by its own rules."""
    weights = {"num_bits": 8, "strategy": "channel"}
    scheme = QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["re:.*lm_head"])
    model = zoo()[name].build(0)
    result = oneshot(model, recipe=scheme, output_dir=tmp_path / "out")
    said = [note for note in result.report.notes if f"of which the _init_weights of {owner or 'any'} asks" in note]
    assert bool(said) is bool(owner), result.report.notes
    if owner:
        with pytest.raises(AttributeError, match="has no attribute 'weight'"):
            type(model).from_pretrained(tmp_path / "out")
    else:
        type(model).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gptj", "codegen", "llama", "gemma3"])
def test_computed_buffers_are_as_exact_as_where_transformers_loads_them(name, dtype, token_ids, tmp_path):
    """GPT-J computes its positions in the constructor, in torch's default dtype."""
    zoo()[name].build(0).to(dtype).save_pretrained(tmp_path / "base")
    weights = {"num_bits": 8, "strategy": "channel"}
    scheme = QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    oneshot(tmp_path / "base", recipe=scheme, output_dir=tmp_path / "out")
    loaded, base = load_compressed(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    own, theirs = dict(loaded.named_buffers()), dict(base.named_buffers())
    assert theirs and all(own[key].dtype == value.dtype and torch.equal(own[key], value) for key, value in theirs.items())
    assert torch.equal(logits(loaded, token_ids % 64), transformers_logits(tmp_path / "out", token_ids % 64))
    again = QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    assert not oneshot(base, recipe=again, output_dir=tmp_path / "from_memory").report.notes


def test_a_head_that_the_config_calls_tied_and_that_differs_is_not_quantized(make_model, token_ids, tmp_path):
    model = make_model("llama")
    model.config.tie_word_embeddings = True  # as transformers loads a folder that says so and holds two weights that differ
    for ignore, targets in (([], ("Linear",)), (["lm_head"], ("Linear", "Embedding"))):
        with pytest.raises(SchemeError, match=r"(lm_head|model\.embed_tokens): config\.json says that head and embedding are tied"):
            oneshot(model, recipe=recipe("W4A16", targets, ignore=ignore), output_dir=tmp_path / "out")
    oneshot(model, recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    assert torch.equal(transformers_logits(tmp_path / "out", token_ids), logits(model, token_ids))


def test_ignore_leaves_out_weights_and_never_single_caches(make_model):
    scheme = {"strategy": "tensor", "dynamic": True}
    for pattern in ("model.layers.0.self_attn", "LlamaAttention", "re:.*self_attn$"):
        with pytest.raises(TargetError, match="in all attention modules or in none"):
            oneshot(make_model("llama"), recipe=recipe("W4A16", ignore=["lm_head", pattern], kv_cache_scheme=scheme))
    result = oneshot(make_model("llama"), recipe=recipe("W4A16", ignore=["lm_head", "re:.*layers.0.*"], kv_cache_scheme=scheme))
    assert any("keys and values of 2 attention modules" in note for note in result.report.notes)


def test_kv_cache_schemes_that_cannot_work_are_refused_by_name(make_model, tmp_path):
    with pytest.raises(ValueError, match="kv_cache_scheme: strategy='channel'"):
        oneshot(make_model("llama"), recipe=recipe(None, kv_cache_scheme={"strategy": "channel"}))
    with pytest.raises(ValueError, match="Sequential has no attention module in which readers would"):
        oneshot(nn.Sequential(nn.Linear(8, 8)), recipe=recipe(None, kv_cache_scheme={"strategy": "tensor", "dynamic": True}))
    with pytest.raises(SchemeError, match="leaves keys and values as they are"):
        asymmetric = recipe("W4A16_ASYM", kv_cache_scheme={"strategy": "tensor", "dynamic": True})
        oneshot(make_model("llama"), recipe=asymmetric, output_dir=tmp_path / "out")


def tensor_bytes(*modules: nn.Module) -> int:
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.filterwarnings("ignore:transformers does not (load|run)")  # before 5.21, as check_transformers says
def test_a_loaded_model_is_a_quarter_in_memory_and_stays_so(make_model, token_ids, peak_bytes, tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    model = make_model("llama", **shape)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    floats, whole = tensor_bytes(*linears), tensor_bytes(model)
    oneshot(model, recipe=recipe("W4A16", ("Linear", "Embedding"), ignore=[]), output_dir=tmp_path / "out")
    del model, linears
    kept: list[nn.Module] = []
    building = peak_bytes(lambda: kept.append(load_compressed(tmp_path / "out", device="cpu")))
    loaded = kept[0]
    layers = [module for module in loaded.modules() if isinstance(module, QuantizedLinear)]
    assert 0.25 < tensor_bytes(*layers) / floats < 0.27
    # Built without its float weights: beside the files there was never as much as one of them whole.
    assert building < tensor_bytes(loaded) + 0.05 * floats
    largest = max(layer.in_features * layer.out_features * 2 for layer in layers)
    forward = peak_bytes(lambda: loaded(token_ids[:1, :4]))
    assert largest < forward < 6 * largest < 0.5 * floats
    assert tensor_bytes(loaded) < 0.27 * whole


def test_native_products_are_asked_for_and_shown(make_model, token_ids, tmp_path, int8_path):
    model = make_model("llama")
    oneshot(model, recipe=recipe("W8A8"), output_dir=tmp_path / "out")
    reference, native = load_compressed(tmp_path / "out"), load_compressed(tmp_path / "out", matmul="native")
    layer = native.model.layers[0].mlp.up_proj
    assert layer.matmul_path(torch.zeros(1, 3, layer.in_features)) == int8_path and "matmul=native" in repr(layer)
    first, second = logits(reference, token_ids), logits(native, token_ids)
    assert not torch.equal(first, second) and (first - second).abs().max() < 0.1 * first.std()
    with pytest.raises(SchemeError, match="matmul: 'fastest' does not exist"):
        load_compressed(tmp_path / "out", matmul="fastest")


def test_what_compressed_tensors_itself_wrote_is_read(make_model, token_ids, tmp_path):
    """A folder that owes nothing to this project's writer, with settings of observers and dtypes of zero points in its config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = make_model("llama")
    scheme = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
    scheme.weights.observer = "memoryless_minmax"
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen")
    with contextlib.redirect_stderr(io.StringIO()):
        apply_quantization_config(model, config, show_progress=False)
        for linear in (module for module in model.modules() if hasattr(module, "quantization_scheme")):
            groups = linear.weight.detach().unflatten(1, (-1, 128))
            span = (groups.amax(-1) - groups.amin(-1)) / 15
            linear.weight_scale.data.copy_(span)
            linear.weight_zero_point.data.copy_((-8 - groups.amin(-1) / span).round().clamp(-8, 7))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with quiet_transformers():
            model.save_pretrained(tmp_path / "out")
        compressor.update_config(tmp_path / "out")
        expected = logits(model, token_ids)  # unpacks it
    assert torch.equal(logits(load_compressed(tmp_path / "out"), token_ids), expected)


DAMAGE = {
    "a tensor is missing": (lambda stored: stored.pop("model.layers.0.mlp.up_proj.weight_packed"), "1 tensors are missing .*weight_packed"),
    "a tensor is left over": (lambda stored: stored.update({"model.other": torch.ones(1)}), "1 tensors are left over .*model.other"),
    "another shape": (
        lambda stored: stored.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3, 1)}),
        "of another shape or dtype .*weight_scale",
    ),
    "another dtype": (
        lambda stored: stored.update({k: v.to(torch.int64) for k, v in stored.items() if k.endswith("layers.1.mlp.up_proj.weight_packed")}),
        "of another shape or dtype .*weight_packed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused(damage, make_model, tmp_path):
    oneshot(make_model("llama"), recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    harm, message = DAMAGE[damage]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    harm(stored)
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_compressed(tmp_path / "out")


@pytest.mark.parametrize(
    ("preset", "part"),
    [("W4A16", "weight_scale"), ("W8A8", "weight_scale"), ("FP8_DYNAMIC", "weight_scale"), ("NVFP4A16", "weight_global_scale")],
)
def test_the_part_of_a_weight_that_is_missing_is_named(preset, part, make_model, tmp_path):
    oneshot(make_model("llama", num_hidden_layers=1, intermediate_size=256), recipe=recipe(preset), output_dir=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    del stored[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 tensors are missing \(model\.layers\.0\.mlp\.up_proj\.{part}\)"):
        load_compressed(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": {}}, "names no compressed-tensors groups"),
        ({"quant_method": "gptq"}, "no compressed-tensors groups but 'gptq'; give a checkpoint .*from_pretrained of transformers"),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 12}}}},
            "cannot be used here .*num_bits|cannot be used",
        ),
        ({"kv_cache_scheme": {"strategy": "nothing"}}, "cannot be used here"),
        ({"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4, "group_size": 128}}}}, "cannot be used here"),
        ({"ignore": [3]}, "cannot be used here"),
        ({"config_groups": {"group_0": {"targets": ["re:x"], "weights": {"num_bits": 4, "group_size": 128}}}}, "no group of the"),
    ],
)
def test_configs_that_say_something_else_are_refused(change, message, make_model, tmp_path):
    oneshot(make_model("llama", num_hidden_layers=1), recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_compressed(tmp_path / "out")


class _Wrapped(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def _wrap(model) -> None:
    model.model.layers[0].self_attn.q_proj = _Wrapped(model.model.layers[0].self_attn.q_proj)


def _cut(model) -> None:
    model.model.layers = model.model.layers[:1]


def _bias(model) -> None:
    model.model.layers[0].mlp.down_proj.bias = nn.Parameter(torch.ones(128))


def _buffer(model) -> None:
    model.register_buffer("tokens_seen", torch.zeros(1))


def _buffer_of_a_layer(model) -> None:
    model.model.layers[1].mlp.up_proj.register_buffer("step", torch.zeros(1))


def _buffer_of_another_size(model) -> None:
    model.model.layers[1].register_buffer("counts", None)
    model.model.layers[1].counts = torch.zeros(3)


def _unsaved_buffer(model) -> None:
    model.register_buffer("tokens_seen", torch.zeros(1), persistent=False)


def _two_layers():
    return tiny.llama(hidden_size=128, intermediate_size=128, vocab_size=128)


def _epsilon(model) -> None:
    model.config.rms_norm_eps = 0.5


def _activation(model) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def _forward(model) -> None:
    plain = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)


def _frequencies(model) -> None:
    model.model.rotary_emb.inv_freq.div_(4)


def _nothing(model) -> None:
    model.train().model.gradient_checkpointing = True
    model.resize_token_embeddings(130)


class _Extra(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def _extra_state(model):
    model.model.layers[1].extra = _Extra({"a": 1})


def _extra_tensor(model):
    model.model.layers[1].extra = _Extra(torch.ones(2))


def _entry_of_a_hook(model):
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(more_of_it=torch.ones(2)))


def test_an_extra_state_that_no_file_holds_is_refused_before_anything_is_compressed(tmp_path):
    model = nn.Sequential(nn.Linear(128, 32), _Extra({"a": 1}))
    with pytest.raises(CheckpointError, match=r"1 entries of the state are no tensors with values \(1._extra_state\)"):
        oneshot(model, recipe=QuantizationModifier(scheme="W8A16"), output_dir=tmp_path / "out")
    assert type(model[0]) is nn.Linear and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("change", "named"), [
    (_epsilon, r"input_layernorm\.variance_epsilon is 1e-06, not 0\.5"), (_activation, "layers.1.mlp.act_fn is a GELU, not a SiLU"),
    (_forward, "layers.1.forward was replaced"), (_frequencies, "rotary_emb.inv_freq holds other values"),
    (_nothing, None), (_unsaved_buffer, None)
])  # fmt: skip
def test_what_no_file_can_hold_of_a_model_in_memory_is_said(change, named, tmp_path):
    model = _two_layers()
    change(model)
    with warnings.catch_warnings() if named is None else pytest.warns(UserWarning, match=named):
        warnings.simplefilter("error" if named is None else "always")
        result = oneshot(model, recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    assert [re.search(named or "", note) is not None for note in result.report.notes] == ([] if named is None else [True])


@pytest.mark.parametrize(("change", "named"), [
    (_wrap, "q_proj.base.weight"), (_cut, "layers.1.input_layernorm.weight"), (_bias, "down_proj.bias"), (_buffer, "tokens_seen"),
    (_buffer_of_a_layer, r"layers\.1\.mlp\.up_proj\.step"), (_buffer_of_another_size, r"layers\.1\.counts"),
    (_extra_state, r"layers\.1\.extra\._extra_state"), (_extra_tensor, r"layers\.1\.extra\._extra_state"),
    (_entry_of_a_hook, "more_of_it"),
])  # fmt: skip
def test_a_model_built_otherwise_than_its_config_is_not_saved_but_may_stay_in_memory(change, named, tmp_path):
    model = _two_layers()
    change(model)
    with pytest.raises(ModelError, match=f"{named}.* not those that the class builds"):
        oneshot(model, recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    result = oneshot(model, recipe=recipe("W4A16"))
    for save in (model.save_pretrained, result.save):
        with pytest.raises(ModelError, match="not those that the class builds"):
            save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_config_that_follows_the_change_is_saved(token_ids, tmp_path):
    model = _two_layers()
    _cut(model)
    model.config.num_hidden_layers = 1
    model.config.layer_types = None
    model.resize_token_embeddings(130, mean_resizing=False)
    oneshot(model, recipe=recipe("W4A16"), output_dir=tmp_path / "out")
    assert torch.equal(transformers_logits(tmp_path / "out", token_ids % 128), logits(model, token_ids % 128))


@pytest.mark.parametrize("compute", [
    lambda layer: nn.utils.parametrizations.weight_norm(layer), lambda layer: prune.l1_unstructured(layer, "weight", 0.5)
])  # fmt: skip
def test_a_weight_that_is_computed_from_others_is_refused_by_name(compute):
    model = _two_layers()
    compute(model.model.layers[1].mlp.up_proj)
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj: its weight is computed"):
        oneshot(model, recipe=recipe("W4A16"))
    oneshot(model, recipe=recipe("W4A16", ignore=["lm_head", "re:.*up_proj"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "FP8"},
        {"scheme": "NVFP4"},
        {"scheme": "W4A16", "weight_observer": "mse"},
        {"scheme": "NVFP4A16", "weight_observer": "imatrix_mse"},
        {"scheme": "W8A8", "kv_cache_scheme": {"num_bits": 8, "type": "float", "observer": "memoryless_minmax"}},
    ],
    ids=str,
)
def test_what_was_loaded_is_saved_again_in_the_same_bytes_whatever_found_its_scales(settings, source_dir, token_ids, tmp_path):
    oneshot(source_dir, recipe=recipe(**settings), dataset=[*token_ids], output_dir=tmp_path / "out")
    load_compressed(tmp_path / "out").save_pretrained(tmp_path / "again")
    names = {file.name for file in (tmp_path / "again").iterdir()}
    assert {"config.json", "compression.json", "model.safetensors"} <= names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.filterwarnings("ignore:transformers does not load Qwen3MoeForCausalLM with quantized keys and values")
def test_experts_of_which_nothing_is_quantized_are_named_as_one_whether_they_are_apart_or_not(tmp_path):
    kv = {"num_bits": 8, "type": "float"}
    data = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    oneshot(tiny.qwen3_moe(), recipe=recipe(None, kv_cache_scheme=kv), dataset=data, output_dir=tmp_path / "out")
    load_compressed(tmp_path / "out").save_pretrained(tmp_path / "again")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts" in ignored and not any(".experts.0" in name for name in ignored)
    for name in ("config.json", "compression.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.parametrize(("name", "head"), [("BertForSequenceClassification", "classifier"), ("BertForMaskedLM", "re:cls.*")])
def test_a_checkpoint_of_another_class_is_answered_with_that_class(name, head, tmp_path):
    """Also where the weights would fit, as those of a masked language model do."""
    import transformers

    torch.manual_seed(0)
    config = tiny.config("bert", hidden_size=128, intermediate_size=128, num_hidden_layers=1, vocab_size=128)
    kind = getattr(transformers, name)
    oneshot(kind(config).eval(), recipe=recipe("W8A16", ignore=[head]), output_dir=tmp_path / "out")
    with pytest.raises(ModelError, match=f"model_class='{name}'"):
        load_compressed(tmp_path / "out")
    loaded = load_compressed(tmp_path / "out", model_class=name)
    assert type(loaded) is kind
    loaded.save_pretrained(tmp_path / "again")
    for written in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / written).read_bytes() == (tmp_path / "out" / written).read_bytes()


@pytest.mark.filterwarnings("ignore:transformers does not load quantized layers of Dinov2Model")
def test_a_checkpoint_of_which_the_default_class_makes_no_model_is_answered_with_its_class(tmp_path):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    oneshot(Dinov2Model(config).eval(), recipe=recipe("W8A16", ignore=[]), output_dir=tmp_path / "out")
    with pytest.raises(ModelError, match=r"its config gives no model .*name model_class \(config.json says model_class='Dinov2Model'\)"):
        load_compressed(tmp_path / "out")
    assert type(load_compressed(tmp_path / "out", model_class="Dinov2Model")) is Dinov2Model


@pytest.mark.parametrize("load", [load_model, load_empty])
def test_a_base_of_another_class_is_answered_with_that_class(load, tmp_path):
    from transformers import BertForMaskedLM

    config = tiny.config("bert", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"a BertForMaskedLM, and AutoModelForCausalLM makes a BertLMHeadModel .*model_class='BertForM"):
        load(tmp_path)
    for name in ("BertForMaskedLM", "AutoModelForCausalLM"):
        load(tmp_path, model_class=name)


_SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_LINEAR = {
    f"linear_{what}": size for what, size in [("num_key_heads", 2), ("num_value_heads", 2), ("key_head_dim", 8), ("value_head_dim", 8)]
}
# The first two store some tensors joined or cut; the third calls a layer as such only where its config says that it is quantized.
_CONVERTED = {"olmo_hybrid": _HEADS | _LINEAR, "hrm_text": _HEADS, "falcon_mamba": {"state_size": 8, "time_step_rank": 4}}


@pytest.mark.parametrize("kind", _CONVERTED)
def test_classes_that_convert_or_call_layers_otherwise_are_read_alike(kind, token_ids, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**_SMALL, **_CONVERTED[kind], max_position_embeddings=64, pad_token_id=0, use_cache=False)
    result = oneshot(AutoModelForCausalLM.from_config(config).eval(), recipe=recipe("W8A8"), output_dir=tmp_path / "out")
    ids, found = token_ids % 96, load_compressed(tmp_path / "out")
    assert torch.equal(logits(found, ids), logits(result.model, ids))
    assert torch.equal(transformers_logits(tmp_path / "out", ids), logits(result.model, ids))
    assert "_is_quantized" not in (tmp_path / "out" / "config.json").read_text()
    found.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(tmp_path / "out" / "model.safetensors").keys()


def test_a_model_that_does_not_say_which_its_embedding_is_can_be_saved(tmp_path):
    from transformers import SpeechT5Config, SpeechT5Model

    each = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in each.items()}
    model = SpeechT5Model(SpeechT5Config(vocab_size=40, hidden_size=32, **sizes)).eval()
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()
    result = oneshot(model, recipe=recipe("W8A8", ignore=[]))
    assert (result.save(tmp_path / "out") / "compression.json").is_file()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_no_file_of_the_class_holds_are_computed(dtype, tmp_path):
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    layers = {f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in (("layers", 1), ("attention_heads", 2))}
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 16}
    model = MarianMTModel(MarianConfig(**sizes, **layers, pad_token_id=0, decoder_start_token_id=1)).to(dtype).eval()
    oneshot(model, recipe=recipe("FP8_DYNAMIC"), output_dir=tmp_path / "out")
    loaded = load_compressed(tmp_path / "out", model_class="MarianMTModel")
    ids = {"input_ids": torch.arange(1, 9)[None], "decoder_input_ids": torch.arange(1, 6)[None]}
    with torch.inference_mode():
        assert torch.equal(loaded(**ids).logits, MarianMTModel.from_pretrained(tmp_path / "out")(**ids).logits)
