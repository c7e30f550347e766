"""`harness check` and `harness catalogue`: a user's own quantizer from the command line, every flag, every exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compressor.errors import UserInputError
from harness import check
from harness.checks.plain_functions import Pruner
from harness.cli import main

MODULE = '''
import torch
from harness.checks.oracles import int_grid
from harness.checks.protocols import Quantized


class MyQuantizer:
    """Rows of int4 with the scale of their largest value."""

    kind = "quantizer"
    tags = frozenset({"zero", "half_even", "local", "homogeneous", "covers"})
    code_values = int_grid(4)
    dtypes = (torch.float32,)
    scale_rule = "max_code"
    stored_scale = None
    column_multiple = 1

    def __init__(self, name="mine", wrong=False):
        self.name, self.wrong = name, wrong

    def unit(self, shape):
        return 1, shape[1]

    def quantize(self, weight):
        scale = weight.abs().amax(1, keepdim=True) / 7
        scale = torch.where(scale == 0, 1.0, scale)
        found = Quantized(weight, scale)
        return Quantized(self.encode(weight, found), scale)

    def encode(self, values, like):
        scaled = (values / like.scale).clamp(-8, 7)
        return (scaled + 0.5).floor() if self.wrong else scaled.round()

    def dequantize(self, quantized):
        return quantized.codes * quantized.scale


GOOD = MyQuantizer()
BAD = MyQuantizer("bad", wrong=True)
BOTH = [GOOD, BAD]


def mixed():
    from harness.checks.ours import OBSERVERS, PACKERS

    return [GOOD, PACKERS[0], OBSERVERS[0]]


MIXED = mixed()
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_quantizer.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users_quantizer", raising=False)


def test_a_users_quantizer_passes(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--check", "quantizer.ties", "--check", "quantizer.zero", "--check", "quantizer.covers"]
    assert main(["check", "users_quantizer:GOOD", *chosen, "--profile", "dev"]) == 0
    assert "mine: pass" in capsys.readouterr().out


def test_a_users_bug_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:BOTH", "--no-draws", "--json"]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["verdict"], bad["verdict"]) == ("pass", "regression")
    assert [record["name"] for record in bad["checks"] if record["outcome"] == "fail"] == ["quantizer.ties"]


def test_without_draws_there_are_only_fixed_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:GOOD", "--check", "5"]) == 0
    assert "drawn" in capsys.readouterr().out
    assert main(["check", "users_quantizer:GOOD", "--check", "quantizer.zero", "--no-draws"]) == 0
    assert "drawn" not in capsys.readouterr().out


def test_expected_failures_turn_a_failure_into_a_skip_and_a_pass_into_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-draws", "--check", "quantizer.ties", "--check", "quantizer.zero", "--expect-failure", "quantizer.ties=rounds up"]
    assert main(["check", "users_quantizer:BAD", *flags]) == 0
    assert main(["check", "users_quantizer:GOOD", *flags]) == 1
    assert "was expected to fail (rounds up), and did not" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("subject", "flags"), [("GOOD", ["--check", "5"]), ("MIXED", ["--check", "5"]), ("BOTH", [])])
def test_a_failure_that_nobody_would_see_is_not_expected(subject: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    other = "packer.dense" if subject == "BOTH" else "quantizer.ties"
    assert main(["check", f"users_quantizer:{subject}", "--no-draws", *flags, "--expect-failure", f"{other}=rounds up"]) == 3
    caught = capsys.readouterr()
    assert other in caught.err and not caught.out


def test_a_check_is_expected_to_fail_by_its_number_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:GOOD", "--no-draws", "--check", "5", "--expect-failure", "5=never right"]) == 1
    assert "was expected to fail (never right), and did not" in " ".join(capsys.readouterr().out.split())


def test_junit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:BAD", "--check", "quantizer.ties", "--no-draws", "--junit"]) == 1
    suite = ElementTree.fromstring(capsys.readouterr().out)[0]
    assert suite.get("failures") == "1"
    assert main(["check", "users_quantizer:BOTH", "--check", "quantizer.ties", "--no-draws", "--junit"]) == 1
    suites = ElementTree.fromstring(capsys.readouterr().out)  # one document
    assert [(suite.tag, suite.get("failures")) for suite in suites] == [("testsuite", "0"), ("testsuite", "1")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "users_quantizer"], "write package.module:Name"),
        (["check", "users_quantizer:Nothing"], "has no 'Nothing'"),
        (["check", "no_such_module:X"], "cannot be imported"),
        (["check", "users_quantizer:GOOD", "--check", "99"], "there is no check '99'"),
        (["check", "users_quantizer:GOOD", "--expect-failure", "quantizer.ties"], "write NAME=REASON"),
        (["check", "users_quantizer:GOOD", "--expect-failure", "5=a", "--expect-failure", "5=b"], "one check was given more than once"),
        (["check", "sys:maxsize"], "nothing that can be checked"),
        (["check", "not_there.py:GOOD"], "not_there.py:GOOD: there is no such file; correct the path"),
        (["verify", "compressor:GPTQModifer"], "did you mean 'GPTQModifier'?"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 3
    assert message in capsys.readouterr().err


def test_a_file_is_named_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{tmp_path / 'users_quantizer.py'}:GOOD", "--no-draws", "--check", "5"]) == 0
    assert "mine: pass" in capsys.readouterr().out


def test_subjects_without_a_check_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-draws", "--check", "5", "--check", "packer.dense"]
    assert main(["check", "users_quantizer:MIXED", *flags]) == 0
    caught = capsys.readouterr()
    assert "1 of 3 subjects have no check 5, packer.dense, and are left out" in caught.err
    assert "quantizer.zero" in caught.out
    assert "packer.dense" in caught.out
    assert "observer." not in caught.out
    assert main(["check", "users_quantizer:MIXED", *flags, "--json", "--expect-failure", "packer.dense=it is wide"]) == 1
    assert [row["verdict"] for row in json.loads(capsys.readouterr().out)] == ["pass", "regression"]
    assert main(["check", "users_quantizer:MIXED", "--check", "20"]) == 3
    assert "no check '20' of a quantizer" in capsys.readouterr().err


LOUD = """
import users_quantizer
print("imported")

class Loud(users_quantizer.MyQuantizer):
    def quantize(self, weight):
        print("a call")
        return super().quantize(weight)
"""


@pytest.mark.parametrize("flag", ["--json", "--junit"])
def test_what_a_subject_prints_is_no_part_of_the_report(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"loud{flag.strip('-')}.py"
    path.write_text(LOUD)
    assert main(["check", f"{path}:Loud", "--check", "5", "--no-draws", flag]) == 0
    told = capsys.readouterr()
    assert "imported" in told.err and "a call" in told.err
    (json.loads if flag == "--json" else ElementTree.fromstring)(told.out)


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5])
def test_a_share_that_leaves_nothing_to_choose_is_refused(sparsity: float) -> None:
    pruner = Pruner(lambda weight, hessian: weight * 0, sparsity=sparsity, tags=frozenset({"reads_hessian"}))
    with pytest.raises(UserInputError, match=rf"sparsity is {sparsity}, where there is nothing to choose; give a share between 0 and 1"):
        check(pruner)


def test_a_check_that_no_subject_has_is_refused_beside_one_that_some_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:GOOD", "--check", "10", "--check", "9", "--no-draws"]) == 3
    assert "--check 10: no subject that is looked at has such a check; leave it out" in capsys.readouterr().err


def test_nothing_applies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "users_quantizer:GOOD", "--check", "16"]) == 2
    assert "does not promise 'per_token'" in capsys.readouterr().out


def test_the_catalogue_lists_checks_and_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogue"]) == 0
    text = capsys.readouterr().out
    assert "mlx-lm#1880" in text and "harness verify" in text
    assert main(["catalogue", "--kind", "packer", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"packer"} and rows[0]["number"] == 10
