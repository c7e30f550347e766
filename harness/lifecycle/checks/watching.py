"""A check of what hooks do to a forward: they watch it. Everybody but the modifier sees and gets what there would be without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import leading_tensor
from compressor.lifecycle import State
from compressor.random_state import RandomState, random_numbers_kept
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.compare import Violation, describe
from harness.lifecycle.driving.oracle_run import CheckedRun, causes, list_differences
from harness.lifecycle.driving.probes import masked_batch, tiny_batches
from harness.lifecycle.driving.snapshot import Difference, Snapshot, freeze, num_hooks
from harness.lifecycle.forwards import Batch, call, gradients, token_mask
from harness.lifecycle.subject import Subject, begin_random_numbers
from harness.lifecycle.witness import Witness, flowing, strides

# A hook may wait for its second call, or for its fifth: these many batches, in evaluation and in training mode.
LEAST_BATCHES = 4
# Bytes within which the place of a tensor decides how it is read.
_ALIGNMENT = 64
# What a modifier keeps for itself and in the shared state of the run.
_ITS_OWN = ("state", "settings", "session")
# What it holds of the batch that runs, for all modifiers alike.
_OF_THE_STATE = ("token_mask", "batch_index", "batch_shape", "sample_parts", "base_stream", "seed")
_ADVICE = "hooks watch, and return None; change values in copies, or declare 'changes_forward'"


@dataclass(frozen=True)
class _Case:
    """A batch and the mode in which the model gets it."""

    number: int
    batch: Batch
    training: bool
    is_base: bool = False

    def __str__(self) -> str:
        base = ", in the base stream" if self.is_base else ""
        return f"batch {self.number}, in {'training' if self.training else 'evaluation'} mode{base}"


@dataclass(frozen=True)
class _Forward:
    """What one forward shows to everybody but the modifier: values by their places, in order, and what is not as it was before it."""

    values: list[tuple[str, object]]
    changes: list[Difference]
    reaching: list[Tensor | None]


def _are_near(due: Sequence[Tensor | None], came: Sequence[Tensor | None]) -> bool:
    """Whether gradients are the same but for a few roundings: behind a backward hook, even an idle one, torch adds in another order."""
    return len(due) == len(came) and all(map(_is_near, due, came))


def _is_near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    eps, dense, also = torch.finfo(one.dtype).eps, *(grad.detach().to_dense().double() for grad in (one, other))
    largest = float(dense.abs().nan_to_num(nan=0.0, posinf=0.0).amax()) if dense.numel() else 0.0
    return torch.allclose(dense, also, rtol=0.0, atol=16 * eps * largest, equal_nan=True)


class _Watch:
    """Runs forwards of one run with hooks awake and asleep, and compares them.

    Args:
        subject: what is verified.
        model: of the run that will be opened; the caller's own hooks are hung up on it.
    """

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        self._subject = subject
        others: list[Batch] = [masked_batch(), tiny_batches(1)[0][:1]] if subject.is_tiny else []
        batches = [*subject.batches, *others]
        some = list(islice(cycle(batches), max(LEAST_BATCHES, len(batches))))
        # Where random numbers may be drawn, those of the model's own training mode cannot be held against one another.
        modes = (False,) if "random" in subject.tags else (False, True)
        streams = (True, False) if subject.template.base_stream != "unused" and not subject.trains else (False,)
        self._cases = [
            _Case(number + 1, batch, training, is_base) for training in modes for number, batch in enumerate(some) for is_base in streams
        ]
        self._callers: list[nn.Module] = []
        self._own = set(model.modules())
        self._hung: set[object] = set()  # they may have gone over to a module that took the place of another
        for module in self._own:
            for hook in _callers_hooks(self._callers):
                module.register_forward_hook(hook)
                self._hung.add(hook)
        self._begin = self._latest = Snapshot(model)
        self._layout = _layout(model)
        self._original = [self._forward(State(model), model, one, nullcontext()) for one in self._cases]
        self._turn = 0

    def compare(self, checked: CheckedRun, state: State) -> int:
        """Hold forwards with the hooks awake against the same with the hooks asleep, or before the run where nothing was changed since.

        Args:
            checked: the run.
            state: of the run; while a forward runs, it holds the mask of the batch.

        Returns:
            The number of forwards.

        Raises:
            Violation: a hook has changed something.
        """
        run, now = checked.run, Snapshot(checked.run.model)
        is_as_at_first = not [one for one in self._begin.differences(now) if one.kind in ("module", "tensor", "requires_grad")]
        # Sums may be added up in another order where the same values lie in another way.
        is_as_at_first = is_as_at_first and self._layout == _layout(run.model)
        cases = list(enumerate(self._cases))
        if not self._latest.differences(now):  # the same hooks as before: what they do may depend on what has come since
            self._turn += 1
            cases = [cases[self._turn % len(cases)]] if self._begin.differences(now) else []
        self._latest = now
        for number, case in cases:
            where = f"after {checked.oracle.last}, {case}"
            due = self._original[number] if is_as_at_first else self._forward(state, run.model, case, run.hooks_disabled(None))
            try:
                came = self._forward(state, run.model, case, nullcontext())
            except Violation:
                raise
            except Exception as error:  # hooks are their author's, and raise what they like
                raise Violation("hooks", f"{where}: with its hooks the forward raised {describe(error)}", [describe(error)]) from error
            self._hold(where, due, came)
        checked.look_again()
        return len(cases)

    def _hold(self, where: str, due: _Forward, came: _Forward) -> None:
        allowed = {*_ITS_OWN, *self._subject.allowed}
        changes = [one for one in came.changes if one not in due.changes and allowed.isdisjoint((one.kind, (one.kind, one.where)))]
        if changes:
            text = f"{where}: with its hooks a forward changed {list_differences(changes)}"
            raise Violation("hooks", text, causes(changes))
        for (place, one), (other_place, other) in zip(due.values, came.values, strict=False):
            if place != other_place or one != other:
                raise Violation("hooks", f"{where}: with its hooks {other_place} is not what it is without; {_ADVICE}", [other_place])
        if not _are_near(due.reaching, came.reaching):
            where_reached = "what gradients reach the parameters"
            raise Violation("hooks", f"{where}: with its hooks {where_reached} is not what it is without; {_ADVICE}", [where_reached])
        if len(due.values) != len(came.values):
            raise Violation("hooks", f"{where}: with its hooks other modules are called than without; {_ADVICE}", ["other modules"])

    def _forward(self, state: State, model: nn.Module, case: _Case, sleep: AbstractContextManager[None]) -> _Forward:
        witness, batch = Witness(model), copy.deepcopy(case.batch)
        self._callers.clear()
        reaching: list[Any] = []
        with_gradients = self._subject.trains or case.number % 2 == 0  # where another modifier trains, a calibration meets both
        with sleep, _kept(model, case.training), _running(state, case), random_numbers_kept(), torch.set_grad_enabled(with_gradients):
            begin_random_numbers()
            if case.number % 4 == 3:
                _accumulate(model)
            before = Snapshot(model, {"batch": _of_the_state(state)})
            output = witness.run(lambda: call(model, batch))
            after = Snapshot(model, {"batch": _of_the_state(state)})
            if self._subject.trains:
                reaching = gradients(model, output)
            tensors = freeze(dict(model.state_dict()))
            drawn = [] if "random" in self._subject.tags else [freeze([*RandomState.current(foreign=False).by_device.values()])]
        self._hold_callers(model, witness)
        values = [*witness.seen, ("what the model returns", flowing(output)), ("the caller's batch", flowing(batch))]
        values += [("the model's state dict", tensors), ("what the caller draws next", drawn)]
        return _Forward(values, before.differences(after), reaching)

    def _hold_callers(self, model: nn.Module, witness: Witness) -> None:
        """The hooks that the caller hung up before the run have run at every module, in their order."""
        hung = self._hung
        called = [one for one in witness.called if one in self._own or not hung.isdisjoint(one._forward_hooks.values())]
        if self._callers != [module for module in called for _ in range(2)]:
            raise Violation("hooks", "hooks that were on the model before the run do not run any more, or in another order", ["hooks"])


@register(
    "hooks_watch",
    "Hooks only watch: with them a forward gives what it gives without, and changes nothing",
    number=50,
    tags=("changes_forward",),
    in_training=True,
    in_modes=True,
)
def hooks_watch(subject: Subject) -> str:
    """Run forwards at every point of a whole life, and hold what flows against forwards without the modifier.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    model = copy.deepcopy(subject.model)
    watch = _Watch(subject, model)
    run = subject.open(model=model)
    checked = subject.check(run)
    num_forwards, num_callers = 0, num_hooks(run.model)
    for moment, names in subject.life():
        if subject.go(checked, run, moment, names).kind == "failed":
            break
        # Most of its forwards were compared in a calibration: in batches those are where it has hung up a hook.
        if not subject.trains_beside_calibration or num_hooks(run.model) > num_callers:
            num_forwards += watch.compare(checked, run.state)
    checked.close()
    return f"{num_forwards} forwards"


def _callers_hooks(called: list[nn.Module]) -> tuple[Callable[..., None], ...]:
    """Two hooks of the caller; functions, so that a modifier can copy a module that carries them."""

    def first(module: nn.Module, *values: object) -> None:
        called.append(module)

    def second(module: nn.Module, *values: object) -> None:
        if called and called[-1] is module:
            called.append(module)

    return first, second


@contextmanager
def _running(state: State, case: _Case) -> Iterator[None]:
    """Show modifiers the mask of a batch while it runs, and in a calibration its number, shape and stream."""
    kept, batch = {name: getattr(state, name) for name in _OF_THE_STATE}, case.batch
    if state.data is not None:
        state.batch_index, state.base_stream = case.number - 1, case.is_base
        state.batch_shape = tuple(leading_tensor(batch if isinstance(batch, dict | tuple) else (batch,)).shape[:2])
        state.sample_parts = (0,) * state.batch_shape[0]
    if (mask := token_mask(batch)) is not None:
        state.token_mask = mask
    try:
        yield
    finally:
        vars(state).update(kept)


def _of_the_state(state: State) -> dict[str, object]:
    return {f"state.{name}": getattr(state, name) for name in _OF_THE_STATE}


@contextmanager
def _kept(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model into a mode, and put its modes, tensors and gradients back afterwards."""
    gradients_before = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    held: list[dict[str, Any]] = [own for module in model.modules() for own in (module._parameters, module._buffers)]
    tensors = [(own, dict(own), _copies(own.values())) for own in held]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients_before:
            parameter.grad = gradient
        for own, before, copies in tensors:
            own.update(before)
            for tensor, value in zip(before.values(), copies, strict=True):
                # One number that is spread over a whole tensor cannot be copied into.
                if tensor is not None and value is not None and not (0 in strides(tensor) and torch.equal(tensor, value)):
                    tensor.data.copy_(value)


def _accumulate(model: nn.Module) -> None:
    """Give the parameters gradients, as those of earlier forwards are that add up. Changes the model."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.layout is torch.strided:
            parameter.grad = torch.full_like(parameter, 0.5)


def _layout(model: nn.Module) -> list[tuple[object, ...]]:
    """How the values of a model lie in memory."""
    own = {id(tensor): tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())}
    return [_place(tensor) for tensor in own.values() if tensor is not None]


def _place(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return (tensor.layout,)
    return tensor.stride(), tensor.data_ptr() % _ALIGNMENT


def _copies(tensors: Any) -> Sequence[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]
