"""Rotations that are learned: orthogonal all the way, better where they were trained and where not, and the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compressor import GPTQModifier, QuantizationModifier, SpinQuantModifier, oneshot
from compressor.algorithms.rotations import Rotation, make_rotation
from compressor.errors import CalibrationError, CompressorError, DatasetError, RecipeError
from compressor.mappings.basis import find_basis
from compressor.mappings.turns import Turn, has_biases
from compressor.model.evaluation import evaluation_mode
from compressor.modifiers.transforms.learned_rotations import LearnedRotation, LearnedTurns
from compressor.modifiers.tuning.budget import frozen
from compressor.numerics import QuantizationArgs, QuantizationScheme
from tests.compressor.modifiers.transforms.test_spinquant import GROUPS, IDS, difference, llama, logits, moe, opt, roughened

CPU = torch.device("cpu")
INT2 = {"g": {"targets": ["Linear"], "weights": {"num_bits": 3, "strategy": "group", "group_size": 16}}}
TRAINED = {"learnable": True, "steps": 24, "batch_size": 4, "lr": 0.05, "held_out_frac": 0.25}
MANY = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))


def sharp(model: Any) -> Any:
    """Predictions that a wrong weight changes."""
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def divergence(base: Tensor, own: Tensor) -> float:
    log_p, log_q = base.log_softmax(-1), own.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("keeps_mean", [False, True])
def test_it_is_orthogonal_wherever_it_moves(keeps_mean: bool) -> None:
    start = make_rotation("random-hadamard", 24, keeps_mean=keeps_mean)
    learned = LearnedRotation.of(start, CPU, keeps_mean=keeps_mean)
    assert torch.allclose(learned.matrix(torch.float64), start.matrix(), atol=1e-7)
    learned.move_BB.data = 3 * torch.randn(24, 24, generator=torch.Generator().manual_seed(0))
    matrix = learned.settled().matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(24, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float((matrix - start.matrix()).norm()) > 1
    if keeps_mean:
        assert torch.allclose(matrix.sum(1), torch.ones(24, dtype=torch.float64), atol=1e-6)


def turns_of(model: nn.Module, kind: str = "random-hadamard") -> tuple[Any, list[Turn]]:
    basis = find_basis(model, {"input_ids": IDS}, CPU)
    readers = tuple(name for pair in basis.norms for name in pair.readers)
    norms = tuple(pair.source for pair in basis.norms if not has_biases(model, pair.readers))
    return basis, [Turn(make_rotation(kind, basis.size, keeps_mean=basis.keeps_mean), (*basis.writers, *norms), (*basis.readers, *readers))]


def test_without_formats_the_tried_model_is_the_model_and_it_comes_back() -> None:
    for make in (llama, opt):
        model = make()
        before, stored = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        basis, turns = turns_of(model)
        moves = LearnedTurns(model, basis.norms, turns, {}, CPU, keeps_mean=basis.keeps_mean)
        moves.tensors()[0].data = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), moves.tried():
            assert difference(before, logits(model)) < 1e-4
            assert not torch.allclose(model.get_submodule(basis.writers[0]).weight, stored[f"{basis.writers[0]}.weight"])
        assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_gradients_are_those_of_finite_differences() -> None:
    """Without rounding behind the loss would not change; what reads is left as it is, so that it does."""
    model = llama().double()
    basis, (turn,) = turns_of(model)
    half = Turn(turn.rotation, turn.writers, tuple(name for name in turn.readers if name != "lm_head"))
    moves = LearnedTurns(model, basis.norms, [half], {}, CPU, keeps_mean=False)
    (move,) = moves.tensors()

    def loss() -> Tensor:
        return model(IDS).logits.square().mean()

    with evaluation_mode(model), frozen(model):
        with moves.tried():
            loss().backward()
        assert move.grad is not None
        gradient = move.grad.clone()
        direction = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
        step, found = 1e-2, []
        for sign in (1, -1):
            move.data = sign * step * direction
            with torch.no_grad(), moves.tried():
                found.append(float(loss()))
    expected = (found[0] - found[1]) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=2e-2)
    assert torch.allclose(gradient, -gradient.T, atol=1e-7)  # of A - A^T


@pytest.mark.parametrize("make", [llama, moe, opt], ids=["llama", "moe", "opt"])
def test_the_rounded_model_comes_closer_on_what_no_step_has_seen(make: Any) -> None:
    base = make()
    if make is not opt:
        sharp(base)
    expected = base(MANY[:4]).logits.detach()
    errors, moves = [], list[tuple[float, float]]()
    # Which rate comes closer on so small a model hangs on the instructions of the CPU; none ends further off.
    learned: list[dict[str, Any]] = [TRAINED | {"lr": rate, "steps": 64} for rate in (0.003, 0.01, 0.03, 0.1)]
    for settings in ({}, *learned):
        model = make() if make is opt else sharp(make())
        recipe = [
            SpinQuantModifier(rotations=["R1"], **settings),
            QuantizationModifier(config_groups=INT2, ignore=["lm_head", "re:.*gate$"]),
        ]
        if make is not moe:
            recipe[1] = QuantizationModifier(config_groups=INT2, ignore=["lm_head"])
        report = oneshot(model, recipe=recipe, dataset=MANY[4:]).report
        errors.append(divergence(expected, model(MANY[:4]).logits.detach()))
        notes = [note for note in report.notes if "rotations learned" in note]
        moves += [(float(note.split(" -> ")[0].split()[-1]), float(note.split(" -> ")[1].split()[0])) for note in notes]
    assert len(moves) == len(learned) and all(after <= before for before, after in moves), moves
    assert any(after < before for before, after in moves), moves
    assert min(errors[1:]) < errors[0], errors


def test_activations_that_are_rounded_take_part() -> None:
    model = sharp(llama())
    basis, turns = turns_of(model)
    inputs = QuantizationArgs(num_bits=4, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, strategy="channel"), input_activations=inputs)
    names = [name for pair in basis.norms for name in pair.readers]
    before = logits(model)
    with torch.no_grad(), LearnedTurns(model, basis.norms, turns, dict.fromkeys(names, scheme), CPU, keeps_mean=False).tried():
        rounded = difference(before, logits(model))
    assert 0.02 < rounded < 0.5
    assert difference(before, logits(model)) == 0


@pytest.mark.nightly
def test_what_was_learned_is_stored_and_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    written = []
    for number in range(2):
        recipe = [SpinQuantModifier(**TRAINED), GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])]
        result = oneshot(str(tmp_path / "base"), recipe=recipe, dataset=IDS, output_dir=tmp_path / str(number), device="cpu")
        written.append([(tmp_path / str(number) / name).read_bytes() for name in ("model.safetensors", "compression.json")])
    assert written[0] == written[1]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert difference(logits(result.model), logits(read)) < 1e-5
    assert len(result.report.transforms[0]["turns"]) == 3  # the hidden states, and the values of each layer


@pytest.mark.parametrize(
    ("recipe", "dataset", "error", "why"),
    [
        ([SpinQuantModifier(learnable=True)], IDS, RecipeError, "no modifier behind it quantizes weights"),
        ([SpinQuantModifier(learnable=True), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])], None, DatasetError, "no dataset"),
        (
            [SpinQuantModifier(learnable=True), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])],
            IDS[:1],
            CalibrationError,
            "at least 2",
        ),
    ],
)
def test_what_there_is_nothing_to_learn_from_is_refused(recipe: Any, dataset: Any, error: type[CompressorError], why: str) -> None:
    with pytest.raises(error, match=why):
        oneshot(llama(), recipe=recipe, dataset=dataset)


@pytest.mark.parametrize("name", ["steps", "batch_size", "lr", "held_out_frac"])
def test_settings_of_a_training_without_one_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}=.* is for a training; add learnable"):
        SpinQuantModifier(**{name: 0.5 if name in ("lr", "held_out_frac") else 3})


def test_a_rotation_that_did_not_help_is_not_taken() -> None:
    model = llama()
    settings: dict[str, Any] = {**TRAINED, "lr": 1.0, "steps": 4}
    recipe = [SpinQuantModifier(rotations=["R1"], **settings), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    report = oneshot(roughened(model), recipe=recipe, dataset=IDS).report
    note = next(note for note in report.notes if "rotations learned" in note)
    kept = "signs" in report.transforms[0]["turns"][0]["matrix"]  # a Hadamard matrix still
    assert kept == ("after step 0" in note)


def test_matrices_of_any_kind_may_begin() -> None:
    learned = LearnedRotation.of(Rotation((torch.eye(4, dtype=torch.float64),)), CPU, keeps_mean=False)
    assert torch.equal(learned.turn(torch.ones(2, 8)), torch.ones(2, 8))


@pytest.mark.parametrize("is_cut", [False, True])
def test_modules_that_no_gradient_comes_to_are_named(is_cut: bool) -> None:
    model = llama()
    if is_cut:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output.detach())
    recipe = [SpinQuantModifier(rotations=["R1"], **TRAINED | {"steps": 2}), QuantizationModifier(config_groups=INT2, ignore=["lm_head"])]
    notes = [note for note in oneshot(model, recipe=recipe, dataset=IDS).report.notes if "no gradient came" in note]
    assert len(notes) == is_cut
    if is_cut:
        names = [f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")]  # and the norm that they read
        assert f"to 4 of 21 that are trained ({', '.join(names)}, ...)" in notes[0]


def test_a_forward_without_gradients_teaches_no_rotation_and_takes_a_fixed_one() -> None:
    def run(**settings: Any) -> Any:
        model = llama()
        model.forward = torch.no_grad()(model.forward)
        recipe = [SpinQuantModifier(rotations=["R1"], **settings), QuantizationModifier(config_groups=INT2, ignore=["lm_head"])]
        return oneshot(model, recipe=recipe, dataset=IDS)

    with pytest.raises(CalibrationError, match=r"its forward keeps no gradients .*train nothing: .*SpinQuantModifier without learnable"):
        run(**TRAINED)
    assert run().report.transforms
