"""`harness replay kernels`: functions by name, each swap alone and then all at once, tolerances as a gate, mistakes in one line."""

from __future__ import annotations

import json

import pytest

from harness.cli import main
from harness.replay.kernels.sources import read_swap

SOURCE = """
import torch

LIMIT = 3

def silu(x):
    print("noise that must not mix with the verdict")
    return x / (1 + torch.exp(-x))

def half(x):
    return torch.nn.functional.silu(x.half()).to(x.dtype)

def flat(x):
    return x.flatten()

class Kernels:
    @staticmethod
    def silu_backward(grad, x):
        return torch.ops.aten.silu_backward(grad, x)
"""
SMALL = ["--steps", "2", "--batch-size", "1", "--seq-length", "4", "--device", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_a_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kernels(*argv: str) -> int:
    rounds = () if "--rounds" in argv else ("--rounds", "0")
    return main(["replay", "kernels", "llama", *SMALL, *rounds, *argv])


def test_a_swap_is_reported_and_its_prints_go_elsewhere(capsys):
    assert kernels("--swap", "aten.silu=kernels_of_a_test:silu") == 0
    streams = capsys.readouterr()
    assert "aten.silu=kernels_of_a_test:silu: exchanged at 2 of" in streams.out and "after 2 steps" in streams.out
    assert "A/A control" in streams.out and "noise" not in streams.out and "noise" in streams.err


@pytest.mark.nightly
def test_a_tolerance_makes_it_a_gate(capsys):
    swap = ("--swap", "aten.silu=kernels_of_a_test:half")
    assert kernels(*swap, "--max-ulps", "2") == 1
    out = capsys.readouterr().out
    assert "regression: beyond the tolerance" in out and "ulp and 2 are allowed" in out and "model.layers.0.mlp.act_fn" in out
    assert kernels(*swap, "--max-error", "1e-2") == 0
    assert "pass: every op is within the tolerance" in capsys.readouterr().out


def test_zeros_prove_nothing(capsys):
    # The zeros that a gradient starts from can be made by anybody.
    assert kernels("--swap", "aten._foreach_zero_=torch:_foreach_zero_", "--max-ulps", "0") == 2
    assert "nothing but zeros" in capsys.readouterr().out


def test_several_swaps_are_reported_one_by_one_and_together(capsys):
    swaps = ("--swap", "aten.silu=kernels_of_a_test:silu", "--swap", "aten.silu_backward=kernels_of_a_test:Kernels.silu_backward")
    assert kernels(*swaps, "--json", "--seed", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(report["sites"]) for report in found["reports"]] == [2, 2, 4] and found["verdict"] == "pass"
    first, second, both = found["reports"]
    assert second["bitwise_equal"] and not first["bitwise_equal"] and both["grown"] == first["grown"]
    assert first["sites"][0]["timing"] is None and first["sites"][0]["results"][0]["truth"]["nearness"]


@pytest.mark.nightly
def test_two_candidates_for_one_op_are_reported_side_by_side(capsys):
    assert kernels("--swap", "aten.silu=kernels_of_a_test:silu", "--swap", "aten.silu.default=kernels_of_a_test:half", "--json") == 0
    found = json.loads(capsys.readouterr().out)["reports"]
    assert [report["swaps"] for report in found] == [["aten.silu=kernels_of_a_test:silu"], ["aten.silu.default=kernels_of_a_test:half"]]
    assert found[0]["worst"]["max_ulp"] < found[1]["worst"]["max_ulp"]


@pytest.mark.nightly
def test_rounds_time_the_ops_and_the_step(capsys):
    assert kernels("--swap", "aten.silu=kernels_of_a_test:silu", "--rounds", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)["reports"][0]
    assert report["step_timing"]["control_over_original"]["num_rounds"] == 3
    assert set(report["sites"][0]["timing"]["median_seconds"]) == {"tape", "original", "control", "variant"}


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ("aten.silu", "not of the form OP=MODULE:FUNCTION"),
        ("aten.silu=mine", "not of the form OP=MODULE:FUNCTION"),
        ("aten.silu=no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("aten.silu=broken_kernels_of_a_test:f", "fails while it is imported (RuntimeError: boom); make it importable"),
        ("aten.silu=misspelt_kernels_of_a_test:f", "fails while it is imported (SyntaxError: "),
        ("aten.silu=kernels_of_a_test:sliu", "has no 'sliu'; did you mean 'silu'?"),
        ("aten.silu=kernels_of_a_test:LIMIT", "LIMIT is a int, which cannot be called"),
        ("aten.sliu=kernels_of_a_test:silu", "did you mean aten.silu?"),
        ("aten.silu=kernels_of_a_test:flat", "returned shape"),
    ],
)
def test_mistakes_are_named(swap, message, folder, capsys):
    (folder / "broken_kernels_of_a_test.py").write_text('raise RuntimeError("boom\\nand more")\n')
    (folder / "misspelt_kernels_of_a_test.py").write_text("def f(:\n")
    assert kernels("--swap", swap) == 3
    assert message in capsys.readouterr().err


def test_a_tolerance_below_zero_is_refused(capsys):
    for flag in ("--max-ulps", "--max-error"):
        for value in ("-1", "inf", "1e19"):
            assert kernels("--swap", "aten.silu=kernels_of_a_test:silu", flag, value) == 3
            assert f"{flag} {float(value):g}: a tolerance is a number of 0 or more" in capsys.readouterr().err


def test_a_kernel_that_is_right_at_first_is_beyond_any_tolerance(folder, capsys):
    (folder / "flaky_kernels_of_a_test.py").write_text(
        "import torch\ncalls = []\n\n\ndef silu(x):\n    calls.append(1)\n"
        "    return torch.nn.functional.silu(x) * (1 if len(calls) < 2 else 1.5)\n"
    )
    assert kernels("--swap", "aten.silu=flaky_kernels_of_a_test:silu", "--max-ulps", "4") == 1
    assert "the variant gave other bits the second time" in capsys.readouterr().out


def test_a_kernel_that_ends_the_process_is_no_pass(folder, capsys):
    (folder / "leaving_kernels_of_a_test.py").write_text("import sys\n\n\ndef silu(x):\n    sys.exit(0)\n")
    assert kernels("--swap", "aten.silu=leaving_kernels_of_a_test:silu") == 3
    assert "code that it ran called sys.exit(0)" in capsys.readouterr().err


def test_functions_come_from_the_current_folder_or_from_what_is_installed(folder, monkeypatch):
    import sys

    import torch

    before = list(sys.path)
    assert read_swap("aten.silu=torch.nn.functional:silu").variant is torch.nn.functional.silu
    assert read_swap("aten.silu=kernels_of_a_test:silu").variant_name == "kernels_of_a_test:silu"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "has_mask"), [("llama", True), ("mistral", True), ("gemma2", True), ("bloom", False), ("bert", False), ("mamba2", True)]
)
def test_models_get_the_mask_that_gives_their_own_logits(name, has_mask):
    import torch

    from harness.replay.equivalence.models import causal_mask
    from harness.traceability.architectures import zoo

    model, ids = zoo()[name].build(), torch.arange(4, 12).reshape(1, 8)
    found = causal_mask(model, ids)
    assert bool(found) == has_mask
    if found:
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids, **found).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    if name == "gemma2":  # layers of two kinds, each with its own window
        assert set(found["attention_mask"]) == {"full_attention", "sliding_attention"}
