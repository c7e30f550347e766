"""One vocabulary of verdicts, one table of exit codes: no command of the harness has a number of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from compressor.errors import CheckpointError, CompressorError, UserInputError
from compressor.interruption import EXIT_INTERRUPTED
from compressor.settings.options import Settings
from harness.bisect.report import Answer
from harness.cli import VERBS, command_of, main
from harness.errors import GoldenError, HarnessError
from harness.goldens.store.store import GoldenVerdict
from harness.onnx_graph.census.census import Status
from harness.onnx_graph.contracts.base import Holding
from harness.replay.hazards.registry import HazardOutcome
from harness.replay.sabotage.break_ops import TrialOutcome
from harness.reporting.verdict import EXIT_CODES, EXIT_FAILURE, Verdict, worst
from harness.traceability.verdicts import Finding
from harness.verbs import Actions, Command, Run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        ((), Verdict.INCONCLUSIVE),
        ((Verdict.PASS,), Verdict.PASS),
        ((Verdict.PASS, Verdict.INCONCLUSIVE), Verdict.INCONCLUSIVE),
        ((Verdict.INCONCLUSIVE, Verdict.REGRESSION, Verdict.PASS), Verdict.REGRESSION),
    ],
)
def test_the_worst_part_decides_and_nothing_is_no_pass(parts: tuple[Verdict, ...], together: Verdict) -> None:
    assert worst(parts) is together


def test_exit_codes_are_four_different_numbers() -> None:
    assert [EXIT_CODES[verdict] for verdict in Verdict] == [0, 1, 2]
    assert (EXIT_FAILURE, EXIT_INTERRUPTED) == (3, 130)


def test_words_of_the_rooms_have_one_meaning_each() -> None:
    assert {one.value: one.verdict.value for one in Holding} == {"holds": "pass", "violated": "regression", "not analysed": "inconclusive"}
    unclear = {Status.MISSING, Status.AMBIGUOUS, Status.UNKNOWN}
    assert {one for one in Status if one.verdict is Verdict.INCONCLUSIVE} == unclear
    assert {one for one in Status if one.verdict is Verdict.PASS} == {Status.SEPARATE}
    assert {one for one in Finding if one.verdict is Verdict.REGRESSION} == {Finding.CRASH, Finding.SILENT}
    assert {one for one in GoldenVerdict if one.verdict is Verdict.PASS} == {GoldenVerdict.PASS}
    assert {one for one in HazardOutcome if one.verdict is Verdict.PASS} == {HazardOutcome.EQUAL, HazardOutcome.REFUSED}
    assert {one for one in TrialOutcome if one.verdict is Verdict.PASS} == {TrialOutcome.NAMED, TrialOutcome.NO_EFFECT}
    assert [one.verdict.value for one in (Answer.EQUAL, Answer.FOUND, Answer.SPREAD)] == ["pass", "regression", "inconclusive"]
    assert [verdict.outcome.value for verdict in Verdict] == ["pass", "fail", "inconclusive"]


def test_the_readme_has_the_numbers_of_the_table() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    sentence = text[text.index("Verbs of the harness exit with") : text.index("Verbs of the compressor judge nothing")]
    told = {word: int(number) for number, word in re.findall(r"(\d) \((\w+)", sentence)}
    assert told == {**{verdict.value: EXIT_CODES[verdict] for verdict in Verdict}, "bad": EXIT_FAILURE}
    assert f"An interruption (ctrl-C, SIGTERM) exits with {EXIT_INTERRUPTED} everywhere" in text


def _leaves() -> Iterator[tuple[str, Command]]:
    for verb in VERBS:
        command = command_of(verb)
        if isinstance(command, Command):
            yield verb, command
        else:
            yield from ((f"{verb} {name}", action) for name, action in command.actions.items())


LEAVES = dict(_leaves())


@pytest.mark.parametrize("words", LEAVES)
def test_the_help_of_every_verb_has_the_numbers_of_the_table(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split("exit codes: ")[-1].split())
    numbers = [int(part.split()[0]) for part in re.split(r"; (?=\d )", said)]
    assert numbers[0] == EXIT_CODES[Verdict.PASS] and numbers[-1] == EXIT_FAILURE and numbers == sorted(set(numbers))


@pytest.mark.parametrize("words", LEAVES)
def test_every_verb_exits_as_its_verdict_says(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, seen = LEAVES[words], list[Settings]()
    for verdict in Verdict:
        _replace_run(monkeypatch, words, lambda given, verdict=verdict: seen.append(given) or verdict)
        assert main([*words.split(), *GIVEN[words].split()]) == EXIT_CODES[verdict]
    assert [type(given) for given in seen] == [command.settings] * 3


@pytest.mark.parametrize(("words", "error"), list(zip(LEAVES, cycle((UserInputError, GoldenError, HarnessError, CheckpointError)))))
def test_no_error_of_any_verb_is_a_verdict(
    words: str, error: type[CompressorError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(given: Settings) -> Verdict:
        raise error("thing: it was given and is wrong; correct it")

    _replace_run(monkeypatch, words, fail)
    assert main([*words.split(), *GIVEN[words].split()]) == EXIT_FAILURE
    assert capsys.readouterr().err == f"harness {words.split()[0]}: error: thing: it was given and is wrong; correct it\n"


@pytest.mark.parametrize("words", LEAVES)
def test_wrong_arguments_of_every_verb_are_no_verdict(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), *GIVEN[words].split(), "--no-such-option"])
    assert caught.value.code == EXIT_FAILURE and "--no-such-option" in capsys.readouterr().err


GIVEN = dict.fromkeys(LEAVES, "") | {
    "validate": "a b --dataset d",
    "report": "a",
    "bisect": "a b --dataset d",
    "verify": "a:b",
    "check": "a:b",
    "golden why": "name",
    "replay equivalence": "llama",
    "replay kernels": "llama --swap a=b:c",
    "replay sabotage": "llama",
    "nightly run": "night.yaml",
    "nightly add": "metric 1",
    "nightly show": "metric",
    "nightly accept": "metric night --reason r",
    "nightly blame": "metric",
    "nightly export": "a.csv",
    "nightly import": "a.csv",
    "nightly report": "--output-dir pages",
    "release check": "a b",
    "release verify": "statement.json a",
    "onnx export": "a b.onnx",
    "onnx roundtrip": "a",
    "onnx census": "a",
    "onnx check": "a b",
    "onnx explain": "a",
    "onnx fusing-cost": "a",
    "onnx run": "--skip fuse_qkv",
}
"""What each verb needs, and no more."""


def _replace_run(monkeypatch: pytest.MonkeyPatch, words: str, run: Run) -> None:
    verb, _, action = words.partition(" ")
    whole, changed = command_of(verb), replace(LEAVES[words], run=run)
    made = replace(whole, actions={**whole.actions, action: changed}) if isinstance(whole, Actions) else changed
    monkeypatch.setattr(f"{VERBS[verb]}.COMMAND", made)
