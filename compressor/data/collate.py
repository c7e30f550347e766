"""Token rows become padded batches, foreign batches become ours, and both become a hash.

Padding goes to the right and is masked; a batch whose rows are equally long carries no mask at all, so that it takes the same kernels,
and gives the same bits, as a plain forward of its tokens.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from compressor.data.layouts import dense_parts, has_memory, shape_of
from compressor.errors import DatasetError
from compressor.pages import raw_bytes

Batch = dict[str, Tensor] | tuple[Tensor, ...]


_CPU = torch.device("cpu")
_ATOMS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
WITHOUT_PADDING = "give batches without padding: batch_size=1 makes them of rows, and those of a DataLoader you cut to their own length"
ALL_COUNTED = f"leave out the loss_mask where there is one, and {WITHOUT_PADDING}"
"""What to do where a mask cannot be laid on what a module is handed; holds for rows and for batches, which have no batch_size."""
_TOKENS_ON_GPU, _TOKENS_ON_CPU = 8192, 1024


def without_single_axes(x: Tensor) -> Tensor:
    """Drop axes of one between batch and tokens, or behind them: DeepSeek hands on what keys and values are made of as a single head.

    Args:
        x: [batch, seq, C] with any number of axes of one in between, or anything else.

    Returns:
        A view of x: [batch, seq, C]; or x itself.
    """
    inner = [axis for axis in range(1, x.dim() - 1) if x.shape[axis] == 1]
    return x.squeeze(inner[: x.dim() - 3]) if x.dim() > 3 else x


def tokens_at_once(device: torch.device) -> int:
    """Say how many tokens a forward takes when nobody sets a batch size.

    On a CPU products are as fast with some hundred rows, and activations of few tokens stay in its cache and in memory that is used
    again, where those of many are mapped anew for each operator (`compressor.pipelines.memory`). A GPU is done with 2048 tokens before
    Python has launched the next operators.

    Args:
        device: where forwards run.

    Returns:
        At most so many, unless one row has more.
    """
    return _TOKENS_ON_CPU if device.type == "cpu" else _TOKENS_ON_GPU


def collate(
    rows: Sequence[Tensor],
    batch_size: int | None,
    pad_id: int,
    counted: Sequence[Tensor | None] | None = None,
    device: torch.device = _CPU,
) -> tuple[list[Batch], list[Tensor | None]]:
    """Group token rows, in order, into right-padded batches.

    Args:
        rows: int64 token ids, one dimension each, none empty.
        batch_size: rows in one batch; the last batch may have fewer. None: as many equally long rows as make `tokens_at_once`, so
            that nothing is padded.
        pad_id: token id that fills up short rows; masked, so its value does not matter.
        counted: for each row, bool, True for a token that statistics may count; None where all count.
        device: where forwards will run, by which batches are as large as they are without a `batch_size`.

    Returns:
        The batches (`input_ids`, and `attention_mask` only where something is padded) and their token masks (bool [batch, sequence],
        True for a token that counts; None where all do).
    """
    counts = iter(counted if counted is not None else [None] * len(rows))
    batches: list[Batch] = []
    masks: list[Tensor | None] = []
    if batch_size is None:
        groups = _equally_long(rows, tokens_at_once(device))
    else:
        groups = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    for group in groups:
        input_ids = nn.utils.rnn.pad_sequence(list(group), batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(row) for row in group], dtype=torch.int64)
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        batches.append({"input_ids": input_ids} if bool(mask.all()) else {"input_ids": input_ids, "attention_mask": mask.long()})
        masks.append(_counting(mask, [next(counts) for _ in group]))
    return batches, masks


def _counting(real: Tensor, counted: Sequence[Tensor | None]) -> Tensor | None:
    """Leave those of the real tokens that count."""
    mask = real.clone()
    for row, own in zip(mask, counted, strict=True):
        if own is not None:
            row[: len(own)] &= own
    return None if bool(mask.all()) else mask


def _equally_long(rows: Sequence[Tensor], num_tokens: int) -> list[Sequence[Tensor]]:
    """Cut a list into runs of equally long rows of at most so many tokens, at least one row each."""
    groups: list[Sequence[Tensor]] = []
    start = 0
    for stop in range(1, len(rows) + 1):
        is_full = (stop - start + 1) * len(rows[start]) > num_tokens
        if stop == len(rows) or is_full or len(rows[stop]) != len(rows[start]):
            groups.append(rows[start:stop])
            start = stop
    return groups


def as_batch(raw: Any, where: str) -> Batch:
    """Take a batch as a DataLoader gives it.

    Args:
        raw: a mapping of names to tensors, a tuple or list of tensors, or one tensor.
        where: which batch, for errors only.

    Returns:
        A dict for keyword arguments, or a tuple for positional ones; the tensors are those of `raw`.

    Raises:
        DatasetError: something else, something in it that is no tensor, or token ids that are no whole numbers in rows.
    """
    raw = (raw,) if isinstance(raw, Tensor) else raw
    items = list(raw.items()) if isinstance(raw, Mapping) else list(enumerate(raw)) if isinstance(raw, tuple | list) else None
    if items is None:
        raise DatasetError(f"{where}: a {type(raw).__name__} is no batch; let the loader give a dict, a tuple or a tensor")
    strangers = [f"{key!r} ({type(value).__name__})" for key, value in items if not isinstance(value, Tensor)]
    if strangers or not items:
        found = ", ".join(strangers) or "nothing"
        raise DatasetError(f"{where}: the batch holds {found}, but only tensors can be fed to a model; drop the rest in collate_fn")
    empty = [repr(key) for key, value in items if value.is_meta]
    if empty:
        raise DatasetError(f"{where}: {empty[0]} is on the meta device and has no values; give an ordinary tensor")
    if odd := odd_ids(dict(items)):
        raise DatasetError(f"{where}: {odd}")
    if nested := [repr(key) for key, value in items if value.is_nested and value.layout is torch.strided]:
        raise DatasetError(f"{where}: {nested[0]} is a nested tensor, which has no shape; make it with layout=torch.jagged")
    if isinstance(raw, Mapping):
        return {str(key): value for key, value in items}
    return tuple(value for _, value in items)


def odd_ids(batch: Mapping[Any, Any]) -> str:
    """Say how token ids are given that no embedding reads; empty where there are none.

    Args:
        batch: its arguments by name.

    Returns:
        What is wrong, and what to do.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or (has_memory(ids) and not ids.is_complex()):
        return ""
    kind = "complex" if ids.is_complex() else "nested" if ids.is_nested else str(ids.layout).removeprefix("torch.")
    return f"input_ids are {kind}; give rows of whole numbers, padded under an attention_mask"


def check_mask(mask: Tensor, name: str, where: str) -> None:
    """Refuse a mask that holds something else than 0 and 1: of a 2 or a NaN nobody knows what it means.

    Args:
        mask: of any dtype.
        name: of the mask.
        where: whose it is.

    Raises:
        DatasetError: it holds another number.
    """
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise DatasetError(f"{where}: {name} holds {other[0].item()}, and a mask holds 0 and 1; write it so")


def check_strided(tensor: Tensor, where: str) -> Tensor:
    """Refuse a tensor whose values cannot be read as they lie.

    Args:
        tensor: any tensor.
        where: whose it is.

    Returns:
        The tensor.

    Raises:
        DatasetError: it is on the meta device, or sparse.
    """
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "no values (it is on the meta device)" if tensor.is_meta else f"the layout {tensor.layout}"
        raise DatasetError(f"{where}: a tensor with {kind} was given; give an ordinary tensor")
    return tensor


def take_token_mask(batch: Batch, where: str) -> tuple[Batch, Tensor | None]:
    """Find out which tokens of a foreign batch count.

    Args:
        batch: a batch; an `attention_mask` of two dimensions speaks of padding, a `loss_mask` of tokens that are not to be counted.
        where: which batch, for errors only.

    Returns:
        The batch without its `loss_mask`, which no model takes; and bool [batch, sequence], True for a token that counts, None when all do.

    Raises:
        DatasetError: a mask is not of the shape of the tokens, or holds something else than 0 and 1.
    """
    if not isinstance(batch, dict):
        return batch, None
    for name in ("attention_mask", "loss_mask"):
        if name in batch and batch[name].dim() == 2:
            check_mask(batch[name], name, where)
    rest = {name: tensor for name, tensor in batch.items() if name != "loss_mask"}
    mask, loss_mask = batch.get("attention_mask"), batch.get("loss_mask")
    real = mask.bool() if mask is not None and mask.dim() == 2 else None
    ids = batch.get("input_ids")
    if real is not None and ids is not None and ids.dim() == 2 and real.shape != ids.shape:
        raise DatasetError(f"{where}: attention_mask {tuple(real.shape)} and input_ids {tuple(ids.shape)} differ; make them equal")
    if loss_mask is not None:
        wanted = real.shape if real is not None else leading_tensor(rest).shape[:2] if rest else None
        if loss_mask.dim() != 2 or loss_mask.shape != wanted:
            raise DatasetError(
                f"{where}: loss_mask {tuple(loss_mask.shape)} is not [batch, sequence] of its tokens; give a number per token"
            )
        counted = loss_mask.bool()
        real = counted if real is None else real & counted.to(real.device)
    return rest, None if real is None or bool(real.all()) else real


def leading_tensor(batch: Batch) -> Tensor:
    """Find the tensor that says how many samples a batch holds.

    Args:
        batch: a batch with at least one tensor.

    Returns:
        `input_ids`, else the first tensor that has a dimension, else the first one.
    """
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"]
    tensors = [*batch.values()] if isinstance(batch, dict) else batch
    return next((tensor for tensor in tensors if tensor.dim()), tensors[0])


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """Move a batch.

    Args:
        batch: a batch; not modified.
        device: where it shall be.

    Returns:
        The batch on the device; tensors that are there already are not copied.

    Raises:
        DatasetError: something in it is no tensor, as what a modifier has put there.
    """
    for name, value in enumerate(batch) if isinstance(batch, tuple) else batch.items():
        if not hasattr(value, "to"):
            raise DatasetError(f"batch[{name!r}]: {type(value).__name__} is no tensor; leave batches as they are, which hold tensors alone")
    if isinstance(batch, tuple):
        return tuple(tensor.to(device) for tensor in batch)
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def copied_batch(batch: Batch) -> Batch:
    """Copy a batch, because a forward may write to what it is given.

    Args:
        batch: not modified.

    Returns:
        A batch of copies; values that are one tensor, or look at the same memory, do so in the copy. A parameter stays one, and tensors
        keep whether they require gradients, and attributes. Of what is no tensor (lists, dicts, caches) there is a deep copy.

    Raises:
        DatasetError: something in it cannot be copied.
    """
    values: Iterable[Any] = batch if isinstance(batch, tuple) else batch.values()  # of a trace, they may be other things than tensors
    tensors: dict[int, Tensor] = {id(value): value for value in values if isinstance(value, Tensor)}
    copies = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    for group in _overlapping({key: tensor for key, tensor in tensors.items() if type(tensor) is Tensor and has_memory(tensor)}):
        copies |= _copied_together(group)
    memo: dict[int, Any] = {key: _alike(copies[key], tensor) for key, tensor in tensors.items()}
    if isinstance(batch, tuple):
        return tuple(_copied_value(value, memo) for value in batch)
    return {name: _copied_value(value, memo) for name, value in batch.items()}


def _alike(copied: Tensor, tensor: Tensor) -> Tensor:
    """Make a copy what the tensor is to autograd, and to whoever reads its attributes."""
    if isinstance(tensor, nn.Parameter) and type(tensor) is nn.Parameter:
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        copied.requires_grad_()
    if type(copied) is type(tensor):
        copied.__dict__.update(tensor.__dict__)
    return copied


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo or value is None or isinstance(value, _ATOMS) or callable(value):
        return memo.get(id(value), value)
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise DatasetError(
            f"batch: a {type(value).__name__} in it cannot be copied ({error}), and each forward gets a copy of its own; give what can be"
        ) from error


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte in its storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    last = first + sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1 if tensor.numel() else first) * tensor.element_size()


def _overlapping(tensors: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """Find tensors that look at the same bytes. Others may lie in one storage, too, far apart: rows of a mapped file."""
    groups: list[dict[int, Tensor]] = []
    reached = (-1, 0)  # storage and byte
    for storage, start, stop, key in sorted((one.untyped_storage()._cdata, *_span(one), key) for key, one in tensors.items()):
        if storage != reached[0] or start >= reached[1]:
            groups.append({})
            reached = (storage, stop)
        groups[-1][key] = tensors[key]
        reached = (storage, max(reached[1], stop))
    return [group for group in groups if len(group) > 1]


def _copied_together(group: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy the bytes that some tensors look at, once."""
    first, spans = next(iter(group.values())), [_span(one) for one in group.values()]
    start = min(span[0] for span in spans) // 16 * 16  # all dtypes stay aligned
    size = max(span[1] for span in spans) - start
    data = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage(), start, (size,), (1,)).clone()
    made = {}
    for key, one in group.items():
        offset = int(one.storage_offset()) - start // one.element_size()
        empty = torch.empty(0, dtype=one.dtype, device=one.device)
        made[key] = empty.set_(data.untyped_storage(), offset, one.size(), one.stride())
    return made


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Run the model's forward on a copy of a batch: it may write to what it is given, and batches run more than once.

    Args:
        model: the model; called with keyword arguments for a dict, with positional ones for a tuple.
        batch: on the device of the model; not modified.

    Returns:
        What the forward returns.
    """
    given = copied_batch(batch)
    return model(*given) if isinstance(given, tuple) else model(**given)


def hash_rows(rows: Sequence[Tensor], counted: Sequence[Tensor | None] | None = None) -> str:
    """Hash token rows in their order, whatever batches they will form.

    Args:
        rows: int64 token ids, one dimension each.
        counted: for each row, bool, which tokens count; None where all do.

    Returns:
        The sha256 in hexadecimal.
    """
    digest = hashlib.sha256()
    for index, row in enumerate(rows):
        _add(digest, "row", row)
        mask = counted[index] if counted is not None else None
        if mask is not None:
            _add(digest, "counted", mask)
    return digest.hexdigest()


class TextMarks(NamedTuple):
    """Runs of 16 tokens, chosen by what they hold and not by where they stand: two sets of marks tell how much text two data sets share.

    The digest of a data set is another one when a sample is left out or cut; its marks stay, but for those of what is gone.

    Source: Schleimer et al. 2003, "Winnowing: local algorithms for document fingerprinting" (selection by a modulus).

    Attributes:
        every: a power of two; of so many runs about one is chosen.
        marks: a digest of 32 bits of each chosen run, as 8 hexadecimal digits, sorted.
    """

    every: int
    marks: tuple[str, ...]

    @property
    def record(self) -> dict[str, Any]:
        """As a record holds them: JSON types, with a digest by which damage shows."""
        return {"every": self.every, "hex": "".join(self.marks), "sha256": marks_digest(self.every, "".join(self.marks))}


def marks_digest(every: int, text: str) -> str:
    """Hash the marks of a record.

    Args:
        every: of so many runs about one was chosen.
        text: the marks, in hexadecimal, one behind the other.

    Returns:
        The sha256 in hexadecimal.
    """
    return hashlib.sha256(f"{every} {text}".encode()).hexdigest()


NO_MARKS = TextMarks(1, ())
_RUN = 16
_MOST_MARKS = 4096


def text_marks(rows: Iterable[Tensor], every: int | None = None) -> TextMarks:
    """Choose the marks of token rows.

    Args:
        rows: int64 token ids without padding, one dimension each; a shorter row than a run is one.
        every: as another set of marks has it; None: the least with which there are at most 4,096.

    Returns:
        The marks.
    """
    step, chosen = every or 1, set[int]()
    for row in (row for row in rows if len(row)):
        hashes = _hash_runs(row.cpu().numpy().astype(np.uint64) + np.uint64(1))
        chosen.update(hashes[hashes % np.uint64(step) == 0].tolist())
        while every is None and len(chosen) > _MOST_MARKS:
            step *= 2
            chosen = {one for one in chosen if one % step == 0}
    return TextMarks(step, tuple(sorted({f"{one >> 32:08x}" for one in chosen})))


def _hash_runs(ids: np.ndarray) -> np.ndarray:
    """Hash every run of an array of uint64: a polynomial, whose bits are mixed (splitmix64) so that any of them may choose."""
    ids = np.pad(ids, (0, max(0, _RUN - len(ids))))
    found = np.zeros(len(ids) - _RUN + 1, dtype=np.uint64)
    for place in range(_RUN):
        found = found * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + len(found)]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found


def token_rows(batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield the tokens of each sample of batches.

    Args:
        batches: those without `input_ids` [batch, sequence] have none.

    Yields:
        Token ids [T], without what an `attention_mask` says is padding.
    """
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else leading_tensor(batch)
        if ids is None or ids.dim() != 2 or ids.is_floating_point():
            continue
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        masks = mask.bool() if mask is not None and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
        yield from (row[real] for row, real in zip(ids, masks, strict=True))


def hash_batches(batches: Sequence[Batch]) -> str:
    """Hash foreign batches in their order: names, dtypes, shapes and bytes of all tensors.

    Args:
        batches: the batches.

    Returns:
        The sha256 in hexadecimal.
    """
    digest = hashlib.sha256()
    for batch in batches:
        items = sorted(batch.items()) if isinstance(batch, dict) else [(str(i), tensor) for i, tensor in enumerate(batch)]
        digest.update(f"batch {len(items)}\n".encode())
        for name, tensor in items:
            _add(digest, name, tensor)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {shape_of(tensor)}\n".encode())
    for part in dense_parts(tensor):
        digest.update(raw_bytes(part.cpu()).numpy().data)
