"""Who takes experts out may keep them in any order; what is changed beside the choice is told, by what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.checks.adapters.modifiers import OurExpertPruner
from harness.checks.inputs.expert_scores import LONG, LONG_READINGS, READINGS, look, mean_of_all


class Plain:
    """Takes the experts that ours would keep out of a Mixtral-like model; something may follow."""

    kind, name, sparsity, architectures = "expert_pruner", "plain", 0.5, ("qwen3_moe",)
    tags = frozenset({"router_weighted"})

    def __init__(self, also: Callable[[Any], object] = lambda model: None, *, last_first: bool = False) -> None:
        self._also, self._last_first = also, last_first

    def chosen(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        return OurExpertPruner(self.sparsity, refit=False).prune(copy.deepcopy(model), input_ids, masks)

    @torch.no_grad()
    def prune(self, model: Any, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        kept = [sorted(own, reverse=self._last_first) for own in self.chosen(model, input_ids, masks)]
        for block, own in zip(_blocks(model), kept, strict=True):
            for owner, name in ((block.experts, "gate_up_proj"), (block.experts, "down_proj"), (block.gate, "weight")):
                setattr(owner, name, nn.Parameter(getattr(owner, name)[own].clone()))
            block.experts.num_experts = block.gate.num_experts = model.num_experts = model.config.num_experts = len(own)
        self._also(model)
        return kept


def _blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")]


def _scale(name: str, by: float) -> Callable[[Any], object]:
    return lambda model: model.get_parameter(name).mul_(by)


def _one_for_two(model: Any) -> None:
    model.config.num_experts_per_tok = 1
    for block in _blocks(model):
        block.gate.top_k = 1


def _patch(model: Any) -> None:
    kind = type(_blocks(model)[0])
    forward = kind.forward
    kind.forward = lambda self, *args, **named: forward(self, *args, **named)


_LAYER = "model.layers.1."
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "experts grow": (_scale(f"{_LAYER}mlp.experts.down_proj", 2.0), "mlp.experts.down_proj is not what it was"),
    "experts grow by little": (_scale(f"{_LAYER}mlp.experts.gate_up_proj", 1.0001), "mlp.experts.gate_up_proj is not what it was"),
    "no router": (_scale(f"{_LAYER}mlp.gate.weight", 0.0), "mlp.gate.weight is not what it was"),
    "attention": (_scale(f"{_LAYER}self_attn.o_proj.weight", 1.01), "self_attn.o_proj.weight is not what it was"),
    "head": (_scale("lm_head.weight", 1.01), "lm_head.weight is not what it was"),
    "a norm in half precision": (lambda model: model.model.norm.bfloat16().float(), "model.norm.weight is not what it was"),
    "fewer experts for a token": (_one_for_two, "the setting num_experts_per_tok was 2 and is 1"),
    "how it generates": (lambda model: setattr(model.generation_config, "eos_token_id", 5), "generation_config.eos_token_id was"),
    "how long it generates": (lambda model: setattr(model.generation_config, "max_length", 77), "generation_config.max_length was"),
    "another setting": (lambda model: setattr(model.config, "use_cache", True), "the setting use_cache was False and is True"),
    "hooks": (lambda model: _blocks(model)[0].experts.register_forward_pre_hook(print), "hooks changed: 0 before, 1 after"),
    "a seed": (lambda model: torch.manual_seed(0), "rng was seeded or drawn from"),
    "gradients": (lambda model: model.lm_head.weight.requires_grad_(False), "lm_head.weight: requires_grad changed: True -> False"),
    "gradients of experts": (lambda model: _blocks(model)[0].experts.requires_grad_(False), "requires_grad changed: True -> False"),
    "evaluation": (lambda model: model.eval(), "training changed: True -> False"),
    "training": (lambda model: model.train(), "training changed: False -> True"),
}  # fmt: skip


@pytest.mark.parametrize("last_first", [False, True])
def test_experts_may_stay_in_any_order(last_first: bool) -> None:
    report = harness.check(Plain(last_first=last_first), draws=False)
    assert report.verdict.value == "pass", report.to_text()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_changed_beside_the_choice_is_told(name: str) -> None:
    also, says = WRONG[name]
    record = harness.check(Plain(also), checks=["expert_pruner.kept_weights"], draws=False).records[0]
    assert record.outcome == "fail" and says in record.summary, record.summary


def _there_and_back(model: Any) -> None:
    before = model.config._attn_implementation
    for name in ("eager", before):
        model.set_attn_implementation(name)


def test_another_attention_for_a_while_is_no_change() -> None:
    report = harness.check(Plain(_there_and_back), checks=["expert_pruner.smaller_model", "expert_pruner.kept_weights"], draws=False)
    assert report.verdict.value == "pass", report.to_text()


@pytest.mark.parametrize("place", [lambda model: model, lambda model: _blocks(model)[0].experts], ids=["model", "experts"])
def test_a_tensor_that_the_class_does_not_have_is_told(place: Callable[[Any], Any]) -> None:
    also = Plain(lambda model: place(model).register_buffer("gone", torch.ones(1)))
    record = harness.check(also, checks=["expert_pruner.smaller_model"], draws=False).records[0]
    assert record.outcome == "fail" and "gone is no tensor of the class" in record.summary, record.summary


LEFT: dict[str, tuple[Callable[[Any], object], str]] = {
    "a stale count": (lambda model: setattr(model, "num_experts", 4), "num_experts was 4 and is 4, where the class makes 2"),
    "a stale count of a layer": (lambda model: setattr(_blocks(model)[0].gate, "num_experts", 4), "mlp.gate.num_experts was 4 and is 4"),
    "a count that is gone": (lambda model: delattr(model, "num_experts"), "num_experts was 4 and is nothing"),
    "an attribute": (lambda model: setattr(model, "pruned", True), "pruned was nothing and is True"),
    "an attribute of a layer": (lambda model: setattr(_blocks(model)[0].gate, "kept", [0, 2]), "mlp.gate.kept was nothing and is [0, 2]"),
    "a forward": (lambda model: setattr(model, "forward", model.forward), "forward was nothing and is <forward>"),
    "a module": (lambda model: model.add_module("probe", nn.Identity()), "probe was nothing and is <Module>"),
    "another top-k of a router": (lambda model: setattr(_blocks(model)[0].gate, "top_k", 1), "mlp.gate.top_k was 2 and is 1"),
    "a computed buffer": (lambda model: model.model.rotary_emb.inv_freq.mul_(1.0001), "rotary_emb.inv_freq was float32[4] "),
    "another name": (lambda model: setattr(model.config, "_name_or_path", "mine"), "config._name_or_path was  and is mine"),
    "another attention": (lambda model: model.set_attn_implementation("eager"), "_attn_implementation_internal was sdpa and is eager"),
    "other products of experts": (lambda model: model.set_experts_implementation("eager"), "_experts_implementation_internal was"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_at_a_module_or_in_its_config_is_told(name: str) -> None:
    also, says = LEFT[name]
    record = harness.check(Plain(also), checks=["expert_pruner.smaller_model"], draws=False).records[0]
    assert record.outcome == "fail" and says in record.summary, record.summary


def test_a_class_that_is_patched_is_told() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    forward = Block.forward
    try:
        record = harness.check(Plain(_patch), checks=["expert_pruner.kept_weights"], draws=False).records[0]
    finally:
        Block.forward = forward
    assert record.outcome == "fail" and "Qwen3MoeSparseMoeBlock: class changed: forward" in record.summary, record.summary


class OtherTie(OurExpertPruner):
    """Of the first two experts, which no token is sent to, takes the other one than ours."""

    def prune(self, model: Any, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        for layer in model.model.layers:
            for one in layer.mlp.parameters():
                if len(one) == layer.mlp.experts.num_experts:
                    one.data[[0, 1]] = one.data[[1, 0]]
        return [[{0: 1, 1: 0}.get(number, number) for number in own] for own in super().prune(model, input_ids, masks)]


def test_of_several_experts_without_tokens_any_may_go() -> None:
    subject = OtherTie(0.25, refit=False, architectures=("gpt_oss",))
    report = harness.check(subject, checks=["expert_pruner.unused_experts"], draws=False)
    assert report.verdict.value == "pass", report.to_text()


class Numbers(Plain):
    """Keeps the experts in one order, and tells another."""

    def prune(self, model: Any, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        return [list(own)[::-1] for own in super().prune(model, input_ids, masks)]


def test_numbers_are_those_of_the_places() -> None:
    record = harness.check(Numbers(), checks=["expert_pruner.kept_weights"], draws=False).records[0]
    assert record.outcome == "fail" and "is not what it was, of the experts that are told to stay" in record.summary


class Misreads(Plain):
    """Scores experts in another way than the criterion says."""

    def __init__(self, reading: str) -> None:
        super().__init__()
        self._reading = reading

    def chosen(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        layers = [name for name, module in model.named_modules() if name.endswith(".experts")]
        batches = [look(model, layers, ids) for ids in input_ids]
        is_read = "long rows" not in self._reading or max(ids.shape[1] for ids in input_ids) >= LONG
        score = {**READINGS, **LONG_READINGS}[self._reading] if is_read else mean_of_all
        scores = [score([batch[place] for batch in batches]) for place in range(len(layers))]
        return [one.topk(len(one) // 2).indices.tolist() for one in scores]


@pytest.mark.parametrize("reading", [*READINGS, *LONG_READINGS])
def test_another_reading_of_the_criterion_is_told(reading: str) -> None:
    record = harness.check(Misreads(reading), checks=["expert_pruner.criterion"], draws=False).records[0]
    assert record.outcome == "fail" and "matter most" in record.summary, record.summary


def test_all_readings_are_told_apart() -> None:
    record = harness.check(Plain(), checks=["expert_pruner.criterion"], draws=False).records[0]
    assert record.outcome == "pass" and "not told" not in record.summary, record.summary


class Refuses(Plain):
    """Of too few experts it raises, or sends tokens to fewer; something happens before."""

    def __init__(self, said: str | None, also: Callable[[Any], object] = lambda model: None) -> None:
        super().__init__()
        self._said, self._before = said, also

    @torch.no_grad()
    def prune(self, model: Any, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        self._before(model)
        if self._said is not None:
            raise ValueError(self._said)
        return super().prune(model, input_ids, masks)


TOO_FEW: dict[str, tuple[Refuses, str, str]] = {
    "in words": (Refuses("too few experts"), "pass", "1 architectures: qwen3_moe"),
    "fewer for a token": (Refuses(None, _one_for_two), "pass", "1 architectures: qwen3_moe"),
    "without a word": (Refuses(""), "fail", "ValueError came without a message"),
    "after a change": (Refuses("too few", _scale("lm_head.weight", 1.01)), "fail", "it was refused, and lm_head.weight is not what it was"),
    "after an attribute": (Refuses("too few", lambda model: setattr(model, "seen", 1)), "fail", "and is not the model that it was"),
    "after another setting": (Refuses("too few", _one_for_two), "fail", "it was refused, and is not the model that it was"),
}


@pytest.mark.parametrize("what", TOO_FEW)
def test_too_few_experts_are_refused_and_nothing_changes(what: str) -> None:
    subject, outcome, said = TOO_FEW[what]
    record = harness.check(subject, checks=["expert_pruner.too_few"], draws=False).records[0]
    assert record.outcome.value == outcome and said in record.summary, record.summary
