"""Whatever a subject raises is a finding, and the results of the others are kept; only an interrupt ends the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor import Modifier
from compressor.errors import UserInputError
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.ours import OurQuantizer
from harness.checks.parametrize import CatalogueCheckFailedError, parametrize_with_catalogue
from harness.checks.protocols import Pruner, Quantized
from harness.cli import main
from harness.reporting.verdict import Outcome, Verdict


class OwnError(BaseException):
    """No Exception: it goes through every `except Exception`."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "exit with 0": lambda: SystemExit(0),
    "exit": SystemExit,
    "generator exit": GeneratorExit,
    "its own": OwnError,
    "skip": lambda: pytest.skip.Exception("not today"),
    "xfail": lambda: pytest.xfail.Exception("expected"),
    "end of pytest": lambda: pytest.exit.Exception("enough"),
    "stop": StopIteration,
    "runtime": lambda: RuntimeError("no gpu"),
    "bad input": lambda: UserInputError("give another"),
    "group": lambda: BaseExceptionGroup("both", [SystemExit(0), ValueError("x")]),
}
INT4 = QuantizationArgs(num_bits=4, group_size=16)


def raising(make: Callable[[], BaseException]) -> Callable[..., Any]:
    def function(*args: object) -> Any:
        raise make()

    return function


@pytest.mark.parametrize("what", RAISED)
def test_what_a_method_raises_is_a_finding(what: str) -> None:
    report = harness.check(Pruner(raising(RAISED[what])), checks=["sparsifier.target_met", "sparsifier.beats_random"])
    assert [record.outcome for record in report.records] == [Outcome.FAIL, Outcome.FAIL]
    assert len(report.causes()) == 1 and type(RAISED[what]()).__name__ in report.records[0].summary


@pytest.mark.parametrize("draws", [False, True])
def test_what_is_raised_for_drawn_weights_is_a_finding(draws: bool) -> None:
    class Late(OurQuantizer):
        def quantize(self, weight: Tensor) -> Quantized:
            sys.exit(0)

    record = harness.check(Late(INT4), checks=["quantizer.covers"], draws=draws).records[0]
    assert record.outcome is Outcome.FAIL and "SystemExit" in record.summary


@pytest.mark.parametrize("what", RAISED)
@pytest.mark.parametrize("place", ["__init__", "name", "tags", "kind", "prune"])
def test_what_a_constructor_or_property_raises_is_a_finding(what: str, place: str) -> None:
    function = raising(RAISED[what])
    members: dict[str, Any] = {
        "kind": "sparsifier",
        "tags": frozenset(),
        "pattern": None,
        "sparsity": 0.5,
        "scope": "row",
        "second_order": False,
    }
    members |= {"name": "mine", "quantize": None, "prune": function} | {place: function if place == "__init__" else property(function)}
    report = harness.check(type("Mine", (), members))
    assert report.verdict is Verdict.REGRESSION
    assert [record.name for record in report.records] == ["check.usable"]
    assert place in report.records[0].summary or "Mine() raised" in report.records[0].summary
    assert "Mine" in report.to_text() and "failure" in report.to_junit()


def test_a_property_that_raises_in_a_check_is_a_finding() -> None:
    class Tired(OurQuantizer):
        reads = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "tags":
                Tired.reads += 1
                if Tired.reads > 3:
                    sys.exit(0)
            return super().__getattribute__(name)

    assert harness.check(Tired(INT4), checks=["quantizer.covers", "quantizer.zero"], draws=False).verdict is Verdict.REGRESSION


def test_an_interrupt_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        harness.check(Pruner(raising(KeyboardInterrupt)))


@pytest.mark.parametrize("tags", ["zero", None, 3, [1]])
def test_tags_of_another_form_are_bad_input(tags: Any) -> None:
    mine = OurQuantizer(INT4)
    mine.tags = tags
    with pytest.raises(UserInputError, match="is no set of contract tags; give"):
        harness.check(mine)


def test_a_constructor_that_needs_arguments_is_bad_input() -> None:
    class Needs(OurQuantizer):
        def __init__(self, args: QuantizationArgs) -> None:
            super().__init__(args)

    with pytest.raises(UserInputError, match="cannot be made without arguments"):
        harness.check(Needs)


MODULE = """
import sys
import torch
from harness.checks.protocols import Pruner
from compressor import Modifier

def wrong(w, h): return torch.zeros_like(w)
def quits(w, h): sys.exit(0)

class NoGpu:
    def __init__(self): raise RuntimeError("no gpu")

class Leaves:
    def __init__(self): sys.exit(0)

class Mod(Modifier):
    size: int = 1
    def model_post_init(self, context):
        sys.exit(0)
    def on_initialize(self, state): return True

ALL = [Pruner(wrong), NoGpu, Pruner(quits), Leaves]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "raising_subjects.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "raising_subjects", raising=False)
    return "raising_subjects"


@pytest.mark.parametrize("options", [[], ["--check", "sparsifier.target_met"]])
def test_the_command_keeps_the_results_of_the_others(module: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{module}:ALL", "--json", *options]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["subject"], one["verdict"]) for one in found] == [(name, "regression") for name in ("wrong", "NoGpu", "quits", "Leaves")]


def test_verify_tells_a_constructor_with_settings_that_leaves(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{module}:Mod", "--settings", '{"size": 2}']) == 1
    assert "SystemExit" in capsys.readouterr().out


@pytest.mark.parametrize("raised", [SystemExit(0), GeneratorExit(), pytest.skip.Exception("x"), RuntimeError("x")], ids=repr)
def test_verify_tells_a_copy_that_leaves(raised: BaseException) -> None:
    class Uncopied(Modifier):
        def on_initialize(self, state: Any) -> bool:
            return True

        def __deepcopy__(self, memo: Any = None) -> Any:
            raise raised

    report = harness.verify(Uncopied())
    assert not report.passed and type(raised).__name__ in report.to_text()


def test_verify_tells_a_flag_that_leaves() -> None:
    class Flagged(Modifier):
        @property
        def initialized(self) -> bool:
            sys.exit(0)

        def on_initialize(self, state: Any) -> bool:
            return True

    assert harness.verify(Flagged()).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("raised", [SystemExit(0), GeneratorExit(), pytest.skip.Exception("x")], ids=repr)
def test_verify_module_tells_a_forward_that_leaves(raised: BaseException) -> None:
    class Leaves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise raised

    report = harness.verify_module(Leaves(), torch.ones(1))
    assert report.records[0].outcome is Outcome.FAIL


def test_a_subject_that_cannot_be_made_is_one_failed_test() -> None:
    class Leaves(OurQuantizer):
        def __init__(self) -> None:
            pytest.skip("not here")

    mark = parametrize_with_catalogue([Leaves, OurQuantizer(INT4)], expected_failures={"quantizer.zero": "known"}).mark
    first, *others = mark.args[1]
    assert first.id.endswith("Leaves-check.usable") and len(others) > 10
    with pytest.raises(CatalogueCheckFailedError, match="not here"):
        first.values[1](first.values[0])


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit(0)", "import pytest; pytest.skip('x', allow_module_level=True)", "raise GeneratorExit"]
)
def test_a_module_that_leaves_while_it_is_imported_is_bad_input(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "leaving_module.py").write_text(text)
    assert main(["check", f"{tmp_path}/leaving_module.py:X"]) == 3
    assert "fails while it is imported" in capsys.readouterr().err
    sys.modules.pop("leaving_module", None)
