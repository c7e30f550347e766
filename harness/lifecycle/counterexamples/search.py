"""Search for the shortest runs in which a library breaks the lifecycle contract, one for each way of breaking it.

A program is a legal beginning and then any step at all. All of them are tried up to a length, the shortest first, with the oracle beside
each; the first deviation names a symptom. The state machines look deeper, at random; this looks everywhere near the start, so what it finds
has no shorter form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.lifecycle.counterexamples.program import (
    DISABLE,
    ENABLE,
    LEAVE,
    RAISING,
    SILENT,
    CounterExample,
    OpenRun,
    Program,
    Symptom,
    Trial,
)
from harness.lifecycle.oracle import MOMENTS, SessionModel, Settings

MAX_STEPS = 5
TIMES = (Settings(), Settings(start=1.0), Settings(start=0.0, end=1.0), Settings(end=1.0), Settings(start=0.0, update=2.0))


def search(open_run: OpenRun, modifiers: Sequence[str], max_steps: int = MAX_STEPS) -> list[CounterExample]:
    """Find the ways in which a library breaks the contract, and a shortest program for each. The same for the same library.

    Args:
        open_run: opens a run of the library over a fresh model.
        modifiers: names that it knows: the harness's own probe first, with which everything is tried; with the others it is only tried what
            exceptions leave behind.
        max_steps: length of the longest programs.

    Returns:
        One counter-example for each symptom, sorted; no shorter program shows it.
    """
    found: dict[Symptom, CounterExample] = {}
    for number, modifier in enumerate(modifiers):
        broken: set[tuple[Settings, tuple[str, ...]]] = set()
        for program in programs(modifier, max_steps, only_exceptions=number > 0):
            if any((program.times, program.steps[:length]) in broken for length in range(len(program.steps))):
                continue  # the deviation of its beginning has been seen
            deviation = Trial(open_run, program).deviation()
            if deviation is not None:
                broken.add((program.times, program.steps))
                found.setdefault(deviation.symptom, CounterExample(deviation.symptom, program, deviation.seen))
    return [found[symptom] for symptom in sorted(found)]


def programs(modifier: str, max_steps: int, only_exceptions: bool = False) -> Iterator[Program]:
    """List the programs: a legal beginning, then any step at all, the shortest first. Times vary where every step is legal.

    Args:
        modifier: its name.
        max_steps: length of the longest.
        only_exceptions: only programs whose last step ends by an exception.

    Yields:
        The programs.
    """
    beginnings: list[tuple[str, ...]] = [()]
    for _ in range(max_steps):
        longer: list[tuple[str, ...]] = []
        for beginning in beginnings:
            legal = _legal(beginning)
            for last in (*MOMENTS, DISABLE, ENABLE, LEAVE, *(moment + RAISING for moment in legal if moment in MOMENTS), *_silent(legal)):
                if last in legal:
                    longer.append((*beginning, last))
                if only_exceptions and not last.endswith((RAISING, LEAVE)):
                    continue
                if last in legal or last not in (DISABLE, ENABLE):
                    all_times = TIMES if last in legal else TIMES[:1]
                    yield from (Program(modifier, times, (*beginning, last)) for times in all_times)
        beginnings = longer


def _legal(steps: Sequence[str]) -> list[str]:
    """List the steps that may come after others."""
    oracle = SessionModel([Settings()])
    for step in steps:
        if step in MOMENTS:
            oracle.last = step
            oracle.calibrated = oracle.calibrated or step == "CALIBRATION_START"
    in_calibration = oracle.place == "in a calibration"
    return [*oracle.allowed(), *[DISABLE] * in_calibration, *[ENABLE] * (in_calibration and steps.count(DISABLE) > steps.count(ENABLE))]


def _silent(legal: Sequence[str]) -> list[str]:
    return [moment + SILENT for moment in ("INITIALIZE", "FINALIZE") if moment in legal]
