"""A run with the oracle beside it: every call goes to both, and everything that can be seen is compared after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from compressor.errors import CompressorError
from compressor.random_state import random_numbers_kept
from harness.lifecycle.driving.callback_recorder import Acts, Entry
from harness.lifecycle.driving.compare import CLAUSES, CallResult, Clause, Violation, describe, judge_error, replay, show
from harness.lifecycle.driving.driver import ActingRun, Run
from harness.lifecycle.driving.probes import CHAIN_PARTS
from harness.lifecycle.driving.shared_code import SharedCode
from harness.lifecycle.driving.snapshot import Allowed, Difference, Snapshot, num_hooks
from harness.lifecycle.driving.time_limit import TimeLimitError
from harness.lifecycle.oracle import ModifierModel, Script, SessionModel, refuse

# What has to be true of the model itself: what a run may leave behind, and which hooks a forward runs in which order.

# What a run may leave behind once it is over: replaced modules and other weights; what modifiers share is no part of the model.
MAY_STAY = ("module", "tensor", "grad", "state", "settings", "session")


# What its author can do about a difference, by kind.
REMEDIES = {
    "settings": "fields are settings, which a recipe writes; keep state under a private name, as self._seen",
    "batch": "others read it, too; hooks watch, and change values in copies",
    "rng": "draw from a torch.Generator of your own, or declare 'random'",
    "attribute": "take it back when the calibration ends, or declare 'annotates'",
    "class": "keep state on the object, under a private name, as self._seen",
    "hooks": "make hooks with self.register_hook, which takes them away again",
}


def causes(differences: Sequence[Difference]) -> list[str]:
    """Return what lies behind differences: the kinds and places, where a module that was added stands for all that came with it."""
    return list(dict.fromkeys("hooks" if one.kind == "hooks" else f"{one.kind} {one.where}" for one in outermost(differences)))


def outermost(differences: Sequence[Difference]) -> list[Difference]:
    """Return differences without those that a module or tensor has brought along that came or went itself."""
    moved = [one for one in differences if one.text.startswith(("appeared", "vanished"))]
    modules = tuple(f"{one.where}." for one in moved if one.kind == "module")
    tensors = {one.where for one in moved if one.kind == "tensor"}

    def is_brought(one: Difference) -> bool:
        return (bool(modules) and one.where.startswith(modules)) or (one.kind in ("requires_grad", "grad") and one.where in tensors)

    names = {name[:-1] for name in modules}
    return [one for one in differences if not is_brought(one) and not (one.kind == "training" and one.where in names)]


def leftovers(start: Snapshot, end: Snapshot, allowed: Collection[Allowed] = ()) -> list[Difference]:
    """Return what a run left behind on modules that it did not replace.

    Args:
        start: before the run.
        end: after it.
        allowed: kinds of differences that are no violation, and single ones by kind and name.

    Returns:
        The differences; weights and replaced modules are none.
    """
    changed = outermost(start.differences(end, allowed))
    replaced = replaced_modules(changed)
    found = [difference for difference in changed if difference.kind not in MAY_STAY or is_added(difference)]
    found = [one for one in found if not (is_added(one) and "attribute" in allowed)]
    return [one for one in found if not any(one.where == name or one.where.startswith(f"{name}.") for name in replaced)]


def is_added(difference: Difference) -> bool:
    """Say whether a module or tensor has come where none was: replacing one is a modifier's work, adding one leaves something behind."""
    return difference.kind in ("module", "tensor") and difference.text.startswith("appeared")


def replaced_modules(differences: Sequence[Difference]) -> list[str]:
    """Return the names of modules in whose place another one stands."""
    return [one.where for one in differences if one.kind == "module" and one.text.startswith("changed")]


def fire_order(
    modifiers: Sequence[ModifierModel], world: Mapping[str, str], sleeps: Callable[[int], bool], fails: bool = False
) -> list[str]:
    """Return the hooks that one forward of the chain has to run, in torch's order: by module, pre-hooks first, as registered.

    Args:
        modifiers: the models, whose hooks are named `modifier.serial kind module@token`.
        world: what stands where.
        sleeps: says whether the hooks of a modifier sleep.
        fails: the forward of the first layer raises: after it only hooks with always_call run.

    Returns:
        Names of hooks.
    """
    live = [hook for model in modifiers if not sleeps(model.number) for hook in model.hooks if lives(hook, world)]

    def place(hook: str) -> tuple[int, bool, int]:
        serial, kind, where = hook.split(" ")
        return CHAIN_PARTS.index(where.split("@")[0]), not _is_pre(kind), int(serial.split(".")[1])

    if fails:
        live = [hook for hook in live if place(hook)[0] == 0 and (_is_pre(hook.split(" ")[1]) or "+always" in hook)]
    return sorted(live, key=place)


def _is_pre(kind: str) -> bool:
    return kind.startswith("forward_pre")


def lives(hook: str, world: Mapping[str, str]) -> bool:
    """Say whether the module that carries a hook stands in the model."""
    module, _, token = hook.split(" ")[2].partition("@")
    return world.get(module, "original") == token


def list_differences(differences: Sequence[object], limit: int = 4) -> str:
    """Return the first few differences in one line, and how many more there are."""
    more = f" and {len(differences) - limit} more" if len(differences) > limit else ""
    kinds = dict.fromkeys(one.kind for one in differences[:limit] if isinstance(one, Difference))
    remedies = [REMEDIES[kind] for kind in kinds if kind in REMEDIES]
    return "; ".join([*(str(difference) for difference in differences[:limit])]) + more + "".join(f"; {remedy}" for remedy in remedies)


# What no call may change, whatever the modifiers do.
NEVER = ("rng", "torch", "threads", "class")


class OverError(Exception):
    """The example has come to an end, because a clause that is not looked at was broken."""


class CheckedRun:
    """A run and its oracle.

    Args:
        run: fresh.
        oracle: of the same modifiers, fresh.
        obedient: the modifiers do nothing but what the acts say, so that modules and hooks are compared exactly.
        refusals: exceptions with which a modifier's own code may turn down what it is asked.
        allowed: kinds of differences, and single ones by kind and name, that are no violation on top of what the contract allows.
        clauses: the clauses that count; after a breach of another one the example ends.

    Attributes:
        compares_all: False leaves the model and its surroundings uncompared, for a way that has been gone before.
        on_failure: is told of a call that failed though nothing was planned; it may raise.
        flow: runs the batches before a stage, where moments come at random and a calibration is whole all the same; None where who drives
            sees to it.
        stages: names of modules of each, of such a calibration.
        past: likewise, of those that have come.
    """

    def __init__(
        self,
        run: Run,
        oracle: SessionModel,
        *,
        obedient: bool = True,
        refusals: tuple[type[BaseException], ...] = (CompressorError,),
        allowed: Collection[Allowed] = (),
        clauses: Collection[Clause] = CLAUSES,
    ) -> None:
        self.run = run
        self.oracle = oracle
        self.obedient = obedient
        self.refusals = refusals
        self.allowed = set(allowed)
        self.clauses = clauses
        self.compares_all = True
        self.on_failure: Callable[[CallResult, Sequence[Entry]], None] | None = None
        self.flow: Callable[[tuple[str, ...]], object] | None = None
        self.stages: Sequence[tuple[str, ...]] = ()
        self.past: list[tuple[str, ...]] = []
        self.start = self.now = self._snapshot()
        self._process, self._code = Snapshot.of_process(), SharedCode(run.model.modules(), library=True)
        self._num_hooks_of_others = num_hooks(run.model)
        self._asleep: list[tuple[int | None, AbstractContextManager[None]]] = []

    @property
    def is_over(self) -> bool:
        """True after finalize or abort."""
        return self.oracle.place == "over"

    def initialize(self, acts: Acts | None = None) -> CallResult:
        """Initialize both sides."""
        return self.perform("initialize()", self.run.initialize, self.oracle.initialize(), acts, "INITIALIZE")

    def send(self, event: str, acts: Acts | None = None, has_loss: bool | None = None, modules: tuple[str, ...] = ()) -> CallResult:
        """Send an event to both sides; with a loss where one belongs to it, unless said otherwise."""
        loss = event == "LOSS_CALCULATED" if has_loss is None else has_loss
        if self.flow is not None and self.oracle.allows(event) and loss == (event == "LOSS_CALCULATED"):
            if event == "SEQUENTIAL_EPOCH_END":  # a calibration goes through each once, in their order
                modules = next((stage for stage in self.stages if stage not in self.past), modules)
            self._lead_to(event, self.flow, modules)
        payload = ", with a loss" * loss + f", modules={modules}" * bool(modules)
        script = self.oracle.send(event, loss, modules)
        outcome = self.perform(f"send({event}{payload})", lambda: self.run.send(event, loss, modules), script, acts, event)
        if event == "SEQUENTIAL_EPOCH_END" and outcome.kind == "done":  # one that was refused for its payload has not come
            self.past.append(modules)
        return outcome

    def finalize(self, acts: Acts | None = None) -> CallResult:
        """Finalize both sides."""
        if self.flow is not None and self.oracle.allows("FINALIZE"):
            self._lead_to("FINALIZE", self.flow)
        return self.perform("finalize()", self.run.finalize, self.oracle.finalize(), acts, "FINALIZE")

    def _lead_to(self, moment: str, flow: Callable[[tuple[str, ...]], object], modules: tuple[str, ...] = ()) -> None:
        """Have batches run before a stage, every stage before the end of the calibration, and the calibration before the end of the run."""
        if moment == "SEQUENTIAL_EPOCH_END":
            while self._asleep:  # hooks that sleep see nothing of the batches
                self.exit_disabled(0)
            flow(modules)
        elif moment == "CALIBRATION_END":
            for stage in self.stages:
                if stage not in self.past and not self.is_over:
                    self.send("SEQUENTIAL_EPOCH_END", modules=stage)
        elif moment == "FINALIZE" and not self.oracle.calibrated:
            for event in ("CALIBRATION_START", "CALIBRATION_END"):
                if self.oracle.allows(event):
                    self.send(event)

    def go(self, moment: str, acts: Acts | None = None, modules: tuple[str, ...] = ()) -> CallResult:
        """Go through a moment, whatever it is."""
        if moment == "INITIALIZE":
            return self.initialize(acts)
        if moment == "FINALIZE":
            return self.finalize(acts)
        return self.send(moment, acts, modules=modules if moment == "SEQUENTIAL_EPOCH_END" else ())

    def abort(self) -> CallResult:
        """Abort both sides."""
        return self.perform("abort()", self.run.abort, self.oracle.abort())

    def leave(self, error: BaseException | None) -> CallResult:
        """Leave the `with` block on both sides."""
        how = f"by {type(error).__name__}" if error else "without an exception"
        answers: list[bool | None] = []
        script = self.oracle.leave(error is not None)
        outcome = self.perform(f"leaving the with block {how}", lambda: answers.append(self.run.leave(error)), script)
        if any(answers):
            self._break("errors", f"leaving the with block {how} swallows the exception")
        return outcome

    def call_modifier(self, number: int, method: str) -> None:
        """Call a method of a modifier past the session at a moment when it must refuse and nothing may change."""
        self.perform(f"{method}() of modifier {number}", lambda: self.run.call_modifier(number, method), refuse())

    def act(self, number: int, step: str) -> None:
        """Have one modifier make or remove hooks outside of any callback."""
        assert isinstance(self.run, ActingRun)
        self.oracle.modifiers[number].take(self.run.act(number, step))
        self.now = self._snapshot()
        self._check_world(step)

    def enter_disabled(self, number: int | None) -> None:
        """Put the hooks of one modifier, or of all, to sleep."""
        context = self.run.hooks_disabled(number)
        context.__enter__()
        self._asleep.append((number, context))

    def exit_disabled(self, which: int, error: BaseException | None = None) -> None:
        """Leave one of the entered contexts (`which`, modulo their number), by an exception, which must come through, or without."""
        _, context = self._asleep.pop(which % len(self._asleep))
        swallowed = False
        try:
            swallowed = bool(context.__exit__(type(error) if error else None, error, None))
        except BaseException as caught:
            if caught is not error:
                raise
        if swallowed:
            self._break("hooks", "leaving disable_hooks() swallows an exception")

    @property
    def num_disabled(self) -> int:
        """How many contexts are entered."""
        return len(self._asleep)

    def sleeps(self, number: int) -> bool:
        """Say whether the hooks of a modifier must sleep now."""
        return any(one is None or one == number for one, _ in self._asleep)

    def forward(self, inputs: Callable[[], object], fails: bool = False) -> None:
        """Run the model, whose first layer may be meant to raise, and compare the hooks that fired, their order and arguments."""
        self.run.recorder.begin()
        try:
            with torch.no_grad(), random_numbers_kept():  # a model may draw, as in dropout; hooks_watch sees what hooks draw
                inputs()
        except RuntimeError:
            if not fails:
                raise
        for remark in self.run.recorder.remarks:
            self._break("hooks", remark)
        fired = self.run.recorder.fired
        if woken := [name for name in fired if self.sleeps(int(name.split(".")[0]))]:
            self._break("hooks", f"hooks ran inside disable_hooks: {', '.join(woken)}")
        if self.obedient:
            expected = fire_order(self.oracle.modifiers, self.oracle.world.modules, self.sleeps, fails)
            if fired != expected:
                self._break("hooks", f"a forward should have run the hooks {expected}, and ran {fired}")
        self.look_again()

    def look_again(self) -> None:
        """Take what is now for granted: later calls are compared with it."""
        if self.compares_all:
            self.now = self._snapshot()

    def close(self) -> None:
        """Leave every context, give up what is not over, and look at what is left."""
        while self._asleep:
            self.exit_disabled(0)
        if not self.is_over and self.oracle.last != "CREATE" and "abort" in self.run.features:
            self.abort()

    def perform(
        self, call: str, invoke: Callable[[], object], script: Script, acts: Acts | None = None, moment: str | None = None
    ) -> CallResult:
        """Make a call on both sides, and compare all that can be seen.

        Args:
            call: the call in words.
            invoke: makes it on the run.
            script: the oracle's side of it.
            acts: what callbacks are made to do.
            moment: what the session is asked to go through, for its message of refusal.

        Returns:
            What the oracle says of it.

        Raises:
            Violation: something that the contract forbids.
            OverError: the same, in a clause that is not looked at.
        """
        outcome = self._perform(call, invoke, script, acts, moment)
        if outcome.kind == "failed" and not acts and self.on_failure is not None:
            self.on_failure(outcome, self.run.recorder.entries)
        return outcome

    def _perform(self, call: str, invoke: Callable[[], object], script: Script, acts: Acts | None, moment: str | None) -> CallResult:
        before, recorder, last = self.now, self.run.recorder, self.oracle.last
        recorder.begin(acts)
        error: BaseException | None = None
        answer: object = None
        try:
            answer = invoke()
        except TimeLimitError:
            raise
        except BaseException as caught:  # noqa: BLE001 - the error of the subject is what is judged
            error = caught
        entries = recorder.entries
        for remark in recorder.remarks:
            self._break("state", f"{call}: {remark}")
        with self._counting():
            outcome = replay(call, script, entries)
            judge_error(call, outcome, entries, error, answer)
            self._check_own_errors(entries)
            self._check_standing(call)
            if moment is not None and outcome.kind == "refused":
                self._check_message(call, moment, last, str(error))
        if not self.compares_all:
            return outcome
        self.now = self._snapshot()
        self._check_changes(call, outcome, before)
        if outcome.kind == "failed" and moment == "INITIALIZE":
            self._check_shared(call)
        if self.is_over or (outcome.kind == "failed" and self.oracle.last == "CREATE"):
            self._check_left(call)
        return outcome

    def _check_own_errors(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.error is not None and not entry.planned and not isinstance(entry.error, self.refusals):
                what = describe(entry.error)
                raise Violation("errors", f"{show(entry.seen)} raised {what}", [what]) from entry.error

    def _check_standing(self, call: str) -> None:
        for number, (flags, modifier) in enumerate(zip(self.run.flags(), self.oracle.modifiers, strict=True)):
            if flags != modifier.flags:
                raise Violation("flags", f"{call}: modifier {number} shows {flags}, due are {modifier.flags}")
        if "standing" in self.run.features:
            due = (self.oracle.last, self.oracle.step, float(self.oracle.index_at(self.oracle.step)))
            if self.run.standing() != due:
                raise Violation("flags", f"{call}: the session stands at {self.run.standing()}, due is {due}")

    def _check_message(self, call: str, moment: str, last: str, message: str) -> None:
        """A refusal names what was given; where the order is at fault also what came last and what may come."""
        words = [moment] if self.oracle.allows(moment) else [moment, last, *self.oracle.allowed()]
        if missing := [word for word in words if "messages" in self.run.features and word.lower() not in message.lower()]:
            raise Violation("errors", f"{call}: the message of the refusal does not say {', '.join(missing)}: {message}")

    def _check_changes(self, call: str, outcome: CallResult, before: Snapshot) -> None:
        """Hold the differences between two snapshots against what the call may change."""
        found = before.differences(self.now, self.allowed)
        if outcome.kind == "refused" and found:
            self._break("unchanged", f"{call} was refused, and changed {list_differences(found)}", found)
        if never := [difference for difference in found if difference.kind in NEVER]:
            draws = "".join(f"; {draw}" for draw in self.run.recorder.draws[:1])
            self._break("unchanged", f"{call} changed {list_differences(never)}{draws}", never)
        if self.obedient:
            self._check_world(call)

    def _check_world(self, call: str) -> None:
        world = self.oracle.world.modules
        for name in CHAIN_PARTS:
            token = getattr(self.run.model.get_submodule(name), "token", None)
            due = f"{name}@{world.get(name, 'original')}"
            if token != due:
                self._break("modules", f"{call}: {token} stands in the model, due is {due}")
        num_due = sum(len([hook for hook in model.hooks if lives(hook, world)]) for model in self.oracle.modifiers)
        if num_hooks(self.run.model) != num_due:
            self._break("hooks", f"{call}: {num_hooks(self.run.model)} hooks lie on the model, due are {num_due}")

    def _check_left(self, call: str) -> None:
        """Hold the model of a run that is over against the model before it."""
        if (num_left := num_hooks(self.run.model) - self._num_hooks_of_others) > 0:
            hooks = [one for one in leftovers(self.start, self.now, self.allowed) if one.kind == "hooks"]
            where = f": {list_differences(hooks)}" if hooks else ""
            self._break("left behind", f"{call}: {num_left} hooks are left on the model{where}", hooks)
        process = [*self._process.differences(Snapshot.of_process()), *self._code.differences()]
        if found := [*leftovers(self.start, self.now, self.allowed), *process]:
            self._break("left behind", f"{call}: the run is over, and left {list_differences(found)}", found)

    def _check_shared(self, call: str) -> None:
        """A run that could not begin left nothing in what its modifiers share either, or trying again would go another way."""
        if found := [one for one in self.start.differences(self.now, self.allowed) if one.kind == "state"]:
            self._break("left behind", f"{call}: the run could not begin, and changed {list_differences(found)}", found)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.run.model, self.run.shared())

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Let only violations of the clauses that count through."""
        try:
            yield
        except Violation as violation:
            if violation.clause in self.clauses:
                raise
            raise OverError from violation

    def _break(self, clause: Clause, message: str, found: Sequence[Difference] = ()) -> None:
        with self._counting():
            raise Violation(clause, message, causes(found) if found else ())
