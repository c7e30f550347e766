"""What no guard sees is found by the audit within the promised number of steps; audits change no bit, and take their share of time."""

from __future__ import annotations

import mmap
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from compressor.cli.train import add_arguments
from compressor.errors import GuardDriftError, ProofError, SignatureDriftError
from compressor.training import Snapshot, Trainer
from compressor.training.audits import MAX_GAP, MIN_GAP, PROMISE, Audits


class Box:
    """Reached through a weak reference, behind which no guard looks."""

    scale: Any = None


_KEPT = Box()


def _hidden(box: Box) -> Any:
    behind = weakref.ref(box)
    return lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]) * behind().scale


def test_audits_come_densely_and_then_further_apart(mlp_trainer, batches):
    trainer, audits = mlp_trainer(audit_every=None), []
    for number in range(70):
        trainer.train_step(batches(number))
        audits += [number] * (trainer.last_action == "audit")
    assert audits == [3 + 2**power for power in range(7)]


@pytest.mark.parametrize("start", [6, 9, 12, 25, 60, 99])
def test_what_no_guard_sees_is_found_within_the_gap_and_undone(mlp_trainer, batches, start):
    box = Box()
    box.scale = torch.tensor(1.0)
    trainer = mlp_trainer(loss_fn=_hidden(box), audit_every=None)
    for number in range(start):
        trainer.train_step(batches(number))
    box.scale = torch.tensor(2.0)
    latest = start + max(2, start)  # the gaps double until they are 64
    with pytest.raises((ProofError, SignatureDriftError)) as caught:
        for number in range(start, latest + 1):
            before = Snapshot.take(trainer.step)
            trainer.train_step(batches(number))
    assert before.differences(Snapshot.take(trainer.step)) == []
    agreed = 3 if start == 3 else max(3 + 2**power for power in range(7) if 3 + 2**power < start)
    said = str(caught.value)
    assert PROMISE in said and f"step {agreed} was the last that agreed, and the {number - agreed - 1} after it" in str(caught.value)


def test_a_share_of_the_time_decides_the_later_gaps():
    def gaps(step: float, audit: float, count: int = 40) -> list[int]:
        audits, now, found = Audits(), 0.0, []
        audits.proven(0, now)
        for _ in range(count):
            while not audits.is_due():
                audits.since += 1
                now += step
            found.append(audits.since + 1)
            audits.audited(0, now, now := now + audit)
        return found

    dear, cheap, tiny = gaps(1.0, 10.0), gaps(1.0, 1.5), gaps(1e-4, 1.0)
    assert dear[:7] == cheap[:7] == [1, 1, 2, 4, 8, 16, 32]
    late = dear[12:]
    assert 0.025 < 9.0 * len(late) / sum(late) < 0.031, "an audit takes nine steps more, in 3 % of the time"
    assert len({gap % 10 for gap in late}) > 4, "what acts at every tenth step is met"
    assert set(cheap[7:]) == {MIN_GAP} and max(tiny) == MAX_GAP == 1000


def test_the_last_step_of_a_fit_is_audited_and_so_is_one_on_demand(mlp_trainer, batches):
    trainer, actions = mlp_trainer(audit_every=None), []
    trainer.fit(batches, 30, each=lambda number, loss: actions.append(trainer.last_action))
    assert [number for number, action in enumerate(actions) if action == "audit"] == [4, 5, 7, 11, 19, 29]
    trainer.train_step(batches(30))
    trainer.train_step(batches(31), audited=True)
    assert trainer.last_action == "audit"
    box = Box()
    box.scale = torch.tensor(1.0)
    trainer = mlp_trainer(loss_fn=_hidden(box), audit_every=None)
    trainer.fit(batches, 20)
    box.scale = torch.tensor(2.0)
    with pytest.raises((ProofError, SignatureDriftError), match="step 19 was the last"):
        trainer.fit(batches, 24)
    assert trainer.agreed_steps == 20
    never = mlp_trainer(audit_every=0)
    never.fit(batches, 10)
    assert never.last_action == "replay"


def test_every_plan_has_audits_of_its_own(mlp_trainer, batches):
    trainer, seen = mlp_trainer(audit_every=4), {5: [], 6: []}
    for number in range(40):
        rows = 5 + number % 2  # with audits at every fourth step of the run, one of the two would never have any
        trainer.train_step(batches(number, rows))
        seen[rows].append(trainer.last_action)
    assert all(actions[4:] == ["replay", "replay", "replay", "audit"] * 4 for actions in seen.values())


@pytest.mark.parametrize("audit_every", [0, 1, 3, None])
def test_audits_change_no_bit(mlp_trainer, batches, audit_every):
    ends = []
    for settings in ({"mode": "eager"}, {"audit_every": audit_every}):
        trainer = mlp_trainer(**settings)
        ends.append((trainer.fit(batches, 24), Snapshot.take(trainer.step)))
    assert ends[0][0] == ends[1][0] and ends[0][1].differences(ends[1][1]) == []


def test_the_promise_stands_in_the_same_words_everywhere():
    import argparse

    parser = argparse.ArgumentParser(prog="train", formatter_class=lambda prog: argparse.HelpFormatter(prog, width=10_000))
    add_arguments(parser)
    readme = (Path(__file__).parents[3] / "compressor" / "training" / "README.md").read_text(encoding="utf-8")
    for text in (parser.format_help(), " ".join(str(Trainer.__doc__).split()), " ".join(readme.split())):
        assert PROMISE in text


def _in_a_file(tmp_path: Path) -> Callable[[], int]:
    path = tmp_path / "count"
    path.write_text("0")

    def count() -> int:
        number = int(path.read_text()) + 1
        path.write_text(str(number))
        return number

    return count


def _behind_a_reference(tmp_path: Path) -> Callable[[], int]:
    behind = weakref.ref(_KEPT)
    _KEPT.scale = 0

    def count() -> int:
        held = behind()
        assert held is not None
        held.scale += 1
        return int(held.scale)

    return count


def _of_a_queue(tmp_path: Path) -> Callable[[], int]:
    queue: SimpleQueue[int] = SimpleQueue()
    for number in range(100):
        queue.put(number)
    return lambda: queue.get()


def _in_memory_of_c(tmp_path: Path) -> Callable[[], int]:
    memory = mmap.mmap(-1, 16)

    def count() -> int:
        memory[0] += 1
        return memory[0]

    return count


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("make", [_in_a_file, _behind_a_reference, _of_a_queue, _in_memory_of_c])
def test_a_counter_that_the_step_moves_out_of_sight_is_refused_before_any_replay(mlp_trainer, batches, tmp_path, make, mode):
    count = make(tmp_path)

    def loss_fn(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"]), batch["y"]) * (2 if count() > 60 else 1)  # no operator tells before step 60

    trainer = mlp_trainer(loss_fn=loss_fn, mode=mode)
    with pytest.raises(
        GuardDriftError,
        match=r"was \d+ when the step was captured and is \d+ in a later run .* count in a buffer|SimpleQueue\), which a replay",
    ):
        for number in range(5):
            trainer.train_step(batches(number))
    assert trainer.num_steps == (2 if make is _of_a_queue else 3)  # a queue is known by its class, before it was seen to move


def test_clocks_addresses_and_numbers_that_stay_are_no_counters(mlp_trainer, batches):
    def loss_fn(model: Any, batch: Any) -> Any:
        begin, now, address, rows = time.perf_counter(), int(time.time()), id(object()), len(batch["x"])
        loss = cross_entropy(model(batch["x"]), batch["y"])
        seconds = time.perf_counter() - begin
        return loss if rows and now and address and seconds >= 0 else loss * 2

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(8):
        trainer.train_step(batches(number))
    assert trainer.last_action in ("replay", "audit") and sys.getprofile() is None
