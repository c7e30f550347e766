"""Who takes experts out meets padding of every kind and many batches, and each of them decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.checks.inputs.expert_batches import BATCHES, PADDING, Mistake, repadded
from tests.harness.checks.test_expert_pruners import Plain

E = 4
Count = Callable[[Sequence[Tensor], int], Sequence[Tensor]]


class Counts(Plain):
    """Reads the criterion off the experts' own inputs; some places are counted that are none, or left out."""

    architectures = ("mixtral",)  # of two layers

    def __init__(self, count: Count = lambda masks, layer: masks, *, hands_masks: bool = True) -> None:
        super().__init__()
        self._count, self._hands_masks = count, hands_masks

    @torch.no_grad()
    def chosen(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        places = [torch.ones_like(ids).bool() if mask is None else mask for ids, mask in zip(input_ids, masks, strict=True)]
        given = [mask[..., None].expand(*mask.shape, E) for mask in places]
        layers: list[Any] = [module for name, module in model.named_modules() if name.endswith(".experts")]
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]

        def note(own: list[tuple[Tensor, Tensor]]) -> Callable[[Any, Any], None]:
            def hook(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
                hidden, index, weights = args
                hits = (index[..., None] == torch.arange(E)).double()
                gates = [(hidden @ one.T).chunk(2, -1) for one in module.gate_up_proj]
                outputs = [(module.act_fn(gate) * up) @ down.T for (gate, up), down in zip(gates, module.down_proj, strict=True)]
                sizes = torch.stack([one.double().norm(dim=-1) for one in outputs], -1)
                own.append(((weights.double()[..., None] * hits).sum(1) * sizes, hits.sum(1)))

            return hook

        handles = [layer.register_forward_pre_hook(note(own)) for layer, own in zip(layers, seen, strict=True)]
        for ids, mask in zip(input_ids, places, strict=True):
            model(input_ids=ids, use_cache=False, **({"attention_mask": mask.long()} if self._hands_masks else {}))
        for handle in handles:
            handle.remove()
        return [self._stay(own, self._count(given, layer)) for layer, own in enumerate(seen)]

    def _stay(self, own: Sequence[tuple[Tensor, Tensor]], counted: Sequence[Tensor]) -> list[int]:
        there = [one.flatten(0, 1) for one in counted]
        total = sum((sizes * one).sum(0) for (sizes, _), one in zip(own, there, strict=True))
        number = sum((hits * one).sum(0) for (_, hits), one in zip(own, there, strict=True))
        return list(map(int, (total / number.clamp(min=1)).topk(E // 2).indices))  # type: ignore[union-attr]


def in_layer(layer: int, mistake: Mistake) -> Count:
    return lambda masks, own: mistake(masks) if own == layer else masks


def test_who_counts_what_is_there_passes() -> None:
    report = harness.check(Counts(), checks=["expert_pruner.criterion", "expert_pruner.padding"], draws=False)
    assert [record.outcome.value for record in report.records] == ["pass", "pass"], report.to_text()
    assert "batch" not in report.records[0].summary, report.to_text()  # each of them has decided


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("check", "name"), [("padding", name) for name in PADDING] + [("criterion", name) for name in BATCHES])
def test_a_mistake_in_one_layer_is_told(check: str, name: str, layer: int) -> None:
    subject = Counts(in_layer(layer, {**PADDING, **BATCHES}[name]))
    (record,) = harness.check(subject, checks=[f"expert_pruner.{check}"], draws=False).records
    seen = "matter most" in record.summary or "with other padding" in record.summary
    assert (record.outcome == "fail" and seen) or f"{name} in layer {layer}" in record.summary, record.summary


class Once(Counts):
    """Takes batches, or rows of a batch, that it has seen for the same data."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self._rows = rows

    def chosen(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        own = [torch.tensor(list(dict.fromkeys(map(tuple, ids.tolist())))) for ids in input_ids] if self._rows else input_ids
        once = own if self._rows else list({str(ids.tolist()): ids for ids in own}.values())
        return super().chosen(model, once, [None] * len(once))


@pytest.mark.parametrize("rows", [False, True])
def test_what_comes_again_counts_again(rows: bool) -> None:
    (record,) = harness.check(Once(rows=rows), checks=["expert_pruner.criterion"], draws=False).records
    assert record.outcome == "fail" and "matter most" in record.summary, record.summary


@pytest.mark.parametrize("name", ["padding", "the first row's places in each", "places of any row in each", "padding on the left"])
def test_who_promises_no_criterion_must_not_count_padding_either(name: str) -> None:
    for count, outcome in ((lambda masks, layer: masks, "pass"), (in_layer(1, PADDING[name]), "fail")):
        subject = Counts(count)
        subject.tags = frozenset()
        (record,) = harness.check(subject, checks=["expert_pruner.padding"], draws=False).records
        assert record.outcome == outcome and (outcome == "pass" or "with other padding" in record.summary), record.summary


def test_who_hands_no_mask_to_the_model_is_told_by_padding_on_the_left() -> None:
    (record,) = harness.check(Counts(hands_masks=False), checks=["expert_pruner.padding"], draws=False).records
    assert record.outcome == "fail", record.summary


@pytest.mark.parametrize("left", [False, True])
def test_the_same_tokens_stand_beside_other_padding(left: bool) -> None:
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    others, there = repadded(ids, mask, left=left)
    assert others.shape == (2, 11) and torch.equal(others[there], ids[mask]) and torch.equal(there.sum(1), mask.sum(1))
    assert bool(there[:, -1 if left else 0].all()) and not bool((others == 12).any())
