"""A few rows and tokens of a batch, for a proof: what a graph has frozen shows in a small batch as well, and sooner, for its sizes differ.

Only batches of token ids are cut, where every tensor has a row for each sequence and a column for each token: of anything else nobody
knows what belongs together. A batch with padding keeps its length, for what is masked lies at one end. Whether a small batch is a
proof, the caller decides: where it fails, whole ones must be tried.
"""

from __future__ import annotations

from torch import Tensor

from compressor.data.collate import Batch

NUM_ROWS = 2
_SHARE, _MIN_TOKENS = 4, 16  # a quarter of the tokens, at least so many


def excerpt(batch: Batch, place: int) -> Batch:
    """Cut a batch of token ids.

    Args:
        batch: not modified.
        place: of the batch among those of a proof; each gets a length of its own.

    Returns:
        The first row and the one with the most padding, cut to a quarter of the tokens where nothing is padded; the batch itself if it is
        no batch of token ids, or small.
    """
    if not isinstance(batch, dict):
        return batch
    tensors = {name: item for name, item in batch.items() if isinstance(item, Tensor)}
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2 or any(item.shape != ids.shape for item in tensors.values()):
        return batch
    mask = tensors.get("attention_mask")
    is_padded = mask is not None and not bool(mask.all())
    last = int(mask.sum(1).argmin()) if mask is not None and is_padded else min(NUM_ROWS, len(ids)) - 1
    rows = sorted({0, last})
    length = ids.shape[1] if is_padded else min(ids.shape[1], max(_MIN_TOKENS, ids.shape[1] // _SHARE) + place)
    return {**batch, **{name: item[rows, :length] for name, item in tensors.items()}}
