"""The state a model is in while calibration data flows: evaluation mode, no growing caches, all of it undone afterwards. And checks by
forwards of their own: that what was put in a layer's place is called, and that nothing writes past it.

Calls. A layer that its owner also holds in a list or a function stays there as it was. Forwards that run anyway before compression tell
which modules are called; one of the smallest batch at the end tells what is left of it, and where that passes by a layer, those of the
others. A module counts only where its owner is called as well: which experts a token is sent to may change.

Rows. Forwards of one batch with other weights need not hand a module the same tokens. One more forward, of the first batch of each kind,
tells which modules these are, and is run where rows are to be compared.

Writes. What a forward writes to the weight of a compressed layer goes nowhere, for what it gets to see of it is a copy. And where weights
are exchanged for the time of a forward, those are compressed with which nothing is computed: in the first call of each layer some numbers
of its weights are held against those from before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data import Batch, CalibrationData, batch_to
from compressor.data.collate import leading_tensor
from compressor.data.layouts import has_memory, refuse_without_memory
from compressor.errors import CalibrationError
from compressor.lifecycle import Session, State
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.evaluation import evaluation_mode
from compressor.model.folder import some
from compressor.model.targets import outward
from compressor.nn import QuantizedLayer
from compressor.numerics.checksum import checksum
from compressor.pages import let_go
from compressor.tracing import Watched
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.picked_rows import rows_picked_by_values
from compressor.tracing.targets.call_order import plain_forward
from compressor.tracing.traces import PythonValues

_NUMBERS = 1024  # of a weight, or a few more
_MOST_SUMMED = 1 << 20  # numbers of a tensor; of larger ones some are looked at


# Which modules the modifiers of a session are looking at now: those that carry their calibration hooks.


def watched_modules(session: Session, *, keeping: bool = False) -> Watched:
    """Find the hooked modules.

    Args:
        session: its modifiers own the hooks.
        keeping: only those on which hooks may keep statistics.

    Returns:
        Dotted names, in the order of the model.
    """
    # By identity, because a hook knows its module and not the module's name, which may be several.
    looking = [modifier for modifier in session.modifiers if modifier.keeps_on_modules or not keeping]
    hooked = {id(module) for modifier in looking for module, _ in modifier.hooked_modules()}
    return tuple(name for name, module in session.state.model.named_modules() if id(module) in hooked)


def watched_elsewhere(session: Session, names: Collection[str]) -> set[str]:
    """Find the hooked modules that are none of these.

    Args:
        session: its modifiers own the hooks.
        names: of the modules of a stage.

    Returns:
        Dotted names.
    """
    return set(watched_modules(session)).difference(names)


@contextmanager
def calibration_mode(state: State) -> Iterator[None]:
    """Switch dropout and key/value caches off for the duration, and forget the token mask at the end. Changes the model.

    Args:
        state: of the session.

    Yields:
        Nothing.
    """
    try:
        with evaluation_mode(state.model):
            yield
    finally:
        state.leave_batch()
        state.base_stream, state.has_base_stream = False, False


def note_kept(state: State, kept: Collection[str]) -> None:
    """Say in the report that batches do not see what the model keeps of those before them.

    Args:
        state: of the session; changed.
        kept: attributes of modules by which a batch would change what the next one gives.
    """
    if kept:
        names = ", ".join(kept)
        state.report.notes.append(f"{names} would pass from batch to batch; every batch starts with the state of the model")


def note_proof(state: State, widened: str) -> None:
    """Say in the report why all batches were run beforehand, if they were.

    Args:
        state: of the session; changed.
        widened: the reason; empty where a few batches were enough.
    """
    if widened:
        state.report.notes.append(f"all batches were held against the plain model before the first stage, for {widened}")


def note_unproved(state: State, place: str) -> None:
    """Say in the report that the run has left something where no batch of the proof did.

    Args:
        state: of the session; changed.
        place: in the model; empty where there is none.
    """
    if place:
        state.report.notes.append(
            f"{place} is not what it was when the run began, and no batch of the proof has changed it; whether one batch leaves something "
            'there that another finds, verify="all" (--verify all) shows'
        )


def set_token_mask(state: State, data: CalibrationData, index: int) -> None:
    """Give the modifiers the mask and the shape of the batch that is about to run. Changes the state.

    Args:
        state: of the session.
        data: the batches with their masks.
        index: number of the batch.
    """
    state.enter_batch(data, index)


def check_alike(state: State, names: Sequence[str]) -> None:
    """Refuse to go on where ranks have made different things of one stage.

    Args:
        state: of the session.
        names: dotted names of the stage's modules, before it was compressed.

    Raises:
        CalibrationError: the tensors of a module differ.
    """
    if state.ranks.size == 1:
        return
    changed = {name for name in names if name in state.claims or name in state.touched}
    modules = {name: module for name, module in state.model.named_modules() if name in changed}
    sums = {name: [checksum(tensor) for tensor in module.state_dict().values()] for name, module in modules.items()}
    first, *others = state.ranks.gather(sums)
    for rank, own in enumerate(others, 1):
        different = [name for name in first if own.get(name) != first[name]]
        if different:
            raise CalibrationError(
                f"{different[0]} (one of {len(different)}): rank {rank} has made something else of it than rank 0; ranks must run on equal "
                "machines with as many threads each (OMP_NUM_THREADS)"
            )


@contextmanager
def unchanged_elsewhere(state: State, fixed: Collection[str], names: Collection[str], targets: Collection[str]) -> Iterator[None]:
    """Refuse that a stage is compressed by a change of what samples have run past: what follows was fed by what it was.

    Writes that torch does not count (`tensor.data`) are seen in tensors that a modifier touches; beyond a million numbers, a thousand
    from all over the tensor are looked at.

    Args:
        state: its model.
        fixed: dotted names of the modules and tensors that may not change, such as those that samples have used.
        names: of the modules that may change.
        targets: of the run; Python values outside of them may not change either, for code that has been recorded holds what they were.

    Raises:
        CalibrationError: a parameter of these is another one, or has been written to; or an attribute is another one.
    """

    def look() -> dict[str, tuple[Tensor, int, int]]:
        named = [(name, name.rpartition(".")[0], one) for name, one in state.model.named_parameters(remove_duplicate=False)]
        written = {id(one) for _, owner, one in named if owner in touched and has_memory(one)}
        return {
            name: (one, 0 if one.is_inference() else one._version, _print(one) if id(one) in written else 0)
            for name, owner, one in named
            if not stay.isdisjoint(outward(name)) and owner not in within
        }

    own = {id(state.model.get_submodule(name)) for name in names}  # which may stand under other names, too
    within = {name for name, module in state.model.named_modules(remove_duplicate=False) if id(module) in own}
    stay, touched = frozenset(fixed), frozenset(state.touched)
    stage = next(iter(names)) or "the model"
    before, values = look(), PythonValues(state.model, targets, whole=True)
    yield
    now, change = look(), values.change(PythonValues(state.model, targets, whole=True))
    if change:
        raise CalibrationError(
            f"{change}, since {stage} was compressed, and code between the layers may have run with what it was; change it "
            'before calibration begins, or give pipeline="basic"'
        )
    for name, (tensor, *prints) in before.items():
        if name not in now or now[name][0] is not tensor or list(now[name][1:]) != prints:
            raise CalibrationError(
                f"{name}: was changed as {stage} was compressed, which is not in it, and others would learn from what is no longer so; "
                "change only what event.modules names, or give passes='two', where that is a whole layer, or pipeline=\"basic\""
            )


def shared_parameters(model: nn.Module) -> set[str]:
    """List the parameters that several modules hold, by all of their names.

    Args:
        model: not modified.

    Returns:
        Dotted names.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    counts = Counter(id(parameter) for _, parameter in named)
    return {name for name, parameter in named if counts[id(parameter)] > 1}


def _print(tensor: Tensor) -> int:
    return checksum(tensor if tensor.numel() <= _MOST_SUMMED else _some_numbers(tensor))


def compressed_names(state: State) -> list[str]:
    """List the modules that the modifiers have claimed or changed, in the order of the model."""
    return [name for name, _ in state.model.named_modules() if name in state.claims or name in state.touched]


@contextmanager
def calls_of(model: nn.Module, names: Sequence[str]) -> Iterator[set[str]]:
    """Note which modules are called for the duration.

    Args:
        model: hooks come and go.
        names: dotted names.

    Yields:
        Those that were called so far.

    Raises:
        CalibrationError: one is given a tensor without memory.
    """
    called: set[str] = set()
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(_noting(called, name, module)).remove)
        yield called


def _noting(called: set[str], name: str, module: nn.Module) -> Callable[..., None]:
    """A hook for the calls of one module alone: what comes in its place may share its table of hooks."""

    def hook(given: nn.Module, args: tuple[Any, ...]) -> None:
        if given is module:
            called.add(name)
            for value in args:
                if isinstance(value, Tensor):
                    refuse_without_memory(value, name)

    return hook


@contextmanager
def weights_held_to(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Note which modules compute with other weights than they hold before, for the duration.

    Args:
        model: hooks come and go.
        names: dotted names.

    Yields:
        Name of the parameter to that of its module, for those that were so far.
    """
    found: dict[str, str] = {}
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(_holding(found, name, module)).remove)
        yield found


def _holding(found: dict[str, str], name: str, module: nn.Module) -> Callable[..., None]:
    own = {key: weight for key, weight in module._parameters.items() if weight is not None and _can_be_read(weight)}
    left = {key: _some_numbers(weight) for key, weight in own.items()}
    let_go(own.values())  # a number from each page, of all modules, makes a mapped model resident

    def hook(given: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        with torch._C.DisableTorchFunction(), torch.no_grad():  # nobody is to take it for a read of the model's
            while left and given is module:  # the first call only
                key, kept = left.popitem()
                now = module._parameters.get(key)
                if now is not None and _can_be_read(now) and not _same_numbers(_some_numbers(now), kept):
                    found[f"{name}.{key}".lstrip(".")] = name

    return hook


def _can_be_read(weight: Tensor) -> bool:
    return has_memory(weight) and not weight.is_meta and not weight.is_quantized and type(weight) in (Tensor, nn.Parameter)


def _some_numbers(weight: Tensor) -> Tensor:
    """Numbers from all over a tensor: of a large model, reading all of them would take as long as a forward."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUMBERS)].to("cpu", copy=True)


def _same_numbers(now: Tensor, kept: Tensor) -> bool:
    """A weight that is cast for a call is the same."""
    return now.shape == kept.shape and torch.equal(now.nan_to_num(), kept.to(now.dtype).nan_to_num())


def refuse_exchanged(found: Mapping[str, str], rewritten: Collection[str]) -> None:
    """Refuse a model whose layers compute with other weights than those that would be compressed.

    Args:
        found: what `weights_held_to` has given.
        rewritten: parameters that a forward writes to for good, which others judge.

    Raises:
        CalibrationError: there is such a layer.
    """
    odd = sorted(name for name in found if name not in rewritten)
    if odd:
        raise CalibrationError(
            f"{found[odd[0]] or 'the model'}: a forward writes to its {odd[0].rpartition('.')[2]}, or exchanges it, for as long as it runs "
            "(moving averages, a scale), so that other numbers would be compressed than it computes with; give it these for good, or let "
            "the forward change the layer's input or output instead, or ignore the layer"
        )


def check_still_called(session: Session, data: CalibrationData, before: set[str], rewritten: Collection[str]) -> None:
    """Run the compressed model on its smallest batch: are all layers called, and is nothing written to them? The model is as before.

    Where a layer is not called, others may reach it that this one passes by: then batches follow until all layers were called.

    Args:
        session: after the last stage; its hooks are put to sleep.
        data: the batches.
        before: modules that were called before compression; those with tokens in the report were, too.
        rewritten: parameters that a forward writes to for good, as RWKV does at its first one. A model of transformers is compressed as it
            was loaded, for who reads the checkpoint may unpack its weights first; a note says so.

    Raises:
        CalibrationError: a layer is called no more, though its owner is; its weight is written to; or the compressed model raises an
            error.
    """
    # What no forward has called before says nothing when none calls it now.
    before = before | {name for name, one in session.state.report.modules.items() if one.num_tokens}
    owners = {name: _owner(session.state.model, name) for name in compressed_names(session.state) if name in before}
    if not owners and not compressed_names(session.state):
        return
    called: set[str] = set()
    written: set[str] = set()
    lost: list[str] = []
    for batch in _smallest_first(data):
        try:
            now, writes = _calls_and_writes(
                session, batch_to(batch, session.state.device), list(dict.fromkeys((*owners, *owners.values())))
            )
        except Unrepeatable as error:
            if not any(batch is one for one in data.batches):  # a part of one, and the model may take whole ones only
                continue
            raise CalibrationError(
                f"forward: the compressed model raises {one_line(error.__cause__ or error)} on a batch that it took before; ignore the "
                "layers of which its code asks for more than to be called"
            ) from error
        called, written = called | now, written | writes
        lost = [name for name, owner in owners.items() if owner in called and name not in called]
        if not lost:
            break
    _judge_writes(session.state, written, rewritten)
    if not lost:
        return
    more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
    raise CalibrationError(
        f"{lost[0]}{more}: {owners[lost[0]] or 'the model'} calls it no more now that it is compressed: it holds the float layer in "
        "another place (a list, a dict, a function), or asks for its class; let it call its submodule by name, or ignore the layer"
    )


def _calls_and_writes(session: Session, batch: Batch, watched: Sequence[str]) -> tuple[set[str], set[str]]:
    """Run the compressed model on a batch: which modules were called, and to the weights of which was written?"""
    model = session.state.model
    with session.hooks_disabled(), torch.no_grad(), Footprint(model), calls_of(model, watched) as called, _writes_to(model) as written:
        plain_forward(model, batch)
    return called, written


@contextmanager
def _writes_to(model: nn.Module) -> Iterator[set[str]]:
    """Look at each call of a compressed layer, and at the end, whether what was read as its weight still is that; else name the layer."""
    found: set[str] = set()
    with ExitStack() as held:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
        looks = [_noting_writes(found, name, layer, held.enter_context(layer.lent_weights())) for name, layer in layers.items()]
        for layer, look in zip(layers.values(), looks, strict=True):
            held.callback(layer.register_forward_pre_hook(look).remove)
        yield found
        for look in looks:
            look()


def _noting_writes(found: set[str], name: str, layer: QuantizedLayer, lent: list[Tensor]) -> Callable[..., None]:
    def look(*call: Any) -> None:
        del call
        if lent:
            weight = layer.dequantized_weight()
            if not all(one.shape == weight.shape and torch.equal(one.to(weight), weight) for one in lent):
                found.add(name)
            lent.clear()

    return look


def _judge_writes(state: State, written: Collection[str], rewritten: Collection[str]) -> None:
    known = {name.rpartition(".")[0] for name in rewritten} if as_pretrained(state.model) is not None else set()
    wrong = sorted(name for name in written if name not in known)
    if wrong:
        raise CalibrationError(
            f"{wrong[0]}: a forward writes to its weight, and what it writes is lost on a compressed layer; let it change the layer's "
            "input or output instead, or ignore the layer"
        )
    if written:
        state.report.notes.append(
            f"{len(written)} layers ({some(written)}) are compressed as they were loaded; what the model's own forward writes to their "
            "weights is lost on the compressed ones: they compute something else, unless their reader unpacks them before"
        )


def picked_rows(session: Session, data: CalibrationData) -> frozenset[str]:
    """Find the modules whose rows are picked by values that compression changes, in the first batch of each kind.

    Args:
        session: its model is as before.
        data: the batches; those of other inputs take other ways through the model.

    Returns:
        Dotted names of modules that are watched or will be compressed, the same on all ranks.
    """
    model, device = session.state.model, session.state.device
    varying, watched = compressed_names(session.state), watched_modules(session)
    kinds = {tuple(batch) if isinstance(batch, Mapping) else len(batch): batch for batch in reversed(data.batches)}
    found: set[str] = set()
    with session.hooks_disabled(), torch.no_grad(), Footprint(model) as footprint:
        for batch in kinds.values():
            with footprint.returning():
                found |= rows_picked_by_values(model, batch_to(batch, device), varying, {*varying, *watched})
    return frozenset(session.state.ranks.union(tuple(sorted(found))))


def _smallest_first(data: CalibrationData) -> Iterator[Batch]:
    """The smallest batch; of token ids alone its first row, which any model of tokens takes. Then all, from the largest down."""
    by_size = sorted(data.batches, key=lambda one: leading_tensor(one).numel())
    first = by_size[0]
    if isinstance(first, dict) and first.keys() <= {"input_ids", "attention_mask"}:
        first = {name: tensor[:1] for name, tensor in first.items()}
    yield first
    yield from reversed(by_size)


def _owner(model: nn.Module, name: str) -> str:
    """The nearest module around another one that is called itself; a ModuleList is not."""
    owner = name.rpartition(".")[0]
    while owner and type(model.get_submodule(owner)).forward is nn.Module.forward:
        owner = owner.rpartition(".")[0]
    return owner
