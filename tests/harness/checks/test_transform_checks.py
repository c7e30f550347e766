"""Checks 31 to 36 pass correct reference transforms and catch the bugs that are known from the field."""

from __future__ import annotations

import os

import pytest
import torch

from compressor.algorithms.rotations import make_rotation
from harness import check
from harness.checks.inputs.norm_linear_models import build, in_dtype, logits, token_ids, truly
from harness.checks.protocols import InPlaceTransform
from harness.mutants.family import find_family
from harness.mutants.hunt import fate_of
from harness.reporting.verdict import Outcome
from tests.mutation.transforms import (
    CentredEmbeddings,
    DoesNothing,
    ForgetsTheOne,
    InBfloat16,
    InFloat32,
    KeepsTheTie,
    NormNotReset,
    NoTargets,
    NotNormalized,
    ScaleOnOneSide,
    SkipsOne,
    TakesTheWorst,
    UntiesInMemoryOnly,
    WrongNormOfGemma,
)
from tests.mutation.wrong_transforms import AlwaysSmooth, FoldNorms, Rotate, Smooth


@pytest.mark.parametrize("transform", [FoldNorms, Rotate, AlwaysSmooth])
def test_correct_transforms_pass(transform):
    report = check(transform())
    assert not [record for record in report.records if record.outcome is Outcome.FAIL], report.to_text()
    passed = {record.name for record in report.records if record.outcome is Outcome.PASS}
    assert {"transform.float_output", "transform.every_architecture", "transform.tied_weights", "transform.not_vacuous"} <= passed


def test_a_correct_search_passes():
    report = check(Smooth(), checks=[31, 36])
    assert [record.outcome for record in report.records] == [Outcome.PASS, Outcome.PASS], report.to_text()


PLANTS = [
    (CentredEmbeddings, 31), (NormNotReset, 31), (ForgetsTheOne, 32), (WrongNormOfGemma, 32), (InBfloat16, 31), (InFloat32, 31),
    (KeepsTheTie, 34), (UntiesInMemoryOnly, 34), (NotNormalized, 33), (NotNormalized, 31), (DoesNothing, 35), (SkipsOne, 35),
    (NoTargets, 35),
    (ScaleOnOneSide, 31), (TakesTheWorst, 36),
]  # fmt: skip


@pytest.mark.parametrize(("transform", "number"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_caught(transform, number):
    record = check(transform(), checks=[number]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary
    assert "could not be completed" not in record.summary, record.summary


@pytest.mark.parametrize("wrong", ["right", "one head", "one row", "all", "noise"])
def test_what_is_wrong_in_bfloat16_alone_is_caught(wrong):
    def scale_values(model, batches):
        for layer in model.model.layers:
            value, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
            value.mul_(2)
            output.div_(2)
        if output.dtype == torch.bfloat16:  # of the last layer
            if wrong == "noise":
                output.mul_(1 + 0.5 * torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output))
            heads = {"one head": output[:, : layer.self_attn.head_dim], "one row": output[-1], "all": output}
            heads.get(wrong, output[:0]).mul_(2)

    subject = InPlaceTransform(scale_values, ["*.v_proj.weight"], architectures=["llama"])
    record = check(subject, checks=[31]).records[0]
    assert record.outcome is (Outcome.PASS if wrong == "right" else Outcome.FAIL), record.summary


@pytest.mark.parametrize("when", [lambda ids: len(ids) == 1, lambda ids: len(ids) > 2, lambda ids: len({one.shape for one in ids}) > 1])
def test_what_is_wrong_for_some_batches_is_caught(when):
    def scale_values(model, batches):
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(2)
            layer.self_attn.o_proj.weight.div_(2 + when(batches))

    record = check(InPlaceTransform(scale_values, ["*.v_proj.weight"], architectures=["llama"]), checks=[31]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary


@pytest.mark.parametrize("token", [0, 5, -1])
def test_a_token_that_is_spoilt_is_caught(token):
    def scale_values(model, batches):
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(2)
            layer.self_attn.o_proj.weight.div_(2)
        model.get_input_embeddings().weight[token].mul_(1.5)

    record = check(InPlaceTransform(scale_values, ["*.v_proj.weight"], architectures=["llama"]), checks=[31]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary


def test_the_ladder_really_computes_in_float64():
    model = in_dtype(build("llama"), torch.float64)
    ids = token_ids(model)[0]
    with truly(torch.float64):
        fine = logits(model, ids)
    coarse = logits(model, ids)
    assert 1e-9 < float((coarse - fine).norm() / fine.norm()) < 1e-5


@pytest.mark.parametrize(("architecture", "says"), [
    ("mixtral", None), ("gpt_oss", None), ("jamba", None), ("t5", None), ("ibert", None),
    ("whisper", "whisper does not run on token ids alone in float32: "), ("xglm", "alone in float64: "), ("fnet", "alone in bfloat16: "),
])  # fmt: skip
def test_a_model_that_does_not_run_as_it_is_is_no_fault_of_a_transform(architecture, says):
    nothing = InPlaceTransform(lambda model, batches: None, ["*"], architectures=[architecture])
    record = check(nothing, checks=[31]).records[0]
    assert record.outcome is (Outcome.SKIP if says else Outcome.PASS) and (says or f"{architecture} ") in record.summary, record.summary


def test_who_ties_no_weights_is_looked_at_all_the_same():
    nothing = InPlaceTransform(lambda model, batches: None, ["*"], architectures=["dbrx"])
    tied, saved = check(nothing, checks=[34, "transform.checkpoint"]).records
    assert (tied.outcome, saved.outcome) == (Outcome.SKIP, Outcome.PASS) and "dbrx ties no weights: " in tied.summary
    assert saved.summary.startswith("dbrx, dbrx ties no weights: "), saved.summary


@pytest.mark.parametrize("number", [32, 35])
def test_an_architecture_that_cannot_be_looked_at_hides_no_other(number):
    def double(model, batches):
        for layer in model.model.layers if (model.config.model_type == "gemma2") is (number == 32) else ():
            layer.mlp.up_proj.weight.mul_(2)

    wrong = InPlaceTransform(double, ["*.up_proj.weight"], architectures=["llama", "whisper", "gemma2"])
    record = check(wrong, checks=[number]).records[0]
    assert record.outcome is Outcome.FAIL and "gemma2: " in record.summary, record.summary


def test_nothing_is_said_where_there_is_nothing_to_check():
    outcomes = {record.name: record.outcome for record in check(CentredEmbeddings(), checks=[33, 36]).records}
    assert set(outcomes.values()) == {Outcome.SKIP}


def test_a_plain_function_is_a_subject():
    def double_and_halve(model, batches):
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2)
            layer.mlp.down_proj.weight.div_(2)

    right = InPlaceTransform(double_and_halve, ["*.up_proj.weight", "*.down_proj.weight"])
    assert check(right).verdict.value == "pass"
    assert right.name == "double_and_halve"
    wrong = InPlaceTransform(double_and_halve, ["*_proj.weight"])
    assert check(wrong, checks=[35]).records[0].outcome is Outcome.FAIL
    assert check(InPlaceTransform(double_and_halve, ["*.up_proj.weight"], matrices={"R": torch.ones(4, 4)}), checks=[33]).exit_code == 1


@pytest.mark.parametrize(("seeds", "said"), [
    ((1, 2), "14 weights"), ((1, None), "spread over 3.1% of the rows"), ((None, 2), "spread over 3.1% of the columns"),
    ((1, 1), "rows and columns are turned alike"),
])  # fmt: skip
def test_weights_are_turned_on_both_sides_by_rotations_of_their_own(seeds, said):
    def turned(x, seed):
        return x if seed is None else x @ make_rotation("random-matrix", x.shape[-1], seed=seed).matrix().float()

    def turn(model, batches):
        for name, part in model.named_modules():
            if "proj" in name:
                part.weight.copy_(turned(turned(part.weight, seeds[0]).T, seeds[1]).T)

    subject = InPlaceTransform(turn, ["*_proj.weight"], tags=frozenset({"incoherent"}))
    (record,) = check(subject, checks=["transform.incoherent"]).records
    assert record.outcome is (Outcome.PASS if seeds == (1, 2) else Outcome.FAIL) and said in record.summary


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("still", [slice(12, 20), slice(24, 32), slice(31, 32)], ids=str)
def test_a_part_of_a_weight_that_is_not_turned_is_told_wherever_it_lies(still, side):
    def rotation(size, seed, whole):
        matrix = make_rotation("random-matrix", size, seed=seed).matrix().float()
        rest = torch.ones(size, dtype=torch.bool)
        rest[still] = whole
        part = torch.eye(size)
        part[rest.outer(rest)] = make_rotation("random-matrix", int(rest.sum()), seed=seed).matrix().float().flatten()
        return matrix if whole else part

    def turn(model, batches):
        for name, part in model.named_modules():
            if name.endswith("q_proj"):
                height, width = part.weight.shape
                rows, columns = rotation(height, 1, side == "columns"), rotation(width, 2, side == "rows")
                part.weight.copy_(rows @ part.weight @ columns.T)

    subject = InPlaceTransform(turn, ["*q_proj.weight"], tags=frozenset({"incoherent"}))
    (record,) = check(subject, checks=["transform.incoherent"]).records
    assert record.outcome is Outcome.FAIL and f"of the {side}" in record.summary, record.summary


@pytest.mark.parametrize("bug", find_family("transforms").mutants)
def test_a_planted_bug_of_the_family_is_killed_by_a_check(bug):
    family = find_family("transforms")
    assert fate_of(family, family.mutants[bug]).killed_by


@pytest.mark.parametrize("how", ["seed", "calls", "fixed"])
def test_what_hangs_on_the_callers_seed_or_on_earlier_calls_is_told(how):
    calls = []

    def scale(model, batches):
        calls.append(len(batches))
        factor = {"seed": 2.0 + torch.initial_seed() % 2, "calls": 2.0 ** len(calls), "fixed": 2.0}[how]
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.div_(factor)

    subject = InPlaceTransform(scale, ["*.up_proj.weight", "*.down_proj.weight"], architectures=("llama",))
    (record,) = check(subject, checks=["transform.repeats"]).records
    assert record.outcome is (Outcome.PASS if how == "fixed" else Outcome.FAIL), record.summary
    assert how == "fixed" or "others after a second call" in record.summary


class Online(InPlaceTransform):
    """Something of it runs in forwards."""

    def reload(self, model):
        raise NotImplementedError


def looking(when, architecture="llama", target="down_proj"):
    """Doubles the weight of a layer and halves its inputs, but in some forwards."""

    def hook(module, args):
        return None if when(module, args[0]) else (args[0] / 2,)

    def apply(model, batches):
        for name, layer in model.named_modules():
            if "layers.0." in name and name.endswith(target):
                layer.weight.mul_(2)
                layer.register_forward_pre_hook(hook)

    return Online(apply, [f"*.{target}.weight"], architectures=[architecture], tags=frozenset({"invariant_fp", "online"}))


SHAPES = {"a token": lambda m, x: x.shape[1] == 1, "a row": lambda m, x: len(x) == 1, "long rows": lambda m, x: x.shape[1] > 32}


@pytest.mark.parametrize("when", SHAPES.values(), ids=SHAPES)
def test_a_hook_that_looks_at_shapes_is_caught(when):
    record = check(looking(when), checks=[31]).records[0]
    assert record.outcome is Outcome.FAIL and "the float output has changed" in record.summary
    assert check(looking(lambda m, x: False), checks=[31]).records[0].outcome is Outcome.PASS


def later(number):
    """True from one of the forwards of a model on."""
    seen = []
    return lambda module, x: bool(seen.append(0)) or len(seen) > number


MODES = {
    "training": (lambda m, x: m.training, "in training mode without gradients: the float output has changed"),
    "gradients": (lambda m, x: torch.is_grad_enabled(), "in evaluation mode with gradients: the float output has changed"),
    "the tenth forward": (later(9), "the float output has changed"),
    "a number": (lambda m, x: torch.rand(1) > 2, "a forward changes torch: rng was seeded or drawn from"),
    "an activation": (lambda m, x: setattr(m, "last", x), "a forward changes model.layers.0.mlp.down_proj.last"),
    "a buffer": (lambda m, x: m.register_buffer("largest", x.detach().amax()), "a forward changes model.layers.0.mlp.down_proj.largest"),
}


def test_a_transform_that_leaves_a_hook_out_in_training_mode_is_told():
    def apply(model, batches):
        layer = model.model.layers[0].mlp.down_proj
        layer.weight.mul_(2)
        if not model.training:
            layer.register_forward_pre_hook(lambda module, args: (args[0] / 2,))

    online = Online(apply, ["*.0.mlp.down_proj.weight"], architectures=["llama"], tags=frozenset({"invariant_fp", "online"}))
    (record,) = check(online, checks=["transform.repeats"]).records
    assert record.outcome is Outcome.FAIL and "in another mode the model computes something else" in record.summary, record.summary


@pytest.mark.parametrize("shapes", [False, True])
def test_what_forwards_keep_beside_the_model_is_told(shapes):
    """A table by shapes is made once; a list grows with every forward."""
    kept, tables = [], {}
    when = (lambda m, x: tables.setdefault(x.shape, x) is None) if shapes else (lambda m, x: kept.append(x))
    record = check(looking(when), checks=["transform.every_forward"]).records[0]
    assert record.outcome is (Outcome.PASS if shapes else Outcome.FAIL), record.summary
    assert shapes or "3 more forwards of one batch leave" in record.summary


@pytest.mark.parametrize("what", MODES)
def test_a_forward_that_depends_on_its_mode_or_leaves_something_is_told(what):
    when, says = MODES[what]
    record = check(looking(when), checks=["transform.every_forward"]).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary


def making(module, x):
    """Make something in the first forward."""
    if not hasattr(module, "made"):
        module.made = torch.ones(3)
    return False


@pytest.mark.parametrize(("architecture", "target"), [("llama", "down_proj"), ("opt", "out_proj")])
def test_what_the_first_forward_makes_may_stay_and_a_models_own_dropout_is_its_own(architecture, target):
    record = check(looking(making, architecture, target), checks=["transform.every_forward"]).records[0]
    assert record.outcome is Outcome.PASS, record.summary


@pytest.mark.parametrize("how", ["anew", "by shape", "by shape at itself"])
def test_what_is_kept_of_an_earlier_model_is_told(how):
    kept = {}

    def scale(model, batches):
        for number, layer in enumerate(model.model.layers):
            down = layer.mlp.down_proj.weight
            factor = down.abs().amax(0).rsqrt()
            if how != "anew":
                factor = (kept if how == "by shape" else vars(scale)).setdefault(f"{number} {down.shape}", factor)
            layer.mlp.up_proj.weight.div_(factor[:, None])
            down.mul_(factor)

    subject = InPlaceTransform(scale, ["*.up_proj.weight", "*.down_proj.weight"], architectures=("llama",))
    record = next(one for one in check(subject).records if one.name == "transform.another_model")
    assert record.outcome is (Outcome.PASS if how == "anew" else Outcome.FAIL), record.summary
    assert how == "anew" or "others behind another model" in record.summary


def test_a_copy_of_the_process_that_gives_no_answer_is_told():
    def die(model, batches):
        os._exit(3)

    def ask(model, batches):
        raise RuntimeError("no")

    for function, said in ((die, "ended without an answer"), (ask, "RuntimeError: no")):
        (record,) = check(InPlaceTransform(function, ["*"], architectures=("llama",)), checks=["transform.another_model"]).records
        assert record.outcome is Outcome.SKIP and said in record.summary, record.summary


@pytest.mark.parametrize("mode", ["kept", "lost"])
def test_a_model_in_training_mode_comes_back_in_it(mode):
    def scale(model, batches):
        was = model.training
        model.eval()(batches[0])
        model.train(was and mode == "kept")
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2)
            layer.mlp.down_proj.weight.div_(2)

    subject = InPlaceTransform(scale, ["*.up_proj.weight", "*.down_proj.weight"], architectures=("llama",))
    (record,) = check(subject, checks=["transform.repeats"]).records
    assert record.outcome is (Outcome.PASS if mode == "kept" else Outcome.FAIL), record.summary
    assert mode == "kept" or "training changed: True -> False" in record.summary


@pytest.mark.parametrize("rounds", [lambda x: x, lambda x: x.float().double(), lambda x: x.to(torch.float32).double()])
def test_a_matrix_that_is_float32_only_is_not_exact_in_float64(rounds):
    def turn(model, batches):
        matrix = rounds(make_rotation("random-matrix", model.model.layers[0].self_attn.head_dim).matrix().double())
        for layer in model.model.layers:
            for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                weight = linear.weight.data.T if linear is layer.self_attn.v_proj else linear.weight.data
                for head in weight.split(len(matrix), 1):
                    head.copy_(head.double() @ matrix)

    subject = InPlaceTransform(turn, ["*.v_proj.weight", "*.o_proj.weight"], architectures=("llama",))
    (record,) = check(subject, checks=[31]).records
    exact = rounds(torch.ones(1)).dtype is torch.float32
    assert record.outcome is (Outcome.PASS if exact else Outcome.FAIL), record.summary
