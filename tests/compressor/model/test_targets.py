"""Patterns name the modules that compressed-tensors would name, and a pattern without a match is an error."""

from __future__ import annotations

import pytest
from torch import nn

from compressor.errors import TargetError
from compressor.model.targets import loose_patterns, resolve_layers, resolve_targets


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
        resolve_targets(_Model(), ["Liner", "Linear", "layers.0.up_prj", "up_proj", "re:up_proj"], ["re:(", "lm_haed"])
    message = str(caught.value)
    for expected in [
        "targets 'Liner' matches no module (nearest: Linear",
        "'layers.0.up_prj' matches no module (nearest: layers.0.up_proj",
        "'up_proj' matches no module by its whole name (did you mean 're:.*up_proj$'?)",
        "targets 're:up_proj' matches no module from the start of its name (did you mean 're:.*up_proj'?)",
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


def _is_linear(module):
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize("pattern", ["re:layers[.]0$", "layers.0", "re:layers[.]0", "re:layers[.]0[.].*"])
def test_a_pattern_of_a_module_that_holds_layers_means_the_layers(pattern):
    model = _Model()
    below = [name for name in _LINEARS if name.startswith("layers.0.")]
    assert below and list(resolve_layers(model, [pattern], [], _is_linear)) == below
    assert list(resolve_layers(model, [pattern], ["re:.*up_proj"], _is_linear)) == [name for name in below if "up_proj" not in name]


def test_the_class_of_a_module_that_holds_layers_means_all_of_them():
    assert list(resolve_layers(_Model(), ["_Block"], [], _is_linear)) == [name for name in _LINEARS if name.startswith("layers.")]


def test_a_pattern_that_leads_to_no_layer_keeps_what_it_matches():
    assert [type(module).__name__ for module in resolve_layers(_Model(), ["ReLU"], [], _is_linear).values()][:1] == ["ReLU"]
    with pytest.raises(TargetError, match="'nothing' matches no module"):
        resolve_layers(_Model(), ["Linear"], ["nothing"], _is_linear)


def test_a_regular_expression_of_other_models_may_be_ignored_and_is_noted():
    model = _Model()
    ignore = ["re:.*vision.*", "re:up_proj", "lm_head"]
    assert list(resolve_targets(model, ["Linear"], ignore)) == _LINEARS[:-1]
    assert loose_patterns(model, ["Linear"], ignore, _is_linear) == [
        "ignore 're:.*vision.*' matches no module",
        "ignore 're:up_proj' matches no module from the start of its name (did you mean 're:.*up_proj'?)",
    ]


def test_an_ignored_parameter_name_leaves_out_its_module_and_is_noted():
    model = _Model()
    left = [name for name in _LINEARS if not name.endswith("up_proj")]
    assert list(resolve_targets(model, ["Linear"], ["re:.*up_proj.weight"])) == left
    (said,) = loose_patterns(model, ["Linear"], ["re:.*up_proj.weight", "lm_head"], _is_linear)
    assert said == f"ignore 're:.*up_proj.weight' names parameters, and leaves out the {len(_LINEARS) - len(left)} modules that hold them"


def test_what_a_loose_target_matched_is_said():
    (said,) = loose_patterns(_Model(), ["re:layers[.]0", "lm_head"], [], _is_linear)
    number = len([name for name in _LINEARS if name.startswith("layers.0.")])
    assert said.startswith(f"targets 're:layers[.]0' mean {number} layers, and match ") and "_Block" in said


@pytest.mark.parametrize("pattern", ["re:.*up_proj[.]weight", "re:.*up_proj.weight$", "layers.0.up_proj.weight"])
def test_names_of_parameters_mean_their_modules(pattern):
    found = list(resolve_targets(_Model(), [pattern]))
    assert found and all(name.endswith("up_proj") for name in found)


def test_a_name_of_a_module_goes_before_those_of_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight_norm = nn.ReLU()
    assert list(resolve_targets(model, ["re:.*weight"])) == ["0.weight_norm"]


def test_all_that_can_be_pruned_are_linear_layers_and_convolutions():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.Embedding(3, 2), nn.Conv1d(2, 2, 1))
    assert list(resolve_targets(model, ["__ALL_PRUNABLE__"])) == ["0", "2", "4"]


def test_a_class_of_which_some_are_no_layers_keeps_them_to_be_refused():
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Odd(2, 2))
    assert list(resolve_layers(model, ["Linear"], [], lambda module: type(module) is nn.Linear)) == ["0", "1"]
    assert list(resolve_layers(model, ["re:[01]"], [], lambda module: type(module) is nn.Linear)) == ["0"]
