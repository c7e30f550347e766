"""Checks by forwards of their own: that the mask fits what modules are handed, and that what was put in a layer's place is called.

Padding. Shapes alone do not say: a model may flip, sort or transpose its tokens. Two further forwards of one padded batch tell: one with
other padding, one with other tokens throughout. A row of a module's input that moves with the padding, or with nothing, is no token. Where
the mask keeps such a row and drops one that is a token, padding would be counted in place of tokens. A model whose padding reaches every
row is its author's choice, and none of the kind.

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

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data import Batch, CalibrationData, batch_to
from compressor.data.collate import WITHOUT_PADDING, leading_tensor, without_single_axes
from compressor.data.layouts import has_memory, refuse_without_memory
from compressor.errors import CalibrationError
from compressor.lifecycle import Session, State
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.folder import some
from compressor.nn import QuantizedLayer
from compressor.pages import let_go
from compressor.pipelines.calibration_mode import watched_modules
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.picked_rows import rows_picked_by_values
from compressor.tracing.targets.call_order import plain_forward

_MOVED = 1e-3
"""Share of a row's length: experts round a row otherwise when the rows beside it change."""
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision)\w*_token_(id|index)$")
_DIRECTIONS = 16
"""On one direction alone, one row in a hundred that moves by a tenth of its length would seem to stand still."""

_NUMBERS = 1024  # of a weight, or a few more


def check_padding(state: State, data: CalibrationData, watched: Collection[str]) -> None:
    """Hold the mask against what modules are handed, on the batch with the most padding; note masks that are not read.

    Args:
        state: of the session, whose hooks are asleep; its report may get a note, its model is as before.
        data: the batches with their masks; where none is padded there is nothing to do.
        watched: dotted names of the modules with calibration hooks.

    Raises:
        CalibrationError: the rows of a module's input are not the tokens of the batch, or lie in another order; or a decoder takes tokens
            of the very same shape, of which the mask says nothing.
    """
    for index, (one, mask) in enumerate(zip(data.batches, data.token_masks, strict=True)):
        if mask is not None and not bool(mask.all()):
            _refuse_a_second_sequence(one, mask, index)
    _note_unread(state, data)
    padded = [(batch, real) for batch in data.batches if isinstance(batch, dict) and (real := _real(batch)) is not None]
    if not padded or not watched:
        return
    batch, real = max(padded, key=lambda one: int(one[1].logical_not().sum()))
    batch, real = {name: tensor.to(state.device) for name, tensor in batch.items()}, real.to(state.device)
    ids = batch["input_ids"]
    others = _others(ids, real, media_tokens(state.model))
    if bool((others == ids).all()):
        return  # tokens of one kind, in whatever order
    with Footprint(state.model) as footprint, torch.no_grad():
        seen = []
        for other in (ids, ids.where(real, others), others):
            with footprint.returning():
                seen.append(_rows(state.model, {**batch, "input_ids": other}, real, watched))
    for name in watched:
        for plain, padding, tokens in zip(*(one[name] for one in seen), strict=False):
            _check(name, real, plain, padding, tokens)


def _others(ids: Tensor, real: Tensor, kept: Collection[int]) -> Tensor:
    """Other tokens that the model surely knows: the neighbours', and where these are equal, another of the batch; some stay in place."""
    free = ~torch.isin(ids, torch.tensor(sorted(kept), dtype=ids.dtype, device=ids.device))
    if not bool((free & real).any()):
        return ids
    ordinary = ids[free & real]
    others = ids.roll(1, -1).where(free.roll(1, -1), ordinary[0])
    others = others.where(others != ids, ordinary.min())
    return others.where(others != ids, ordinary.max()).where(free, ids)


def media_tokens(model: nn.Module) -> frozenset[int]:
    """Find the tokens that stand for images, videos and audio, as many as there are features: another number of them is refused.

    Args:
        model: any module.

    Returns:
        What the config calls so (`image_token_id`, `audio_token_index`, ...); nothing for a model without such a config.
    """
    config = getattr(model, "config", None)
    named = vars(config) if config is not None else {}
    return frozenset(value for name, value in named.items() if isinstance(value, int) and _MEDIA_TOKEN.search(name))


def _refuse_a_second_sequence(batch: Any, mask: Tensor, index: int) -> None:
    """Inputs of another shape are told apart from masked ones by their shape; those of the same shape would be masked as well."""
    names = [name for name in batch if name.startswith("decoder_")] if isinstance(batch, Mapping) else []
    for name in names:
        if name != "decoder_attention_mask" and batch[name].shape[:2] == mask.shape:
            real = batch.get("attention_mask")
            is_padded = real is not None and real.dim() == 2 and not bool(real.all())
            takes_more = not is_padded or not torch.equal(real.bool(), mask.to(real.device))
            remedies = [*(["leave out the loss_mask"] if takes_more else []), *([WITHOUT_PADDING] if is_padded else [])]
            raise CalibrationError(
                f"dataset batch {index}: {name} has the shape {tuple(mask.shape)} of the encoder's input, so that tokens of it would not "
                f"count where those of the encoder do not; {', and '.join(remedies)}"
            )


def _note_unread(state: State, data: CalibrationData) -> None:
    """Say that tokens count which a mask of another name may mean to be padding."""
    pairs = zip(data.batches, data.token_masks, strict=True)
    unread = {name for batch, mask in pairs for name in _masks(batch) if mask is None or name != "attention_mask"}
    if getattr(getattr(state.model, "config", None), "is_encoder_decoder", False):  # what a decoder is given follows from them
        named = [batch.get("labels") for batch in data.batches if isinstance(batch, Mapping)]
        unread |= {"-100 among the labels" for labels in named if labels is not None and bool((labels == -100).any())}
    if unread:
        state.report.notes.append(
            f"{', '.join(sorted(unread))} of the batches is not read as padding, and all tokens count; a loss_mask beside it "
            "(1: counts; the model never gets it) says which do"
        )


def _masks(batch: Batch) -> list[str]:
    """What looks like a mask of tokens: of ones and zeros, a row for each sample, named so or of truth values; a wider attention_mask.

    It may be of another length than the tokens, as that of a decoder is. Truth values without such a name are of their shape.
    """
    shape = leading_tensor(batch).shape[:2]
    named = batch.items() if isinstance(batch, Mapping) else ((f"position {place}", one) for place, one in enumerate(batch))
    alike = [
        (name, one)
        for name, one in named
        if (one.dim() == len(shape) == 2 and len(one) == shape[0] and "mask" in name) or (one.shape == shape and one.dtype == torch.bool)
    ]
    found = [name for name, one in alike if bool((one == 0).any()) and bool((one == 1).any()) and bool(((one == 0) | (one == 1)).all())]
    wide = isinstance(batch, Mapping) and "attention_mask" in batch and batch["attention_mask"].dim() > len(shape)
    return [*found, *(["attention_mask of more than two dimensions"] if wide else [])]


def _real(batch: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of a batch that are no padding, bool [batch, sequence]; None where nothing is padded, or nothing can be exchanged."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if mask is None or ids is None or mask.shape != ids.shape or not bool(mask.any()) or bool(mask.all()):
        return None
    return mask.bool()


def _rows(model: nn.Module, batch: Batch, real: Tensor, watched: Collection[str]) -> dict[str, list[Tensor]]:
    """Numbers for each row of what modules are handed, where the mask would be laid on it."""
    found: dict[str, list[Tensor]] = {name: [] for name in watched}
    handles = []
    for name in watched:

        def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point() and _fits(x, real):
                found[name].append(_numbers(x.reshape(-1, x.shape[-1])))

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    try:
        plain_forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _fits(x: Tensor, real: Tensor) -> bool:
    return without_single_axes(x).shape[:-1] == real.shape or (x.dim() == 2 and len(x) == real.numel())


def _numbers(rows: Tensor) -> Tensor:
    """[N, D + 1]: the projections of each row on drawn directions, and its length."""
    drawn = torch.randn(rows.shape[1], _DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(rows.device)
    wide = rows.float()
    return torch.cat([wide @ drawn, wide.norm(dim=1, keepdim=True)], 1).nan_to_num()


def _check(name: str, real: Tensor, plain: Tensor, padding: Tensor, tokens: Tensor) -> None:
    kept = real.flatten()
    by_padding, by_tokens = _moved(plain, padding), _moved(plain, tokens)
    is_token = by_tokens & ~by_padding
    if not bool(by_tokens.any()):
        raise CalibrationError(
            f"{name}: its input has the shape of a padded batch of {tuple(real.shape)} tokens, and no token reaches it, so something else "
            f"would be taken out as padding; {WITHOUT_PADDING}"
        )
    if bool((is_token & ~kept).any()) and bool((~is_token & kept).any()):
        raise CalibrationError(
            f"{name}: the rows of its input are not in the order of the {tuple(real.shape)} tokens of a padded batch, so padding would be "
            f"counted in place of tokens; {WITHOUT_PADDING}"
        )


def _moved(one: Tensor, other: Tensor) -> Tensor:
    difference = (one[:, :-1] - other[:, :-1]).square().mean(1).sqrt()
    return difference > _MOVED * (one[:, -1] + other[:, -1])


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
    if not owners:
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
