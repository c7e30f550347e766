"""Experts are taken apart, calibrated and put back: same outputs, right names, every token where it belongs, unknown layouts refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import AWQModifier, GPTQModifier, QuantizationModifier, WandaPruningModifier, load_compressed, oneshot, plan
from compressor.algorithms.hessian import Hessian
from compressor.errors import CalibrationError, ModelError
from compressor.model.experts.unfuse import UnfusedModel, check_no_unknown_experts, unfuse_into, unfused_experts, unknown_experts
from compressor.nn.experts import Expert, UnfusedExperts, fused_weights
from compressor.pipelines import settings as pipeline_settings
from compressor.pipelines.settings import expert_targets

KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(5))
MoE = Callable[..., nn.Module]


def _group4(**settings: Any) -> GPTQModifier:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    return GPTQModifier(config_groups=groups, ignore=settings.pop("ignore", ["lm_head"]), **settings)


def _logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def _tokens_of_experts(report: Any, projection: str) -> list[int | None]:
    return [record.num_tokens for name, record in report.modules.items() if ".experts." in name and name.endswith(projection)]


def _seen(module: nn.Module) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """What a module is given and gives back from now on."""
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
    module.register_forward_hook(lambda module, args, output: calls.append((args, output)))
    return calls


@torch.no_grad()
def _expert_by_expert(fused: Any, hidden: Tensor, index: Tensor, shares: Tensor, *, adds: bool) -> Tensor:
    """The definition, with the products that the unfused layer makes: gate, up and down of each expert by itself."""
    is_gpt_oss = type(fused).__name__ == "GptOssExperts"  # columns interleaved, transposed, with biases
    slots = torch.zeros(*index.shape, hidden.shape[-1])
    total = torch.zeros_like(hidden)
    for expert in range(fused.down_proj.shape[0]):
        rows, places = torch.where(index == expert)
        first, down = fused.gate_up_proj[expert], fused.down_proj[expert]
        if is_gpt_oss:
            bias = fused.gate_up_proj_bias[expert]
            gate, up = (F.linear(hidden[rows], first[:, part::2].t(), bias[part::2]) for part in (0, 1))
            gate, up = gate.clamp(max=fused.limit), up.clamp(-fused.limit, fused.limit)
            output = F.linear((up + 1) * (gate * torch.sigmoid(gate * fused.alpha)), down.t(), fused.down_proj_bias[expert])
        else:
            gate, up = torch.cat([F.linear(hidden[rows], half) for half in first.chunk(2)], -1).chunk(2, -1)  # strided: exp has two loops
            output = F.linear(fused.act_fn(gate) * up, down)
        weighted = output * shares[rows, places, None]
        total.index_add_(0, rows, weighted)
        slots[rows, places] = weighted
    return total if adds else slots.sum(1)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_unfused_forward_is_bitwise_its_products_and_the_fused_one_up_to_rounding(tiny_moe: MoE, kind: str, implementation: str) -> None:
    """Whether one product for gate and up gives the bits of two is a property of the kernel: it does on AVX-512, not on every CPU."""
    model = tiny_moe(kind)
    model.set_experts_implementation(implementation)
    before = _logits(model)
    unfused = UnfusedModel(model)
    unfuse_into(unfused)
    assert unfused.modules
    seen = [_seen(model.get_submodule(name)) for name in unfused.modules]
    after = _logits(model)
    assert 0 < float(before.abs().max()) < 1e3
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max())
    assert all(seen)
    for name, calls in zip(unfused.modules, seen, strict=True):
        for arguments, output in calls:
            expected = _expert_by_expert(unfused.fused[name], *arguments, adds=implementation == "eager")
            assert torch.equal(output, expected)
    for module in (one for one in model.modules() if isinstance(one, UnfusedExperts)):
        assert all(isinstance(layer, nn.Linear) for expert in module.experts() for layer in expert.children())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_views_and_go_back_into_the_fused_tensors(tiny_moe: MoE, kind: str) -> None:
    unfused = UnfusedModel(tiny_moe(kind))
    unfuse_into(unfused)
    for name, fused in unfused.fused.items():
        apart = unfused.model.get_submodule(name)
        assert isinstance(apart, UnfusedExperts)
        down = next(apart.experts()).get_submodule(apart.layout.down).get_parameter("weight")
        assert down.untyped_storage().data_ptr() == fused.get_parameter("down_proj").untyped_storage().data_ptr()
        back = fused_weights(apart)
        assert set(back) == {key for key, _ in fused.named_parameters(recurse=False)}
        assert all(torch.equal(back[key], fused.get_parameter(key)) for key in back)


@pytest.mark.parametrize(("kind", "names"), [("mixtral", "w1 w3 w2"), ("qwen3_moe", "gate_proj up_proj down_proj")])
def test_projections_are_called_as_in_the_files(tiny_moe: MoE, kind: str, names: str) -> None:
    model = tiny_moe(kind)
    unfuse_into(UnfusedModel(model))
    expert = model.get_submodule("model.layers.1.mlp.experts.0")
    assert [name for name, _ in expert.named_children()] == names.split()


def test_a_layout_that_is_not_what_it_says_is_found_by_running_it(tiny_moe: MoE, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_moe("gpt_oss")
    kind: Any = type(model.get_submodule("model.layers.0.mlp.experts"))
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, index, weights: plain(self, x, index, weights.sqrt()))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts: GptOssExperts taken apart gives other outputs"):
        unfuse_into(UnfusedModel(model))


def test_a_forward_that_was_exchanged_on_the_object_would_not_read_them(tiny_moe: MoE) -> None:
    model = tiny_moe("qwen3_moe")
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    experts.forward = experts.forward
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: its forward was exchanged on the object"):
        oneshot(model, recipe=_group4(), dataset=[IDS[0].tolist()])
    assert model.get_submodule("model.layers.0.mlp.experts") is experts
    oneshot(model, recipe=_group4(ignore=["lm_head", "re:.*experts.*"]), dataset=[IDS[0].tolist()])


def test_what_their_author_has_put_on_them_stays(tiny_moe: MoE) -> None:
    model = tiny_moe("qwen3_moe")
    fused: Any = model.get_submodule("model.layers.0.mlp.experts")
    fused.register_buffer("counts", torch.arange(3.0))
    fused.register_buffer("scratch", torch.ones(2), persistent=False)
    fused.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    oneshot(model, recipe=_group4(fallback_budget=100), dataset=[IDS[0].tolist()])
    now: Any = model.get_submodule("model.layers.0.mlp.experts")
    assert now is not fused and now.temperature is fused.temperature and torch.equal(now.counts, torch.arange(3.0))
    assert hasattr(now, "scratch") and not any(name.endswith("scratch") for name in model.state_dict())


def test_experts_that_no_modifier_changes_come_back_and_so_do_all_after_an_error(tiny_moe: MoE) -> None:
    model = tiny_moe("qwen3_moe")
    own = dict(model.named_modules())
    oneshot(model, recipe=_group4(ignore=["lm_head", "re:.*experts.*"]), dataset=[IDS[0].tolist()])
    assert all(dict(model.named_modules())[name] is module for name, module in own.items() if "experts" in name)
    with pytest.raises(RuntimeError, match="planted"), unfused_experts(model, hold=True):
        assert any(isinstance(module, UnfusedExperts) for module in model.modules())
        raise RuntimeError("planted")
    assert all(dict(model.named_modules())[name] is module for name, module in own.items() if "experts" in name)


def test_a_failed_run_leaves_a_model_in_memory_as_it_was(tiny_moe: MoE) -> None:
    model = tiny_moe("qwen3_moe")
    before, logits = list(model.state_dict()), _logits(model)
    with pytest.raises(CalibrationError, match="no calibration token reached it"):
        oneshot(model, recipe=_group4(), dataset=[[3, 4]], pipeline="sequential")
    assert list(model.state_dict()) == before
    assert torch.equal(_logits(model), logits)


def test_an_expert_without_tokens_is_a_counted_fallback(tiny_moe: MoE) -> None:
    result = oneshot(tiny_moe("qwen3_moe"), recipe=_group4(fallback_budget=100), dataset=[[3, 4]])
    seen = _tokens_of_experts(result.report, "gate_proj")
    assert None in seen and any(seen)
    assert {fallback.kind for fallback in result.report.fallbacks if ".experts." in fallback.module} == {"no_tokens"}
    assert sum(number or 0 for number in seen) == 2 * 2 * 2  # tokens x experts per token x layers


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_all_experts_learn_from_all_tokens_and_the_flow_stays_routed(tiny_moe: MoE, pipeline: str) -> None:
    model = tiny_moe("qwen3_moe")
    result = oneshot(model, recipe=_group4(), dataset=[IDS[0].tolist()], pipeline=pipeline, calibrate_all_experts=True)
    assert set(_tokens_of_experts(result.report, "_proj")) == {9}
    assert result.record["calibrate_all_experts"] is True
    assert not any(module.calibrate_all for module in result.model.modules() if isinstance(module, UnfusedExperts))
    shown = UnfusedModel(tiny_moe("qwen3_moe"))
    unfuse_into(shown)
    routed = _logits(shown.model)
    shown.calibrate_all()
    seen: list[int] = []
    expert = shown.model.get_submodule("model.layers.0.mlp.experts.3.gate_proj")
    with expert.register_forward_pre_hook(lambda module, args: seen.append(len(args[0]))):
        assert torch.equal(_logits(shown.model), routed)
    assert seen == [18]


def test_calibrate_all_experts_without_experts_is_noted(make_model: MoE) -> None:
    report = oneshot(make_model("llama"), recipe=_group4(), dataset=[[1, 2]], calibrate_all_experts=True).report
    assert "calibrate_all_experts: no module with experts is compressed, so there is none to show all tokens" in report.notes


@pytest.mark.parametrize("what", ["Wanda", "AWQ", "imatrix"])
@pytest.mark.parametrize("key", ["attention_mask", "loss_mask"])
def test_an_expert_that_a_padded_batch_does_not_reach_is_told_nothing(tiny_moe: MoE, what: str, key: str) -> None:
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8, "strategy": "group"}}}
    rest: dict[str, Any] = {"ignore": ["lm_head", "re:.*gate$"]}
    imatrix = QuantizationModifier(config_groups=groups, weight_observer="imatrix_mse", fallback_budget=99, **rest)
    recipe = {
        "Wanda": [WandaPruningModifier(sparsity=0.5, fallback_budget=99, **rest)],
        "AWQ": [AWQModifier(), QuantizationModifier(config_groups=groups, **rest)],
        "imatrix": [imatrix],
    }[what]
    counted = torch.arange(8) > 4 if key == "loss_mask" else torch.arange(8) < 3
    ids = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(0))  # all experts are reached in the end
    rows = [{"input_ids": row, key: counted.long()} for row in ids]
    result = oneshot(tiny_moe("qwen3_moe"), recipe=recipe, dataset=DataLoader(rows, batch_size=1))
    assert any("experts" in name for name in result.report.modules)


def test_padding_reaches_no_expert(tiny_moe: MoE) -> None:
    rows = [IDS[0].tolist(), IDS[1].tolist()[:4]]
    padded = oneshot(tiny_moe("mixtral"), recipe=_group4(fallback_budget=100), dataset=rows, batch_size=2)
    alone = oneshot(tiny_moe("mixtral"), recipe=_group4(fallback_budget=100), dataset=rows, batch_size=1)
    counts = _tokens_of_experts(padded.report, ".w1")
    assert sum(number or 0 for number in counts) == 13 * 2 * 2
    assert counts[:4] == _tokens_of_experts(alone.report, ".w1")[:4]


def test_experts_of_large_layers_are_stages_of_their_own(tiny_moe: MoE) -> None:
    model = tiny_moe("deepseek_v3")
    with unfused_experts(model, hold=True):
        claimed = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
        assert expert_targets(model, claimed, "sequential") is None
        assert expert_targets(model, claimed, "sequential", ["Own"], limit=0) == ["Own"]
        targets = expert_targets(model, claimed, "sequential", limit=0)
        assert targets is not None
        prefix = "model.layers.1."
        assert targets[0] == "model.layers.0"
        assert targets[1] == f"{prefix}self_attn"
        assert {f"{prefix}mlp.experts.{index}" for index in range(8)} | {f"{prefix}mlp.shared_experts"} == set(targets[2:])
    result = oneshot(model, recipe=_group4(fallback_budget=100), dataset=[IDS[0].tolist()] * 3, sequential_targets=targets)
    assert len(result.report.modules) == len(claimed)


def test_hessians_of_few_experts_live_at_a_time(tiny_moe: MoE, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Hessian] = weakref.WeakSet()
    most: list[int] = []
    plain = Hessian.add

    def counted(self: Hessian, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        alive.add(self)
        most.append(len({id(one.panels) for one in alive if one.panels.nodes}))

    monkeypatch.setattr(Hessian, "add", counted)
    peaks = {}
    for limit in (pipeline_settings.HESSIAN_BYTES, 0):
        monkeypatch.setattr(pipeline_settings, "HESSIAN_BYTES", limit)
        most.clear()
        oneshot(tiny_moe("qwen3_moe"), recipe=_group4(fallback_budget=100), dataset=[IDS[0].tolist()] * 3)
        peaks[limit] = max(most)
    assert peaks[pipeline_settings.HESSIAN_BYTES] <= 3  # the module's limit is 0 now: attention has 2, an expert 2
    assert max(peaks.values()) >= 12  # a layer at once: attention, and two for each of at least five experts


class _StrangeExperts(nn.Module):
    """Experts in a layout that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(4, 8, 8))
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,eoi->...o", self.gate(x).new_ones(x.shape) * x, self.bank)


def test_an_unknown_layout_is_an_error_that_names_the_class_unless_it_is_ignored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _StrangeExperts())
    assert unknown_experts(model) == {"1": "_StrangeExperts"}
    with pytest.raises(ModelError, match=r"1: 1 modules of class _StrangeExperts .* add _StrangeExperts to ignore"):
        oneshot(model, recipe=_group4(ignore=[]), dataset=[torch.randn(3, 8)])
    check_no_unknown_experts(model, ["Linear"], ["_StrangeExperts"])
    check_no_unknown_experts(model, ["re:0"], [])


def test_fused_experts_outside_of_oneshot_are_an_error_not_left_as_floats(tiny_moe: MoE) -> None:
    with pytest.raises(ModelError, match=r"still hold the weights of many experts .*; ignore them here"):
        _group4().resolve(tiny_moe("mixtral"))


def test_a_plan_lists_single_experts_and_leaves_the_model_fused(tiny_moe: MoE) -> None:
    model = tiny_moe("gpt_oss")
    names = list(model.state_dict())
    made = plan(model, recipe=_group4())
    assert "model.layers.1.mlp.experts.3.down_proj" in {module.name for module in made.modules}
    assert list(model.state_dict()) == names


def test_unfused_models_can_be_copied(tiny_moe: MoE) -> None:
    model = tiny_moe("gpt_oss")
    unfuse_into(UnfusedModel(model))
    assert torch.equal(_logits(copy.deepcopy(model)), _logits(model))
    assert all(expert.token_rows is None for expert in model.modules() if isinstance(expert, Expert))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_a_token_of_a_mixture_has_a_scale_of_its_own(tiny_moe: MoE, kind: str, scheme: str, tmp_path: Path) -> None:
    """Of [N, C] and [batch, 1, sequence, C] compressed-tensors takes one scale: what a token gives would hang on those behind it."""
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head", "re:.*(gate|router)$"])
    with pytest.warns(UserWarning, match="transformers 5.23"):  # does not read them so
        model = oneshot(tiny_moe(kind), recipe=recipe, output_dir=tmp_path / "out").model
    other = IDS.clone()
    other[:, 5:] = (other[:, 5:] + 7) % 64
    torch.testing.assert_close(_logits(model)[:, :5], _logits(model, other)[:, :5], rtol=0, atol=1e-4)
    torch.testing.assert_close(_logits(model)[:1], _logits(model, IDS[:1]), rtol=0, atol=1e-4)
    assert torch.equal(_logits(load_compressed(tmp_path / "out", device="cpu")), _logits(model))
