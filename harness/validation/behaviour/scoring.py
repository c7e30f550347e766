"""Runs both models over the held-out tokens and keeps what the quality checks need: a few numbers per token, never the logits.

A decoy runs along: the compressed model's own predictions shifted by one token. They are wrong by construction, so a limit that lets them
pass measures nothing on this model and data (an untrained model, or tokens that nothing predicts).

B batch, T positions, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
import torch

from compressor.data import CalibrationData
from compressor.distributed.ranks import Ranks
from compressor.errors import DatasetError
from compressor.progress import Progress, SilentProgress
from harness.validation.behaviour.metrics import TokenScores, score_tokens

_DECOY_TOKENS = 4096
"""How many tokens the decoy is measured on; its errors are so large that a few suffice."""

LogitsFn = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Token ids and attention mask [B, T] -> logits [B, T, V]."""


_SEEN_AHEAD = {torch.float32: 1e-4, torch.float64: 1e-4}
"""How far, relative to the logits, later tokens may move a prediction; other dtypes: 2e-2. Experts' kernels round by number of tokens."""
_TOKENS_AHEAD = 64


@dataclass(frozen=True)
class TokenBatch:
    """Tokens that the models read.

    Attributes:
        input_ids: int64 [B, T].
        mask: which are real, [B, T]; None where all are.
        counted: which are judged, bool [B, T]; the others are read, too. None where all real ones are.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """Bool [B, T]."""
        return torch.ones_like(self.input_ids, dtype=torch.bool) if self.mask is None else self.mask.to(torch.bool)

    @property
    def scored(self) -> torch.Tensor:
        """Bool [B, T-1]: position t predicts t+1; both are real, and what comes is judged."""
        return self.real[:, :-1] & self._judged[:, 1:]

    @property
    def predicting(self) -> torch.Tensor:
        """Bool [B, T]: what is scored, and before padding or the end, where nobody knows what would come, what is judged itself."""
        ahead = torch.nn.functional.pad(self.real[:, 1:], (0, 1))
        return self.real & torch.where(ahead, torch.nn.functional.pad(self._judged[:, 1:], (0, 1)), self._judged)

    @property
    def _judged(self) -> torch.Tensor:
        return self.real if self.counted is None else self.real & self.counted


def token_batches(data: CalibrationData) -> list[TokenBatch]:
    """Return the tokens of data.

    Args:
        data: batches with token ids.
    Returns:
        One for each batch.
    Raises:
        DatasetError: a batch holds none.
    """
    batches = []
    for batch, counted in zip(data.batches, data.token_masks, strict=True):
        named = batch if isinstance(batch, dict) else {"input_ids": batch[0]}
        if "input_ids" not in named:
            raise DatasetError("dataset: its batches hold no input_ids; give token ids or text")
        mask = named.get("attention_mask")
        is_padding = mask is not None and mask.dim() == 2 and not bool(mask.all())
        batches.append(TokenBatch(named["input_ids"], mask if is_padding else None, counted))
    return batches


@dataclass(frozen=True)
class Scores:
    """All scored tokens of a data set.

    Attributes:
        tokens: both models at every scored token.
        sequence: the sequence of each token, int64 [N], counted from 0 without gaps; sequences of the same tokens have one number.
        decoy: the base against the shifted predictions, at the first tokens.
    """

    tokens: TokenScores
    sequence: np.ndarray
    decoy: TokenScores

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one scored token; copies of one say no more than it does."""
        return int(self.sequence.max()) + 1


def score_models(
    base: LogitsFn,
    compressed: LogitsFn,
    batches: Sequence[TokenBatch],
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score both models on the same tokens.

    Args:
        base: logits of the base model.
        compressed: logits of the compressed model.
        batches: the held-out data.
        ranks: share the batches; each gets the scores of all.
        progress: shows a bar.
    Returns:
        The scores of every position that has a token that is judged after a real token.
    Raises:
        DatasetError: there is none.
    """
    ranks = ranks or Ranks()
    positions = {number: scored for number, batch in enumerate(batches) if bool((scored := batch.scored).any())}
    if not positions:
        raise DatasetError("the data holds no sequence of two real tokens of which a later one counts; nothing can be predicted from it")
    shown_decoys = _first_decoys(positions)
    pieces: dict[int, TokenScores] = {}
    decoys: dict[int, TokenScores] = {}
    own = list(positions)[ranks.rank :: ranks.size]
    with (progress or SilentProgress()).task("predictions", len(own)) as task, torch.inference_mode():
        for number in own:
            ranks.check()
            batch, scored = batches[number], positions[number]
            base_BTV, compressed_BTV = (model(batch.input_ids, batch.mask) for model in (base, compressed))
            pieces[number] = _score(base_BTV, compressed_BTV, batch.input_ids, scored)
            if number in shown_decoys:
                decoys[number] = _score_decoy(base_BTV, compressed_BTV, batch.input_ids, scored)
            task.advance(1)
    tokens, decoy = _of_all(pieces, ranks), _of_all(decoys, ranks)
    return Scores(TokenScores.concatenate(tokens), _sequences(positions, batches), TokenScores.concatenate(decoy or [_no_tokens()]))


def sees_ahead(model: LogitsFn, batches: Sequence[TokenBatch]) -> bool:
    """Tell whether predictions depend on tokens that come later, as those of encoders and masked language models do.

    Args:
        model: its logits.
        batches: the data; the first sequence of two tokens is run twice, once with another second half.
    Returns:
        True where they do; such a model has read the token that it would have to predict.
    """
    rows = (row[real] for batch in batches for row, real in zip(batch.input_ids, batch.real, strict=True))
    ids = next((row[None, :_TOKENS_AHEAD] for row in rows if len(row) > 1), None)
    if ids is None:
        return False
    half, other = ids.shape[1] // 2, ids.clone()
    other[:, half:] = (ids[:, half:] + 1) % (ids.max() + 1)
    with torch.inference_mode():
        first, second = (model(tokens, None)[:, :half] for tokens in (ids, other))
    scale = (first.float() - first.float().mean(-1, keepdim=True)).norm()
    return bool((first.float() - second.float()).norm() > _SEEN_AHEAD.get(first.dtype, 2e-2) * scale)


def _first_decoys(positions: Mapping[int, torch.Tensor]) -> set[int]:
    """The first batches that hold tokens enough for the decoy."""
    counts = {number: int(scored[:, 1:].sum()) for number, scored in positions.items()}
    before = accumulate(counts.values(), initial=0)
    return {number for (number, count), sum_ in zip(counts.items(), before, strict=False) if count and sum_ < _DECOY_TOKENS}


def _sequences(positions: Mapping[int, torch.Tensor], batches: Sequence[TokenBatch]) -> np.ndarray:
    """The sequence of each scored token, counted without gaps by the tokens that are read."""
    numbers, found = dict[bytes, int](), list[int]()
    for number, scored in positions.items():
        batch = batches[number]
        for ids, real, count in zip(batch.input_ids.cpu(), batch.real.cpu(), scored.sum(1).tolist(), strict=True):
            if count:
                found += [numbers.setdefault(ids[real].numpy().tobytes(), len(numbers))] * count
    return np.array(found)


def _of_all(pieces: Mapping[int, TokenScores], ranks: Ranks) -> list[TokenScores]:
    """The pieces of all ranks, by batch."""
    if ranks.size == 1:
        return list(pieces.values())
    told = [[number, [torch.from_numpy(getattr(piece, one.name)) for one in fields(piece)]] for number, piece in pieces.items()]
    heard = {number: TokenScores(*(column.numpy() for column in columns)) for own in ranks.gather(told) for number, columns in own}
    return [heard[number] for number in sorted(heard)]


def _score(base_BTV: torch.Tensor, compressed_BTV: torch.Tensor, input_ids: torch.Tensor, scored: torch.Tensor) -> TokenScores:
    scored = scored.to(base_BTV.device)
    targets = input_ids[:, 1:].to(base_BTV.device)[scored]
    return score_tokens(base_BTV[:, :-1][scored], compressed_BTV[:, :-1][scored], targets)


def _score_decoy(base_BTV: torch.Tensor, compressed_BTV: torch.Tensor, input_ids: torch.Tensor, scored: torch.Tensor) -> TokenScores:
    return _score(base_BTV[:, 1:], compressed_BTV[:, :-1], input_ids[:, 1:], scored[:, 1:])


def _no_tokens() -> TokenScores:
    return TokenScores(*(np.empty(0) for _ in range(6)))


def model_logits(model: torch.nn.Module, device: torch.device) -> LogitsFn:
    """Return the logits function of a transformers causal language model.

    Args:
        model: the model; moved to `device`.
        device: where it runs.
    Returns:
        A function of token ids and mask.
    """
    model.to(device)

    def logits(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        attention_mask = mask.to(device, torch.long) if mask is not None else None
        result: torch.Tensor = model(input_ids=input_ids.to(device), attention_mask=attention_mask, use_cache=False).logits
        return result

    return logits
