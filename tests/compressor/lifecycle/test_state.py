"""Replacing modules, taking it back, and a report that is the same for the same run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from torch import nn

from compressor.errors import TargetError
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
