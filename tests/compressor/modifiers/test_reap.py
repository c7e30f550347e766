"""REAP in a run: a smaller model that its class loads, with other modifiers behind it, undone where a run fails, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3MoeForCausalLM,
)

from compressor import (
    GPTQModifier,
    QuantizationModifier,
    REAPPruningModifier,
    SmoothQuantModifier,
    WandaPruningModifier,
    load_compressed,
    oneshot,
    plan,
)
from compressor.algorithms.pruning.refit import SentTokens, refit
from compressor.errors import CompressorError, ModelError, RecipeError, SchemeError, TargetError
from compressor.lifecycle import Modifier, Session, State
from compressor.model.experts.unfuse import unfused_experts
from compressor.modifiers.pruning import expert_count
from tests import tiny

SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}


def drawn(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() <= 2 and "inv_freq" not in name:
            tensor.data = tensor.data + 0.05 * torch.randn(tensor.shape, generator=generator)
    return model.eval()


def qwen3_moe(**more: Any) -> Qwen3MoeForCausalLM:
    return drawn(tiny.qwen3_moe(**SIZE, num_experts=6, intermediate_size=32, **more))  # type: ignore[no-any-return]


def mixtral() -> MixtralForCausalLM:
    return drawn(tiny.mixtral(**SIZE, intermediate_size=32, num_local_experts=6))  # type: ignore[no-any-return]


def gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
    return drawn(GptOssForCausalLM(GptOssConfig(**SIZE, **sizes)))  # type: ignore[no-any-return]


def deepseek_v3(**more: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 12, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**SIZE, **latent, **experts, "intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4, **more}
    return drawn(DeepseekV3ForCausalLM(DeepseekV3Config(**config)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Any]] = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def num_experts(model: nn.Module) -> set[int]:
    return {module.down_proj.shape[0] for module in model.modules() if getattr(getattr(module, "down_proj", None), "ndim", 0) == 3}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_class_loads_a_smaller_model_that_computes_the_same(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    (before,) = num_experts(model)
    recipe = REAPPruningModifier(sparsity=0.5, report_path=tmp_path / "kept.json")  # type: ignore[arg-type]
    result = oneshot(model, recipe=recipe, dataset=IDS, output_dir=tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert num_experts(loaded) == {before // 2}
    assert torch.equal(logits(loaded), logits(result.model))
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert {len(set(one)) for one in kept.values()} == {before // 2}
    assert sorted(kept) == sorted(result.report.modules) and any(
        "3 of 6 experts stay" in note or "6 of 12" in note for note in result.report.notes
    )
    lost = [record.error for record in result.report.modules.values()]
    assert all(0 < one < 0.5 for one in lost)  # those that go matter less than those that stay


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_other_modifiers_see_the_smaller_model(make: Callable[[], Any], tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "base")
    recipe = [
        REAPPruningModifier(sparsity=0.34),
        SmoothQuantModifier(),
        GPTQModifier(config_groups=GROUPS, ignore=["lm_head"]),
    ]
    said = plan(tmp_path / "base", recipe=[one.model_copy() for one in recipe], num_calibration_samples=8, max_seq_length=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transformers does not load quantized experts of gpt_oss
        result = oneshot(tmp_path / "base", recipe=recipe, dataset=IDS, output_dir=tmp_path / "out")
    own = load_compressed(tmp_path / "out")
    assert torch.equal(logits(own), logits(result.model))
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in result.report.modules if ".experts." in name}
    (before,) = num_experts(make())
    left = before - (before // 3 if make is not deepseek_v3 else 4)
    assert numbers == set(range(left))
    assert {module.name for module in said.modules} == {name for name, one in result.report.modules.items() if "int4" in one.scheme}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118 (no mapping)
    assert said.estimate.checkpoint_bytes == pytest.approx(stored, rel=0.02)


@pytest.mark.parametrize("refit", [True, False])
def test_routers_that_have_lost_their_rows_are_not_said_to_come_late(refit: bool) -> None:
    recipe = [REAPPruningModifier(sparsity=0.25, refit=refit), GPTQModifier(config_groups=GROUPS, ignore=["lm_head", "re:.*mlp.gate$"])]
    notes = oneshot(qwen3_moe(), recipe=recipe, dataset=IDS).report.notes
    assert not [note for note in notes if "compressed last" in note], notes


def test_groups_of_a_router_lose_as_many_experts_each() -> None:
    result = oneshot(deepseek_v3(), recipe=REAPPruningModifier(sparsity=0.5), dataset=IDS)
    (layer,) = result.report.transforms[0]["layers"]
    assert [sum(place < 6 for place in layer["kept"]), sum(place >= 6 for place in layer["kept"])] == [3, 3]
    assert result.model.config.n_routed_experts == 6


def test_a_plan_takes_as_many_from_each_group() -> None:
    said = plan(deepseek_v3(), recipe=[REAPPruningModifier(sparsity=0.25), QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])])
    numbers = {int(module.name.split(".experts.")[1].split(".")[0]) for module in said.modules if ".experts." in module.name}
    assert numbers == set(range(10))  # a quarter of six is one, of each of two groups


def test_a_run_that_fails_leaves_the_model_as_it_was() -> None:
    model = qwen3_moe()
    before, state = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 7}
    wrong = QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": weights}})
    with pytest.raises(SchemeError, match="group_size=7"):
        oneshot(model, recipe=[REAPPruningModifier(sparsity=0.5), wrong], dataset=IDS)
    assert model.config.num_experts == 6 and model.model.layers[0].mlp.gate.num_experts == 6
    assert torch.equal(logits(model), before)
    after = model.state_dict()
    assert state.keys() == after.keys() and all(torch.equal(tensor, state[name]) for name, tensor in after.items())


def test_experts_whose_order_matters_are_refused() -> None:
    model = qwen3_moe()
    gates = torch.linspace(0.5, 2.0, 6)  # a place for each expert that no config builds
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: (output[0], output[1] * gates[output[2]], output[2]))
    before = logits(model)
    with pytest.raises(ModelError, match=r"in another order its layers give something else .*layers\.1"):
        oneshot(model, recipe=REAPPruningModifier(sparsity=0.5), dataset=IDS)
    assert torch.equal(logits(model), before)


def test_the_proof_leaves_the_model_as_it_was() -> None:
    model = deepseek_v3()
    with unfused_experts(model, hold=True):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        count = expert_count.count_experts(model, 6)
        assert expert_count.num_groups(model, count, {"input_ids": IDS}, torch.device("cpu"), 0) == 2
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert count.path == ("n_routed_experts",) or model.config.n_routed_experts == 12
        assert set(count.tensors) == {f"model.layers.1.mlp.gate.{one}" for one in ("weight", "e_score_correction_bias")}


def test_a_later_modifier_may_not_stand_before_it() -> None:
    recipe = [QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"]), REAPPruningModifier(sparsity=0.5)]
    with pytest.raises(RecipeError, match="let it stand first in the recipe"):
        oneshot(qwen3_moe(), recipe=recipe, dataset=IDS)


def llama() -> LlamaForCausalLM:
    return tiny.llama(**SIZE, intermediate_size=32)


def jamba() -> JambaForCausalLM:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_offset": 1, "attn_layer_offset": 0, "attn_layer_period": 2}
    return JambaForCausalLM(JambaConfig(**SIZE, **experts, intermediate_size=32, use_mamba_kernels=False, use_cache=False)).eval()


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[CompressorError], str]] = {
    "no experts": (llama, {"sparsity": 0.5}, TargetError, "no layer of experts"),
    "none would go": (qwen3_moe, {"sparsity": 0.1}, RecipeError, "sparsity=0.1 of 6 experts is none; give 0.167"),
    "none of a group would go": (deepseek_v3, {"sparsity": 0.1}, RecipeError, "6 experts in each of 2 groups is none; give 0.167"),
    "fewer than are chosen": (qwen3_moe, {"sparsity": 0.9}, ModelError, "cannot choose among 1 of 6 experts"),
    "one layer ignored": (qwen3_moe, {"sparsity": 0.5, "ignore": "re:.*layers.1.*"}, TargetError, "one number for all layers"),
    "a layer that is not there": (qwen3_moe, {"sparsity": 0.5, "ignore": ["re:.*nothing"]}, TargetError, "matches no layer of experts"),
    "all ignored": (qwen3_moe, {"sparsity": 0.5, "ignore": ["re:.*experts"]}, TargetError, "ignore names all layers"),
    "a class that has no layer of one expert": (jamba, {"sparsity": 0.5}, ModelError, "no setting of its config makes a model with 1 of 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused(what: str) -> None:
    make, settings, error, said = REFUSED[what]
    model = make()
    before = logits(model)
    with pytest.raises(error, match=said):
        oneshot(model, recipe=REAPPruningModifier(**settings), dataset=IDS)
    assert torch.equal(logits(model), before)


def test_fewer_experts_than_routers_choose_are_refused_before_any_data_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.modifiers.pruning.reap.run_batches", lambda *args, **kwargs: pytest.fail("a pass over the data"))
    with pytest.raises(ModelError, match=r"its routers cannot choose among 1 of 6 experts .*give a smaller sparsity"):
        oneshot(qwen3_moe(), recipe=REAPPruningModifier(sparsity=0.9), dataset=IDS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "'sparsity' is required"),
        ({"sparsity": 1}, "less than 1"),
        ({"sparsity": 0.5, "report_path": "kept.txt"}, "json"),
        ({"sparsity": 0.5, "report_path": "nowhere/kept.json"}, "no folder"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        REAPPruningModifier(**settings)


def test_a_training_cannot_run_it() -> None:
    model = qwen3_moe()
    session = Session(State(model), [REAPPruningModifier(sparsity=0.5)])
    with pytest.raises(CompressorError, match="no calibration data"), unfused_experts(model, hold=True):
        session.initialize()


@pytest.mark.parametrize("modifier", [REAPPruningModifier(sparsity=0.5), WandaPruningModifier(sparsity=0.5, ignore=["lm_head"])])
def test_nothing_flows_layer_by_layer_where_nobody_looks(modifier: Modifier) -> None:
    alone = oneshot(qwen3_moe(), recipe=modifier.model_copy(), dataset=IDS)
    asked = oneshot(qwen3_moe(), recipe=modifier.model_copy(), dataset=IDS, pipeline="sequential")
    assert torch.equal(logits(alone.model), logits(asked.model))
    assert [note for note in asked.report.notes if note not in alone.report.notes] == [
        "no modifier looks at layers one after another, so they were not run so"
    ]
    with pytest.raises(TargetError, match="passes: 'one' was given, but no modifier looks at layers one after another; leave it out"):
        oneshot(qwen3_moe(), recipe=modifier.model_copy(), dataset=IDS, pipeline="sequential", passes="one")


def test_experts_that_stay_make_good_for_those_that_went_where_held_out_tokens_say_so() -> None:
    ids = torch.randint(64, (64, 24), generator=torch.Generator().manual_seed(0))
    models = [oneshot(qwen3_moe(), recipe=REAPPruningModifier(sparsity=0.34, refit=refit), dataset=ids) for refit in (True, False)]
    moved, plain = ({name: tensor for name, tensor in one.model.state_dict().items()} for one in models)
    changed = {name for name in plain if not torch.equal(plain[name], moved[name])}
    better = {
        layer
        for layer, record in models[0].report.modules.items()
        if record.details["error_after_refit"] < record.details["error_before_refit"]  # type: ignore[operator]
    }
    assert better and all(name.rpartition(".experts.")[0] + ".experts" in better and "down_proj" in name for name in changed)
    assert {layer["experts"] for layer in models[0].report.transforms[0]["layers"] if layer["refit"]} == better
    assert not any(layer["refit"] for layer in models[1].report.transforms[0]["layers"])


def test_refitting_runs_a_block_once_through_the_hooks_of_its_author() -> None:
    """Which scale what the block is handed: refitted on held-out tokens it is better, so it is on those of the run."""
    ids = torch.randint(64, (64, 24), generator=torch.Generator().manual_seed(0))

    def error(refit: bool) -> float:
        models: list[Any] = [qwen3_moe(), qwen3_moe()]
        for layer in (layer for model in models for layer in model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] * torch.linspace(0.1, 4, args[0].shape[-1]),))
        oneshot(models[1], recipe=REAPPruningModifier(sparsity=0.34, refit=refit), dataset=ids)
        with torch.no_grad():
            base, found = (model(ids).logits for model in models)
        return float((found - base).norm() / base.norm())

    assert error(refit=True) < error(refit=False)


@pytest.mark.parametrize("how", ["inference_mode", "writes"])
def test_refitting_takes_a_block_that_makes_inference_tensors_or_writes_to_what_its_experts_gave(how: str) -> None:
    def run(change: Callable[[Any], Any]) -> dict[str, Tensor]:
        model: Any = qwen3_moe()
        for layer in model.model.layers:
            layer.mlp.forward = change(layer.mlp.forward)
        oneshot(model, recipe=REAPPruningModifier(sparsity=0.5), dataset=IDS)
        return dict(model.state_dict())

    if how == "inference_mode":
        plain, other = run(lambda forward: forward), run(torch.inference_mode())
    else:
        plain, other = run(lambda forward: lambda x: forward(x) * 2), run(lambda forward: lambda x: forward(x).mul_(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.items())


def test_refitting_is_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn_of(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    sent = [SentTokens(torch.arange(0, 300), drawn_of(300, 6)), SentTokens(torch.arange(100, 400), drawn_of(300, 6))]
    sent.append(SentTokens(torch.arange(0), drawn_of(0, 6)))
    weights, wanted = [drawn_of(5, 6) for _ in sent], drawn_of(400, 5)
    given = torch.zeros_like(wanted)
    for tokens, weight in zip(sent, weights, strict=True):
        given[tokens.rows_n] += tokens.inputs_nD @ weight.T
    missing = wanted - given
    new = refit(sent, weights, missing, 0.0, 60)
    design = torch.zeros(400, 12, dtype=torch.float64)
    design[:300, :6], design[100:, 6:] = sent[0].inputs_nD.double(), sent[1].inputs_nD.double()
    best = torch.linalg.lstsq(design, wanted.double()).solution
    assert torch.allclose(torch.cat(new[:2], dim=1).T.double(), best, atol=1e-4)
    assert torch.equal(new[2], weights[2])  # of whom nothing is known
    assert torch.allclose(missing.double(), wanted.double() - design @ best, atol=1e-4)


def test_blocks_that_are_handed_more_than_hidden_states_are_not_refitted_in_silence() -> None:
    model = qwen3_moe()
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda hidden, positions=None: plain(hidden)
    kind = type(layer.mlp)
    layer.mlp.__class__ = type("Handed", (kind,), {"__call__": lambda self, hidden: kind.__call__(self, hidden, hidden)})
    with pytest.raises(ModelError, match="handed more than hidden states, so that experts cannot be refitted; set refit: false"):
        oneshot(model, recipe=REAPPruningModifier(sparsity=0.5), dataset=IDS)
    assert oneshot(model, recipe=REAPPruningModifier(sparsity=0.5, refit=False), dataset=IDS).report.transforms


def test_experts_that_hold_nan_are_named() -> None:
    model = qwen3_moe()
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts: its experts give NaN or infinity"):
        oneshot(model, recipe=REAPPruningModifier(sparsity=0.5), dataset=IDS)
