"""Replacing modules, taking it back, and a report that is the same for the same run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from compressor.errors import TargetError, UserInputError
from compressor.lifecycle import Fallback, ModuleRecord, Report, State


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


def test_replace_module_puts_the_new_one_in_place_and_keeps_the_training_flag() -> None:
    state = State(nested())
    state.model.eval()
    new = nn.Linear(2, 2)
    state.replace_module("0.0", new)
    assert state.model.get_submodule("0.0") is new
    assert not new.training
    assert state.originals == {}


def test_hooks_go_to_the_new_module_with_their_handles_and_come_back_with_the_old_one() -> None:
    state = State(nested(), keep_originals=True)
    old, new = state.model.get_submodule("1"), nn.Linear(2, 2)
    handle = old.register_forward_hook(lambda module, args, kwargs, output: output + len(kwargs), with_kwargs=True)
    state.replace_module("1", new)
    assert torch.equal(new(input=torch.zeros(1, 2)), nn.functional.linear(torch.zeros(1, 2), new.weight, new.bias) + 1)
    state.restore_originals()
    assert len(old._forward_hooks) == 1
    handle.remove()
    assert not (old._forward_hooks or new._forward_hooks or new._forward_hooks_with_kwargs)


def test_a_module_around_the_old_one_leaves_it_its_hooks() -> None:
    state = State(nested())
    old = state.model.get_submodule("1")
    old.register_forward_hook(lambda module, args, output: output * 2)
    state.replace_module("1", nn.Sequential(old))
    assert not state.model.get_submodule("1")._forward_hooks


def test_originals_come_back_all_of_them_even_below_a_replaced_parent() -> None:
    state = State(nested(), keep_originals=True)
    before = dict(state.model.named_modules())
    state.replace_module("0", nn.Sequential(nn.Linear(2, 2)))
    state.replace_module("0.0", nn.Identity())
    state.replace_module("0", nn.Identity())
    state.replace_module("1", nn.Identity())
    assert set(state.originals) == {"0", "0.0", "1"}
    state.restore_originals()
    assert dict(state.model.named_modules()) == before
    assert state.originals == {}


def test_a_module_in_several_places_is_replaced_and_restored_in_all() -> None:
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)
    old, new = model.a, nn.Linear(2, 2)
    state = State(model, keep_originals=True)
    state.replace_module("a", new)
    assert model.a is new and model.b is new
    state.restore_originals()
    assert model.a is old and model.b is old


@pytest.mark.parametrize("name", ["2", "0.9", "nothing", "0.weight"])
def test_a_name_that_is_no_module_is_refused_and_changes_nothing(name: str) -> None:
    state = State(nested(), keep_originals=True)
    before = dict(state.model.named_modules())
    with pytest.raises(TargetError, match=name):
        state.replace_module(name, nn.Identity())
    assert dict(state.model.named_modules()) == before
    assert state.originals == {}


def test_the_model_itself_cannot_be_replaced() -> None:
    with pytest.raises(TargetError, match="itself"):
        State(nested()).replace_module("", nn.Identity())


def test_two_states_share_nothing(new_state: Callable[[], State]) -> None:
    first, second = new_state(), new_state()
    first.report.add_fallback("a", "rtn", "dead")
    first.originals["x"] = nn.Identity()
    assert second.report == Report()
    assert second.originals == {}


def test_a_module_is_claimed_once_and_a_refused_claim_claims_nothing() -> None:
    state = State(nested())
    state.claim(["0.0"], "First[0]")
    with pytest.raises(TargetError, match=r"Second\[1\]: 1 of its modules \(0\.0\) belong to First\[0\] already; "):
        state.claim(["1", "0.0"], "Second[1]")
    assert state.claims == {"0.0": "First[0]"}
    state.claim(["1"], "Second[1]")
    assert state.claims == {"0.0": "First[0]", "1": "Second[1]"}


def test_names_from_a_generator_are_claimed_too() -> None:
    state = State(nested())
    state.claim((name for name in ("0.0", "1")), "First[0]")
    assert state.claims == {"0.0": "First[0]", "1": "First[0]"}


def test_a_refused_claim_names_three_modules_and_says_that_there_are_more() -> None:
    state = State(nested())
    state.claim(["a", "b", "c"], "First")
    with pytest.raises(TargetError, match=r"3 of its modules \(a, b, c\) belong"):
        state.claim(["a", "b", "c"], "Second")
    state.claim(["d"], "First")
    with pytest.raises(TargetError, match=r"4 of its modules \(a, b, c, \.\.\.\) belong"):
        state.claim(["a", "b", "c", "d"], "Second")


def test_what_is_remembered_comes_back_whatever_was_added() -> None:
    state = State(nested())
    state.claim(["0"], "First")
    state.report.add_fallback("a", "rtn", "dead")
    state.report.notes.append("a note")
    report, before = state.report, (dict(state.claims), state.report.to_dict())
    bring_back = state.remember()
    state.claim(["1"], "Second")
    state.report.add_fallback("b", "rtn", "dead")
    state.report.modules["b"] = ModuleRecord("b", "M", "int4", 0.5)
    state.report.notes.append("another")
    bring_back()
    assert (state.claims, state.report.to_dict()) == before
    assert state.report is report


@pytest.mark.parametrize("noted", ["claims", "schemes", "touched", "settled", "sparse", "narrowable", "settled_to_base", "phases"])
def test_everything_that_is_noted_of_modules_is_remembered(noted: str) -> None:
    state = State(nested())
    bring_back = state.remember()
    held = getattr(state, noted)
    held.add("0") if isinstance(held, set) else held.update({"0": ["noted"]})
    bring_back()
    assert not getattr(state, noted)


def test_report_is_sorted_and_plain() -> None:
    first, second = Report(), Report()
    records = [ModuleRecord("b", "M", "int4", 0.5, 3, {"y": 1, "x": "z"}), ModuleRecord("a", "M", "int4", 0.25)]
    fallbacks = [Fallback("b", "rtn", "no token"), Fallback("a", "rtn", "dead columns")]
    for report, order in ((first, 1), (second, -1)):
        for record in records[::order]:
            report.modules[record.name] = record
        for fallback in fallbacks[::order]:
            report.add_fallback(fallback.module, fallback.kind, fallback.detail)
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
    assert first.to_dict() == {
        "modules": {
            "a": {"modifier": "M", "scheme": "int4", "error": 0.25, "num_tokens": None, "details": {}},
            "b": {"modifier": "M", "scheme": "int4", "error": 0.5, "num_tokens": 3, "details": {"x": "z", "y": 1}},
        },
        "fallbacks": [
            {"module": "a", "kind": "rtn", "detail": "dead columns"},
            {"module": "b", "kind": "rtn", "detail": "no token"},
        ],
    }


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_a_seed_that_no_generator_takes_is_an_error_in_words(seed: int) -> None:
    with pytest.raises(UserInputError, match=f"^seed: {seed} was given"):
        State(nested(), seed=seed)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63), -1])
def test_every_seed_that_torch_takes_is_taken(seed: int) -> None:
    torch.Generator().manual_seed(State(nested(), seed=seed).seed)


@pytest.mark.parametrize("name", ["not_there", "is_fixed"])
def test_a_setting_that_cannot_be_brought_back_is_an_error_in_words_and_is_not_remembered(name: str) -> None:
    class Config:
        is_fixed = property(lambda self: 1)

    state = State(nested(), keep_originals=True)
    with pytest.raises(UserInputError, match=rf"Config\.{name}: it was to become 2, and .*; give an attribute that is there"):
        state.set_setting(Config(), name, 2)
    state.restore_originals()
