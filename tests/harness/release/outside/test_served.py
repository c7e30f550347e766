"""vLLM writes in an environment of its own; here another program answers for it. What it writes decides, and no answer is no pass."""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness.release.candidate import Candidate
from harness.release.outside import served
from harness.release.outside.served import check_served
from harness.release.policy import load_release_policy
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome
from tests.harness.release.conftest import NUM_TOKENS, POLICY, Release

WITH_VLLM = Path(served.__file__).with_name("with_vllm.py")
VERSIONS = {"vllm": "0.0.0", "torch": "2"}
END = 2


@pytest.fixture(scope="module")
def candidate(made: Release) -> Candidate:
    return Candidate(made.base, made.compressed, POLICY, [list(range(5, 21)), list(range(30, 50))], torch.device("cpu"), 0)


@pytest.fixture(scope="module")
def texts(candidate: Candidate) -> list[list[int]]:
    """What the checkpoint writes after both prompts."""
    model: Any = candidate.model
    return [
        model.generate(prompt, max_new_tokens=candidate.num_new, do_sample=False)[0, prompt.shape[1] :].tolist()
        for prompt in candidate.prompts
    ]


def looked(candidate: Candidate, folder: Path, *answers: Any, last: str = "", **limits: float) -> CheckRecord:
    lines = "\n".join([*(f"harness: {json.dumps(one)}" for one in answers), last])
    (folder / "python").write_text(f"#!/bin/sh\necho $* > {folder}/words\ncat > {folder}/given\ncat <<'END'\n{lines}\nEND\n")
    (folder / "python").chmod(0o755)
    generation = candidate.policy.generation.model_copy(update=limits)
    policy = candidate.policy.model_copy(update={"vllm": folder / "python", "generation": generation})
    asked = Candidate(candidate.base, candidate.compressed, policy, candidate.rows, candidate.device, 0)
    asked.__dict__["model"] = candidate.model  # loaded once
    (record,) = check_served(asked)
    assert record.name == "served.vllm"
    return record


def test_what_it_writes_is_right_and_it_was_asked_for_that(candidate: Candidate, texts: list[list[int]], tmp_path: Path) -> None:
    record = looked(candidate, tmp_path, VERSIONS, texts)
    assert (record.outcome, record.summary) == (Outcome.PASS, "vllm 0.0.0: 32 tokens after 2 prompts")
    given = (tmp_path / "given").read_text().splitlines()
    assert [[int(token) for token in line.split()] for line in given] == [prompt[0].tolist() for prompt in candidate.prompts]
    assert (tmp_path / "words").read_text() == f"-I {WITH_VLLM} {candidate.compressed} 16\n"


Change = Callable[[list[int]], list[int]]
PLANTED: dict[str, tuple[Change, str]] = {
    "another token": (lambda text: [*text[:3], text[3] + 9, *text[4:]], "prompt 1: token 3 is another, "),
    "an early end": (lambda text: [*text[:3], END], "prompt 1: token 3 is another, "),
    "no end": (lambda text: text[:4], "prompt 1: ends after 4 tokens, and none of them ends a text"),
    "nothing": (lambda text: [], "prompt 1: ends after 0 tokens, and none of them ends a text"),
    "on behind the end": (lambda text: [*text[:3], END, *text[4:]], "prompt 1: goes on behind token 2, which ends a text"),
    "no such token": (lambda text: [*text[:-1], NUM_TOKENS], f"prompt 1: token {NUM_TOKENS} is outside of the vocabulary"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_another_text_is_told(name: str, candidate: Candidate, texts: list[list[int]], tmp_path: Path) -> None:
    change, words = PLANTED[name]
    record = looked(candidate, tmp_path, VERSIONS, [texts[0], change(texts[1])])
    assert record.outcome is Outcome.FAIL and len(record.findings) == 1 and record.findings[0].startswith(words), record


def test_a_tie_is_counted_and_no_text_is_missed(candidate: Candidate, texts: list[list[int]], tmp_path: Path) -> None:
    last_is_another = [texts[0], [*texts[1][:-1], 3]]
    record = looked(candidate, tmp_path, VERSIONS, last_is_another, max_deviation=2.5, max_dtype_deviation=2.5)
    assert (record.outcome, record.summary) == (Outcome.PASS, "vllm 0.0.0: 32 tokens after 2 prompts, 1 of them at a tie")
    record = looked(candidate, tmp_path, VERSIONS, texts[:1])
    assert (record.outcome, record.findings) == (Outcome.FAIL, ("1 texts came, of 2 prompts",))


def test_what_does_not_load_fails_and_what_does_not_run_tells_nothing(candidate: Candidate, tmp_path: Path) -> None:
    record = looked(candidate, tmp_path, VERSIONS, last="ValueError: no kernel")
    assert (record.outcome, record.summary) == (Outcome.FAIL, "vllm 0.0.0: ValueError: no kernel")
    record = looked(candidate, tmp_path, last="No module named 'vllm'")
    assert (record.outcome, record.summary) == (Outcome.INCONCLUSIVE, "could not be tried: No module named 'vllm'")
    (record,) = check_served(candidate)
    assert (record.outcome, record.summary) == (Outcome.SKIP, "not run: the policy names no interpreter")
    (tmp_path / "policy.yaml").write_text("vllm: not/there\n")
    policy = load_release_policy(tmp_path / "policy.yaml")
    (record,) = check_served(Candidate(candidate.base, candidate.compressed, policy, candidate.rows, candidate.device, 0))
    assert (record.outcome, record.summary) == (Outcome.SKIP, f"not run: there is no interpreter {tmp_path / 'not/there'}")


def test_the_file_that_it_runs_asks_for_greedy_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    class Engine:
        def __init__(self, folder: str, **options: Any) -> None:
            asked.update(options, folder=folder)

        def generate(self, prompts: list[Any], settings: Any, **_: Any) -> list[Any]:
            asked["prompts"], asked["settings"] = prompts, settings
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(number, 7))]) for number in range(len(prompts))]

    module: Any = ModuleType("vllm")
    module.__version__, module.LLM, module.SamplingParams = "9", Engine, lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(sys, "argv", ["with_vllm.py", "there", "5"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 2 3\n4"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    runpy.run_path(str(WITH_VLLM), run_name="__main__")
    versions, texts = (json.loads(line.removeprefix("harness: ")) for line in capsys.readouterr().out.splitlines())
    assert versions["vllm"] == "9" and texts == [[0, 7], [1, 7]]
    assert asked["settings"] == {"temperature": 0.0, "max_tokens": 5} and asked["prompts"] == [
        {"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4]}
    ]  # fmt: skip
    assert (asked["folder"], asked["max_model_len"], asked["max_num_seqs"]) == ("there", 8, 2)
