"""What the modifiers learn from the inputs of layers: which tokens count, and static ranges.

Padding never enters a statistic: `real_tokens` drops it, or refuses an input that it cannot line up with the mask. Nor do samples that
another process counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.data.collate import ALL_COUNTED, without_single_axes
from compressor.distributed.ranks import Ranks
from compressor.errors import CalibrationError, NumericsError
from compressor.lifecycle import State
from compressor.nn.experts import expert_rows
from compressor.numerics import Observer, QParams, check_qparams

InputHook = Callable[[Tensor], None]


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Tensor:
    """Find what a layer is handed, in a form that can be read.

    Args:
        args: positional arguments of the call.
        kwargs: named ones.
        name: dotted module name, for errors only.

    Returns:
        The very tensor, of any layout but a sparse one, which is filled up.

    Raises:
        CalibrationError: it is one of the tensors in which torch.func hides a batch or a derivative.
    """
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise CalibrationError(
            f"{name}: is called inside a transform of torch.func (vmap, grad, jvp), where its inputs cannot be read; ignore it, or call it "
            "on whole batches"
        )
    return x if x.layout in (torch.strided, torch.jagged) else x.to_dense()


def real_tokens(x: Tensor, token_mask: Tensor | None, name: str) -> Tensor:
    """Return the inputs of real tokens, [N, C], without padding.

    Args:
        x: [batch, seq, C], which may have axes of one in between, or [batch * seq, C], or nested [seq_i, C].
        token_mask: [batch, seq] bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        [N, C], a view of x where nothing is padded.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if x.is_nested:
        return torch.cat(_nested_sequences(x, token_mask, name))
    x = without_single_axes(x)
    if token_mask is None or bool(token_mask.all()):
        return x.reshape(-1, x.shape[-1])
    if x.shape[:-1] == token_mask.shape:
        return x[token_mask.to(x.device)]
    if x.dim() == 2 and x.shape[0] == token_mask.numel():
        return x[token_mask.flatten().to(x.device)]
    raise CalibrationError(
        f"{name}: an input of shape {tuple(x.shape)} does not line up with a batch of {tuple(token_mask.shape)} tokens, not all of which "
        f"count; {ALL_COUNTED}"
    )


def token_sequences(x: Tensor, token_mask: Tensor | None, name: str) -> list[Tensor]:
    """Return the inputs of real tokens sequence by sequence.

    Sums over them are then taken in one order whatever the batch size: rounding in another order is enough to change a few codes of the
    first layer, and from there a tenth of the codes of the last.

    Args:
        x: [batch, seq, C], which may have axes of one in between, or [batch * seq, C], or nested [seq_i, C].
        token_mask: [batch, seq] bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        One [N_i, C] per sequence; a single one where x does not show its sequences.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if x.is_nested:
        return _nested_sequences(x, token_mask, name)
    x = without_single_axes(x)
    if token_mask is not None and x.dim() == 2 and x.shape[0] == token_mask.numel():
        x = x.view(*token_mask.shape, x.shape[-1])
    if x.dim() != 3:
        return [real_tokens(x, token_mask, name)]
    if token_mask is None:
        return list(x)
    if x.shape[:-1] != token_mask.shape:
        return [real_tokens(x, token_mask, name)]
    return [real_tokens(row, mask, name) for row, mask in zip(x, token_mask, strict=True)]


def own_sequences(state: State, x: Tensor, name: str) -> list[tuple[int, Tensor]]:
    """Return the inputs of real tokens that this process counts, sequence by sequence.

    Args:
        state: of the run; its batch says what is padding, and who counts which sample.
        x: input of a module, as `token_sequences` takes it.
        name: dotted module name.

    Returns:
        The part of all samples that a sequence is in, and its tokens [N_i, C]; what does not show its sequences is in the part of the
        batch's first one.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    sequences, parts = token_sequences(x, mask_of_input(state, name), name), state.sample_parts
    found = ((parts[row * len(parts) // len(sequences)], tokens_NC) for row, tokens_NC in enumerate(sequences))
    return [(part, tokens_NC) for part, tokens_NC in found if part is not None]


def own_tokens(state: State, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """Return the inputs of real tokens that this process counts, where their order does not matter.

    Args:
        state: of the run; its batch says who counts which sample.
        x: [batch, seq, C] or [batch * seq, C], or nested [seq_i, C].
        mask: bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        [N, C].

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if None not in state.sample_parts:
        return real_tokens(x, mask, name)
    own = [tokens_NC for _, tokens_NC in own_sequences(state, x, name)]
    return torch.cat(own) if own else x.reshape(-1, x.shape[-1])[:0]


def _nested_sequences(x: Tensor, token_mask: Tensor | None, name: str) -> list[Tensor]:
    """Nested tensors hold sequences without their padding: they must be as long as the mask says."""
    rows = [row.reshape(-1, row.shape[-1]) for row in x.unbind()]
    if token_mask is not None and [len(row) for row in rows] != token_mask.sum(1).tolist():
        raise CalibrationError(
            f"{name}: a nested input of {[len(row) for row in rows]} tokens does not line up with a batch, of whose "
            f"sequences {token_mask.sum(1).tolist()} tokens count; {ALL_COUNTED}"
        )
    return rows


def mask_of_input(state: State, name: str) -> Tensor | None:
    """Return the mask that belongs to what a module is handed: that of the batch or, for an expert, of the tokens sent to it.

    Args:
        state: of the run.
        name: dotted module name.

    Returns:
        Bool, True at real tokens; None when all are real.

    Raises:
        CalibrationError: the experts were not handed the tokens of the batch, so padding cannot be told from tokens.
    """
    mask = state.token_mask
    sent = None if mask is None else expert_rows(state.model, name)
    if mask is None or sent is None:
        return mask
    if sent.num_tokens != mask.numel():
        raise CalibrationError(
            f"{name}: its layer of experts was handed {sent.num_tokens} rows for a batch of {mask.numel()} tokens, not all of which count; "
            f"{ALL_COUNTED}"
        )
    return mask.flatten()[sent.rows.to(mask.device)]


def observing(observer: Observer, state: State, name: str) -> InputHook:
    """Return what feeds an observer with the inputs of real tokens.

    Args:
        observer: of the input's range; every forward updates it.
        state: of the run; its token mask says what is padding.
        name: dotted module name, for errors only.

    Returns:
        The hook.
    """

    def observe(x: Tensor) -> None:
        if state.base_stream:  # ranges are those of the compressed model
            return
        tokens = own_tokens(state, x.detach(), mask_of_input(state, name), name)
        if tokens.numel() > 0:  # an expert that no token of this batch was sent to
            observer.update(tokens)

    return observe


def join_observers(ranks: Ranks, observers: Mapping[str, Observer]) -> None:
    """Put together what the observers of all ranks have learnt. Changes them.

    Args:
        ranks: of the run.
        observers: the same ones on all ranks, by any name.
    """
    if ranks.size == 1 or not observers:
        return
    states = ranks.gather({name: observer.state() for name, observer in observers.items()})
    for name, observer in observers.items():
        observer.restore_all([state[name] for state in states])


def static_input_qparams(observer: Observer, name: str, dtype: torch.dtype) -> QParams:
    """Return scale and zero point of a static input, in the dtype in which they are stored.

    Args:
        observer: has seen the calibration data.
        name: dotted module name, for errors only.
        dtype: of the layer's weight.

    Returns:
        Scale [1] and zero point [1] or None.

    Raises:
        CalibrationError: the observer saw no data, or nothing but zeros.
        NumericsError: the range gives no usable scale.
    """
    try:
        qparams = observer.qparams()
    except NumericsError as error:
        raise CalibrationError(
            f"{name}: its static input range was never observed ({error}); add data that exercises it; "
            "calibrate_all_experts shows every expert all tokens; a layer whose weight its owner reads by itself (F.linear) "
            "is never called, whatever the data: ignore it, or choose dynamic inputs"
        ) from error
    if not any(bool(observer.state()[end].any()) for end in ("min", "max")):
        raise CalibrationError(
            f"{name}: its input was zero on every calibration token, and a static range of zero would cut off whatever comes later; "
            "add data that exercises it, choose a scheme with dynamic inputs, or ignore the module"
        )
    qparams = qparams._replace(scale=qparams.scale.to(dtype))
    check_qparams(qparams, f"{name} input")
    return qparams
