"""Patterns name the modules that compressed-tensors would name, and a pattern without a match is an error."""

from __future__ import annotations

import pytest
from torch import nn

from compressor.errors import TargetError
from compressor.model.targets import resolve_targets


class _SpecialLinear(nn.Linear):
    """A subclass, as models define them."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.down_proj = _SpecialLinear(8, 4)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(), _Block()])
        self.lm_head = nn.Linear(4, 16)


_LINEARS = ["layers.0.up_proj", "layers.0.down_proj", "layers.1.up_proj", "layers.1.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["Linear"], [], _LINEARS),
        (["Linear"], ["lm_head"], _LINEARS[:-1]),
        (["_SpecialLinear"], [], [_LINEARS[1], _LINEARS[3]]),
        (["Linear"], ["_SpecialLinear"], [_LINEARS[0], _LINEARS[2], "lm_head"]),
        (["lm_head", "layers.0.up_proj"], [], ["layers.0.up_proj", "lm_head"]),
        ([r"re:layers\.1\."], ["ReLU"], ["layers.1.up_proj", "layers.1.down_proj"]),
        (["re:.*up_proj"], [r"re:layers\.0"], ["layers.1.up_proj"]),
        ("Linear", "lm_head", _LINEARS[:-1]),
    ],
)
def test_patterns_find_modules_in_model_order(targets, ignore, expected):
    model = _Model()
    found = resolve_targets(model, targets, ignore)
    assert list(found) == expected
    assert all(model.get_submodule(name) is module for name, module in found.items())


def test_patterns_mean_what_they_mean_in_compressed_tensors():
    match = pytest.importorskip("compressed_tensors.utils.match")
    model = _Model()
    for targets, ignore in [
        (["Linear"], ["lm_head"]),
        (["re:.*proj"], ["re:.*1"]),
        (["_SpecialLinear", "re:lm"], []),
        (["re:layers.0.*"], ["ReLU"]),
    ]:
        theirs = [name for name, _ in match.match_named_modules(model, targets, ignore)]
        assert list(resolve_targets(model, targets, ignore)) == theirs


def test_every_pattern_without_a_match_is_named_at_once_with_the_nearest_names():
    with pytest.raises(TargetError) as caught:
        resolve_targets(_Model(), ["Liner", "Linear", "layers.0.up_prj", "up_proj"], ["re:up_proj", "re:(", "lm_haed"])
    message = str(caught.value)
    for expected in [
        "targets 'Liner' matches no module (nearest: Linear",
        "'layers.0.up_prj' matches no module (nearest: layers.0.up_proj",
        "'up_proj' matches no module by its whole name (did you mean 're:.*up_proj$'?)",
        "ignore 're:up_proj' matches no module from the start of its name (did you mean 're:.*up_proj'?)",
        "'re:(' is not a regular expression",
        "'lm_haed' matches no module (nearest: lm_head)",
    ]:
        assert expected in message
    assert "'Linear'" not in message and "\n" not in message


def test_ignoring_every_target_is_an_error():
    with pytest.raises(TargetError, match="leaves none of the 5 modules"):
        resolve_targets(_Model(), ["Linear"], ["re:.*"])


def test_the_root_is_never_a_target():
    with pytest.raises(TargetError, match="'_Model' matches no module"):
        resolve_targets(_Model(), ["_Model"])


def test_a_module_with_two_names_comes_once_and_answers_to_both():
    model = _Model()
    model.alias = model.lm_head
    assert list(resolve_targets(model, ["alias"])) == ["lm_head"]
    assert list(resolve_targets(model, ["Linear"], ["alias"])) == _LINEARS[:-1]


@pytest.mark.parametrize(("pattern", "advice"), [
    ("layers.0", "re:layers[.]0[.]"), ("_Block", "re:layers[.]0[.]"), ("re:layers.[0-9]$", "re:layers.[0-9][.]")
])  # fmt: skip
def test_to_ignore_a_module_whose_parts_stay_targets_is_an_error_and_its_advice_works(pattern, advice):
    with pytest.raises(TargetError, match=r"such as layers\.0\.up_proj, to be changed") as caught:
        resolve_targets(_Model(), ["Linear"], [pattern])
    assert f"write {advice!r} to" in str(caught.value)
    assert "layers.0.up_proj" not in resolve_targets(_Model(), ["Linear"], [advice])
    assert list(resolve_targets(_Model(), ["Linear"], [pattern, "re:.*proj"])) == ["lm_head"]  # its parts are ignored as well
