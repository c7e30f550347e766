"""Equal training runs of one case that take turns, held against each other: speed, guards, memory, bits."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.replay.kernels.timing import Ratio, interleave, median_interval, ratios
from tests.bench.interleaved_runs import UNGUARDED, Turns, timed_guards

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compressor.training import Trainer
    from tests.bench.replay_cases import Batch, Case


EAGER, REPLAY, COMPILED, ORDINARY = "eager", "replay", "compiled", "ordinary"
_WARM_STEPS = 8  # two warm-ups, capture, proof, a second proof on an unseen batch, and some replays
_NUM_BATCHES = 4
_SAMPLE_SECONDS = 5e-3
_SHORT_ROUNDS = 5  # times as many rounds where a step is shorter than a measurement: they cost nothing


@dataclass(frozen=True)
class Goals:
    """What is asked of a case.

    Attributes:
        speed: least ratio of eager over replay.
        guards: largest share of the guards in a replayed step.
        memory: largest ratio of the tape's memory over the live peak of an eager step.
        compiled: least ratio of a compiled step over replay; on a GPU.
    """

    speed: float
    guards: float
    memory: float
    compiled: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes beside the model, the gradients, the optimizer and the inputs.

    Attributes:
        held: by the captured step, between steps.
        live_peak: at most at a time in an eager step, as the allocator tells.
        recorded_peak: the same as the recorder counted it; None where it does not.
    """

    held: int
    live_peak: int
    recorded_peak: int | None

    @property
    def ratio(self) -> float:
        """What is held over the live peak."""
        return self.held / self.live_peak if self.live_peak else math.inf


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case.

    Attributes:
        name: of the case.
        goals: what is asked.
        rounds: of the timing.
        seconds: median seconds per step, by run.
        speed: eager over replay.
        ordinary: an ordinary loop over replay: gradients set to None, the same fused optimizer, no trainer.
        guards: share of the guards in a replayed step, timed where they run.
        unguarded: a replayed step without guards over one with them; the same told otherwise, with more noise.
        compiled: compiled over replay; None without a GPU.
        memory: of the captured step.
        differences: what differs between eager and replay at the end; empty where all bits are equal.
        num_ops: operators of the step.
    """

    name: str
    goals: Goals
    rounds: int
    seconds: Mapping[str, float]
    speed: Ratio
    ordinary: Ratio
    guards: Ratio
    unguarded: Ratio
    compiled: Ratio | None
    memory: Memory
    differences: tuple[str, ...]
    num_ops: int

    def figures(self) -> list[tuple[str, str, str, str, str]]:
        """Return what was measured, its value, what it is made of, the goal and whether it is met, a row each."""
        goals, memory = self.goals, self.memory
        times = {name: f"{_ms(seconds)} / {_ms(self.seconds[REPLAY])}" for name, seconds in self.seconds.items()}
        held, less = f"{_mb(memory.held)} / {_mb(memory.live_peak)}", f"a step without: {self.unguarded.median - 1:+.1%}"
        bits = "equal" if not self.differences else "DIFFERENT"
        speed = ("eager / replay", f"{self.speed}", times[EAGER], f">= {goals.speed:g}", at_least(self.speed, goals.speed))
        ordinary = ("loop / replay", f"{self.ordinary}", times[ORDINARY], "", "")
        compiled = []
        if self.compiled is not None:
            is_met = at_least(self.compiled, goals.compiled)
            compiled = [("compiled / replay", f"{self.compiled}", times[COMPILED], f">= {goals.compiled:g}", is_met)]
        return [
            speed,
            ordinary,
            *compiled,
            ("guards' share", _percent(self.guards), less, f"<= {goals.guards:.0%}", at_most(self.guards, goals.guards)),
            ("memory / live peak", f"{memory.ratio:.2f}", held, f"<= {goals.memory:g}", "yes" if memory.ratio <= goals.memory else "no"),
            ("bits", bits, f"{self.num_ops} ops", "equal", "no" if self.differences else "yes"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        goals = self.goals
        return {
            "name": self.name,
            "rounds": self.rounds,
            "num_ops": self.num_ops,
            "median_seconds": dict(self.seconds),
            "eager_over_replay": self.speed.to_dict() | {"goal": goals.speed, "met": self.speed.median >= goals.speed},
            "ordinary_over_replay": self.ordinary.to_dict(),
            "guards_share": self.guards.to_dict() | {"goal": goals.guards, "met": self.guards.median <= goals.guards},
            "unguarded_over_replay": self.unguarded.to_dict(),
            "compiled_over_replay": None
            if self.compiled is None
            else self.compiled.to_dict() | {"goal": goals.compiled, "met": self.compiled.median >= goals.compiled},
            "memory": {
                "held_bytes": self.memory.held,
                "live_peak_bytes": self.memory.live_peak,
                "recorded_live_peak_bytes": self.memory.recorded_peak,
                "ratio": self.memory.ratio,
                "goal": goals.memory,
                "met": self.memory.ratio <= goals.memory,
            },
            "bitwise_equal": not self.differences,
            "differences": list(self.differences),
        }


def measure(case: Case, goals: Goals, rounds: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> CaseResult:
    """Measure one case.

    Args:
        case: the model.
        goals: what is asked of it.
        rounds: of the timing; short steps are measured more often.
        device: to run on.
        clock: gives seconds.

    Returns:
        What was measured.
    """
    from tests.bench.live_peak import live_peak_bytes

    trainers, batches = make_trainers(case, device), case.batches(_NUM_BATCHES, device)
    runs = {name: stepper(trainer, batches) for name, trainer in trainers.items()} | {ORDINARY: ordinary_loop(trainers, case, batches)}
    turns = Turns(trainers, device)
    interleave(runs, _WARM_STEPS, before=turns.begin, device=device)
    probe = interleave(runs, 1, before=turns.begin, device=device, clock=clock)
    slowest = max(series[0] for series in probe.values())
    repeats = max(1, math.ceil(_SAMPLE_SECONDS / slowest))
    rounds *= _SHORT_ROUNDS if slowest < _SAMPLE_SECONDS else 1
    plan = trainers[REPLAY].plans[0]
    with timed_guards(plan, clock) as spent:
        seconds = interleave(runs, rounds, repeats=repeats, before=turns.begin, device=device, clock=clock)
    in_guards = [statistics.fmean(spent[number * repeats : (number + 1) * repeats]) for number in range(rounds)]
    turns.begin(EAGER)
    while trainers[EAGER].num_steps < trainers[REPLAY].num_steps:
        runs[EAGER]()
    differences = _differences(trainers, turns)
    captured = plan.captured
    recorded = getattr(captured, "live_peak_bytes", None)
    memory = Memory(captured.scratch_bytes, live_peak_bytes(runs[EAGER], device), recorded)
    over_replay = ratios(seconds, REPLAY)
    guards = median_interval([part / whole for part, whole in zip(in_guards, seconds[REPLAY], strict=True)])
    return CaseResult(
        case.name,
        goals,
        rounds,
        {name: statistics.median(series) for name, series in seconds.items()},
        over_replay[EAGER],
        over_replay[ORDINARY],
        guards,
        over_replay[UNGUARDED],
        over_replay.get(COMPILED),
        memory,
        differences,
        len(captured.ops),
    )


def make_trainers(case: Case, device: torch.device) -> dict[str, Trainer]:
    """Make equal training runs in all the ways that are compared.

    Args:
        case: the model.
        device: to train on.

    Returns:
        Name to trainer; replay with and without guards is one and the same.
    """
    from compressor.training import Trainer

    replay = Trainer(case.step(device), "replay", audit_every=0)  # audits take 3 % of a long run, and would fall on some rounds only
    trainers = {name: Trainer(case.step(device), "eager") for name in (EAGER, ORDINARY)} | {REPLAY: replay, UNGUARDED: replay}
    if device.type == "cuda":
        trainers[COMPILED] = Trainer(case.step(device, model_of=_compiled), "eager")
    return trainers


def ordinary_loop(trainers: Mapping[str, Trainer], case: Case, batches: Sequence[Batch]) -> Callable[[], object]:
    """Return a function that makes the next step of a loop as people write it: gradients set to None, and nothing of a trainer's."""
    step = trainers[ORDINARY].step
    model, optimizer, numbers = step.model, step.optimizer, itertools.count()

    def run() -> None:
        optimizer.zero_grad()
        case.loss_fn(model, batches[next(numbers) % len(batches)]).backward()
        optimizer.step()

    return run


def _compiled(model: nn.Module) -> nn.Module:
    import torch

    compiled: Any = torch.compile(model, mode="reduce-overhead")
    found: nn.Module = compiled
    return found


def stepper(trainer: Trainer, batches: Sequence[Batch]) -> Callable[[], object]:
    """Return a function that makes the next step of a run."""
    return lambda: trainer.train_step(batches[trainer.num_steps % len(batches)])


def _differences(trainers: Mapping[str, Trainer], turns: Turns) -> tuple[str, ...]:
    """Say what differs between the runs that must be equal bit for bit."""
    from compressor.training import Snapshot

    ends = {}
    for name in (EAGER, REPLAY):
        turns.begin(name)
        ends[name] = Snapshot.take(trainers[name].step)
    found = ends[EAGER].differences(ends[REPLAY])
    if trainers[REPLAY].last_action not in ("replay", "audit"):
        found.append(f"the last step was no replay but {trainers[REPLAY].last_action}")
    return tuple(found)


def at_least(ratio: Ratio, goal: float) -> str:
    """Say whether a median reaches a goal: `yes` or `no`, with a question mark where the goal lies within the interval."""
    return ("yes" if ratio.median >= goal else "no") + "?" * (ratio.low < goal <= ratio.high)


def at_most(ratio: Ratio, goal: float) -> str:
    """Say whether a median stays within a goal, likewise."""
    return ("yes" if ratio.median <= goal else "no") + "?" * (ratio.low <= goal < ratio.high)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def _percent(share: Ratio) -> str:
    return f"{share.median:.1%} [{share.low:.1%}, {share.high:.1%}]"
