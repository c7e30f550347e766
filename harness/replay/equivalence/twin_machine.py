"""A state machine over a training run: whatever happens between steps, a replaying trainer stays bit for bit beside its eager twin.

Both live through the same: steps of several shapes, weights edited in place or replaced, hooks that come and go, rates, flags of training,
evaluations, a resume from a file. After every rule all state is equal; or the replaying trainer has refused a step with one of its named
errors, its state was as before the call, and it goes on after `forget_plans()`.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from compressor.errors import ReplayError, UserInputError
from compressor.random_state import RandomState, foreign_random
from compressor.training import Trainer, load_training, save_training
from harness.replay.equivalence.run import Factory, Plot
from harness.replay.equivalence.training_state import differing_names, state_of

# What may happen to a training run between two steps: the things that a state machine does to both twins.


@dataclass(frozen=True)
class Change:
    """One thing that may happen.

    Attributes:
        name: for counts.
        act: does it to a trainer, given two small numbers that choose where and how.
        survives_resume: a fresh instance that loads the stored state is as if it had happened to it.
    """

    name: str
    act: Callable[[Trainer, int, int], object]
    survives_resume: bool = False

    def __repr__(self) -> str:
        """Name it, for examples that Hypothesis prints."""
        return self.name


def _edit(trainer: Trainer, which: int, way: int) -> None:
    tensors = [tensor for tensor in trainer.step.tensors().values() if tensor.is_floating_point()]
    with torch.no_grad():
        _chosen(tensors, which).mul_((0.5, 1.0, -1.0)[way])


def _assign_data(trainer: Trainer, which: int, way: int) -> None:
    _, parameter = _chosen(list(trainer.step.model.named_parameters()), which)
    parameter.data = parameter.data.clone()


def _replace(trainer: Trainer, which: int, way: int) -> None:
    name, parameter = _chosen(list(trainer.step.model.named_parameters()), which)
    owner, _, key = name.rpartition(".")
    setattr(trainer.step.model.get_submodule(owner), key, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def _hook(trainer: Trainer, which: int, way: int) -> None:
    factor = (2.0, 0.5, 1.0)[way]
    leaves = [module for module in trainer.step.model.modules() if not list(module.children())]
    _chosen(leaves, which).register_forward_hook(lambda module, args, out: _scaled(out, factor))


def _unhook(trainer: Trainer, which: int, way: int) -> None:
    for module in trainer.step.model.modules():
        if module._forward_hooks:
            module._forward_hooks.popitem()
            return


def _rate_in_place(trainer: Trainer, which: int, way: int) -> None:
    for group in trainer.step.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_((1e-3, 1e-2, 0.0)[way])


def _rate_as_number(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.param_groups[0]["lr"] = (1e-3, 1e-2, 1e-4)[way]


def _decay(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.param_groups[0]["weight_decay"] = (0.0, 0.1, 0.2)[way]


def _training(trainer: Trainer, which: int, way: int) -> None:
    _chosen(list(trainer.step.model.modules()), which).train(way > 0)


def _number_of_module(trainer: Trainer, which: int, way: int) -> None:
    """Another rate of a dropout, another eps of a norm."""
    numbered = [module for module in trainer.step.model.modules() if isinstance(getattr(module, "p", getattr(module, "eps", None)), float)]
    if numbered:
        module: Any = _chosen(numbered, which)
        setattr(module, "p" if hasattr(module, "p") else "eps", (0.1, 0.2, 0.5)[way])


def _freeze(trainer: Trainer, which: int, way: int) -> None:
    """The first parameter stays as it is, so that something is trained."""
    parameters = list(trainer.step.model.parameters())[1:]
    if parameters:
        parameter = _chosen(parameters, which)
        parameter.requires_grad_(not parameter.requires_grad)


def _zero(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.zero_grad(set_to_none=way > 0)


def _reload(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.load_state_dict(trainer.step.optimizer.state_dict())


def _load_weights(trainer: Trainer, which: int, way: int) -> None:
    state = {key: value.detach().clone() for key, value in trainer.step.model.state_dict().items()}
    trainer.step.model.load_state_dict(state, assign=way > 1)


def _forget(trainer: Trainer, which: int, way: int) -> None:
    if which % 4 == 0:  # seldom, or nothing would ever be replayed
        trainer.forget_plans()


CHANGES: Sequence[Change] = (
    Change("edit in place", _edit, True),
    Change("assign data", _assign_data, True),
    Change("replace a parameter", _replace),
    Change("add a hook", _hook),
    Change("remove a hook", _unhook),
    Change("set a rate in place", _rate_in_place, True),
    Change("set a rate to a number", _rate_as_number),
    Change("set the decay", _decay, True),
    Change("train or eval", _training),
    Change("set a number of a module", _number_of_module),
    Change("freeze or thaw", _freeze),
    Change("zero gradients", _zero, True),
    Change("reload the optimizer", _reload, True),
    Change("load weights", _load_weights),
    Change("forget plans", _forget, True),
)


def _chosen(items: Sequence[Any], which: int) -> Any:
    return items[which % len(items)]


def _scaled(out: Any, factor: float) -> Any:
    return out * factor if isinstance(out, Tensor) and out.is_floating_point() else out


MakeBatch = Callable[[int], Any]
_SEED = 11


@dataclass
class World:
    """One of the twins, with random generators of its own.

    Attributes:
        trainer: of the run.
        generators: states of torch's, Python's and numpy's, while the other twin is at work.
    """

    trainer: Trainer
    generators: RandomState

    @classmethod
    def open(cls, factory: Factory, mode: str) -> World:
        """Make a twin from the seed."""
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        trainer, _ = Plot(factory, [], 0).open(mode)
        return cls(trainer, RandomState.current(foreign=True))

    @contextmanager
    def entered(self) -> Iterator[Trainer]:
        """Let this twin's generators stand in the place of the process's while it is at work."""
        self.generators.restore()
        try:
            yield self.trainer
        finally:
            self.generators = RandomState.current(foreign=True)

    def digests(self) -> dict[str, str]:
        """Return a text per part of the state."""
        with self.entered() as trainer:
            return state_of(trainer.step).digests()


@dataclass
class Seen:
    """What all examples together came to see, so that a machine that never replayed is not taken for a proof.

    Attributes:
        actions: steps by what the replaying trainer did.
        refusals: by the name of the error.
        rules: how often each was followed.
    """

    actions: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)


class ReplayMachine(RuleBasedStateMachine):
    """Twins of one step, one eager and one replaying."""

    factory: ClassVar[Factory]
    batches: ClassVar[Sequence[MakeBatch]]
    seen: ClassVar[Seen]

    @initialize()
    def open(self) -> None:
        """Make the twins."""
        self._caller = RandomState.current(foreign=True)
        self.eager, self.replay = (World.open(type(self).factory, mode) for mode in ("eager", "replay"))
        self.number, self.is_plain, self.is_over = 0, True, False

    @rule(kind=st.integers(0, 3), count=st.integers(1, 8))
    def train(self, kind: int, count: int) -> None:
        """Make some steps with batches of one kind."""
        for _ in range(count if not self.is_over else 0):
            batch_at = self.batches[kind % len(self.batches)]
            self._step(batch_at(self.number), batch_at(self.number))
            self.number += 1
            if self.is_over:
                return

    @rule(kind=st.sampled_from(CHANGES), which=st.integers(0, 20), way=st.integers(0, 2), kind_of_batch=st.integers(0, 3))
    def change(self, kind: Change, which: int, way: int, kind_of_batch: int) -> None:
        """Let the same happen to both, and make a step."""
        if self.is_over:
            return
        self.seen.rules[kind.name] += 1
        self.is_plain = self.is_plain and kind.survives_resume
        for world in (self.eager, self.replay):
            with world.entered() as trainer:
                kind.act(trainer, which, way)
        self.train(kind_of_batch, 1)

    @rule(count=st.integers(1, 3))
    def evaluate(self, count: int) -> None:
        """Evaluate and draw random numbers between steps, as data loaders do."""
        for world in (self.eager, self.replay):
            with world.entered() as trainer:
                trainer.evaluate([self.batches[0](1000 + number) for number in range(count)])
                torch.rand(count), random.random(), np.random.rand()

    @precondition(lambda self: self.is_plain and self.number > 0 and not self.is_over)
    @rule()
    def resume(self) -> None:
        """Save both, and go on with fresh trainers that load what was saved."""
        self.seen.rules["resume"] += 1
        for name, world in (("eager", self.eager), ("replay", self.replay)):
            with tempfile.TemporaryDirectory() as folder:
                with world.entered() as trainer:
                    save_training(trainer, Path(folder) / "state.safetensors")
                    numpy_state = foreign_random().numpy
                fresh = World.open(type(self).factory, name)
                with fresh.entered() as trainer:
                    load_training(trainer, Path(folder) / "state.safetensors")
                    foreign_random()._replace(numpy=numpy_state).restore()  # numpy's is not part of a stored state
            setattr(self, name, fresh)

    @invariant()
    def twins_are_equal(self) -> None:
        """Compare all state, bit for bit."""
        if hasattr(self, "eager") and not self.is_over:
            names = differing_names(self.eager.digests(), self.replay.digests())
            _hold(not names, f"after step {self.number}: {', '.join(names[:5])} of the replaying twin is not that of the eager one")

    def teardown(self) -> None:
        """Give the generators back to the process."""
        if hasattr(self, "_caller"):
            self._caller.restore()

    def _step(self, batch: Any, same_batch: Any) -> None:
        """One step of both; the batch is made twice, so that none can change that of the other."""
        try:
            with self.eager.entered() as trainer:
                expected = trainer.train_step(batch)
        except Exception:  # noqa: BLE001 - what eager cannot do, replay need not; the example is over
            self.is_over = True
            self.seen.rules["eager cannot"] += 1
            return
        before = self.replay.digests()
        try:
            with self.replay.entered() as trainer:
                loss = trainer.train_step(same_batch)
        except ReplayError as error:
            loss = self._refused(error, before, same_batch)
        self.seen.actions[self.replay.trainer.last_action] += 1
        is_same = torch.equal(loss, expected) or bool(loss.isnan() & expected.isnan())
        _hold(is_same, f"step {self.number}: loss {loss} and not {expected}")

    def _refused(self, error: ReplayError, before: dict[str, str], batch: Any) -> Tensor:
        self.seen.refusals[type(error).__name__] += 1
        after = self.replay.digests()
        changed = [name for name in before if after.get(name) != before[name] and not name.startswith("modifier")]
        # What drops gradients is followed by a call that allocates them anew, before anything is refused.
        changed = [name for name in changed if not name.startswith("grad:")]
        _hold(not changed, f"step {self.number}: {type(error).__name__} left {', '.join(changed[:5])}: {error}")
        with self.replay.entered() as trainer:
            trainer.forget_plans()
            return trainer.train_step(batch)


def replay_machine(factory: Factory, *batches: MakeBatch) -> type[ReplayMachine]:
    """Return a machine over one's own training step, for `run_state_machine_as_test` or `.TestCase`.

    Args:
        factory: as for `assert_equivalent`; the mode of what it makes is set anew.
        *batches: each makes the batch of a step by its number; several of them for several shapes.

    Returns:
        The machine; its `seen` counts what all examples came to see.

    Raises:
        UserInputError: no function for batches, or something that is none.
    """
    given: Sequence[object] = batches
    wrong = next((type(one).__name__ for one in given if not callable(one)), "" if batches else "nothing")
    if wrong:
        raise UserInputError(f"replay_machine: {wrong} was given for batches; give functions from a step's number to its batch")
    members = {"factory": staticmethod(factory), "batches": batches, "seen": Seen()}
    return type("ReplayMachine", (ReplayMachine,), members)


def _hold(is_right: bool, text: str) -> None:
    """As `assert`, which `python -O` leaves out."""
    if not is_right:
        raise AssertionError(text)
