"""Another kernel on the same tape: what it changes is measured, what its author got wrong is named, and nothing else moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compressor.errors import UserInputError
from compressor.training import Plan, locate
from harness.errors import HarnessError
from harness.replay.equivalence.training_state import state_of
from harness.replay.kernels import compare as kernels
from harness.replay.kernels import timing as kernel_timing
from harness.replay.kernels.compare import Swap, compare_kernel, compare_kernels
from harness.replay.kernels.exchange import find_ops, swapped
from harness.replay.kernels.sources import plan_on_tape
from harness.replay.kernels.timing import KernelTiming, Ratio
from tests.bench.replay_cases import lstm, mlp, small_llama

aten = torch.ops.aten
CPU = torch.device("cpu")
CASES = {"mlp": mlp(), "llama": small_llama(16, 2, 2, 6), "lstm": lstm()}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_on_tape(case.step(CPU), case.batch_at) for name, case in CASES.items()}


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid + x * sigmoid * (1 - sigmoid))  # in another order than the scalar code of torch


def compare(plans, name, match, variant, **settings):
    return compare_kernel(plans[name], CASES[name].batch_at(9), match, variant, **{"rounds": 0, **settings})


@pytest.mark.parametrize("name", CASES)
def test_every_op_exchanged_for_itself_changes_no_bit(plans, name):
    for func in {op.func for op in plans[name].captured.ops if op.run is not None}:
        if "mkldnn" in str(func):
            continue  # its workspace exists only where gradients are enabled
        report = compare(plans, name, func, func._op, steps=2)
        assert report.bitwise_equal and report.control_equal, report.text()
        assert all(site.repeatable and site.control_equal for site in report.sites)
        assert report.exceeded(max_ulps=0, max_error=0) == []


@pytest.mark.parametrize(("match", "variant", "num_sites"), [("aten.silu", silu, 2), ("aten.silu_backward", silu_backward, 2)])
def test_another_formula_shows_its_error_where_it_is_made_and_where_it_ends(plans, match, variant, num_sites):
    report = compare(plans, "llama", match, variant, steps=4)
    assert len(report.sites) == num_sites and report.control_equal and not report.bitwise_equal
    ulps = [error.distance.max_ulp for site in report.sites for error in site.errors]
    assert 0 < max(ulps) < 16
    assert [grown.num_steps for grown in report.grown] == [1, 4]
    gradients = next(error for error in report.grown[0].errors if error.role == "gradients")
    assert gradients.num_differing > 0 and 0 < gradients.relative_error < 1e-5
    assert report.exceeded(max_ulps=max(ulps)) == [] and len(report.exceeded(max_ulps=0)) >= 1


@pytest.mark.parametrize("calls", [2, 3])
def test_a_variant_whose_later_calls_differ_is_beyond_every_tolerance(plans, calls):
    """Each site is asked twice, so that the third call is the first of the steps behind."""
    seen = []

    def flaky(x):
        seen.append(x)
        return silu(x) if len(seen) >= calls else torch.nn.functional.silu(x)

    only = next(op for op in plans["llama"].captured.ops if op.func is torch.ops.aten.silu.default)
    report = compare(plans, "llama", lambda op: op.index == only.index, flaky, steps=2)
    said = "gave other bits the second time" if calls == 2 else "later calls of the variant give something else"
    assert any(said in line for line in report.exceeded(max_error=1e3)) and report.exceeded() == []


@pytest.mark.parametrize("period", [5, 7, 9])
def test_a_variant_that_differs_now_and_then_is_beyond_every_tolerance(plans, period):
    """Two ops, each asked twice, are four calls; the steps behind are six, and six again."""
    seen = []

    def flaky(x):
        seen.append(x)
        return torch.nn.functional.silu(x) + (1e-3 if len(seen) % period == 0 else 0)

    report = compare(plans, "llama", "aten.silu", flaky, steps=3)
    assert not report.repeatable and not report.to_dict()["variant_repeatable"]
    assert "3 steps with the variant gave other bits the second time" in report.exceeded(max_error=1e3)
    assert "the same steps with the variant again: NOT equal" in report.text()
    assert compare(plans, "llama", "aten.silu", silu, steps=3).repeatable


def test_nan_beside_numbers_is_beyond_every_tolerance(plans):
    report = compare(plans, "llama", "aten.silu", lambda x: x * math.nan)
    assert len(report.exceeded(max_ulps=math.inf)) == len(report.exceeded(max_error=math.inf)) == 2


def test_the_local_error_is_that_of_the_real_inputs_and_grows_as_calculus_says(plans):
    # All gradients are linear in that of the loss.
    report = compare(plans, "mlp", "aten.nll_loss_backward", lambda *args: aten.nll_loss_backward(*args) * 1.5)
    site = report.sites[0]
    assert site.errors[0].distance.relative_error == pytest.approx(0.5, rel=1e-6)
    gradients = next(error for error in report.grown[0].errors if error.role == "gradients")
    assert gradients.relative_error == pytest.approx(0.5, rel=1e-4) and gradients.num_differing >= 4
    loss = next(error for error in report.grown[0].errors if error.role == "loss")
    assert loss.num_differing == 0 and report.grown[0].original_loss == report.grown[0].variant_loss


def test_a_variant_that_is_nearer_to_the_truth_is_said_to_be(plans):
    def exact(x):
        wide = x.double()
        return (wide / (1 + torch.exp(-wide))).to(x.dtype)

    def coarse(x):
        return torch.nn.functional.silu(x).bfloat16().to(x.dtype)

    for variant, verdict in ((exact, "nearer"), (coarse, "farther"), (aten.silu, "as near")):
        report = compare(plans, "llama", "aten.silu", variant)
        assert report.to_dict()["truth"] == {verdict: 2}
    truth = compare(plans, "llama", "aten.silu", exact).sites[0].errors[0].truth
    assert truth.variant_ulp <= 0.5 + 1e-9 < truth.original_ulp


@pytest.mark.parametrize(
    ("case", "match", "reason"),
    [
        ("mlp", "aten.bernoulli_", "draws random numbers"),
        ("llama", "aten.arange", "no floating numbers"),
    ],
)
def test_where_there_is_no_truth_the_reason_is_told(plans, case, match, reason):
    func = find_ops(plans[case].captured.ops, match)[0].func
    site = compare(plans, case, match, func._op).sites[0]
    assert reason in site.no_truth and all(error.truth is None for error in site.errors)


def test_an_op_that_names_its_dtype_is_held_against_float64_as_well(plans):
    func = find_ops(plans["llama"].captured.ops, "aten._to_copy")[0].func

    def rounded(x, **settings):
        return func._op(func._op(x, dtype=torch.bfloat16), **settings) + 1

    truths = [error.truth for site in compare(plans, "llama", func, rounded).sites for error in site.errors]
    assert truths and all(truth.original_max == 0 and truth.variant_max == 1 and truth.nearness == "farther" for truth in truths)


def test_in_place_ops_and_optimizers_are_exchanged_by_functions_that_write_in_place(plans):
    def add(self, other, alpha=1):
        self.copy_(self + alpha * other + 1e-3)

    report = compare(plans, "mlp", lambda op: op.phase == "backward" and str(op.func) == "aten.add_.Tensor", add)
    assert len(report.sites) == 6 and {error.name for site in report.sites for error in site.errors} == {"self"}
    assert all(error.distance.max_abs == pytest.approx(1e-3, rel=1e-2) for site in report.sites for error in site.errors[:1])

    def frozen(*args, **kwargs):
        return None

    report = compare(plans, "llama", "aten._fused_adamw_", frozen)
    names = {error.name for error in report.sites[0].errors}
    assert {"self[0]", "exp_avgs[3]", "exp_avg_sqs[20]"} <= names
    roles = {error.role: error.num_differing for error in report.grown[0].errors}
    assert roles["parameters"] == 21 and roles["gradients"] == 0


def test_batch_norm_is_held_to_its_running_statistics_too(plans):
    def forgets(x, weight, bias, mean, var, training, momentum, eps):
        return aten.native_batch_norm(x, weight, bias, mean.clone(), var.clone(), training, momentum, eps)

    report = compare(plans, "mlp", "aten.native_batch_norm", forgets)
    differing = {error.name for error in report.sites[0].errors if not error.bitwise_equal}
    assert differing == {"running_mean", "running_var"}
    assert {error.role for error in report.grown[0].errors if error.num_differing} == {"buffers"}


def _wrong_shape(x):
    return silu(x)[..., :-1]


def _wrong_dtype(x):
    return silu(x).double()


def _wrong_device(x):
    return silu(x).to("meta")


def _changes_input(x):
    return x.mul_(torch.sigmoid(x))


def _changes_a_clone_back(x):
    x.add_(1)
    result = silu(x - 1)
    x.sub_(1)
    return result


def _is_view(x):
    return x.view_as(x)


def _sparse(x):
    return silu(x).to_sparse()


def _raises(x):
    raise KeyError("no kernel for this shape")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (_wrong_shape, r"returned shape \[2, 6, 31\], and the op returns \[2, 6, 32\]"),
        (_wrong_dtype, r"returned dtype torch.float64, and the op returns torch.float32"),
        (_wrong_device, r"returned device meta"),
        (_changes_input, r"changed its tensor argument 0 in place"),
        (_is_view, r"returned a view of one of its arguments"),
        (_sparse, r"layout torch.sparse_coo"),
        (_raises, r"raised KeyError: 'no kernel for this shape'"),
        (lambda x, y: x, r"raised TypeError: .*missing 1 required positional argument"),
        (lambda x: None, r"returned nothing, and the op returns one tensor"),
        (lambda x: (silu(x),), r"returned a tuple of 1 tensor, and the op returns one tensor"),
        (lambda x: 3.0, r"returned float"),
    ],
)
def test_what_an_author_got_wrong_is_named_with_op_and_module(plans, variant, message):
    before = state_of(plans["llama"].step).digests()
    with pytest.raises(UserInputError, match=rf"op \d+ \(forward, model.layers.0.mlp.act_fn\): aten.silu.default: variant .*{message}"):
        compare(plans, "llama", "aten.silu", variant)
    assert state_of(plans["llama"].step).digests() == before


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (lambda x, *rest: x, r"returned 1 tensor, and the op returns 3; return them all"),
        (lambda x, *rest: (x.clone(), rest[0].clone(), rest[1].double()), r"result 2 returned dtype"),
    ],
)
def test_several_results_are_checked_one_by_one(plans, variant, message):
    with pytest.raises(UserInputError, match=message):
        compare(plans, "mlp", "aten.native_batch_norm", variant)


def test_a_new_tensor_from_an_in_place_op_is_refused(plans):
    with pytest.raises(UserInputError, match=r"returned a new tensor, but the op gives its result in its argument"):
        compare(plans, "mlp", "aten.add_.Tensor", lambda self, other, alpha=1: self + alpha * other)


def test_no_match_says_what_there_is(plans):
    with pytest.raises(UserInputError, match=r"did you mean aten.silu\? the tape has .*aten.silu \(2\)"):
        compare(plans, "llama", "aten.sliu", silu)
    with pytest.raises(UserInputError, match=r"match predicate .*none of \d+ ops of the tape is meant; the tape has"):
        compare(plans, "llama", lambda op: op.phase == "sideward", silu)
    with pytest.raises(UserInputError, match=r"only make aliases or allocate"):
        compare(plans, "llama", "aten.view", silu)


def test_batches_that_are_no_function_are_refused(plans):
    batches = [CASES["mlp"].batch_at(number) for number in range(4)]
    with pytest.raises(UserInputError, match=r"batch_at: .* was given, where a function belongs"):
        compare(plans, "mlp", "aten.relu", torch.relu, batch_at=batches)
    with pytest.raises(UserInputError, match=r"batch_at: .* was given, where a function belongs"):
        plan_on_tape(CASES["mlp"].step(CPU), batches)


def test_names_overloads_packets_and_predicates_find_the_same_ops(plans):
    ops = plans["llama"].captured.ops
    found = [
        [op.index for op in find_ops(ops, match)]
        for match in ("aten.silu", "aten::silu", "aten.silu.default", aten.silu, aten.silu.default, lambda op: "silu.default" in op.line)
    ]
    assert len(found[0]) == 2 and all(one == found[0] for one in found)
    assert {str(op.func) for op in find_ops(ops, "aten.mul")} == {"aten.mul.Tensor", "aten.mul.Scalar"}


def test_several_swaps_at_once_and_none_twice(plans):
    batch = CASES["llama"].batch_at(9)
    report = compare_kernels(
        plans["llama"], batch, [Swap("aten.silu", silu, "a"), Swap("aten.silu_backward", silu_backward, "b")], rounds=0
    )
    assert report.swaps == ("aten.silu=a", "aten.silu_backward=b") and [site.variant for site in report.sites] == ["a", "a", "b", "b"]
    with pytest.raises(UserInputError, match=r"is meant by both aten.silu=a and predicate .*=b"):
        compare_kernels(plans["llama"], batch, [Swap("aten.silu", silu, "a"), Swap(lambda op: True, silu, "b")], rounds=0)
    with pytest.raises(UserInputError, match="no swap was given"):
        compare_kernels(plans["llama"], batch, [])


@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_before_bit_for_bit_also_after_an_error(plans, name):
    plan, case = plans[name], CASES[name]
    before, runs = state_of(plan.step, plan.captured.loss, plan.buffers.batch).digests(), [op.run for op in plan.captured.ops]
    expected = plan(case.batch_at(20))
    after_one = state_of(plan.step).digests()
    target = next(op.func for op in plan.captured.ops if str(op.func) in ("aten.addmm.default", "aten.mm.default"))
    numpy_before = np.random.get_state()[1].copy()

    def random_variant(*args):
        np.random.random()
        torch.rand(3)
        return target._op(*args) + 1

    compare(plans, name, target, random_variant, steps=3, rounds=2)
    with pytest.raises(UserInputError):
        compare(plans, name, target, lambda *args: args)
    assert state_of(plan.step).digests() == after_one and before != after_one
    assert [op.run for op in plan.captured.ops] == runs
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert not math.isnan(expected.item())
    plan.guard()


def test_an_error_between_the_checked_call_and_the_step_leaves_the_tape_whole(plans):
    plan, calls = plans["llama"], []

    def fails_late(x):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("late")
        return silu(x)

    runs, before = [op.run for op in plan.captured.ops], state_of(plan.step).digests()
    with pytest.raises(RuntimeError, match="late"):
        compare(plans, "llama", "aten.silu", fails_late)
    assert [op.run for op in plan.captured.ops] == runs and state_of(plan.step).digests() == before
    assert locate(plan, CASES["llama"].batch_at(3)) is None


def test_a_variant_that_replaces_a_parameter_is_found_out():
    plan = plan_on_tape(CASES["llama"].step(CPU), CASES["llama"].batch_at)
    layer = plan.step.model.model.layers[0].mlp.up_proj

    def meddles(x):
        layer.extra = 7
        return silu(x)

    with pytest.raises(HarnessError, match=r"attribute:model.layers.0.mlp.up_proj.extra cannot be brought back"):
        compare_kernel(plan, CASES["llama"].batch_at(9), "aten.silu", meddles, rounds=0)


def test_a_variant_that_gives_other_bits_each_time_is_told(plans):
    report = compare(plans, "llama", "aten.silu", lambda x: silu(x) + 1e-3 * torch.rand_like(x))
    assert report.sites[0].repeatable  # the generator stands where it stood
    noise = iter(range(100))
    report = compare(plans, "llama", "aten.silu", lambda x: silu(x) + 1e-3 * next(noise))
    assert not report.sites[0].repeatable and "other bits the second time" in report.text()


def test_timing_stands_beside_its_control_and_only_a_clear_difference_counts(plans, monkeypatch):
    def interleave(programs, rounds, *, before=None, **settings):
        for name, run in programs.items():  # each is run as it would be, and what it took is given
            if before is not None:
                before(name)
            run()
        took = {"tape": 1e-6, "original": 2e-6, "control": 2e-6, "variant": 9e-6}
        return {name: [took[name] * (1 + number / 100) for number in range(rounds)] for name in programs}

    for module in (kernel_timing, kernels):
        monkeypatch.setattr(module, "interleave", interleave)
    report = compare(plans, "llama", "aten.silu", silu, rounds=7)
    timing = report.sites[0].timing
    assert timing.speed == report.timing.speed == "slower" and timing.variant.median == pytest.approx(4.5)
    assert set(timing.seconds) == {"tape", "original", "control", "variant"} and timing.control.num_rounds == 7
    text = report.text()
    assert text.index("A/A control ") < text.index("slower") and "time of the whole step, 7 interleaved rounds" in text
    assert "2.06 us -> 9.27 us: slower" in text
    assert compare(plans, "llama", "aten.silu", silu, rounds=0).timing is None


def test_an_original_that_does_not_repeat_itself_spoils_the_control(plans):
    tape = plans["llama"].captured
    op = find_ops(tape.ops, "aten.silu")[0]
    with swapped(tape, {op.index: lambda: op.outs[0].copy_(silu(op.args[0]) * 1.001)}):
        report = compare(plans, "llama", "aten.silu", aten.silu)
    assert [site.control_equal for site in report.sites] == [False, True] and not report.control_equal
    assert "does not repeat its own bits here" in report.text() and "NOT equal" in report.text()
    assert not report.to_dict()["control_bitwise_equal"]


@pytest.mark.parametrize(
    ("variant", "control", "speed"),
    [
        ((1.3, 1.2, 1.4), (1.0, 0.9, 1.1), "slower"),
        ((0.7, 0.6, 0.8), (1.0, 0.9, 1.1), "faster"),
        ((1.3, 1.05, 1.4), (1.0, 0.9, 1.1), "no difference shown"),  # within the noise of the control
        ((1.03, 1.01, 1.05), (1.0, 0.999, 1.02), "no difference shown"),
        ((0.97, 0.96, 0.98), (0.9, 0.85, 0.95), "no difference shown"),  # the control is off, too, so nothing above it counts as faster
        ((1.03, 1.02, 1.04), (0.9, 0.85, 0.95), "slower"),
    ],
)
def test_only_an_interval_that_leaves_the_control_and_one_is_a_verdict(variant, control, speed):
    ratio = {name: Ratio(*values, 0.95, 9) for name, values in (("variant", variant), ("control", control))}
    assert KernelTiming({}, ratio["control"], ratio["variant"], ratio["control"]).speed == speed
    few = Ratio(*variant, 0.75, 3)
    assert KernelTiming({}, ratio["control"], few, ratio["control"]).speed == "too few rounds to tell"


def test_the_sign_of_a_zero_is_told_from_an_error(plans):
    report = compare(plans, "mlp", "aten.relu", lambda x: x * (x > 0))
    assert not report.sites[0].bitwise_equal and report.exceeded(max_ulps=0, max_error=0) == []
    assert "equal numbers, but other bits (the sign of a zero" in report.text()


def test_numbers_out_of_range_are_refused(plans):
    for settings in ({"steps": 0}, {"rounds": -1}):
        with pytest.raises(UserInputError, match=r"compare_kernel: (steps|rounds)=-?\d is below"):
            compare(plans, "llama", "aten.silu", silu, **settings)
