"""The search for counter-examples finds bugs planted in our session, nothing in the real one, and in llm-compressor what it must."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import PrivateAttr
from torch import nn
from torch.utils.hooks import RemovableHandle

from compressor.lifecycle import Event, EventType, Flags, Modifier, Session, State
from harness.errors import HarnessError
from harness.lifecycle.counterexamples.__main__ import main
from harness.lifecycle.counterexamples.llmcompressor import OWN, PROBE, open_llm_compressor_run
from harness.lifecycle.counterexamples.program import DISABLE, ENABLE, LEAVE, CounterExample, OpenRun
from harness.lifecycle.counterexamples.search import search
from harness.lifecycle.driving.driver import CompressorRun, apply_settings
from harness.lifecycle.driving.probes import Chain, Probe
from harness.lifecycle.oracle import Settings


def opener(session_class: type[Session] = Session, modifier_class: type[Modifier] = Probe) -> OpenRun:
    def open_run(modifier: str, times: Settings) -> CompressorRun:
        run = CompressorRun(Chain(), [apply_settings(modifier_class(), times)], session_class=session_class)
        run.recorder.perform = perform
        return run

    return open_run


def perform(step: str, owner: Modifier, state: State) -> None:
    """The two things that the search makes a probe do."""
    if step == "unhook all":
        owner.remove_hooks()
    else:
        _, kind, where = step.split()
        owner.register_hook(state.model.get_submodule(where), lambda *seen: None, kind)


@functools.cache
def found_in(subject: type[Session] | type[Modifier]) -> list[CounterExample]:
    open_run = opener(session_class=subject) if issubclass(subject, Session) else opener(modifier_class=subject)
    return search(open_run, [PROBE], max(map(len, PLANTED.get(subject, [("any step",) * 4]))))


class KeepsHooks(Session):
    """Nothing is undone after an error."""

    def _roll_back(self, *flags: Any) -> None:
        pass


class EndsCalibrationAtAnyTime(Session):
    """A calibration may end that has not begun."""

    def send(self, event_type: EventType, loss: Any = None, modules: Any = ()) -> None:
        if event_type is EventType.CALIBRATION_END and self.last.name not in ("CREATE", "FINALIZE", "ABORT"):
            self._last = EventType.CALIBRATION_START
        super().send(event_type, loss, modules)


class InitializesSilently(Session):
    """A second initialize does nothing and says nothing."""

    def initialize(self) -> None:
        if self.last.name == "CREATE":
            super().initialize()


class WakesAtTheFirstExit(Probe):
    """Leaving an inner context wakes the hooks inside the outer one."""

    _asleep: bool = PrivateAttr(default=False)

    def register_hook(self, module: nn.Module, fn: Callable[..., Any], kind: Any, **options: Any) -> RemovableHandle:
        return super().register_hook(module, lambda *seen: None if self._asleep else fn(*seen), kind, **options)

    @contextmanager
    def disable_hooks(self) -> Iterator[None]:
        self._asleep = True
        try:
            yield
        finally:
            self._asleep = False


class NeverEnds(Probe):
    """The end of a modifier's time is not noticed."""

    def should_end(self, index: float) -> bool:
        return False


class StartsLate(Probe):
    """The flag of a start is forgotten."""

    def update_event(self, state: State, event: Event) -> None:
        super().update_event(state, event)
        if event.type is EventType.BATCH_START:
            self.restore_flags(Flags(**{**self.flags._asdict(), "started": False}))


def test_our_own_session_keeps_the_contract() -> None:
    assert [example.to_text() for example in found_in(Session)] == []


PLANTED: dict[type[Session] | type[Modifier], list[tuple[str, ...]]] = {
    KeepsHooks: [("INITIALIZE", "BATCH_START, its callback raises"), ("INITIALIZE", "CALIBRATION_START", LEAVE)],
    EndsCalibrationAtAnyTime: [("INITIALIZE", "CALIBRATION_END"), ("INITIALIZE", "BATCH_START", "CALIBRATION_END")],
    InitializesSilently: [("INITIALIZE", "FINALIZE", "INITIALIZE")],
    WakesAtTheFirstExit: [("INITIALIZE", "CALIBRATION_START", DISABLE, DISABLE, ENABLE)],
    NeverEnds: [("INITIALIZE", "BATCH_START", "BATCH_END")],
    StartsLate: [("INITIALIZE", "BATCH_START")],
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_bug_is_found_by_the_shortest_program_that_shows_it(planted: type[Session] | type[Modifier]) -> None:
    found = found_in(planted)
    assert {*PLANTED[planted]} <= {example.program.steps for example in found}, "\n".join(example.to_text() for example in found)


def test_the_same_search_finds_the_same() -> None:
    first, second = (search(opener(session_class=EndsCalibrationAtAnyTime), [PROBE], 2) for _ in range(2))
    assert first == second and first


def test_a_counter_example_says_what_was_done_and_what_was_seen() -> None:
    example = next(one for one in found_in(InitializesSilently) if one.program.steps == ("INITIALIZE", "FINALIZE", "INITIALIZE"))
    assert example.to_text().splitlines() == [
        "INITIALIZE is accepted after FINALIZE",
        "    Probe(): INITIALIZE -> FINALIZE -> INITIALIZE",
        "    it raised nothing; no callback ran; no flag changed",
    ]
    assert example.to_dict()["steps"] == ["INITIALIZE", "FINALIZE", "INITIALIZE"]


@pytest.mark.skipif(importlib.util.find_spec("llmcompressor") is not None, reason="llmcompressor is installed here")
def test_where_the_library_is_absent_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HarnessError, match="llmcompressor is not installed"):
        open_llm_compressor_run(PROBE, Settings())
    assert main(["--steps", "1", "--json"]) == 3
    assert "python -m harness.lifecycle.counterexamples: error: lifecycle: llmcompressor is not installed" in capsys.readouterr().err


def test_the_program_takes_its_options_as_every_verb_does(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, told in (
        (["--help"], 0, "programs (default: 5)"),
        (["--steps", "0"], 3, "'0' is not a whole number above 0"),
        (["--steps", "2", "--steps", "3"], 3, "give it once"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        assert told in " ".join("".join(capsys.readouterr()).split())


Example = dict[str, Any]
MUST_FIND: dict[str, Callable[[Example], bool]] = {
    "start never fires": lambda one: one["start"] == 1 and one["steps"] == ["INITIALIZE", "BATCH_START", "BATCH_END", "BATCH_START"],
    "end never fires": lambda one: one["end"] == 1 and one["steps"] == ["INITIALIZE", "BATCH_START", "BATCH_END"],
    "CALIBRATION_END before START": lambda one: one["steps"] == ["INITIALIZE", "CALIBRATION_END"],
    "BATCH_END twice": lambda one: one["steps"] == ["INITIALIZE", "BATCH_START", "BATCH_END", "BATCH_END"],
    "finalize during calibration": lambda one: one["steps"] == ["INITIALIZE", "CALIBRATION_START", "FINALIZE"],
    "initialize after finalize": lambda one: (
        one["steps"] == ["INITIALIZE", "FINALIZE", "INITIALIZE"] and "no callback ran; no flag changed" in one["seen"]
    ),
    "nested disable_hooks": lambda one: one["steps"] == ["INITIALIZE", "CALIBRATION_START", DISABLE, DISABLE, ENABLE],
    "hooks and observers left": lambda one: (
        one["modifier"] == OWN and one["steps"] == ["INITIALIZE", "CALIBRATION_START", LEAVE] and "first.input_observer" in one["seen"]
    ),
}


@pytest.fixture(scope="module")
def run_in_peer(peer_python: Path, repo_root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python of this repository with the other library's interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([peer_python, *arguments], cwd=repo_root, env=environment, capture_output=True, text=True, check=False)

    if run("-c", "import llmcompressor, hypothesis").returncode:
        pytest.skip(f"{peer_python} has no llmcompressor or no hypothesis")
    return run


@pytest.fixture(scope="module")
def peer_examples(run_in_peer: Callable[..., subprocess.CompletedProcess[str]]) -> list[Example]:
    run = run_in_peer("-m", "harness.lifecycle.counterexamples", "--json")
    assert run.returncode == 1, run.stderr
    examples: list[Example] = json.loads(run.stdout)["counter_examples"]
    return examples


@pytest.mark.peer
@pytest.mark.parametrize("finding", MUST_FIND)
def test_what_is_known_of_llm_compressor_is_found_and_shrunk(finding: str, peer_examples: list[Example]) -> None:
    assert any(MUST_FIND[finding](example) for example in peer_examples), json.dumps(peer_examples, indent=1)


RANDOM = """
from harness.lifecycle.counterexamples.llmcompressor import llm_compressor_stage
from harness.lifecycle.machines.machine_subjects import drive_session
from harness.profiles import PROFILES
drive_session(llm_compressor_stage({clauses!r}), PROFILES["pr"])
"""


@pytest.mark.peer
@pytest.mark.parametrize("clause", ["callbacks", "flags", "errors", "hooks"])
def test_the_random_machine_drives_llm_compressor_too_and_each_clause_falls(
    clause: str, run_in_peer: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = run_in_peer("-c", RANDOM.format(clauses=(clause,)))
    assert f"Violation: [{clause}]" in run.stderr, run.stderr
