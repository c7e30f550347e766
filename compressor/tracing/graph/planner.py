"""Which recorded graph a batch takes: all of it decided before the first stage.

A batch whose guards hold takes a program that is there. Else the function around the failing guard becomes a leaf, so that the guard
lies inside it, and recording starts over; else the batch gets a program of its own; else the graph engine gives up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, is_tensor, nn

from compressor.data.collate import Batch, batch_to, copied_batch
from compressor.data.layouts import digest as digest_of
from compressor.data.layouts import has_memory, kind_of, shape_of
from compressor.errors import TracingError
from compressor.random_state import RandomState
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.guards import GuardPlan, plan_guards, why_late
from compressor.tracing.graph.nodes import Frame, GuardFailure, Refusal, SwallowedTarget, current_frames, one_line, raised
from compressor.tracing.graph.program import Program, Segment, build_program
from compressor.tracing.graph.recorder import Recorder
from compressor.tracing.graph.replay import run_nodes, run_program
from compressor.tracing.graph.torch_patches import GIVEN, LeafFunction, function_around, noting_values, recording, resolve_leaf
from compressor.tracing.reads import HostReads
from compressor.tracing.targets.out_of_memory import is_out_of_memory
from compressor.tracing.targets.partition import taken_apart
from compressor.tracing.targets.records import Leaf
from compressor.tracing.targets.sample_state import ModuleValues

# Recording one forward: inputs become placeholders, the forward runs once, and the recorder's graph becomes a program.


def record(
    model: nn.Module, batch: Batch, targets: Mapping[str, nn.Module], groups: Mapping[str, int], leaves: Sequence[LeafFunction]
) -> Program:
    """Run the forward of a model once and record it.

    Args:
        model: as it was afterwards.
        batch: on the device of the model; not modified.
        targets: dotted name to module.
        groups: target to the number of the stage it shares.
        leaves: functions to record as one node.

    Returns:
        The program of this batch.

    Raises:
        Refusal: the forward does what a graph cannot repeat.
    """
    batch = copy_batch(batch)
    values, outside = ModuleValues(), RandomState.current(foreign=True)
    with torch.no_grad():
        recorder = Recorder(model, targets)
    reads = HostReads(model, taken_apart(targets), [one.function for one in leaves if one.reason != GIVEN])
    recorder.reads = reads.look
    try:
        given = _bind_inputs(recorder, batch)
        with recording(recorder, leaves, values):
            output = _run(model, given)
            with recorder.builder.opaque():
                recorder.side_effects.check()
                recorder.weights.check()
                encoded = recorder.encoder.encode(output)
            reassigned = {f"{recorder.builder.names.get(id(module), '?')}.{name}".lstrip(".") for module, name in values.noted()}
    finally:
        outside.restore()
        reads.forget()
    program = build_program(model, recorder, encoded, signature_of(batch), groups, reassigned)
    program.reads = reads.first or recorder.left
    program.readers = frozenset(reads.places)
    program.borrowed, program.lent = recorder.weights.borrowed, frozenset(recorder.weights.lent)
    return program


def signature_of(batch: Any) -> Any:
    """Describe what the graph of one batch takes for granted about another.

    Args:
        batch: dict or tuple.

    Returns:
        Names with number of dimensions, dtype and device of each tensor; other values as they are.
    """

    def describe(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return repr(item)
        return (item.ndim, item.dtype, item.device.type, *(() if has_memory(item) else (item.layout, item.is_nested)))

    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return tuple((name, describe(item)) for name, item in items)


def _run(model: nn.Module, batch: Batch) -> Any:
    try:
        return model(*batch) if isinstance(batch, tuple) else model(**batch)
    except TracingError:
        raise
    except Exception as error:  # the model's own code raises what it likes
        if is_out_of_memory(error):
            raise
        # Whatever the forward cannot do with symbolic numbers; a plain forward tells whether the model is to blame.
        raise Refusal(
            f'{raised(error)}; use engine="suspend", or, where code in C is handed a size or .item() value, write int(...) around it',
            current_frames(),
        ) from error


def _bind_inputs(recorder: Recorder, batch: Batch) -> Batch:
    bound: dict[str, Any] = {}
    with recorder.builder.opaque():
        for name, item in named_inputs(batch).items():
            if is_tensor(item):
                node = recorder.builder.emit("placeholder", str(name))
                bound[name] = recorder.binder.bind(node, item)
            else:
                bound[name] = item  # part of the signature
    return bound if isinstance(batch, dict) else tuple(bound.values())


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch for a graph, in which every input has a node of its own.

    Args:
        batch: not modified.

    Returns:
        A copy; a tensor that stands in two places becomes two that look at one memory.
    """
    seen: set[int] = set()

    def apart(item: Any) -> Any:
        if not is_tensor(item) or id(item) not in seen:
            seen.add(id(item))
            return item
        return item.detach()

    copied = copied_batch(batch)
    return {name: apart(item) for name, item in copied.items()} if isinstance(copied, dict) else tuple(map(apart, copied))


def named_inputs(batch: Batch) -> dict[str, Any]:
    """Name the values of a batch as the placeholders of a program do.

    Args:
        batch: dict or tuple.

    Returns:
        Name to value.
    """
    if isinstance(batch, dict):
        return {str(name): item for name, item in batch.items()}
    return {f"arg_{number}": item for number, item in enumerate(batch)}


_MAX_LEAVES = 16  # functions that are made leaves for one model; recording starts over for each


class Variant:
    """A program, with how its guards are decided.

    Attributes:
        index: number of the variant.
        program: the recorded forward.
        guards: how they are decided.
        num_batches: batches that take it, of those that were planned.
    """

    def __init__(self, index: int, program: Program, guards: GuardPlan) -> None:
        """Made by GraphPlanner."""
        self.index = index
        self.program = program
        self.guards = guards
        self.num_batches = 0
        self.sizes: set[Any] = set()  # of the batches that have run through all of it

    @property
    def segments(self) -> list[Segment]:
        """What runs before the first stage, then one segment for each stage; each has a torch.fx `graph`."""
        return self.program.segments


class GraphPlanner:
    """Records programs and gives each batch the one that it takes.

    Attributes:
        variants: recorded so far.
        leaves: functions that are recorded as one node, with the reason.
        num_forwards: forwards that planning has run, recordings and dry runs.
        groups: target to the number of the stage it shares.
        returning: context that puts the model back after a forward.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Module],
        *,
        leaves: Sequence[str | Callable[..., Any]],
        max_variants: int,
        targets_per_stage: int | Literal["input"] = 1,
        device: torch.device | None = None,
    ) -> None:
        """Learn what to record; nothing runs yet."""
        self.variants: list[Variant] = []
        self.functions: list[LeafFunction] = [resolve_leaf(given) for given in leaves]
        self.num_forwards = 0
        self.returning: Callable[[], AbstractContextManager[Footprint | None]] = nullcontext
        self._model, self._targets, self._device = model, targets, device
        self._max_variants, self._per_stage = max_variants, targets_per_stage
        self.groups: dict[str, int] = dict(zip(targets, range(len(targets)), strict=True))
        self._banned: set[str] = set()
        self._chosen: dict[Any, Variant] = {}
        self._origins: list[Batch] = []  # the batches that programs were recorded from, to start over

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Functions that are recorded as one node."""
        return tuple(Leaf(function.label, function.reason) for function in self.functions)

    def choose(self, batches: Sequence[Batch]) -> list[Variant]:
        """Give each batch its variant; records what is missing.

        Args:
            batches: not modified.

        Returns:
            A variant for each batch.

        Raises:
            TracingError: the graph engine cannot follow the model, or there would be too many variants.
        """
        while True:
            chosen = []
            for batch in batches:
                variant = self._choose(batch if self._device is None else batch_to(batch, self._device))
                if variant is None:
                    break  # a new leaf: everything that was recorded is void
                chosen.append(variant)
            else:
                return chosen

    def _choose(self, batch: Batch) -> Variant | None:
        # By shapes where all guards depend on shapes alone, else by content as well.
        key = (signature_of(batch), shapes(batch))
        known = self._chosen.get(key) or self._chosen.get((key, content_digest(batch)))
        if known is not None:
            return known
        reasons: list[str] = []
        failed: list[tuple[GuardFailure, Variant]] = []
        for variant in self.variants:
            try:
                self._check(variant, batch)
            except GuardFailure as failure:
                reasons.append(str(failure))
                failed.append((failure, variant))
            else:
                return self._remember(key, batch, variant)
        # A function made one node serves both batches; another program costs a recording, a proof and memory.
        if any(self._absorb(failed_guard, tried) for failed_guard, tried in failed):
            return None
        if len(self.variants) >= self._max_variants:
            raise TracingError(
                f"{reasons[-1]}; {self._max_variants} recorded graphs do not cover the batches; raise max_variants, name a leaf around "
                'this line, or use engine="suspend"'
            )
        made = self._record(batch)
        return None if made is None else self._remember(key, batch, made)

    def _remember(self, key: Any, batch: Batch, variant: Variant) -> Variant:
        self._chosen[key if variant.guards.by_shape else (key, content_digest(batch))] = variant
        return variant

    def _check(self, variant: Variant, batch: Batch) -> None:
        """Raise GuardFailure unless a batch can take a program."""
        expected, found = variant.program.signature, signature_of(batch)
        if found != expected:
            odd = next((pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]), (expected, found))
            raise GuardFailure(f"inputs: traced with {odd[0]!r}, this batch gives {odd[1]!r}")
        inputs = named_inputs(copy_batch(batch))
        try:
            with self.returning() as before, without_traces() as values:
                # Sizes behind a target show only when all of it runs; once for each set of shapes is enough.
                if variant.guards.late_shapes and not (variant.guards.late_by_shape and shapes(batch) in variant.sizes):
                    self.num_forwards += 1
                    run_program(variant.program, inputs, self._model)
                    variant.sizes.add(shapes(batch))
                elif variant.guards.entry:
                    run_nodes(variant.guards.entry, inputs, self._model)
                if before is not None and not variant.program.reads:  # leaves run as they are
                    variant.program.reads = before.left_by_forward(values.noted())
        except GuardFailure:
            raise
        except Exception as error:  # the recorded operations do not fit this batch, which has not been run for real yet
            if is_out_of_memory(error):
                raise
            raise GuardFailure(f"{getattr(error, '__notes__', ['graph'])[-1]}: {one_line(error)}") from error

    def _absorb(self, failure: GuardFailure, variant: Variant) -> bool:
        """Make the function around a failing guard a leaf."""
        node = next((node for node in variant.program.guard_nodes if node.name == failure.node_name), None)
        if node is None:
            return False
        return self._add_leaf(node.meta["frames"], variant.program.busy, f"absorbed {failure}")

    def _add_leaf(self, frames: Sequence[Frame], busy: set[Any], reason: str) -> bool:
        taken = self._banned | {function.label for function in self.functions}
        found = function_around(frames, busy, taken, reason)
        if found is None or len(self.functions) >= _MAX_LEAVES:
            return False
        self.functions.append(found)
        self._start_over()
        return True

    def _start_over(self) -> None:
        self.variants.clear()
        self._chosen.clear()

    def _record(self, batch: Batch) -> Variant | None:
        """Record a program; None where a new leaf makes everything start over."""
        self.num_forwards += 1
        try:
            with self.returning():
                program = record(self._model, batch, self._targets, self.groups, self.functions)
        except SwallowedTarget as refusal:
            self._ban(refusal)
            return None
        except Refusal as refusal:
            if self._add_leaf(refusal.frames, set(), f"absorbed {refusal}"):
                return None
            raise
        # The first program decides which targets share a stage; all others are cut by the same groups.
        if self._per_stage != 1 and not self.variants:
            order = program.by_input if self._per_stage == "input" else _in_order(program.targets, self._per_stage)
            self.groups = _numbered(order, self._targets)
            program.cut(self.groups)
        guards = plan_guards(program, tuple(self._targets), self._model)
        if guards.late_values:
            node = guards.late_values[0]
            if self._add_leaf(node.meta["frames"], program.busy, f"absorbed a guard at {node.args[2]} on a value that a target computes"):
                return None
            raise TracingError(f"{node.args[2]}: {why_late(node, program, tuple(self._targets))}")
        self.variants.append(Variant(len(self.variants), program, guards))
        self.variants[-1].sizes.add(shapes(batch))
        return self.variants[-1]

    def _ban(self, refusal: SwallowedTarget) -> None:
        """Take a leaf back that turned out to call a target; one that the user named is an error."""
        kept = [function for function in self.functions if function.label != refusal.leaf or function.reason == GIVEN]
        if len(kept) == len(self.functions):
            raise refusal
        self._banned.add(refusal.leaf)
        self.functions = kept
        self._start_over()


@contextmanager
def without_traces() -> Iterator[ModuleValues]:
    """Run something and take back what it has set on modules and drawn from random generators.

    Yields:
        What has been set.
    """
    values, state = ModuleValues(), RandomState.current(foreign=True)
    try:
        with noting_values(values):
            yield values
    finally:
        values.undo({})
        state.restore()


def _in_order(order: Sequence[str], size: int) -> list[list[str]]:
    """Put targets that follow each other into groups of one size."""
    return [list(order[place : place + size]) for place in range(0, len(order), size)]


def _numbered(groups: Sequence[Sequence[str]], targets: Collection[str]) -> dict[str, int]:
    """Number the groups; targets that the forward does not call get groups of their own."""
    called = {name for group in groups for name in group}
    alone = [[name] for name in targets if name not in called]
    return {name: number for number, group in enumerate([*groups, *alone]) for name in group}


def shapes(batch: Batch) -> Any:
    """List the shapes of what is in a batch.

    Args:
        batch: not modified.

    Returns:
        A shape, or None for what is no tensor, each.
    """
    return tuple(shape_of(item) if isinstance(item, Tensor) else None for item in named_inputs(batch).values())


def content_digest(batch: Batch) -> bytes:
    """Hash the contents of a batch.

    Args:
        batch: not modified.

    Returns:
        A digest of names, types, shapes and bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, item in named_inputs(batch).items():
        digest.update((f"{name} {kind_of(item)} {digest_of(item)}" if isinstance(item, Tensor) else f"{name} {item!r}").encode())
    return digest.digest()
