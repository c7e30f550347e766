"""Watching one plain forward: which targets it calls, in which order and how often. All that the suspend engine can plan."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from compressor.data.collate import Batch, call_model
from compressor.data.layouts import kind_of
from compressor.errors import CompressorError, TracingError
from compressor.random_state import foreign_random
from compressor.tracing.footprint import Footprint, Stirred
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.graph.planner import without_traces
from compressor.tracing.graph.torch_patches import noting_values
from compressor.tracing.proof import OtherNumbers, Seen, observe
from compressor.tracing.reads import ForeignWeights, HostReads, LeftMemory, ReadWatch, Unnoticed
from compressor.tracing.targets.order import OutsideCall, Trail
from compressor.tracing.targets.out_of_memory import is_out_of_memory
from compressor.tracing.targets.partition import Partition, module_names
from compressor.tracing.targets.records import Stage
from compressor.tracing.targets.sample_state import ModuleValues, TorchState, names_of

_UNUSUAL_SEED = 3_141_592_653
_NO_PAUSE = 'where a forward cannot pause; use pipeline="basic" or other sequential targets'


def stages_of(model: nn.Module, trail: Trail) -> tuple[Stage, ...]:
    """Describe the stages of one forward.

    Args:
        model: the model.
        trail: of the forward.

    Returns:
        A stage for each target that was called, in the order of the first calls.
    """
    calls = Counter(trail.calls)
    return tuple(Stage(index, (name,), module_names(model, name), num_calls=calls[name]) for index, name in enumerate(calls))


def observe_trail(model: nn.Module, cut: Partition, batch: Batch, footprint: Footprint | None = None) -> Trail:
    """Run one plain forward and note the targets that it calls.

    Args:
        model: as it was afterwards, but for what its own forward writes to in place.
        cut: its targets.
        batch: on the device of the model; not modified.
        footprint: of the model as it is now; None: what the forward leaves there is not looked for.

    Returns:
        A name for each call, in order, and whether random numbers were drawn elsewhere than in torch.

    Raises:
        TracingError: the forward raised something, or uses weights outside of their targets.
    """
    state = TorchState.current(foreign=True)
    try:
        random.seed(_UNUSUAL_SEED)  # a forward that seeds the generators would else end in the state in which the last one ended
        np.random.seed(_UNUSUAL_SEED)
        before = foreign_random()
        modules = dict(model.named_modules())
        with without_traces() as values:
            reads = HostReads(model)
            trail = _calls(model, cut, batch, reads)
            now = dict(model.named_modules())
            reassigned = names_of(model, values.noted())
            left = "" if footprint is None else footprint.left_by_forward(values.noted())
            replaced = tuple(name for name, module in modules.items() if now.get(name) is not module)
            draws = foreign_random() != before
        if draws:  # what it draws may decide what it calls
            state.restore()
            with without_traces():
                trail = _calls(model, cut, batch, reads)
        return dataclasses.replace(trail, foreign_random=draws, replaced=replaced, reads=reads.first or left, reassigned=reassigned)
    finally:
        state.restore()


def _calls(model: nn.Module, cut: Partition, batch: Batch, reads: HostReads) -> Trail:
    """Run one plain forward and list the calls of targets, those of modules outside of the target that they lie in, and weights used."""
    calls: list[str] = []
    outside: dict[OutsideCall, None] = {}
    homes = _homes(model, cut)
    strays: list[str] = []
    thread = threading.get_ident()
    weights = ForeignWeights(model, cut.targets, pauses=True)

    def enter(name: str) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unrepeatable(f"{name}: is called inside a transform of torch.func (vmap, grad, jvp), {_NO_PAUSE}")
        if threading.get_ident() != thread:
            strays.append(name)
        calls.append(name)

    def look(module: nn.Module, args: object) -> None:
        name, home = homes.get(module, ("", None))
        if home is not None and home != weights.inside and name != home:
            outside[OutsideCall(name, home, weights.inside, calls[-1] if calls else None)] = None

    with ExitStack() as hooks, torch.no_grad(), _Looking(weights.look, reads.look):
        hooks.callback(register_module_forward_pre_hook(look).remove)
        hooks.enter_context(_telling(weights, cut.targets, enter))
        plain_forward(model, batch)
    reads.forget()
    if strays:
        raise TracingError(f"{strays[0]}: is called from a thread of its own, {_NO_PAUSE}")
    weights.check()
    return Trail(tuple(calls), outside=tuple(outside), borrowed=weights.borrowed, lent=frozenset(weights.lent))


@torch.no_grad()
def check_weights(model: nn.Module, names: Iterable[str], batch: Batch) -> frozenset[str]:
    """Refuse a batch that uses a weight of a target before that is called; what was recorded of another batch does not tell.

    Args:
        model: runs a plain forward.
        names: of the targets.
        batch: on the device of the model; not modified.

    Returns:
        Targets whose weight another target has used, after they had been called.

    Raises:
        Unrepeatable: it does.
    """
    targets = {name: model.get_submodule(name) for name in names}
    weights = ForeignWeights(model, targets, pauses=False)
    with without_traces(), _Looking(weights.look), _telling(weights, targets, lambda name: None):
        plain_forward(model, batch)
    weights.check()
    return frozenset(weights.lent)


@contextmanager
def _telling(weights: ForeignWeights, targets: Mapping[str, nn.Module], enter: Callable[[str], None]) -> Iterator[None]:
    """Tell who looks for weights which target runs, and what it is given; whoever else wants to know is told of its call before."""

    def begins(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            enter(name)
            weights.look(None, args, kwargs)
            weights.enter(name)
            weights.inside = name

        return hook

    def ends(module: nn.Module, args: object, output: object) -> None:
        weights.inside = None

    with ExitStack() as hooks:
        for name, module in targets.items():
            hooks.callback(module.register_forward_pre_hook(_of_it_alone(module, begins(name)), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_of_it_alone(module, ends), always_call=True).remove)
        yield


def _of_it_alone(module: nn.Module, hook: Callable[..., None]) -> Callable[..., None]:
    """Let a hook sleep in copies of the module that somebody makes: they have its hooks, and no forward pauses there."""
    return lambda called, *given: hook(called, *given) if called is module else None


def _homes(model: nn.Module, cut: Partition) -> dict[nn.Module, tuple[str, str]]:
    """Name each module below a target, and that target; a module with several names goes by the first, as hooks do."""
    named = {module: name for name, module in model.named_modules()}
    inside = {name: target for target in cut.targets for name in module_names(model, target)}
    return {module: (name, inside[name]) for module, name in named.items() if name in inside}


class _Looking(Unnoticed):
    """Shows every torch call of a forward to those who look for weights, or for values that Python reads."""

    def __init__(self, *looks: Callable[..., None]) -> None:
        super().__init__()
        self._looks = looks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for look in self._looks:
            look(func, args, kwargs)
        return func(*args, **kwargs)


def plain_forward(model: nn.Module, batch: Batch) -> Any:
    """Run the model as it is.

    Args:
        model: the model.
        batch: on the device of the model; not modified.

    Returns:
        What the forward returns.

    Raises:
        Unrepeatable: the forward raised something, which is no matter of tracing.
    """
    try:
        return call_model(model, batch)
    except Exception as error:  # the model's own code raises what it likes
        if isinstance(error, CompressorError) or is_out_of_memory(error):
            raise
        raise Unrepeatable(
            f"forward: the model itself raises {one_line(error)}{_ids_beyond(model, batch)}; give batches that it can run "
            f"({describe(batch)})"
        ) from error


@torch.no_grad()
def settles(model: nn.Module, watched: Collection[str], forward: Callable[[], Any]) -> bool:
    """Say whether the first forward rewrites parameters alone, and the second one does not but computes the same.

    A buffer may be written to by some batches only. What the first one only makes of a weight and keeps (a cached property) is no such
    state: compression would leave it as it was.

    Args:
        model: as it was afterwards.
        watched: dotted names of the modules whose inputs and outputs are compared.
        forward: runs the model.

    Returns:
        True if later forwards may begin where the first one ends.
    """
    values = ModuleValues()
    with Footprint(model) as both:
        with noting_values(values):
            first = observe(model, watched, forward)
        keeps = any(isinstance(vars(module).get(name), Tensor) for module, name in values.changed())
        with Footprint(model) as once:
            second = observe(model, watched, forward)
    rewritten = both.stirred.rewritten.keys()
    are_weights = bool(rewritten) and rewritten <= {name for name, _ in model.named_parameters()}
    return first == second and are_weights and not keeps and not once.stirred.rewritten


def changed_by_forwards(model: nn.Module, watched: Collection[str], batches: Sequence[Batch]) -> tuple[Stirred, tuple[str, ...]]:
    """Run plain forwards and see what they change.

    Args:
        model: as it was afterwards.
        watched: dotted names of the modules whose inputs count.
        batches: one or two, on the device of the model; not modified.

    Returns:
        What the first one changed; and the attributes and tensors of modules by which it would change what the second one gives.
    """
    with Footprint(model) as footprint, torch.no_grad():
        with footprint.returning():
            plain_forward(model, batches[0])
        if not footprint.stirred or len(batches) == 1:
            return footprint.stirred, ()
        written = tuple(footprint.stirred.rewritten)
        return footprint.stirred, plain_forwards(model, watched, batches, footprint.returning, written=written)[1]


def plain_forwards(
    model: nn.Module,
    watched: Collection[str],
    batches: Sequence[Batch],
    returning: Callable[[], AbstractContextManager[Footprint | None]] = nullcontext,
    numbers: OtherNumbers | None = None,
    left: LeftMemory | None = None,
    reads: HostReads | None = None,
    written: Collection[str] = (),
) -> tuple[list[list[Seen]], tuple[str, ...]]:
    """Run plain forwards, each with the state of the model as it is, and note all that modules are given and give back.

    Args:
        model: as it was afterwards.
        watched: dotted names of the modules to look at.
        batches: on the device of the model; not modified.
        returning: context that puts the model back after a forward, and gives the footprint of what it was.
        numbers: changes what targets compute.
        left: looks at the forwards.
        reads: look at them, too, more closely than elsewhere.
        written: parameters and buffers that are known to be written to in place.

    Returns:
        What was seen of each batch; and the attributes and tensors by which the first batch changes what the second one gives.
    """
    expected, changed = [], set()
    for place, batch in enumerate(batches):
        with returning() as before, without_traces() as values, ExitStack() as looking:
            looking.enter_context(nullcontext() if numbers is None else numbers.made(place))
            if left is not None:
                left.begin(("alone", place))
                looking.enter_context(left)
            if reads is not None:
                looking.enter_context(ReadWatch(reads))
            expected.append(observe(model, watched, lambda: plain_forward(model, batch)))  # noqa: B023 - called at once
            changed |= set(values.changed())
            if left is not None and before is not None and not left.first:
                left.first = before.left_by_forward(values.noted())
    if not (changed or written) or len(batches) == 1:
        return expected, ()
    if numbers is not None:
        return expected, ()
    with returning(), without_traces():
        plain_forward(model, batches[0])
        is_kept = observe(model, watched, lambda: plain_forward(model, batches[1])) != expected[1]
    names = {module: name for name, module in model.named_modules()}
    attributes = [f"{names.get(module, '?')}.{name}".lstrip(".") for module, name in changed]
    return expected, tuple(dict.fromkeys([*attributes, *written])) if is_kept else ()


def called(model: nn.Module, names: Collection[str], batch: Batch) -> set[str]:
    """Find out which modules a batch calls.

    Args:
        model: as it was afterwards.
        names: dotted names.
        batch: on the device of the model; not modified.

    Returns:
        Those of the names that are called.
    """
    found: set[str] = set()
    with ExitStack() as hooks, without_traces(), torch.no_grad():
        for name in names:
            hook: Any = lambda *args, name=name: found.add(name)  # noqa: E731
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        plain_forward(model, batch)
    return found


def _ids_beyond(model: nn.Module, batch: Batch) -> str:
    """Say which token id the embedding does not have, which torch does not say."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else batch[0]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not isinstance(ids, Tensor) or ids.is_floating_point() or not ids.numel() or not tables:
        return ""
    rows = tables[0].num_embeddings
    odd = next((value for value in (int(ids.max()), int(ids.min())) if not 0 <= value < rows), None)
    return "" if odd is None else f" (token id {odd} is given, and the model has {rows} tokens)"


def describe(batch: Batch) -> str:
    """Say what is in a batch.

    Args:
        batch: not modified.

    Returns:
        Names, types and shapes, for messages.
    """
    items = batch.items() if isinstance(batch, dict) else ((f"argument {place}", value) for place, value in enumerate(batch))
    return ", ".join(f"{name} {_kind(value)}" for name, value in items)


def _kind(value: Any) -> str:
    return kind_of(value) if isinstance(value, Tensor) else type(value).__name__
