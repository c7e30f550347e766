"""Code that does not come back is given up; code that is only slow, or stopped from outside, is not."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.time_limit import Stopwatch, TimeLimitError, counted, run_limited
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Verdict


def test_answers_and_errors_come_through() -> None:
    assert run_limited(lambda: 3, Stopwatch(5)) == 3
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 // 0, Stopwatch(5))


def test_a_loop_is_stopped() -> None:
    ended = threading.Event()

    def loop() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TimeLimitError):
        run_limited(loop, Stopwatch(0.2))
    assert ended.wait(timeout=10)


def test_a_wait_is_left_behind_and_does_nothing_any_more_when_it_ends() -> None:
    """Others run by then, and what it puts back would be theirs."""
    release, done = threading.Event(), []

    def waits() -> None:
        try:
            release.wait(timeout=30)
        except TimeLimitError:
            done.append("caught")
        finally:
            done.append("put back")

    with pytest.raises(TimeLimitError):
        run_limited(waits, Stopwatch(0.2))
    release.set()
    time.sleep(0.3)
    assert not done


@pytest.mark.parametrize(("worked", "counts"), [(0.0, 1.0), (0.01, 1.0), (0.25, 0.25), (0.05, 0.1), (1.0, 1.0), (3.0, 1.0)])
def test_what_other_processes_take_does_not_count(worked: float, counts: float) -> None:
    assert counted(1.0, worked) == counts


def test_each_call_has_its_own_time() -> None:
    watch = Stopwatch(1.2)

    def calls() -> str:
        for _ in range(4):
            watch.restart()
            time.sleep(0.35)
        return "done"

    assert run_limited(calls, watch) == "done"  # 1.4 s in all, and room for a busy machine in each


def test_a_pause_does_not_count() -> None:
    watch = Stopwatch(1)

    def imports() -> str:
        watch.pause()
        time.sleep(1.2)
        watch.restart()
        return "done"

    assert run_limited(imports, watch) == "done"


class _CatchesSignals(Modifier):
    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        signal.signal(signal.SIGUSR2, signal.signal(signal.SIGUSR2, signal.SIG_IGN))


def test_what_python_refuses_in_the_thread_of_a_callback_is_no_fault() -> None:
    report = verify(_CatchesSignals, checks=["lifecycle.completes", "lifecycle.surroundings"])
    assert report.verdict is Verdict.INCONCLUSIVE, report.to_text()
    assert "in a thread of their own" in report.records[1].summary and "only works in main thread" in report.records[1].summary
