"""Decides how each step runs: eagerly, recorded, or by replay. What a step means stands in `step.py` alone.

A new plan key (metadata of the batch, and where the modifiers stand) begins with eager warm-up steps; then one step is captured, the next
one proves the plan, and all later ones replay it. Every call of `train_step` performs exactly one step in every mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from compressor.errors import GuardDriftError, PlanStormError, ProofError, ReplayError, SignatureDriftError, UserInputError
from compressor.lifecycle import EventType
from compressor.progress import Progress, SilentProgress
from compressor.settings.kinds import FLAG, FUNCTION, NUMBERS, PROGRESS, WHOLE, Kind, object_of
from compressor.settings.options import checked
from compressor.training.audits import Audits
from compressor.training.capture.signature import drift
from compressor.training.engines.select import engine_for
from compressor.training.guards.containers import own_generators
from compressor.training.guards.python_values import PythonValues
from compressor.training.python_state import PythonState, kept_buffers, kept_generators
from compressor.training.replay.plan import Plan, record, refuse_early
from compressor.training.replay.prove import audit, compare_recorded, eager_end, prove
from compressor.training.step.batch import Batch, BatchKey, InputBuffers, batch_key, num_tokens, varying_constants
from compressor.training.step.optimizers import Factor, RateSchedule
from compressor.training.step.ranks import StepDecision
from compressor.training.step.snapshot import Snapshot
from compressor.training.step.step import TrainStep

T = TypeVar("T")
# A recording follows what all threads share: random generators, hooks of all modules, the arena. So the threads of a process take turns.
_TURN = threading.RLock()
Mode = Literal["eager", "capture", "replay"]
_PlanKey = tuple[BatchKey, Hashable]


@dataclass
class _KeyRecord:
    """What became of one plan key."""

    began: int = 0
    last: int = 0
    warmed: int = 0
    replayed: int = 0
    plan: Plan | None = None
    proven: bool = False
    lines: list[str] | None = None
    python: PythonValues | None = None
    audits: Audits = field(default_factory=Audits)


class Trainer:
    """Runs a step over batches.

    In replay, what the guards see is refused at once; anything else that Python reads is found by the audit, if it stays changed, at most
    1,000 steps later.

    Args:
        step: the step.
        mode: `eager` runs it as it is; `capture` runs it under the recorder every time, and refuses whatever could not be captured or is
            another step than before; `replay` captures it once per plan key and then replays.
        schedule: step number to factor of the learning rates, which must be tensors then.
        warmup: eager steps per plan key, at least one.
        check_every: the guards are checked at every so manieth replay.
        audit_every: a step is run eagerly, too, and compared, at every so manieth step of a plan; 0: never; None: 1, 2, 4, 8, ... steps
            after the proof, then in 3 % of the time, at most 1,000 steps apart.
        max_plans: largest number of plan keys.
        progress: shows the bar of `fit`.

    Attributes:
        num_steps: steps made so far.
        schedule: sets the learning rates before each step; None: nobody does.
        last_action: what the last step was: eager, warm-up, capture, prove, audit or replay.
        agreed_steps: after an audit that failed, the steps that were made when replay and eager last agreed; those after may be wrong.

    Raises:
        UserInputError: a setting of the wrong kind or out of range.
    """

    @checked(
        step=object_of(TrainStep, words="a TrainStep"),
        schedule=FUNCTION,
        progress=PROGRESS,
        **dict.fromkeys(("warmup", "check_every", "audit_every", "max_plans"), WHOLE),
    )
    def __init__(
        self,
        step: TrainStep,
        mode: Mode = "eager",
        *,
        schedule: Factor | None = None,
        warmup: int = 2,
        check_every: int = 1,
        audit_every: int | None = None,
        max_plans: int = 8,
        progress: Progress | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise UserInputError(f"Trainer: mode={mode!r} does not exist; give one of {', '.join(get_args(Mode))}")
        for name, value, least in (
            ("warmup", warmup, 1),
            ("check_every", check_every, 1),
            ("audit_every", audit_every, 0),
            ("max_plans", max_plans, 1),
        ):
            if value is not None and value < least:
                raise UserInputError(f"Trainer: {name}={value} is below {least}; give at least {least}")
        if mode != "eager" and step.ranks.is_wrapped and warmup < 2:
            raise UserInputError(
                f"Trainer: warmup={warmup} is below 2, and DistributedDataParallel lays out its buckets in the second step; give at least 2"
            )
        self.step, self.mode = step, mode
        self.warmup, self.check_every, self.audit_every, self.max_plans = warmup, check_every, audit_every, max_plans
        self.num_steps = 0
        self.last_action = ""
        self.agreed_steps: int | None = None
        self.schedule = None if schedule is None else RateSchedule(step, schedule)
        self._engine = engine_for(step.device, mode)
        self._progress = SilentProgress() if progress is None else progress
        self._keys: dict[_PlanKey, _KeyRecord] = {}
        self._settings = f"{mode=}, {warmup=}, {check_every=}, {audit_every=}, {max_plans=}, accumulate={step.accumulate}"

    @property
    def plans(self) -> list[Plan]:
        """The captured plans, in the order of their capture."""
        return [record.plan for record in self._keys.values() if record.plan is not None]

    @property
    def unreplayed(self) -> list[range]:
        """Of each plan key of which no step has been a replay yet, the steps from its first to its last."""
        return [range(record.began, record.last + 1) for record in self._keys.values() if not record.replayed]

    def forget_plans(self) -> None:
        """Drop all plans, after a change that they must take over; each key warms up and is captured again."""
        self._keys.clear()
        self.step.choose_update()

    @checked(audited=FLAG)
    def train_step(self, batch: Batch, *, audited: bool = False) -> Tensor:
        """Perform one step. Changes model, optimizer and whatever the modifiers change.

        Args:
            batch: what the step takes.
            audited: make an audit of it where it would be a replay, as of the last step of a run.

        Returns:
            The loss, which belongs to the caller.

        Raises:
            ReplayError: the step cannot be captured or replayed; the step's tensors are as before the call.
            UserInputError: the loss is no scalar that leads to a gradient, torch.autocast is on around the trainer, or averages stand in
                the model. Such an error of the step's own leaves what its forward has done, as in an ordinary loop.
        """
        with _TURN:
            return self._step(batch, audited)

    def _step(self, batch: Batch, audited: bool) -> Tensor:
        if self.step.averages is not None:
            self.step.averages.refuse_applied("Trainer.train_step")
        session = self.step.session
        if session is not None and session.last is not EventType.BATCH_START:  # a step that was refused may be tried again
            session.send(EventType.BATCH_START)
        if self.schedule is not None:
            self.schedule.set(self.num_steps)
        bare = [parameter for parameter in self.step.trained if parameter.grad is None]
        self.step.allocate_gradients()
        self.step.ranks.meet(self._settings)
        try:
            loss = self._planned(batch, audited)
        except ReplayError:
            for parameter in bare:
                parameter.grad = None
            raise
        if session is not None:
            session.send(EventType.BATCH_END)
        self.num_steps += 1
        return loss

    @checked(
        batch_at=Kind(callable, "a function from the number of a step to its batch, such as batches.__getitem__ of a list"),
        num_steps=WHOLE,
        each=FUNCTION,
    )
    def fit(self, batch_at: Callable[[int], Batch], num_steps: int, *, each: Callable[[int, Tensor], None] | None = None) -> list[float]:
        """Train until `num_steps` steps have been made, counting those before; so a resumed trainer goes on where it stood.

        The last step is audited, so that nothing that the audit would find is left behind.

        Args:
            batch_at: gives the batch of a step by its number, from 0.
            num_steps: where to stop.
            each: called after each step with its number and its loss: to evaluate, to save, to log.

        Returns:
            The losses of the steps made here.

        Raises:
            UserInputError: `batch_at` cannot be called, or `num_steps` is no number of steps.
        """
        if num_steps < 0:
            raise UserInputError(f"fit: num_steps={num_steps} is no number of steps; give a whole number of 0 or more")
        losses: list[float] = []
        with self._progress.task("train", max(num_steps, self.num_steps)) as task:
            if self.num_steps:
                task.advance(self.num_steps)
            seconds, tokens = 0.0, 0
            while self.num_steps < num_steps:
                number, begin = self.num_steps, time.monotonic()
                batch = batch_at(number)
                loss = self.train_step(batch, audited=number + 1 == num_steps)
                losses.append(loss.item())
                seconds += time.monotonic() - begin
                tokens += num_tokens(batch)
                rate = self.step.optimizer.param_groups[0].get("lr")
                shown = "" if rate is None else f" lr {float(rate):.1e}"
                speed = tokens / max(seconds, 1e-9)
                task.advance(1, f"loss {losses[-1]:.3f}{shown} {speed:,.0f} tokens/s {self.last_action}")
                if each is not None:
                    each(number, loss)
        return losses

    @checked(
        batches=Kind(
            lambda value: isinstance(value, Iterable) and not isinstance(value, str | Mapping) and getattr(value, "ndim", 1) > 0,
            "a list of batches",
        ),
        weights=Kind(lambda value: NUMBERS.holds(value) or getattr(value, "ndim", 0) == 1, "a list of numbers"),
    )
    def evaluate(self, batches: Iterable[Batch], weights: Sequence[float] | None = None) -> float:
        """Compute the mean loss in eval mode, without a trace: training flags, buffers, and the random generators of torch, Python and
        numpy and those that the step holds are as before.

        Args:
            batches: micro-batches, as `loss_fn` takes them.
            weights: what each of them counts, such as its number of targets; None: all the same.

        Returns:
            The mean of their losses.

        Raises:
            UserInputError: no batch was given, not one weight for each, a weight below 0 or without end, or weights that add up to nothing.
        """
        with _TURN:
            losses = self._evaluated(batches)
        if not losses:
            raise UserInputError("evaluate: no batch was given; give at least one")
        if weights is None:
            return torch.stack(losses).mean().item()
        if len(weights) != len(losses):
            raise UserInputError(f"evaluate: {len(weights)} weights were given for {len(losses)} batches; give one for each")
        shares = torch.tensor(weights, dtype=torch.float64, device=losses[0].device)
        if not (shares.sum() > 0 and bool((shares >= 0).all()) and bool(shares.isfinite().all())):
            raise UserInputError(f"evaluate: the weights {list(weights)!r:.60} are no shares; give numbers of 0 or more, not all of them 0")
        return ((torch.stack(losses) * shares).sum() / shares.sum()).item()

    def _evaluated(self, batches: Iterable[Batch]) -> list[Tensor]:
        model = self.step.model
        flags = [(module, module.training) for module in model.modules()]
        with kept_generators(self.step), kept_buffers(self.step), torch.no_grad(), self.step.ranks.apart():
            model.eval()
            try:
                return [self.step.loss_of(batch).double() for batch in batches]
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                raise UserInputError(
                    f"evaluate: the loss asks for gradients ({error}), and an evaluation makes none; compute them under torch.enable_grad()"
                ) from error
            finally:
                for module, training in flags:
                    module.training = training

    def _planned(self, batch: Batch, audited: bool) -> Tensor:
        if self.mode == "eager":
            self.last_action = "eager"
            return self._engine.eager(lambda: self.step(batch)).clone()
        found: list[_KeyRecord] = []
        turn = self.step.ranks.settle(lambda: self._choose(batch, audited, found))
        self.last_action, known = turn.action, found[0]
        known.last = self.num_steps
        loss = self._refusable(turn, known, batch)
        if not self.step.update_is_captured:
            self._engine.eager(lambda: self._finished(loss))
        return loss

    def _finished(self, loss: Tensor) -> Tensor:
        self.step.finish()
        return loss

    def _refusable(self, turn: StepDecision, known: _KeyRecord, batch: Batch) -> Tensor:
        """Perform what a plan holds of a step; where it is refused, all is as before."""
        run = partial(self._perform, known, batch)
        if turn.rehearsed:
            run = partial(self._compared_with_eager, batch, run)
        if not turn.may_be_refused:
            return run()
        before = replace(known)
        try:
            return self._undone_on_error(run)
        except ReplayError:
            known.warmed, known.plan, known.lines = before.warmed, before.plan, before.lines
            raise

    def _choose(self, batch: Batch, audited: bool, found: list[_KeyRecord]) -> StepDecision:
        """Say what is to be done with a batch, after the guards had a look; adds the record of its key to `found`."""
        known = self._record_of((batch_key(batch), self.step.plan_key()))
        found.append(known)
        if known.warmed < self.warmup:
            return StepDecision("warm-up")
        if known.plan is None:
            refuse_early(self.step)
            return StepDecision("capture", rehearsed=known.lines is None, may_be_refused=True)
        proves = self._needs_proof(known, known.plan, batch, audited)
        if proves or self.num_steps % self.check_every == 0:
            known.plan.guard()
        unproven = not (known.proven and known.plan.proven_with_other_batch)
        if not proves:
            return StepDecision("replay", unproven=unproven)
        refuse_early(self.step)
        return StepDecision("audit" if known.proven else "prove", unproven=unproven)

    def _perform(self, known: _KeyRecord, batch: Batch) -> Tensor:
        if self.last_action in ("warm-up", "eager"):
            known.warmed += self.last_action == "warm-up"
            return self._engine.eager(lambda: self.step.ranks.watched(lambda: self.step.captured_part(batch))).clone()
        if self.mode == "capture":
            return self._captured_once(known, batch)
        loss, plan = self._replayed(known, batch), known.plan
        if plan is not None:
            plan.buffers.take_from(batch)
        return loss

    def _replayed(self, known: _KeyRecord, batch: Batch) -> Tensor:
        if known.plan is None:
            known.plan = Plan(self.step, batch, self._engine)
            if not known.plan.captured.ran_at_capture:
                known.plan.captured.replay()
            return known.plan.captured.loss.clone()
        if self.last_action == "replay":
            known.audits.since += 1
            known.replayed += 1
            return known.plan(batch)
        if self.last_action == "audit" and known.proven and known.plan.proven_with_other_batch:
            return self._audit(known, known.plan, batch)
        loss = prove(known.plan, batch, self._engine)
        known.proven = True
        known.audits.proven(self.num_steps, time.monotonic())
        return loss

    def _audit(self, known: _KeyRecord, plan: Plan, batch: Batch) -> Tensor:
        begin = time.monotonic()
        try:
            loss = audit(plan, batch, self._engine)
        except (ProofError, SignatureDriftError, GuardDriftError) as error:
            self.agreed_steps = known.audits.agreed + 1
            raise type(error)(f"{error}\n{known.audits.doubt(self.num_steps)}") from error
        known.audits.audited(self.num_steps, begin, time.monotonic())
        return loss

    def _record_of(self, key: _PlanKey) -> _KeyRecord:
        if key not in self._keys and len(self._keys) >= self.max_plans:
            constants = ", ".join(f"batch{path}" for path in varying_constants(key[0], [other[0] for other in self._keys]))
            advice = (
                f"make a tensor of {constants}, whose Python value changes, or leave out what the step does not read"
                if constants
                else "pad batches to few shapes"
            )
            raise PlanStormError(
                f"step {self.num_steps}: {key} would be plan key {len(self._keys) + 1}, and max_plans={self.max_plans}; "
                f"{advice}, and keep step numbers out of plan_key()"
            )
        return self._keys.setdefault(key, _KeyRecord(self.num_steps, audits=Audits(self.audit_every)))

    def _needs_proof(self, known: _KeyRecord, plan: Plan, batch: Batch, audited: bool) -> bool:
        if not known.proven or known.audits.is_due() or (audited and self.audit_every != 0):
            return True
        # A first proof on the captured batch says less; it is made up for as soon as another batch comes.
        return not plan.proven_with_other_batch and not plan.buffers.holds(batch)

    def _captured_once(self, known: _KeyRecord, batch: Batch) -> Tensor:
        """Run one step under the recorder, and hold its signature against the first of the key."""
        python = PythonValues()
        buffers = InputBuffers(batch)
        captured = record(self.step, buffers, self._engine, python)
        if not captured.ran_at_capture:
            captured.replay()
        moved = None if known.lines is None else drift(known.lines, captured.lines)
        if moved is not None:
            raise SignatureDriftError(f"step {self.num_steps} is another one than the first with its plan key: {moved}")
        if known.python is not None:
            known.python.refuse_moved(python)
        known.lines, known.python = captured.lines, known.python or python
        buffers.take_from(batch)
        return captured.loss.clone()

    def _compared_with_eager(self, batch: Batch, run: Callable[[], Tensor]) -> Tensor:
        """Run a step, and refuse it where the eager one leads elsewhere: being watched must not change what is watched."""
        generators = own_generators(self.step)
        eager = eager_end(self.step, batch, self._engine, generators)
        loss = run()
        compare_recorded(eager, Snapshot.take(self.step, generators, loss))
        return loss

    def _undone_on_error(self, run: Callable[[], T]) -> T:
        generators = own_generators(self.step)
        start, python = Snapshot.take(self.step, generators), PythonState(self.step)
        try:
            return self.step.ranks.together(run)
        except ReplayError:
            python.put_back()
            start.put_back(self.step, generators)
            raise
