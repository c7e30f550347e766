"""Training with rounding in the forward: equal in all modes, resumable, and what comes out computes what was trained, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor import oneshot
from compressor.errors import CalibrationError, CompressorError, LifecycleError, RecipeError, SchemeError
from compressor.lifecycle import EventType, Session, State
from compressor.model.checkpoints.load import load_compressed
from compressor.model.checkpoints.save import save_checkpoint
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.nn import QuantizedLayer
from compressor.nn.fake_quant import FakeQuantizedLayer, FakeQuantizedLinear
from compressor.numerics import PRESETS, QuantizationScheme, weight_qparams
from compressor.recipe import load_recipe
from compressor.training import Snapshot, Trainer, TrainStep, adamw, load_training, save_training
from compressor.training_run import train
from tests import tiny

NUM_STEPS, START, FREEZE, END = 60, 8, 30, 45
TIMES = {"start": START, "end": END, "disable_quantization_observer_epoch": FREEZE}
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": False}
# Weights and inputs; groups of 8 divide the columns of every model here.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "int4 group": ({"num_bits": 4, "group_size": 8}, None),
    "int8 channel, asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "int4 tensor, mse": ({"num_bits": 4, "strategy": "tensor", "observer": "mse", "observer_kwargs": {"maxshrink": 0.2, "grid": 10}}, None),
    "fp8 channel": ({"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    "int8, dynamic int8": ({"num_bits": 8, "strategy": "channel"}, DYNAMIC),
    "int8, static int8": ({"num_bits": 8, "strategy": "channel"}, STATIC),
    "fp8, static fp8": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


@dataclass(frozen=True)
class Small:
    """A model with its loss and its batches, as the cases of conftest."""

    make: Any
    loss_fn: Any
    batch_at: Any


class Reader(nn.Module):
    """An embedding, a wide layer that every preset fits, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.head = nn.Embedding(16, 256), nn.Linear(256, 128), nn.Linear(128, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(self.table(input_ids))))


def read(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["ids"]).float().flatten(0, 1), batch["ids"].roll(1, 1).flatten())


def ids_at(number: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(number))}


READER = Small(Reader, read, ids_at)


def quantizer(scheme: str, targets: Any = ("Linear",), ignore: Any = (), **times: Any) -> QuantizationModifier:
    weights, inputs = SCHEMES[scheme]
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    return QuantizationModifier(config_groups={"group": group}, ignore=list(ignore), **times)


def make(case: Any, new_trainer: Any, mode: str, modifiers: list[Any], optimizer: Any = None, **settings: Any) -> Trainer:
    plain = new_trainer(case, mode).step
    session = Session(State(plain.model), modifiers)
    session.initialize()
    chosen = plain.optimizer if optimizer is None else optimizer(plain.model.parameters())
    return Trainer(TrainStep(plain.model, plain.loss_fn, chosen, session, **settings), mode, max_plans=16, audit_every=0)


def captures(trainer: Trainer, batch_at: Any, num_steps: int = NUM_STEPS) -> tuple[list[float], list[int]]:
    losses, found = [], []
    for step in range(num_steps):
        losses.append(trainer.train_step(batch_at(step)).item())
        found += [step] if trainer.last_action == "capture" else []
    return losses, found


@pytest.mark.parametrize(
    ("name", "scheme", "times"),
    [
        *(("mlp", scheme, TIMES) for scheme in SCHEMES),
        ("mlp", "int4 group", {"start": START, "end": END, "update": 5}),
        ("mlp", "int8, static int8", {"start": START, "end": END, "update": 5, "disable_quantization_observer_epoch": FREEZE}),
        ("mlp", "fp8 channel", {"start": START, "update": 5, "disable_quantization_observer_epoch": FREEZE}),
        ("mlp", "int4 group", {"start": 0}),
        ("llama", "int4 group", TIMES),
        ("llama", "int8, static int8", TIMES),
    ],
)
def test_sixty_steps_are_equal_in_all_modes(cases, new_trainer, name, scheme, times):
    ends, losses = {}, {}
    recorded = name == "mlp" and times is TIMES and scheme in ("int4 group", "int8, static int8")  # recording every step takes long
    modes = ("eager", "capture", "replay") if recorded else ("eager", "replay")
    for mode in modes:
        trainer = make(cases[name], new_trainer, mode, [quantizer(scheme, ignore=["lm_head"] if name == "llama" else [], **times)])
        losses[mode], captured = captures(trainer, cases[name].batch_at)
        ends[mode] = Snapshot.take(trainer.step)
    assert all(losses["eager"] == losses[mode] and ends["eager"].differences(ends[mode]) == [] for mode in modes)
    # start, the freeze and the end are STRUCTURE; scales that are written at every update are DATA, and so is their last one
    freeze = times.get("disable_quantization_observer_epoch") if "update" not in times or "static" in scheme else None
    moments = [times["start"], freeze, times.get("end")]
    assert captured == sorted({2, *(moment + 2 for moment in moments if moment is not None)})
    assert trainer.last_action == "replay"


def test_accumulated_steps_under_autocast_are_equal(cases, new_trainer):
    ends = []
    for mode in ("eager", "replay"):
        trainer = make(cases["mlp"], new_trainer, mode, [quantizer("int8, static int8", start=2)], accumulate=2, autocast=torch.bfloat16)
        trainer.fit(lambda step: [cases["mlp"].batch_at(2 * step), cases["mlp"].batch_at(2 * step + 1)], 12)
        ends.append(Snapshot.take(trainer.step))
    assert ends[0].differences(ends[1]) == []


def test_the_very_same_parameters_train_under_the_same_names(cases, new_trainer):
    trainer = make(cases["mlp"], new_trainer, "replay", [quantizer("int4 group", start=3)])
    before = dict(trainer.step.model.named_parameters())
    keys = list(trainer.step.model.state_dict())
    trainer.fit(cases["mlp"].batch_at, 8)
    after = dict(trainer.step.model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert list(trainer.step.model.state_dict()) == keys
    assert all(parameter.grad.abs().sum() > 0 for parameter in after.values())
    assert sum(isinstance(module, FakeQuantizedLinear) for module in trainer.step.model.modules()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_codes_compute_what_was_trained_bit_for_bit(new_trainer, preset, dtype):
    small = Small(lambda: Reader().to(dtype), read, ids_at)
    modifier = QuantizationModifier(scheme=preset, targets=["wide"], start=0, disable_quantization_observer_epoch=2)
    trainer = make(small, new_trainer, "eager", [modifier], lambda params: torch.optim.SGD(params, lr=0.05))
    trainer.fit(small.batch_at, 4)
    model, batch = trainer.step.model.eval(), small.batch_at(50)
    with torch.no_grad():
        layer, want = model.wide, model(batch["ids"])
        weight, qparams = layer.fake_weight(), layer.weight_qparams()
        trainer.step.session.finalize()
        assert isinstance(model.wide, QuantizedLayer)
        assert torch.equal(model.wide.dequantized_weight(), weight)
        assert torch.equal(model(batch["ids"]), want)
    stored = model.wide.weight_qparams()
    assert torch.equal(stored.scale.float(), qparams.scale.float())
    assert not torch.equal(weight, model.wide.dequantized_weight() + 1)
    assert trainer.step.session.state.report.modules["wide"].details == {"trained_from": 0.0}


@pytest.mark.parametrize("scheme", ["int4 group", "int8 channel, asymmetric", "fp8 channel"])
@pytest.mark.parametrize("times", [{"start": 0}, {"start": 1, "end": 3}, {"start": 1, "update": 2}])
def test_embeddings_and_every_way_to_fix_scales_give_equal_codes(new_trainer, scheme, times):
    trainer = make(READER, new_trainer, "eager", [quantizer(scheme, ["Embedding", "Linear"], **times)])
    trainer.fit(READER.batch_at, 5)
    model, batch = trainer.step.model.eval(), READER.batch_at(50)
    with torch.no_grad():
        want = model(batch["ids"])
        trainer.step.session.finalize()
        assert torch.equal(model(batch["ids"]), want)
    assert sum(isinstance(module, QuantizedLayer) for module in model.modules()) == 3


@pytest.mark.nightly
def test_a_trained_model_saves_and_loads_like_any_other(cases, new_trainer, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = make(cases["llama"], new_trainer, "replay", [quantizer("int4 group", ignore=["lm_head"], **TIMES)])
    trainer.fit(cases["llama"].batch_at, 50)
    model, batch = trainer.step.model.eval(), cases["llama"].batch_at(70)
    with torch.no_grad():
        want = model(**batch).logits
        codes = {}
        trainer.step.session.finalize()
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLayer):
                codes[name] = module.codes()
        save_checkpoint(model, tmp_path / "out", schemes={name: model.get_submodule(name).scheme for name in codes}, record={})
        ours = load_compressed(tmp_path / "out")
        assert all(torch.equal(ours.get_submodule(name).codes(), code) for name, code in codes.items()) and len(codes) == 14
        assert torch.equal(ours(**batch).logits, want)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batch).logits, want)


def reference(weight: Tensor, scales: Tensor, upstream: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values and gradients of symmetric integers in groups of 8, in float64 and by definition."""
    half = 2 ** (bits - 1)
    values, gradient = torch.zeros_like(weight), torch.zeros_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = float(scales[row, column // 8])
            exact = float(weight[row, column]) / scale
            values[row, column] = min(max(round(exact), -half), half - 1) * scale
            gradient[row, column] = upstream[row, column] if -half - 1 < exact < half else 0.0
    return values, gradient


@pytest.mark.parametrize("grown", [1.0, 1.5])
def test_values_and_straight_through_gradients_are_those_of_the_definition(grown):
    """Under scales of a weight that has grown since, many values are cut off, and those get no gradient."""
    torch.manual_seed(3)
    linear = nn.Linear(16, 6, bias=False)
    layer = FakeQuantizedLinear(linear, _scheme("int4 group"), "layer", None)
    scales = linear.weight.detach().double().unflatten(1, (-1, 8)).abs().amax(-1) / 7.5
    layer.fixed = True
    with torch.no_grad():
        linear.weight.mul_(grown)
    upstream = torch.randn(6, 16)
    weight = layer.fake_weight()
    weight.backward(upstream)
    values, gradient = reference(linear.weight.detach().double(), scales, upstream.double(), 4)
    scaled = (linear.weight.detach().double().unflatten(1, (-1, 8)) / scales[..., None]).flatten(1)
    clear = ((scaled - 0.5) - (scaled - 0.5).round()).abs() > 1e-5  # float32 may take the other neighbour of a tie
    assert float(clear.double().mean()) > 0.8
    assert torch.allclose(weight.detach().double()[clear], values[clear], rtol=1e-6, atol=1e-9)
    assert torch.equal(linear.weight.grad.double(), gradient)
    assert (int((gradient == 0).sum()) > 5) is (grown > 1.0)


@pytest.mark.parametrize("scheme", ["int4 group", "int8 channel, asymmetric", "int4 tensor, mse"])
def test_scales_that_are_stored_are_those_of_the_weight_at_that_moment(scheme):
    torch.manual_seed(5)
    layer = FakeQuantizedLinear(nn.Linear(16, 6), _scheme(scheme), "layer", None)
    before = {key: tensor.clone() for key, tensor in layer.tensors().items()}
    with torch.no_grad():
        layer.weight.add_(torch.rand(6, 16))
    layer.keep_scales()
    wanted = weight_qparams(layer.weight, layer.weight_args)
    for key, tensor in layer.tensors().items():
        assert torch.equal(tensor, getattr(wanted, key.removeprefix("weight_"))) and not torch.equal(tensor, before[key])


@pytest.mark.parametrize(
    ("times", "moments"),
    [
        ({"start": 2, "disable_quantization_observer_epoch": 6}, [6]),
        ({"start": 2, "end": 6}, [6]),
        ({"start": 1, "update": 3}, [1, 4, 7]),
        ({"start": 1, "update": 3, "disable_quantization_observer_epoch": 6}, [1, 4, 6]),
    ],
)
def test_scales_are_stored_at_their_moments_and_stay_between(cases, new_trainer, times, moments):
    modifier = quantizer("int8 channel, asymmetric", ["first"], **times)
    trainer, wanted = make(cases["mlp"], new_trainer, "replay", [modifier]), None
    for step in range(10):
        before = trainer.step.model.first.weight.detach().clone()
        trainer.train_step(cases["mlp"].batch_at(step))
        if step in moments:
            wanted = weight_qparams(before, modifier.schemes["first"].weights)
        if wanted is not None:
            tensors = modifier.training_tensors()
            assert torch.equal(tensors["first.weight_scale"], wanted.scale)
            assert torch.equal(tensors["first.weight_zero_point"], wanted.zero_point)
            assert torch.equal(trainer.step.model.first.weight_qparams().scale, wanted.scale)


def test_global_scales_of_siblings_follow_their_weights(new_trainer):
    small = Small(lambda: nn.ModuleDict({"gate_proj": nn.Linear(16, 16), "up_proj": nn.Linear(16, 4)}), gated, ids_at)
    modifier = QuantizationModifier(scheme="NVFP4A16", start=1, disable_quantization_observer_epoch=8)
    trainer, fixed = make(small, new_trainer, "replay", [modifier]), 0.0
    for step in range(12):
        weights = [layer.weight.detach().clone() for layer in trainer.step.model.values()]
        trainer.train_step(small.batch_at(step))
        if step >= 1:
            now = weights if step >= 8 else [layer.weight.detach() for layer in trainer.step.model.values()]
            largest = max(float(weight.abs().max()) for weight in now)
            fixed = 448 * 6 / largest if step <= 8 else fixed
            scales = [float(tensor) for name, tensor in modifier.training_tensors().items() if name.endswith("global_scale")]
            assert len(scales) == 2 and scales == pytest.approx([fixed, fixed], rel=1e-6)


def gated(model: nn.Module, batch: Any) -> Tensor:
    x = nn.functional.embedding(batch["ids"], torch.eye(16))
    return cross_entropy(model["up_proj"](torch.tanh(model["gate_proj"](x))).flatten(0, 1), batch["ids"].flatten() % 4)


def test_gradients_of_inputs_stop_where_values_are_cut_off():
    layer = FakeQuantizedLinear(nn.Linear(8, 3), _scheme("int8, static int8"), "layer", None)
    layer(torch.linspace(-1, 1, 8)[None])
    layer.observing = False
    x = torch.tensor([[-5.0, -1.0, -0.3, 0.0, 0.2, 1.0, 1.002, 5.0]], requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad != 0).tolist() == [[False, True, True, True, True, True, True, False]]
    straight = layer.fake_weight().sum(0)
    assert torch.allclose(x.grad[0, 1:7], straight[1:7])


def _scheme(name: str) -> QuantizationScheme:
    weights, inputs = SCHEMES[name]
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


def test_static_ranges_are_the_extremes_of_training_and_evaluation_does_not_move_them(cases, new_trainer):
    modifier = quantizer("int8, static int8", ["first"], start=2, disable_quantization_observer_epoch=6)
    trainer = make(cases["mlp"], new_trainer, "replay", [modifier])
    trainer.fit(cases["mlp"].batch_at, 4)
    before = {name: tensor.clone() for name, tensor in modifier.training_tensors().items()}
    trainer.evaluate([{"x": torch.full((4, 8), 100.0), "y": torch.zeros(4, dtype=torch.int64)}])
    assert all(torch.equal(tensor, before[name]) for name, tensor in modifier.training_tensors().items())
    trainer.fit(cases["mlp"].batch_at, 12)
    seen = torch.stack([cases["mlp"].batch_at(step)["x"] for step in range(2, 6)])
    tensors = modifier.training_tensors()
    assert float(tensors["first.input_min"]) == float(seen.min()) and float(tensors["first.input_max"]) == float(seen.max())
    trainer.step.session.finalize()
    layer = trainer.step.model.first
    assert float(layer.input_scale) == pytest.approx(float(seen.max() - seen.min()) / 255, rel=1e-6)


def test_evaluation_computes_what_the_finished_layer_will(cases, new_trainer):
    trainer = make(cases["mlp"], new_trainer, "eager", [quantizer("int8, static int8", ["first", "last"], start=0)])
    trainer.fit(cases["mlp"].batch_at, 4)
    model, beyond = trainer.step.model.eval(), torch.full((4, 8), 100.0)
    with torch.no_grad():
        before = model(beyond)
        trainer.step.session.finalize()
        assert torch.equal(before, model(beyond))


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_forwards_between_steps_move_no_range_whatever_the_mode_of_the_layers(cases, new_trainer, mode):
    modifier = quantizer("int8, static int8", ["first"], start=0)
    trainer = make(cases["mlp"], new_trainer, mode, [modifier])
    for step in range(8):  # also ahead of the first batch, when nothing is known yet
        with torch.no_grad():
            assert bool(trainer.step.model(torch.full((4, 8), 50.0)).isfinite().all())
        trainer.train_step(cases["mlp"].batch_at(step))
    seen = torch.stack([cases["mlp"].batch_at(step)["x"] for step in range(8)])
    tensors = modifier.training_tensors()
    assert float(tensors["first.input_min"]) == float(seen.min()) and float(tensors["first.input_max"]) == float(seen.max())


@pytest.mark.parametrize("start", [0, 3])
def test_layers_in_evaluation_mode_would_observe_nothing(cases, new_trainer, start):
    trainer = make(cases["mlp"], new_trainer, "eager", [quantizer("int8, static int8", ["first"], start=start)])
    trainer.step.model.eval()
    with pytest.raises(CompressorError, match="first are in evaluation mode, in which static ranges of inputs are not observed"):
        trainer.fit(cases["mlp"].batch_at, 6)


@pytest.mark.parametrize("saved_at", [5, START, 20, FREEZE, 37, 50])
@pytest.mark.parametrize("scheme", ["int4 group", "int8, static int8"])
def test_a_resumed_run_goes_on_bit_for_bit(cases, new_trainer, tmp_path, scheme, saved_at):
    def trainer(mode: str) -> Trainer:
        return make(cases["mlp"], new_trainer, mode, [quantizer(scheme, **TIMES)])

    whole = trainer("eager")
    losses = whole.fit(cases["mlp"].batch_at, NUM_STEPS)
    end = Snapshot.take(whole.step)
    first = trainer("replay")
    first.fit(cases["mlp"].batch_at, saved_at)
    path = save_training(first, tmp_path / "state")
    second = trainer("replay")
    load_training(second, path)
    assert second.fit(cases["mlp"].batch_at, NUM_STEPS) == losses[saved_at:]
    assert end.differences(Snapshot.take(second.step)) == []
    for one in (whole, second):
        one.step.session.finalize()
    pairs = zip(whole.step.model.buffers(), second.step.model.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("moment", ["initialize", "training", "finalize"])
def test_an_abort_brings_the_float_layers_back(cases, new_trainer, moment, monkeypatch):
    plain = new_trainer(cases["mlp"], "eager").step
    modules = dict(plain.model.named_modules())
    session = Session(State(plain.model), [quantizer("int4 group", start=0)])
    session.initialize()
    assert isinstance(plain.model.first, FakeQuantizedLayer)
    if moment == "initialize":
        session.abort()
    else:
        trainer = Trainer(TrainStep(plain.model, plain.loss_fn, plain.optimizer, session), "eager")
        trainer.fit(cases["mlp"].batch_at, 3)
        if moment == "training":
            session.abort()
        else:
            with torch.no_grad():
                plain.model.last.weight[0, 0] = torch.nan
            with pytest.raises(ExceptionGroup, match="failed to finalize"):
                session.finalize()
    assert all(module is modules[name] for name, module in plain.model.named_modules())
    assert list(plain.model.state_dict()) == list(new_trainer(cases["mlp"], "eager").step.model.state_dict())


def test_a_finished_run_holds_no_float_layers(cases, new_trainer):
    trainer = make(cases["mlp"], new_trainer, "eager", [quantizer("int4 group", start=0)])
    trainer.fit(cases["mlp"].batch_at, 2)
    trainer.step.session.finalize()
    assert trainer.step.session.state.originals == {}


def test_pruned_weights_stay_zero_under_training_with_rounding(cases, new_trainer):
    modifiers = [
        MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", start=0, end=5, update=2, leave_enabled=True),
        ConstantPruningModifier(start=5),
        quantizer("int4 group", start=8, disable_quantization_observer_epoch=16),
    ]
    ends = []
    for mode in ("eager", "replay"):
        fresh = [type(one)(**one.model_dump(exclude={"index"})) for one in modifiers]
        trainer = make(cases["mlp"], new_trainer, mode, fresh)
        trainer.fit(cases["mlp"].batch_at, 24)
        ends.append(Snapshot.take(trainer.step))
    assert ends[0].differences(ends[1]) == []
    trainer.step.session.finalize()
    for layer in (trainer.step.model.first, trainer.step.model.last):
        assert int((layer.codes() != 0).unflatten(1, (-1, 4)).sum(-1).max()) <= 2
    details = trainer.step.session.state.report.modules["first"].details
    assert details["sparsity"] == 0.5 and details["trained_from"] == 8.0


def test_zeros_that_rounding_brings_back_are_counted(cases, new_trainer):
    """Weights may grow again behind the masks' end; those that are rounded to zero stand as zeros in the checkpoint."""
    modifiers = [MagnitudePruningModifier(final_sparsity=0.5, start=0, end=5, update=2), quantizer("int4 group", start=3)]
    trainer = make(cases["mlp"], new_trainer, "eager", modifiers)
    trainer.fit(cases["mlp"].batch_at, 8)
    grown = float((trainer.step.model.first.weight == 0).float().mean())
    session = trainer.step.session
    session.finalize()
    stored = float((trainer.step.model.first.codes() == 0).float().mean())
    assert session.state.report.modules["first"].details["sparsity"] == pytest.approx(stored, abs=1e-6) != grown
    assert any("of the weights are zero at the end, not 50.0%" in note for note in session.state.report.notes)


def test_a_recipe_in_yaml_trains_and_a_calibration_after_it_keeps_what_was_learnt(cases, new_trainer):
    text = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [last]
      start: 2
      end: 9
      disable_quantization_observer_epoch: 6
      config_groups:
        group_0: {targets: [Linear], weights: {num_bits: 4, type: int, strategy: group, group_size: 8}}
"""
    trainer = make(cases["mlp"], new_trainer, "replay", list(load_recipe(text).modifiers))
    trainer.fit(cases["mlp"].batch_at, 12)
    session, layer = trainer.step.session, trainer.step.model.first
    weight = layer.fake_weight().detach()
    session.send(EventType.CALIBRATION_START)
    session.send(EventType.CALIBRATION_END)
    session.finalize()
    assert torch.equal(trainer.step.model.first.dequantized_weight(), weight)


@pytest.mark.parametrize("scheme", ["int4 group", "int8, static int8"])
def test_a_calibration_without_training_is_one_whatever_start_says(scheme):
    torch.manual_seed(0)
    rows, models = torch.randint(0, 16, (4, 6)), []
    base = Reader()
    for times in ({}, {"start": 0}, {"start": 3}):
        model = copy.deepcopy(base)
        oneshot(model, recipe=quantizer(scheme, **times), dataset=None if scheme == "int4 group" else rows)
        models.append(model(rows))
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])


@pytest.mark.nightly
def test_conv1d_of_gpt2_trains_and_gives_equal_codes(cases, new_trainer):
    case = cases["gpt2"]
    times = {"start": 0, "end": 4, "leave_enabled": True}
    pruner = MagnitudePruningModifier(targets="Conv1D", mask_structure="2:4", final_sparsity=0.5, **times)
    trainer = make(case, new_trainer, "replay", [pruner, quantizer("int4 group", ["Conv1D"], start=1)])
    trainer.fit(case.batch_at, 9)
    model, batch = trainer.step.model.eval(), case.batch_at(30)
    with torch.no_grad():
        want = model(**batch).logits
        trainer.step.session.finalize()
        assert torch.equal(model(**batch).logits, want)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    assert len(layers) == 8
    assert all(int((layer.codes() != 0).unflatten(1, (-1, 4)).sum(-1).max()) <= 2 for layer in layers)  # along the inputs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheme": "W4A16", "end": 5}, "end=5.0 is for training"),
        ({"scheme": "W4A16", "update": 5}, "update=5.0 is for training"),
        ({"scheme": "W4A16", "disable_quantization_observer_epoch": 5}, "needs a start"),
        ({"scheme": "W4A16", "start": 5, "end": 5}, "is not before end"),
        ({"scheme": "W4A16", "start": 5, "disable_quantization_observer_epok": 5}, "disable_quantization_observer_epoch"),
        ({"scheme": "W8A8", "start": 0, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_do(settings, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe({"a_stage": {"a_modifiers": {"QuantizationModifier": settings}}})


def test_what_training_cannot_have_is_refused_before_anything_changes(cases, new_trainer, monkeypatch):
    scheme = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "observer": "mse"}, "targets": ["Linear"]}
    plain = new_trainer(cases["mlp"], "eager").step
    with pytest.raises(SchemeError, match="observer='mse' counts values on the host"):
        Session(State(plain.model), [QuantizationModifier(config_groups={"g": scheme}, start=0)]).initialize()
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        patched.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(SchemeError, match="each of 2 ranks"):
            Session(State(plain.model), [quantizer("int8, static int8", start=0)]).initialize()
    assert not any(isinstance(module, FakeQuantizedLayer) for module in plain.model.modules())
    for times, error in (({"start": 0}, CalibrationError), ({"start": 9}, CalibrationError)):
        session = Session(State(plain.model), [quantizer("int8, static int8", **times)])
        session.initialize()
        with pytest.raises(ExceptionGroup) as raised:
            session.finalize()  # no batch came
        assert raised.group_contains(error)
    with pytest.raises(LifecycleError):
        session.send(EventType.BATCH_START)


class Recalls(nn.Module):
    """Learns to name a class from a random direction; large enough that 3 bits hurt."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def recall_at(number: int) -> dict[str, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x @ torch.randn(16, 8, generator=torch.Generator().manual_seed(0))).argmax(1)}


def test_training_with_rounding_beats_rounding_and_is_not_merely_more_training():
    held_out = [recall_at(10_000 + number) for number in range(16)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["y"])

    def train(model: nn.Module, first: int, count: int, lr: float, modifiers: list[Any]) -> float:
        session = Session(State(model), modifiers)
        session.initialize()
        trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=lr, weight_decay=0.0), session), "replay")
        trainer.fit(lambda step: recall_at(first + step), count)
        if modifiers[0].start is None:
            session.send(EventType.CALIBRATION_START)
            session.send(EventType.CALIBRATION_END)
        session.finalize()
        return trainer.evaluate(held_out)

    def int2(**times: Any) -> QuantizationModifier:
        group = {"targets": ["Linear"], "weights": {"num_bits": 2, "strategy": "channel"}}
        return QuantizationModifier(config_groups={"g": group}, **times)

    torch.manual_seed(0)
    base = Recalls()
    full = Trainer(TrainStep(base, loss_fn, adamw(base.parameters(), lr=1e-2)), "replay")
    full.fit(recall_at, 300)
    rounded = train(copy.deepcopy(base), 0, 0, 1e-3, [int2()])
    more = train(copy.deepcopy(base), 300, 100, 1e-3, [int2()])
    trained = train(copy.deepcopy(base), 300, 100, 1e-3, [int2(start=0, disable_quantization_observer_epoch=80)])
    assert full.evaluate(held_out) < trained < 0.7 * min(rounded, more), (full.evaluate(held_out), trained, rounded, more)


def test_a_checkpoint_in_fewer_bits_has_the_codes_that_were_trained(tmp_path):
    """`train` casts a model to the dtype that it was loaded in; codes come from the weights before that."""
    from transformers import AutoModelForCausalLM

    tiny.llama(
        vocab_size=32,
        max_position_embeddings=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    rows = torch.randint(0, 32, (16, 16))
    models = {}
    for dtype in ("float32", "bfloat16"):
        modifier = quantizer("int4 group", ignore=["lm_head"], start=0, disable_quantization_observer_epoch=4)
        train(
            tmp_path / "base",
            dataset=rows,
            recipe=modifier,
            output_dir=tmp_path / dtype,
            steps=8,
            batch_size=4,
            learning_rate=1e-2,
            save_dtype=dtype,
            mode="eager",
        )
        models[dtype] = load_compressed(tmp_path / dtype)
    layers = {dtype: [m for m in model.modules() if isinstance(m, QuantizedLayer)] for dtype, model in models.items()}
    assert len(layers["float32"]) == 7
    for full, half in zip(layers["float32"], layers["bfloat16"], strict=True):
        assert torch.equal(full.codes(), half.codes())
        assert half.weight_qparams().scale.dtype is torch.bfloat16
        assert torch.equal(full.weight_qparams().scale.bfloat16(), half.weight_qparams().scale)
    stored = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("weight_scale")} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16")
    assert torch.equal(loaded(rows[:2]).logits, models["bfloat16"](rows[:2]).logits)
