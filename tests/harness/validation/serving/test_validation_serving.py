"""A checkpoint that vLLM or SGLang would refuse is refused by name, one planted damage after the other; what they take passes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from compressor import oneshot
from compressor.errors import UserInputError
from compressor.numerics import PRESETS, preset_scheme
from harness import validate
from harness.validation.policy import Policy
from harness.validation.serving.checks import check_serving
from harness.validation.serving.servers import SERVERS, refusal
from harness.validation.subject import read_subject
from tests import tiny
from tests.harness.validation.conftest import Checkpoint

UP, GATE, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "gate", "down"))
Q = "model.layers.1.self_attn.q_proj"


def found(subject, server="vllm", **policy):
    """Findings of all failed checks, by name."""
    records = check_serving(subject, server, Policy(**policy))
    return {record.name: "\n".join(record.findings) for record in records if record.outcome == "fail"}


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("server", SERVERS)
def test_what_both_servers_take_passes(workspace, pristine, preset, server):
    assert found(read_subject(workspace.base, pristine(preset)), server) == {}


def config(change):
    return lambda c: c.edit_config(lambda data: change(data["quantization_config"]))


def group(change):
    return config(lambda q: change(q["config_groups"]["group_0"]))


def tensors(change):
    return lambda c: c.edit(change)


def second_group(q, targets, **weights):
    first = q["config_groups"]["group_0"]
    q["config_groups"]["group_1"] = {**first, "targets": targets, "weights": {**first["weights"], **weights}}


def quantized_head(t):
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        t[f"lm_head.{part}"] = t[f"{Q}.{part}"].clone()
    del t["lm_head.weight"]


DAMAGES = [
    (config(lambda q: q.update(quant_method="gptq")), "serving.config", "quant_method is 'gptq'"),
    (config(lambda q: q.update(config_groups={"group_0": {"targets": ["Linear"]}})), "serving.config", "no arguments for weights"),
    (
        config(lambda q: q.update(sparsity_config={"format": "sparse-bitmask", "targets": ["Linear"]})),
        "serving.config",
        "sparsity was taken",
    ),
    (
        config(lambda q: q.update(transform_config={"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}})),
        "serving.config",
        "applies no transform at 'q_attn'",
    ),
    (group(lambda g: g["weights"].update(actorder="group")), "serving.config", "actorder 'group' is refused"),
    (group(lambda g: g.update(output_activations={"num_bits": 8, "dynamic": True})), "serving.config", "leaves outputs as they are"),
    (group(lambda g: g["weights"].update(rotation="R1")), "serving.config", "weights has rotation, which"),
    (group(lambda g: g["weights"].update(strategy="rows")), "serving.config", "strategy 'rows'"),
    (group(lambda g: g.update(format="marlin-24")), "serving.config", "format 'marlin-24' is none"),
    (group(lambda g: g.update(format="int-quantized")), "serving.config", "wants quantized inputs beside 'int-quantized'"),
    (group(lambda g: g["weights"].update(num_bits="four")), "serving.config", "config_groups.group_0.weights.num_bits: 'four' is not"),
    (group(lambda g: g["weights"].update(num_bits=1)), "serving.schemes", "no kernel for layers of int1, group of 16"),
    (
        group(lambda g: g.update(input_activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})),
        "serving.schemes",
        "with inputs float8, dynamic, token",
    ),
    (
        config(lambda q: q.update(ignore=["lm_head", Q])),
        "serving.layers",
        "are one layer in vLLM 0.33.0, and the ignore patterns mean some",
    ),
    (config(lambda q: q.update(ignore=["lm_head", "re:.*mlp"])), "serving.layers", f"{DOWN}: lies quantized in the file"),
    (group(lambda g: g.update(targets=["re:.*self_attn"])), "serving.layers", f"{UP}: lies quantized in the file, and vLLM 0.33.0 builds"),
    (
        config(lambda q: second_group(q, [f"re:{Q}"], symmetric=False)),
        "serving.layers",
        "is of group_1, and vLLM 0.33.0 takes it for group_0",
    ),
    (
        config(lambda q: (q.update(ignore=[]), q["config_groups"]["group_0"].update(targets=["re:.*"]))),
        "serving.layers",
        "lm_head: lies as floats in the file, and vLLM",
    ),
    (tensors(quantized_head), "serving.layers", "lm_head: lies quantized in the file"),
    (tensors(lambda t: t.pop(f"{Q}.weight_shape")), "serving.tensors", f"{Q}.weight_shape: is missing"),
    (
        tensors(lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64, dtype=torch.int32)})),
        "serving.tensors",
        "WNA16 has no such parameter",
    ),
    (tensors(lambda t: t.update({f"{Q}.input_scale": torch.ones(1)})), "serving.tensors", "input_scale: WNA16 has no such parameter"),
    (tensors(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].T})), "serving.tensors", "has the shape [4, 64]"),
    (tensors(lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].long()})), "serving.tensors", "is torch.int64, and WNA16"),
    (
        config(lambda q: q.update(kv_cache_scheme={"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True})),
        "serving.kv_cache",
        "kv_cache_scheme is int8, and only fp8",
    ),
    (
        config(lambda q: q.update(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True})),
        "serving.kv_cache",
        "the strategy 'channel'",
    ),
]


@pytest.mark.parametrize(("damage", "check", "message"), DAMAGES, ids=[message for _, _, message in DAMAGES])
def test_what_vllm_refuses_is_found_by_name(workspace, compressed, damage, check, message):
    checkpoint = compressed()
    damage(checkpoint)
    assert message in found(read_subject(workspace.base, checkpoint.folder)).get(check, "")


def test_sglang_differs_where_its_loader_does(workspace, compressed):
    three_bits = compressed("W3A16")
    assert "no kernel for layers of int3" in found(read_subject(workspace.base, three_bits.folder), "sglang")["serving.schemes"]
    assert found(read_subject(workspace.base, three_bits.folder)) == {}
    attention_only = compressed()
    attention_only.edit_config(lambda data: data["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*self_attn"]))
    base = read_subject(workspace.base, attention_only.folder)
    assert "no target means it, which SGLang 0.5.23 refuses" in found(_as_floats(base), "sglang")["serving.layers"]
    assert found(_as_floats(base)) == {}
    integer_keys = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
    with_keys = replace(base, config={"quantization_config": {**base.quantization_config, "kv_cache_scheme": integer_keys}})
    assert "serving.kv_cache" not in found(with_keys, "sglang")


ATTENTION = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("targets", "kv", "check", "message"),
    [
        (["LlamaAttention"], ATTENTION, None, ""),
        (["LlamaAttention"], None, "serving.kv_cache", "attention is quantized without a kv_cache_scheme"),
        (["LlamaAttention", "OtherAttention"], ATTENTION, "serving.config", "has no arguments for weights"),
    ],
)
def test_attention_as_a_target_is_taken_as_one_class_with_a_scheme_for_the_cache(workspace, pristine, targets, kv, check, message):
    base = read_subject(workspace.base, pristine("W4A16"))
    groups = {
        **base.quantization_config["config_groups"],
        "attention": {"targets": targets, "weights": None, "input_activations": ATTENTION},
    }
    subject = replace(base, config={"quantization_config": {**base.quantization_config, "config_groups": groups, "kv_cache_scheme": kv}})
    assert found(subject).keys() == ({check} - {None}) and message in found(subject).get(check, "")
    passed_over = [record for record in check_serving(subject, "sglang", Policy()) if record.name == "serving.kv_cache" and check is None]
    assert all("passes it over: queries are quantized, whose scales have no place there" in record.summary for record in passed_over)
    assert bool(passed_over) is (check is None)


def _as_floats(subject):
    """The subject with floats where its config quantizes nothing."""
    entries = subject.compressed.entries
    packed = {name for name in entries if ".mlp." in name and not name.endswith("_proj.weight")}
    return replace(
        subject, compressed=replace(subject.compressed, entries={key: entry for key, entry in entries.items() if key not in packed})
    )


def test_groups_blocks_and_words_are_not_cut_among_gpus(workspace, pristine):
    subject = read_subject(workspace.base, pristine())
    assert found(subject, tensor_parallel=2) == {}
    assert "down_proj: 24 columns on each of 4 GPUs are no multiple of 16" in found(subject, tensor_parallel=4)["serving.shards"]
    assert "do not divide among 5 GPUs" in found(subject, tensor_parallel=5)["serving.shards"]
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    data = json.loads((pristine("FP8_DYNAMIC") / "config.json").read_text())
    data["quantization_config"]["config_groups"]["group_0"]["weights"] = blocks
    shards = found(replace(read_subject(workspace.base, pristine("FP8_DYNAMIC")), config=data))["serving.shards"]
    assert f"{GATE}: 96 rows of the fused layer are no multiple of 128" in shards
    assert UP not in shards  # the last shard may end within a block


@pytest.mark.parametrize("server", SERVERS)
def test_a_head_is_taken_as_a_run_writes_it_but_not_in_blocks(workspace, tmp_path, server):
    kinds = {"channel": {}, "block": {"block_structure": [32, 32]}}
    for strategy, more in kinds.items():
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
        recipe = {"QuantizationModifier": {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}}
        oneshot(workspace.base, recipe=recipe, output_dir=tmp_path / strategy, progress=False)
    channels, blocks = (found(read_subject(workspace.base, tmp_path / strategy), server) for strategy in kinds)
    assert channels == {}
    assert "lm_head: " in blocks["serving.layers"] and "cannot divide its blocks; give it scales" in blocks["serving.layers"]


def test_a_policy_may_allow_schemes_that_nobody_serves(workspace, pristine):
    subject = read_subject(workspace.base, pristine("W3A16"))
    records = {record.name: record for record in check_serving(subject, "sglang", Policy(allow_unserved_schemes=True))}
    assert records["serving.schemes"].outcome == "pass"
    assert "allowed by the policy: config_groups.group_0: SGLang" in records["serving.schemes"].summary
    assert records["serving.tensors"].outcome == "skip"


def test_no_server_judges_nothing_and_a_misspelt_one_is_refused(workspace, pristine):
    assert {record.outcome for record in check_serving(read_subject(workspace.base, pristine()), None, Policy())} == {"skip"}
    with pytest.raises(UserInputError, match="serve: 'vlm' is no server that is known here; did you mean 'vllm'"):
        validate(workspace.base, pristine(), workspace.dataset, serve="vlm")


UNSERVED_BY_ALL = {"W4AFP8", "W2A4", "W3A4", "W4A4", "W2A8", "W3A8", "W5A8", "W6A8", "W7A8"}
UNSERVED = {
    "vllm": UNSERVED_BY_ALL,
    "sglang": UNSERVED_BY_ALL | {"W4A8", "W2A16", "W3A16", "W5A16", "W6A16", "W7A16"}
    | {"MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP8", "MXFP8A16"},
}  # fmt: skip


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "MXFP4", "MXFP8A16"])
def test_formats_of_small_floats_as_a_run_writes_them_pass(workspace, tmp_path, preset):
    recipe = {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": preset}}
    oneshot(workspace.base, recipe=recipe, dataset=torch.arange(32).reshape(2, 16), output_dir=tmp_path / "out", progress=False)
    assert found(read_subject(workspace.base, tmp_path / "out")) == {}


FUSED = {
    "llama": (tiny.llama, "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.q_proj"),
    "experts": (tiny.qwen3_moe, "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.experts.1.gate_proj"),
}


@pytest.mark.filterwarnings("ignore:transformers .* will not load these experts:UserWarning")
@pytest.mark.parametrize("part", ["weight", "input"])
@pytest.mark.parametrize("kind", FUSED)
def test_layers_that_become_one_have_one_global_scale(kind, part, tmp_path):
    make, name, first = FUSED[kind]
    make(vocab_size=64, hidden_size=32).bfloat16().save_pretrained(tmp_path / "base")
    recipe = {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head", "re:.*mlp.gate$"], "scheme": "NVFP4"}}
    oneshot(tmp_path / "base", recipe=recipe, dataset=torch.arange(32).reshape(2, 16), output_dir=tmp_path / "out", progress=False)
    assert found(read_subject(tmp_path / "base", tmp_path / "out")) == {}
    Checkpoint(tmp_path / "out").edit(lambda t: t[f"{name}.{part}_global_scale"].mul_(2))
    said = found(read_subject(tmp_path / "base", tmp_path / "out"))
    assert list(said) == ["serving.shards"]
    assert f"{name}.{part}_global_scale: is " in said["serving.shards"] and f"that of {first} " in said["serving.shards"]


@pytest.mark.parametrize("server", SERVERS)
def test_of_every_preset_it_is_known_whether_it_is_served(server):
    refused = {name for name in PRESETS if refused_by(server, preset_scheme(name))}
    assert refused == UNSERVED[server]


def refused_by(server, scheme, **more):
    weights, inputs = (part and part.model_dump(mode="json") for part in (scheme.weights, scheme.input_activations))
    return refusal(SERVERS[server], weights, inputs, scheme.compression_format, **more)


def test_experts_have_kernels_of_their_own():
    scheme = preset_scheme("W8A8")
    per_tensor = scheme.model_copy(update={"weights": scheme.weights.model_copy(update={"strategy": "tensor"})})
    assert refused_by("vllm", scheme, experts=True) is None
    assert refused_by("vllm", per_tensor) is None
    assert "no kernel for experts of int8, tensor" in refused_by("vllm", per_tensor, experts=True)
