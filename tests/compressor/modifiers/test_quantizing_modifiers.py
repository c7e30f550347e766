"""What the quantizing modifiers hook, share, count and refuse; driven through a session by hand, without a pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file
from torch import Tensor, nn

from compressor import MagnitudePruningModifier, SmoothQuantModifier, oneshot
from compressor.algorithms.hessian import Hessian
from compressor.errors import CalibrationError, CompressorError, NumericsError, SchemeError, TargetError, UserInputError
from compressor.lifecycle import EventType, Session, State
from compressor.modifiers.autoround import AutoRoundModifier
from compressor.modifiers.gptq import GPTQModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.modifiers.schemes.input_statistics import real_tokens, token_sequences
from compressor.nn import QuantizedLinear
from compressor.numerics import preset_scheme
from tests import tiny

GROUPED = {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}


class Block(nn.Module):
    """Three readers of one input (q, k, v) and a reader of their sum."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for parameter in self.parameters():
            parameter.data = torch.rand(width, width, generator=g) - 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) * self.v(x))


def batches(count: int = 4, width: int = 32, tokens: int = 24) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.rand(2, tokens, width, generator=g) - 0.5 for _ in range(count)]


def calibrate(
    model: nn.Module,
    modifier: SchemeModifier,
    data: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    run: Callable[[Any], Any] | None = None,
) -> State:
    state = State(model=model)
    with Session(state, [modifier]) as session, torch.no_grad():
        session.initialize()
        session.send(EventType.CALIBRATION_START)
        for number, x in enumerate(data):
            state.token_mask = masks[number] if masks else None
            (run or model)(x)
        session.send(EventType.SEQUENTIAL_EPOCH_END, modules=[name for name, _ in model.named_modules() if name])
        session.send(EventType.CALIBRATION_END)
        session.finalize()
    return state


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.codes() for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def gptq(**settings: Any) -> GPTQModifier:
    return GPTQModifier(config_groups={"all": GROUPED}, **settings)


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_readers_of_one_tensor_share_a_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    original = Hessian.add
    monkeypatch.setattr(Hessian, "add", lambda self, x, part: (added.append(id(self)), original(self, x, part))[1])
    shared = Block()
    state = calibrate(shared, gptq(), batches())
    assert len(added) == 2 * 4 * 2  # q with k and v, and o, in four forwards of two sequences
    added.clear()
    separate = Block()
    calibrate(separate, gptq(share_inputs=False), batches())
    assert len(added) == 4 * 4 * 2
    different = [float((one != codes(separate)[name]).float().mean()) for name, one in codes(shared).items()]
    assert len(different) == 4
    assert max(different) <= 1e-3
    assert {record.num_tokens for record in state.report.modules.values()} == {4 * 2 * 24}
    assert hooks_on(shared) == 0


def test_gptq_beats_rounding_on_the_outputs() -> None:
    data = batches()
    base, rounded, solved = Block(), Block(), Block()
    calibrate(rounded, QuantizationModifier(config_groups={"all": GROUPED}), data)
    calibrate(solved, gptq(), data)
    with torch.no_grad():
        target = torch.cat([base(x) for x in data])
        errors = [float((torch.cat([model(x) for x in data]) - target).square().mean()) for model in (rounded, solved)]
    assert errors[1] < 0.8 * errors[0]


def test_a_reader_that_changes_its_input_is_refused() -> None:
    model = Block()
    calls = iter(range(100))

    def run(x: Tensor) -> None:
        model.q(x)
        model.k(x if next(calls) == 0 else x + 1)
        model.v(x)
        model.o(x)

    with pytest.raises(CalibrationError, match=r"k: its input was that of q.*share_inputs: false"):
        calibrate(model, gptq(), batches(), run=run)
    assert hooks_on(model) == 0


def _by_data(x: Tensor) -> None:
    x.data.mul_(torch.linspace(0.1, 4, x.shape[-1]))


def _by_numpy(x: Tensor) -> None:
    x.detach().numpy()[..., ::2] *= 3


WRITERS = {"counted": lambda x: x.mul_(torch.linspace(0.1, 4, x.shape[-1])), "data": _by_data, "numpy": _by_numpy}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITERS)
def test_an_input_that_was_written_to_in_between_is_another_one(write: str, inference: bool) -> None:
    """Though it is the same tensor, and may count no versions."""

    def run(model: nn.Module, x: Tensor) -> None:
        with torch.inference_mode(inference):
            x = x.clone()
            model.q(x)
            WRITERS[write](x)
            model.k(x)
            model.v(x)

    def solved(**settings: Any) -> dict[str, Tensor]:
        model = Block()
        model.o = nn.Identity()
        calibrate(model, gptq(target="propagated", **settings), batches(), run=lambda x: run(model, x))
        return codes(model)

    shared, own = solved(), solved(share_inputs=False)
    assert shared.keys() == own.keys() == {"q", "k", "v"}
    assert all(float((shared[name] != own[name]).float().mean()) <= 1e-3 for name in own)


def test_readers_called_unequally_often_are_refused() -> None:
    model = Block()
    calls = iter(range(100))

    def run(x: Tensor) -> None:
        model.q(x)
        if next(calls) == 0:
            model.k(x)
        model.v(x)
        model.o(x + 1)

    with pytest.raises(CalibrationError, match=r"unequally often"):
        calibrate(model, gptq(), batches(), run=run)


def test_padding_does_not_enter_the_statistics() -> None:
    data = batches()
    plain, padded = Block(), Block()
    calibrate(plain, gptq(), data)
    wide = [torch.cat([x, torch.full((2, 5, 32), 1e3)], dim=1) for x in data]
    mask = torch.cat([torch.ones(2, 24, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)], dim=1)
    calibrate(padded, gptq(), wide, masks=[mask] * 4)
    for name, expected in codes(plain).items():
        assert (codes(padded)[name] != expected).float().mean() <= 1e-3


def test_real_tokens_refuses_what_does_not_line_up() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    x = torch.arange(8.0).view(2, 2, 2)
    assert torch.equal(real_tokens(x, mask, "m"), x[mask])
    assert torch.equal(real_tokens(x.view(4, 2), mask, "m"), x[mask])
    assert real_tokens(x, None, "m").shape == (4, 2)
    for shaped in (x[:, None], x[:, :, None], x[:, None, :, None]):  # a single head
        assert torch.equal(real_tokens(shaped, mask, "m"), x[mask])
    assert torch.equal(real_tokens(x[:1, None, :1], torch.tensor([[True]]), "m"), x[0, :1])
    with pytest.raises(CalibrationError, match=r"m: an input of shape .*batch_size=1"):
        real_tokens(x.expand(2, 2, 2, 2), mask, "m")
    with pytest.raises(CalibrationError, match=r"m: an input of shape .*batch_size=1"):
        real_tokens(torch.zeros(3, 2), mask, "m")


def test_sequences_come_one_by_one_without_their_padding() -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    for shaped in (x, x.view(6, 2), x[:, None]):
        first, second = token_sequences(shaped, mask, "m")
        assert torch.equal(first, x[0, :2])
        assert torch.equal(second, x[1])
    assert [len(part) for part in token_sequences(x, None, "m")] == [3, 3]
    assert [len(part) for part in token_sequences(x[:, None], None, "m")] == [3, 3]
    assert len(token_sequences(x.view(6, 2), None, "m")) == 1


def test_the_split_into_batches_does_not_change_a_code() -> None:
    data = torch.cat(batches())
    one, many = Block(), Block()
    calibrate(one, gptq(), list(data.split(1)))
    calibrate(many, gptq(), list(data.split(3)))
    for name, expected in codes(one).items():
        assert torch.equal(codes(many)[name], expected)


def _silent_v(model: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: model.o(model.q(x) + model.k(x))


def _dead_input(model: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: model(0 * x)


def _one_direction(model: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: model(torch.ones_like(x) * x[..., :1])


@pytest.mark.parametrize(
    ("kind", "make_run", "settings", "count"),
    [
        ("no_tokens", _silent_v, {}, 1),
        ("dead_input", _dead_input, {}, 4),
        ("not_positive_definite", _one_direction, {"dampening_frac": 1e-12}, 3),
    ],
)
def test_fallbacks_are_counted_and_an_error_beyond_the_budget(
    kind: str, make_run: Callable[[Block], Callable[[Tensor], Tensor]], settings: dict[str, Any], count: int
) -> None:
    model = Block()
    with pytest.raises(CalibrationError, match=r"fallback_budget=0"):
        calibrate(model, gptq(**settings), batches(), run=make_run(model))
    assert hooks_on(model) == 0
    model = Block()
    state = calibrate(model, gptq(fallback_budget=4, **settings), batches(), run=make_run(model))
    assert [fallback.kind for fallback in state.report.fallbacks].count(kind) >= count
    assert len(codes(model)) == 4


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("settings", [{}, {"solver": "reference"}, {"actorder": "group"}, {"actorder": None}, {"share_inputs": False}])
def test_dead_columns_are_rounded_and_noted_and_no_fallback(zero: float, settings: dict[str, Any]) -> None:
    model, rounded, data = Block(), Block(), batches()
    for x in data:
        x[..., 3:9] = zero
    state = calibrate(model, gptq(**settings), data)
    assert state.report.fallbacks == []
    assert {name: record.details.get("dead_columns") for name, record in state.report.modules.items()} == {
        "q": 6, "k": 6, "v": 6, "o": None
    }  # fmt: skip
    (note,) = state.report.notes
    assert "3 of 4 modules have input columns that were zero on every calibration token (q most of them, 6)" in note
    if settings == {"solver": "reference"}:  # its scales are those of rounding
        calibrate(rounded, QuantizationModifier(config_groups={"all": GROUPED}), [])
        for name in "qkv":
            assert torch.equal(codes(model)[name][:, 3:9], codes(rounded)[name][:, 3:9])
    assert all(bool(found[:, 3:9].any(0).all()) for name, found in codes(model).items() if name != "o")


def test_without_dead_columns_nothing_is_noted() -> None:
    state = calibrate(Block(), gptq(), batches())
    assert state.report.notes == []
    assert all("dead_columns" not in record.details for record in state.report.modules.values())


@pytest.mark.parametrize("modifier", [gptq(fallback_budget=9), QuantizationModifier(config_groups={"all": GROUPED})])
def test_nan_in_a_weight_is_always_an_error(modifier: SchemeModifier) -> None:
    model = Block()
    model.k.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"k\b.*NaN"):
        calibrate(model, modifier.model_copy(), [])


def test_nan_in_the_data_is_always_an_error() -> None:
    data = batches()
    data[1][0, 0, 0] = float("inf")
    with pytest.raises(NumericsError, match=r"q.*NaN or infinity"):
        calibrate(Block(), gptq(fallback_budget=9), data)


@pytest.mark.parametrize("actorder", ["static", "weight", "group", None, "none"])
def test_every_column_order_compresses_and_is_recorded(actorder: str | None) -> None:
    model = Block()
    calibrate(model, gptq(actorder=actorder), batches())
    layer = model.q
    assert isinstance(layer, QuantizedLinear)
    assert layer.weight_args.actorder == (None if actorder == "none" else actorder)
    assert ("weight_g_idx" in layer.state_dict()) == (actorder == "group")


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "modifier", [gptq(), QuantizationModifier(scheme="NVFP4"), QuantizationModifier(scheme="W8A8")], ids=["gptq", "NVFP4", "W8A8"]
)
def test_the_default_dtype_of_the_process_changes_no_byte(modifier: SchemeModifier, default: torch.dtype) -> None:
    model, other, data = Block(), Block(), batches()
    calibrate(model, modifier.model_copy(), data)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        calibrate(other, modifier.model_copy(), data)
    finally:
        torch.set_default_dtype(before)
    for (key, tensor), (_, found) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert tensor.dtype == found.dtype and torch.equal(tensor.view(torch.uint8), found.view(torch.uint8)), key


def test_both_solvers_agree() -> None:
    fast, reference = Block(), Block()
    calibrate(fast, gptq(scale_search=False), batches())
    calibrate(reference, gptq(solver="reference"), batches())
    for name, expected in codes(reference).items():
        assert (codes(fast)[name] != expected).float().mean() <= 5e-3


def test_scales_are_searched_unless_the_classical_solver_is_asked_for() -> None:
    searched, observed, reference = Block(), Block(), Block()
    calibrate(searched, gptq(), batches())
    calibrate(observed, QuantizationModifier(config_groups={"all": GROUPED}), [])
    calibrate(reference, gptq(solver="reference"), batches())
    assert torch.equal(reference.q.state_dict()["weight_scale"], observed.q.state_dict()["weight_scale"])
    assert not torch.equal(searched.q.state_dict()["weight_scale"], observed.q.state_dict()["weight_scale"])


def test_ranges_of_4_bit_floats_are_searched_unless_an_observer_is_named() -> None:
    scales = {}
    for way, settings in {
        "searched": {},
        "spelled": {"weight_observer": "nvfp4_expanded_imatrix"},
        "named": {"weight_observer": "minmax"},
        "off": {"scale_search": False},
    }.items():
        model = Block(width=128)
        calibrate(model, GPTQModifier(targets=["Linear"], scheme="NVFP4A16", **settings), batches(width=128))
        scales[way] = model.q.state_dict()["weight_scale"].float()
    assert torch.equal(scales["named"], scales["off"])
    assert not torch.equal(scales["searched"], scales["off"])
    near = (scales["searched"] - scales["spelled"]).abs() / scales["spelled"]
    assert near.mean() < 0.1  # a sixth of the ranges, the same choice up to their distance


def test_static_inputs_get_the_range_of_the_data() -> None:
    model, data = Block(width=128), batches(width=128)
    calibrate(model, QuantizationModifier(scheme="FP8"), data)
    largest = torch.cat(data).abs().max()
    layer = model.q
    assert isinstance(layer, QuantizedLinear)
    torch.testing.assert_close(layer.get_buffer("input_scale"), (largest / 448).reshape(1))


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_static_range_of_nothing_but_zeros_is_an_error(observer: str, zero: float) -> None:
    with pytest.raises(CalibrationError, match=r"q: its input was zero on every calibration token, .* dynamic inputs"):
        modifier = QuantizationModifier(scheme="FP8", input_observer=observer)
        calibrate(Block(width=128), modifier, [torch.full((2, 4, 128), zero)])


def test_a_static_input_without_data_is_an_error() -> None:
    with pytest.raises(CalibrationError, match=r"q: its static input range was never observed"):
        calibrate(Block(width=128), QuantizationModifier(scheme="FP8"), [])


@pytest.mark.parametrize(("scheme", "whose"), [("FP8_BLOCK", "inputs"), ("W4A16", "weights"), ("NVFP4", "weights")])
def test_whose_groups_do_not_divide_is_said(scheme: str, whose: str) -> None:
    session = Session(State(nn.Sequential(nn.Linear(40, 8))), [QuantizationModifier(scheme=scheme)])
    with pytest.raises(SchemeError, match=rf"0 has 40 columns for {whose} of group_size=\d+; columns must divide"):
        session.initialize()


def test_group_sizes_that_do_not_divide_are_all_named() -> None:
    model = nn.Sequential(nn.Linear(48, 8), nn.Linear(128, 8), nn.Linear(200, 8))
    with pytest.raises(SchemeError, match=r"2 modules: 0 has 48 columns .* 2 has 200 columns .* group_size=128"):
        QuantizationModifier(scheme="W4A16").resolve(model)


def test_a_tied_weight_is_refused() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(8, 128), nn.Linear(128, 8, bias=False)
    model.head.weight = model.embed.weight
    with pytest.raises(TargetError, match=r"head: its weight is tied to \['embed.weight'\]"):
        QuantizationModifier(scheme="W4A16").resolve(model)


_LENT: dict[str, Any] = {"config_groups": {"all": GROUPED}}


class _Twice(nn.Module):
    """Layers that stand in several places: a name beside the list, the list itself, and one called at two moments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32)])
        self.first, self.all = self.layers[0], self.layers

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return self.all[1](self.first(self.layers[0](self.embed(input_ids)).relu()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("modifier", [GPTQModifier(**_LENT), QuantizationModifier(**_LENT, ignore=["all.1"])], ids=["GPTQ", "ignored"])
def test_a_module_in_several_places_is_one_module_and_no_tie(modifier: SchemeModifier, tmp_path: Path) -> None:
    model = _Twice()
    tokens = torch.randint(16, (2, 64), generator=torch.Generator().manual_seed(0))
    result = oneshot(model, recipe=modifier, dataset=tokens, output_dir=tmp_path / "out")
    assert isinstance(model.first, QuantizedLinear) and model.first is model.layers[0] and model.all is model.layers
    assert isinstance(model.layers[1], QuantizedLinear) == (not modifier.ignore)
    assert list(result.report.modules) == (["layers.0"] if modifier.ignore else ["layers.0", "layers.1"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys() and torch.equal(stored["first.weight_packed"], stored["layers.0.weight_packed"])


def test_targets_that_are_not_linear_are_refused() -> None:
    with pytest.raises(TargetError, match=r"no linear layers: 1 \(ReLU\)"):
        QuantizationModifier(scheme="W4A16", targets=["0", "1"]).resolve(nn.Sequential(nn.Linear(128, 8), nn.ReLU()))


def _stack() -> nn.Module:
    return nn.Sequential(Block(width=128), Block(width=128))


@pytest.mark.parametrize(
    "schemes",
    [
        {"W8A16": ["Linear"], "W4A16": ["re:.*[.]q"]},
        {"W4A16": ["re:.*[.]q"], "W8A16": ["Linear"]},
        {"W8A16": ["Linear"], "W4A16": ["re:1[.]"], "W8A8": ["1.o"]},
        {"W8A8": ["1.o", "re:0[.]k"], "W4A16": ["re:1[.]", "Linear"]},
        {"W8A16": ["Linear", "0.v"], "W4A16": ["re:.*[.]v", "1.k"]},
        {"W8A16": ["re:0[.]"], "W4A16": ["re:.*q"], "W8A8": ["Linear"]},
    ],
)
def test_of_schemes_that_overlap_the_closest_holds_as_in_compressed_tensors(schemes: dict[str, list[str]]) -> None:
    model = _stack()
    preset_of = {target: preset for preset, targets in schemes.items() for target in targets}
    expected = {
        name: preset_scheme(preset_of[match_targets(name, module, preset_of)[0]])
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    groups = {name: preset_scheme(name, targets).model_dump() for name, targets in schemes.items()}
    for modifier in (QuantizationModifier(scheme=schemes), QuantizationModifier(config_groups=groups)):  # type: ignore[arg-type]
        found = modifier.resolve(model)
        assert {name: scheme.weights for name, scheme in found.items()} == {name: scheme.weights for name, scheme in expected.items()}
    assert len({repr(scheme.weights) for scheme in expected.values()}) > 1


@pytest.mark.parametrize(
    "schemes",
    [
        {"W4A16": ["Linear"], "W8A16": ["Linear"]},
        {"W4A16": ["0.q"], "W8A16": ["0.q"], "W8A8": ["Linear"]},
        {"W4A16": ["Block"], "W8A16": ["re:.*q"]},
        {"W4A16": ["re:0$"], "W8A16": ["Linear"]},
        {"W4A16": ["re:.*q.weight"], "W8A16": ["Linear"]},
    ],
)
def test_two_schemes_that_mean_a_module_equally_closely_are_refused(schemes: dict[str, list[str]]) -> None:
    with pytest.raises(SchemeError, match=r"0\.q: two schemes .* claim it equally closely \(.*; make their targets disjoint"):
        QuantizationModifier(scheme=schemes).resolve(_stack())


def test_of_two_patterns_of_one_kind_it_is_noted_which_holds() -> None:
    modifier = QuantizationModifier(scheme={"W8A16": ["re:0[.]"], "W4A16": ["re:.*q"], "W8A8": ["Linear"]})
    assert modifier.pattern_notes(_stack()) == [
        "QuantizationModifier: 're:.*q' and 're:0[.]' both mean 1 layers (0.q), which get the scheme of the first, as patterns sort"
    ]


@pytest.mark.parametrize("settings", [{}, {"scheme": "W4A16", "config_groups": {"all": GROUPED}}])
def test_exactly_one_source_of_schemes(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give exactly one of them"):
        QuantizationModifier(**settings)


def test_what_llm_compressor_writes_into_its_recipes_is_understood() -> None:
    modifier = GPTQModifier(
        scheme="W4A16",
        bypass_divisibility_checks=False,  # type: ignore[call-arg]
        requires_calibration_data=True,
        batched_quantization="auto",
        kv_cache_scheme=None,
        observer={"weights": "mse"},
    )
    assert modifier == GPTQModifier(scheme="W4A16", weight_observer="mse")


@pytest.mark.parametrize(
    "setting",
    [{"bypass_divisibility_checks": True}, {"kv_cache_scheme": {"num_bits": 8, "group_size": 32}}, {"observer": {"output": "mse"}}],
)
def test_a_foreign_setting_that_would_change_the_result_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        GPTQModifier(scheme="W4A16", **setting)


def test_no_two_modifiers_change_one_module() -> None:
    first, second = gptq(), QuantizationModifier(config_groups={"all": GROUPED})
    state = State(model=Block())
    with pytest.raises(TargetError, match=r"4 of its modules \(q, k, v, \.\.\.\) belong to GPTQModifier already"):
        Session(state, [first, second]).initialize()


def test_an_observer_in_the_recipe_reaches_every_weight() -> None:
    (scheme,) = QuantizationModifier(scheme="W4A16", weight_observer="mse").target_schemes()
    assert scheme.weights is not None
    assert scheme.weights.observer == "mse"
    minmax, mse = Block(width=128), Block(width=128)
    calibrate(minmax, QuantizationModifier(scheme="W4A16"), [])
    calibrate(mse, QuantizationModifier(scheme="W4A16", weight_observer="mse"), [])
    assert any(not torch.equal(one, codes(mse)[name]) for name, one in codes(minmax).items())


def test_the_plan_says_what_each_layer_gets_and_why_others_stay() -> None:
    model = Block(width=128)
    planned = {module.name: module for module in gptq(ignore=["re:v"]).plan(model)}
    assert planned["q"].scheme == "int4 group 16"
    assert planned["v"].reason == "ignored by 're:v'"
    assert planned["q"].details["bytes_after"] == 128 * 128 // 2 + 4 * 128 * 8 + 16
    narrow = QuantizationModifier(scheme="W4A16", targets=["q"]).plan(model)
    assert {module.name: module.reason for module in narrow}["k"] == "no target matches it"


def test_an_error_puts_the_float_layers_of_an_in_memory_model_back() -> None:
    model = Block()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = State(model=model, keep_originals=True)
    with pytest.raises(CompressorError), Session(state, [gptq()]) as session, torch.no_grad():
        session.initialize()
        session.send(EventType.CALIBRATION_START)
        model(batches()[0])
        session.send(EventType.SEQUENTIAL_EPOCH_END, modules=["q", "k", "v"])
        assert len(codes(model)) == 3
        session.send(EventType.CALIBRATION_START)
    assert not codes(model)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    assert hooks_on(model) == 0


def test_of_layers_that_look_alike_the_one_that_cannot_be_replaced_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].scheme = "of its author"
    with pytest.raises(SchemeError, match="1: it has a 'scheme' of its own"):
        QuantizationModifier(targets=["Linear"], scheme="W8A8").resolve(model)


INT4 = {"config_groups": {"g": GROUPED}, "ignore": ["lm_head"]}


def rounding() -> QuantizationModifier:
    return QuantizationModifier(scheme="W8A8", ignore=["lm_head"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [AutoRoundModifier(**INT4, weight_observer="mse")], "observer mse chooses ranges, which are learned here"),
        (lambda: [AutoRoundModifier(**INT4, enable_minmax_tuning=False, minmax_lr=0.1)], "minmax_lr=0.1 moves nothing"),
        (lambda: [AutoRoundModifier(**INT4, iters=0, lr=0.1)], "lr=0.1 is for learning, and iters=0 learns nothing"),
        (lambda: [AutoRoundModifier(**INT4, iters=0, batch_size=4)], "batch_size=4 is for learning"),
        (
            lambda: [GPTQModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"], scale_search=True)],
            "scale_search=True was given, and float8 channel has",
        ),
        (lambda: [GPTQModifier(scheme="W8A8", ignore=["lm_head"], alpha=0.5)], "alpha=0.5 moves nothing, since target is 'propagated'"),
        (lambda: [GPTQModifier(**INT4, mode="fast", alpha=0.5)], "alpha=0.5 moves nothing"),
        (lambda: [SmoothQuantModifier(ignore=["nosuch"]), rounding()], "ignore 'nosuch' matches no module"),
        (lambda: [SmoothQuantModifier(algorithm="log_equalization", smoothing_strength=0.3), rounding()], "smoothing_strength=0.3 counts"),
        (lambda: [MagnitudePruningModifier(final_sparsity=0.5, leave_enabled=True)], "leave_enabled=True is for training"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(make: Callable[[], list[Any]], said: str) -> None:
    with pytest.raises((CompressorError, ValueError), match=re.escape(said)):
        oneshot(tiny.llama(), recipe=make(), dataset=torch.randint(64, (4, 8)))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ([SmoothQuantModifier(ignore=["re:.*nosuch"]), rounding()], "ignore 're:.*nosuch' names no source of a scale that can move"),
        ([QuantizationModifier(**INT4, start=0.0)], "start=0.0 counts in a training"),
        ([GPTQModifier(**INT4, target="base", alpha=0.5)], "without propagate_error every module has the inputs of the uncompressed model"),
    ],
)
def test_a_setting_that_changed_nothing_is_noted(recipe: list[Any], said: str) -> None:
    chosen = {"propagate_error": False} if "propagate" in said else {}
    report = oneshot(tiny.llama(), recipe=recipe, dataset=torch.randint(64, (4, 8)), **chosen).report
    assert [note for note in report.notes if said in note], report.notes


def test_experts_that_stay_fused_are_named_where_scales_move() -> None:
    """Nothing quantizes or prunes them, so that they are not taken apart, and no scale can move into them."""
    notes = oneshot(tiny.qwen3_moe(), recipe=SmoothQuantModifier(), dataset=torch.randint(64, (4, 8))).report.notes
    assert any("no scale moves into model.layers.0.mlp.experts" in note and "whose experts are fused" in note for note in notes), notes
    recipe = [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    notes = oneshot(tiny.qwen3_moe(), recipe=recipe, dataset=torch.randint(64, (64, 16))).report.notes
    assert not any("are fused" in note for note in notes)


def test_a_default_device_around_the_call_is_refused_by_name() -> None:
    with torch.device("meta"), pytest.raises(UserInputError, match="oneshot: meta is torch's default device around the call"):
        oneshot(nn.Linear(16, 16, device="cpu"), recipe=QuantizationModifier(scheme="W8A16"))


def test_backward_hooks_of_the_models_author_go_over_to_the_quantized_layer() -> None:
    model: Any = tiny.llama()
    layer, calls = model.model.layers[1].mlp.up_proj, list[str]()
    layer.register_full_backward_hook(lambda *_: calls.append("full"))
    layer.register_full_backward_pre_hook(lambda *_: calls.append("pre"))
    oneshot(model, recipe=QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"]))
    assert model.model.layers[1].mlp.up_proj is not layer
    model(inputs_embeds=torch.ones(1, 4, 32, requires_grad=True)).logits.sum().backward()
    assert calls == ["pre", "full"]


@pytest.mark.parametrize("together", [True, False])
def test_fused_layers_that_two_modifiers_have_are_noted(together: bool) -> None:
    parts = [["re:.*[qkv]_proj", "re:.*(gate|up)_proj"]] if together else [["re:.*q_proj"], ["re:.*[kv]_proj", "re:.*up_proj"]]
    result = oneshot(tiny.llama(), recipe=[QuantizationModifier(scheme="NVFP4A16", targets=targets) for targets in parts])
    told = [note for note in result.report.notes if "which runtimes fuse, are quantized by two modifiers" in note]
    layers = [result.model.model.layers[0].self_attn.get_submodule(f"{one}_proj").weight_global_scale for one in "qkv"]
    assert bool(told) is not together and (together or "k_proj and model.layers.0.self_attn.q_proj" in told[0])
    assert (len({float(one) for one in layers}) == 1) is together
