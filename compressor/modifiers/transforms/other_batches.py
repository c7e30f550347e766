"""Whether a transform has left the model's function as it was, also on batches of other kinds than the one that it was proved on.

A forward may take another way for a longer batch, or one with an image, on which a layer reads what the proof never saw it read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.data import Batch, batch_to
from compressor.data.collate import leading_tensor
from compressor.errors import TargetError
from compressor.lifecycle import State
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.picking import excerpt
from compressor.tracing.targets.call_order import plain_forward

_LOOKED_AT = 64  # batches among which kinds are looked for
_COLUMNS = 4096  # numbers of an output that are compared for each token, at most
_MOST = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05}
_MOST_NARROW = 0.2  # bfloat16, whose weights are all rounded a second time


def rounding_of(dtype: torch.dtype) -> float:
    """Return by how much, relative, the outputs of a model may differ because its weights were rounded to `dtype` anew."""
    return _MOST.get(dtype, _MOST_NARROW)


class OtherBatches:
    """What a model gives before a transform on the shortest and the longest batch with each set of inputs, four at most, and on others."""

    def __init__(self, state: State, label: str, more: Mapping[str, Batch] | None = None) -> None:
        """Run them, one row each.

        Args:
            state: of the run; not changed.
            label: of the modifier, for the error.
            more: batches that are none of the data, by what is said of them.
        """
        batches = [] if state.data is None else state.data.batches
        self._label = label
        chosen = {f"batch {number} {tuple(leading_tensor(batches[number]).shape)}": batches[number] for number in _kinds(batches)}
        with Footprint(state.model):
            self._before = {what: _first_outputs(state, one) for what, one in {**chosen, **(more or {})}.items()}

    def check(self, state: State) -> None:
        """Run them again.

        Args:
            state: as it is now.

        Raises:
            TargetError: on one of them the model gives something else, by more than rounding and ten times the others' difference.
        """
        with Footprint(state.model):
            off = {what: _difference(before, _outputs(state, batch)) for what, (batch, before) in self._before.items()}
        if not off:
            return
        worst = max(off, key=lambda one: off[one])
        rounding = rounding_of(next(state.model.parameters()).dtype)
        limit = max(10 * min(off.values()), rounding) if len(off) > 1 else rounding
        if not off[worst] <= limit:
            raise TargetError(
                f"{self._label}: on {worst} the model gives other outputs than before ({off[worst]:.2g} off, relative, for half of its "
                "tokens): its forward takes another way there than on the batch that shows what reads what; leave the modifier out, or "
                "give batches of one kind, and those of the kind that the model is for"
            )


def outputs_of_model(state: State, batch: Batch) -> Tensor:
    """Run the model on an excerpt of a batch.

    Args:
        state: of the session.
        batch: as the model takes it.

    Returns:
        Logits, or the first of what it gives, in float64 on the CPU.
    """
    with torch.no_grad(), Footprint(state.model):  # a forward may change the model for good, as BigBird's does on few tokens
        try:
            output = plain_forward(state.model, batch_to(excerpt(batch, 0), state.device))
        except Unrepeatable:  # the model may take whole batches only
            output = plain_forward(state.model, batch_to(batch, state.device))
    logits = getattr(output, "logits", None)
    first = logits if logits is not None else output if isinstance(output, Tensor) else next(iter(output.values()))
    found: Tensor = first.detach().double().cpu()
    return found


def _kinds(batches: Sequence[Batch]) -> list[int]:
    """Numbers of the shortest and the longest batch with each set of inputs."""
    lengths: dict[object, dict[int, int]] = {}
    for number, batch in enumerate(batches[:_LOOKED_AT]):
        names = tuple(sorted(batch)) if isinstance(batch, dict) else len(batch)
        lengths.setdefault(names, {}).setdefault(leading_tensor(batch).shape[1:].numel(), number)
    chosen = [one for known in lengths.values() for one in {known[min(known)], known[max(known)]}]
    return sorted(chosen)[:4]


def _one_row(batch: Batch) -> Batch:
    """The first row with the most tokens, where every tensor has a row for each."""
    if not isinstance(batch, dict):
        return batch
    rows = len(leading_tensor(batch))
    if any(not one.dim() or len(one) != rows for one in batch.values()):
        return batch
    mask = batch.get("attention_mask")
    row = int(mask.flatten(1).sum(1).argmax()) if mask is not None and mask.dim() > 1 else 0
    return {name: one[row : row + 1] for name, one in batch.items()}


def _first_outputs(state: State, batch: Batch) -> tuple[Batch, Tensor]:
    """What the model gives on one row; on the whole batch where its rows belong together, as those of codebooks do (MusicGen)."""
    row = _one_row(batch)
    try:
        return row, _outputs(state, row)
    except Unrepeatable:
        return batch, _outputs(state, batch)


@torch.no_grad()
def _outputs(state: State, batch: Batch) -> Tensor:
    """[tokens, some of the columns], in float32 on the CPU: logits, or the first of what the model gives."""
    output = plain_forward(state.model, batch_to(batch, state.device))
    leaves = tree_leaves([getattr(output, "logits", None), dict(output) if hasattr(output, "keys") else output])
    found = [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point() and one.dim()]
    if not found:
        return torch.zeros(0, 1, dtype=torch.float32)
    columns = found[0].detach().flatten(0, -2) if found[0].dim() > 1 else found[0].detach()[:, None]
    return columns[:, :: max(1, columns.shape[-1] // _COLUMNS)].float().cpu()


def _difference(before: Tensor, after: Tensor) -> float:
    """The median over tokens of the relative difference: an expert that is chosen otherwise by rounding is few tokens' matter."""
    if before.shape != after.shape:
        return float("inf")
    seen = before.isfinite().all(dim=1)  # not what is masked to the end, which some attention makes NaN
    if not bool(seen.any()):
        return 0.0
    off = (after - before)[seen].norm(dim=1) / before[seen].norm(dim=1).clamp_min(1e-30)
    return float(off.nan_to_num(nan=float("inf")).median())
