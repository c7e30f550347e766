"""What a plan says of transforms: rotations that the result pays for in every forward, and searches beside the stages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from compressor import QuantizationModifier, oneshot
from compressor.cli.main import main
from compressor.errors import CheckpointError, RecipeError, TargetError
from compressor.mappings.inner import find_inner
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import sample_batches
from compressor.modifiers.transforms.awq import AWQModifier
from compressor.modifiers.transforms.quip import QuIPModifier
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.nn.online_rotation import rotated_modules
from compressor.planning import Plan, plan, planner
from compressor.planning.estimate import Speed
from compressor.planning.inner import inner_layers
from harness.traceability.architectures import zoo
from tests import tiny

GPTQ = {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}}


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of this file times anything: 1 GFLOP/s, a microsecond for a column."""
    monkeypatch.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))


def llama() -> Any:
    return tiny.llama(hidden_size=64, intermediate_size=96)


def products(model: Any) -> int:
    """FLOPs of matrix products in a forward of 8 tokens, as whoever serves the result runs it: each layer turns what it is handed."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return counter.get_total_flops()


ONLINE = {
    "R4": SpinQuantModifier(rotations=["R1", "R2", "R4"]),
    "R4 in blocks": SpinQuantModifier(rotations=["R4"], transform_block_size=32, transform_type="random-matrix"),
    "QuIP": QuIPModifier(rotations=["v", "u"]),
    "of weights alone": SpinQuantModifier(),
}


STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
KV, INTS = {"type": "float", **STATIC}, {"num_bits": 8, "strategy": "channel"}
BESIDE: dict[str, list[Any]] = {
    **{name: [modifier, QuantizationModifier(scheme="W8A8", ignore=["lm_head"])] for name, modifier in ONLINE.items()},
    "scales of inputs": [QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": INTS, "input_activations": STATIC}})],
    "zeros of inputs": [
        QuantizationModifier(
            config_groups={"g": {"targets": ["Linear"], "weights": INTS, "input_activations": {**STATIC, "symmetric": False}}}
        )
    ],
    "scales of keys": [QuantizationModifier(kv_cache_scheme=KV)],
    "scales of heads": [QuantizationModifier(kv_cache_scheme={**KV, "strategy": "attn_head"})],
    "scales of queries": [QuantizationModifier(config_groups={"g": {"targets": ["LlamaAttention"], "input_activations": KV}})],
}


@pytest.mark.parametrize("rotations", [["R1"], ["R2"]])
def test_a_head_that_shares_the_embedding_is_planned_as_one_of_its_own_where_it_is_turned(rotations: list[str], tmp_path: Path) -> None:
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    rounding = {"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}
    recipe = {"q_modifiers": {"SpinQuantModifier": {"rotations": rotations}, **rounding}}
    made = plan(tmp_path / "base", recipe=recipe).estimate
    oneshot(tmp_path / "base", recipe=recipe, device="cpu", output_dir=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert made.checkpoint_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert ("lm_head.weight" in tensors) is (rotations == ["R1"])
    plain = plan(tmp_path / "base", recipe={"q_modifiers": rounding}).estimate
    more = tensors["lm_head.weight"].nbytes if rotations == ["R1"] else 0
    assert made.model_bytes == plain.model_bytes + more


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_the_codes_is_planned_on_the_disk(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe() -> list[Any]:
        return [modifier.model_copy(deep=True) for modifier in BESIDE[name]]

    chosen: dict[str, Any] = {"device": "cpu", "dtype": dtype, "dataset": torch.arange(24).reshape(3, 8)}
    llama().save_pretrained(tmp_path / "base")
    planned = plan(tmp_path / "base", recipe=recipe(), dtype=dtype).estimate.checkpoint_bytes
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=planned - 1))
        with pytest.raises(CheckpointError, match="are free"):
            oneshot(tmp_path / "base", recipe=recipe(), output_dir=tmp_path / "full", **chosen)
    oneshot(tmp_path / "base", recipe=recipe(), output_dir=tmp_path / "out", **chosen)
    tensors = load_file(tmp_path / "out" / "model.safetensors").values()
    assert planned == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("names", [["R4"], ["QuIP"], ["QuIP", "R4 in blocks"], ["of weights alone"]], ids=str)
def test_who_reads_rotations_in_the_forward_is_said_by_plan_and_run(names: list[str]) -> None:
    ignore = {"QuIP": ["re:.*down_proj"]}  # R4 turns their inputs

    def recipe() -> list[Any]:
        return [ONLINE[name].model_copy(deep=True, update={"ignore": ignore[name]} if name in ignore else {}) for name in names]

    made, result = plan(llama(), recipe=recipe()), oneshot(llama(), recipe=recipe(), dataset=torch.arange(24).reshape(3, 8), device="cpu")
    said, noted = ([note for note in notes if "transform_config" in note] for notes in (made.notes, result.report.notes))
    assert said == noted and len(said) == sum(name != "of weights alone" for name in names)


@pytest.mark.parametrize("modifier", ONLINE.values(), ids=ONLINE)
def test_rotations_in_the_forward_cost_what_a_forward_of_the_result_takes(modifier: Any) -> None:
    model = llama()
    made = plan(model, recipe=[modifier.model_copy(deep=True)])
    before = products(model)
    oneshot(model, recipe=[modifier.model_copy(deep=True)], device="cpu")
    counted = (products(model) - before) / 8
    assert counted <= sum(made.online.values()) <= 1.2 * counted  # signs and roots are none of a product
    if modifier is ONLINE["R4"]:
        assert list(made.online) == [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert made.online_share == pytest.approx(sum(made.online.values()) / (2 * weights))


def gated_attention() -> Any:
    """One head whose queries, beside a gate in one projection, the first token cannot see: it attends to itself alone."""
    one = zoo()["qwen3_next"]
    model = replace(one, config={**one.config, "num_attention_heads": 1, "num_key_value_heads": 1}).build(0)
    model.get_submodule("model.layers.1.self_attn").q_norm = torch.nn.Identity()
    return model


# Dense and fused, experts of three layouts, layers that share weights, a projection in front of all, norms without statistics, norms of
# heads beside a gate.
FOLLOWED = (
    *("llama", "phi3", "gpt2", "mixtral", "gpt_oss", "jamba", "llama4", "deepseek_v3", "minimax", "albert", "electra", "mobilebert"),
    *("qwen3_next", "gated_attention"),
)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_r4_would_turn_is_followed_on_shapes(name: str) -> None:
    model = (gated_attention() if name == "gated_attention" else zoo()[name].build(0)).eval()
    skeleton = planner.without_values(model)
    with unfused_experts(model, hold=True) as own, unfused_experts(skeleton, hold=True) as experts:
        found = find_inner(model, sample_batches(model).batches[0], torch.device("cpu"))
        assert inner_layers(skeleton) == found
        own.restore()
        experts.restore()


def test_square_layers_are_not_taken_for_those_that_end_an_mlp() -> None:
    def model() -> Any:
        return tiny.qwen3_moe(hidden_size=32, moe_intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16)

    rest = ["lm_head", "re:.*mlp.gate$"]

    def recipe(*left: str) -> list[Any]:
        rounded = QuantizationModifier(scheme="W8A8", ignore=rest)
        return [SpinQuantModifier(rotations=["R4"]), QuIPModifier(ignore=[*rest, *left]), rounded]

    online = plan(model(), recipe=[recipe()[0], recipe()[-1]]).online
    plan(model(), recipe=recipe("re:.*down_proj"))
    turned = rotated_modules(oneshot(model(), recipe=recipe("re:.*down_proj"), device="cpu").model)
    assert set(online) == {name for name, (rotation, *_) in turned.items() if rotation.group == "R4"}
    with pytest.raises(TargetError, match="down_proj is turned by R4 already"):
        plan(model(), recipe=recipe())


def test_it_is_shown_and_sizes_without_a_matrix_are_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llama().config.save_pretrained(tmp_path)
    (tmp_path / "r.yaml").write_text("quant_stage: {quant_modifiers: {QuIPModifier: {rotations: [v]}}}")
    assert main(["plan", str(tmp_path), "--recipe", str(tmp_path / "r.yaml")]) == 0
    assert "rotations in every forward of the result (estimate): 0." in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RecipeError, match="transform_block_size=24 does not divide the 64 channels"):
        plan(llama(), recipe=[QuIPModifier(transform_block_size=24)])


def test_the_search_of_awq_grows_with_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**settings: Any) -> Plan:
        return plan(llama(), recipe={"AWQModifier": settings, **GPTQ}, num_calibration_samples=8, max_seq_length=16)

    def flops(one: Plan) -> float:
        return next(stage.flops for stage in one.estimate.stages if stage.name == "AWQModifier[0]")

    few, many, both = made(n_grid=10), made(n_grid=20), made(n_grid=10, duo_scaling="both")
    a_candidate = 2 * 2 * (64**2 * (64 + 2 * 32 + 64 + 2 * 96) + 96**2 * 64)  # two layers: q, k, v; o; gate, up; down
    assert flops(many) - flops(few) == flops(both) - flops(few) == 10 * a_candidate
    monkeypatch.setattr(AWQModifier, "search_flops", lambda *args: 0.0)
    assert made().estimate.seconds < many.estimate.seconds
