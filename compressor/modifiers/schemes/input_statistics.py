"""What the modifiers learn from the inputs of layers: static ranges, and Hessians shared by all modules that read one tensor.

Padding never enters a statistic: `real_tokens` drops it, or refuses an input that it cannot line up with the mask. Sharing of Hessians
(q/k/v, gate/up) is found, not configured: two modules share when they are handed the very same tensor object, unchanged, in every
forward. A module that stops doing so is an error, never a silent mixture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.algorithms.hessian import Hessian
from compressor.errors import CalibrationError, NumericsError
from compressor.lifecycle import State
from compressor.nn.experts import expert_rows
from compressor.numerics import Observer, QParams, check_qparams

InputHook = Callable[[Tensor], None]
Target = Literal["base", "propagated"]


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
        x: [batch, seq, C] or [batch * seq, C], or nested [seq_i, C].
        token_mask: [batch, seq] bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        [N, C], a view of x where nothing is padded.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if x.is_nested:
        return torch.cat(_nested_sequences(x, token_mask, name))
    if token_mask is None or bool(token_mask.all()):
        return x.reshape(-1, x.shape[-1])
    if x.shape[:-1] == token_mask.shape:
        return x[token_mask.to(x.device)]
    if x.dim() == 2 and x.shape[0] == token_mask.numel():
        return x[token_mask.flatten().to(x.device)]
    raise CalibrationError(
        f"{name}: an input of shape {tuple(x.shape)} does not line up with a padded batch of {tuple(token_mask.shape)} tokens; "
        "use batch_size=1, which needs no padding, and no loss_mask"
    )


def token_sequences(x: Tensor, token_mask: Tensor | None, name: str) -> list[Tensor]:
    """Return the inputs of real tokens sequence by sequence.

    Sums over them are then taken in one order whatever the batch size: rounding in another order is enough to change a few codes of the
    first layer, and from there a tenth of the codes of the last.

    Args:
        x: [batch, seq, C] or [batch * seq, C], or nested [seq_i, C].
        token_mask: [batch, seq] bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        One [N_i, C] per sequence; a single one where x does not show its sequences.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if x.is_nested:
        return _nested_sequences(x, token_mask, name)
    if token_mask is not None and x.dim() == 2 and x.shape[0] == token_mask.numel():
        x = x.view(*token_mask.shape, -1)
    if x.dim() != 3:
        return [real_tokens(x, token_mask, name)]
    if token_mask is None:
        return list(x)
    if x.shape[:-1] != token_mask.shape:
        return [real_tokens(x, token_mask, name)]
    return [real_tokens(row, mask, name) for row, mask in zip(x, token_mask, strict=True)]


def _nested_sequences(x: Tensor, token_mask: Tensor | None, name: str) -> list[Tensor]:
    """Nested tensors hold sequences without their padding: they must be as long as the mask says."""
    rows = [row.reshape(-1, row.shape[-1]) for row in x.unbind()]
    if token_mask is not None and [len(row) for row in rows] != token_mask.sum(1).tolist():
        raise CalibrationError(
            f"{name}: a nested input of {[len(row) for row in rows]} tokens does not line up with a padded batch of "
            f"{token_mask.sum(1).tolist()} tokens; use batch_size=1, which needs no padding, and no loss_mask"
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
            f"{name}: its layer of experts was handed {sent.num_tokens} rows for a padded batch of {mask.numel()} tokens; "
            "use batch_size=1, which needs no padding, and no loss_mask"
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
        tokens = real_tokens(x.detach(), mask_of_input(state, name), name)
        if tokens.numel() > 0:  # an expert that no token of this batch was sent to
            observer.update(tokens)

    return observe


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


class BaseInputs:
    """What modules are handed in the uncompressed model, until the same batch comes in the compressed one.

    Attributes:
        unmatched: dotted names of modules of which a call could not be matched with one in the uncompressed model.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.unmatched: dict[str, None] = {}
        self._waiting: dict[str, deque[tuple[Tensor, Tensor | None]]] = {}
        self._is_taking = False
        self._last: tuple[Tensor, int, Tensor] | None = None

    def keep(self, name: str, x: Tensor, rows: Tensor | None) -> None:
        """Keep an input of the uncompressed model, as it is now.

        Args:
            name: dotted module name.
            x: [..., C], or nested.
            rows: which tokens of the batch an expert was handed; None for all.
        """
        if self._is_taking:  # a new batch; of the one before, the compressed model may have called less
            self._waiting.clear()
            self._is_taking, self._last = False, None
        if self._last is None or self._last[0] is not x or self._last[1] != _version(x):
            self._last = (x, _version(x), x.detach().clone())
        self._waiting.setdefault(name, deque()).append((self._last[2], rows))

    def take(self, name: str, x: Tensor, rows: Tensor | None, batch_shape: tuple[int, ...] | None) -> Tensor | None:
        """Find the input that belongs to one of the compressed model.

        Args:
            name: dotted module name.
            x: [..., C], or nested; the same batch.
            rows: which tokens of the batch an expert was handed; None for all.
            batch_shape: sequences and tokens of the batch.

        Returns:
            As x, token by token what they are in the uncompressed model; tokens that it sends to another expert count as unchanged.
            None where nothing shows which tokens belong together.
        """
        self._is_taking = True
        waiting = self._waiting.get(name)
        if not waiting:
            self.unmatched[name] = None
            return None
        base, base_rows = waiting.popleft()
        if rows is not None and base_rows is not None and not x.is_nested:
            return _matched(x, rows, base, base_rows)
        if x.is_nested or base.is_nested or x.shape != base.shape or not _holds_batch(x, batch_shape):
            self.unmatched[name] = None
            return None
        return base


def _matched(x: Tensor, rows: Tensor, base: Tensor, base_rows: Tensor) -> Tensor:
    """Put inputs of an expert into the order of those that it gets in the other stream."""
    if not len(base_rows):
        return x
    found = base_rows[None, :] == rows[:, None]
    return torch.where(found.any(1)[:, None], base[found.int().argmax(1)], x)


def _holds_batch(x: Tensor, batch_shape: tuple[int, ...] | None) -> bool:
    """True for an input with a place for each sequence, or for each token, of the batch: what was picked by values has none."""
    if batch_shape is None:
        return False
    return (x.dim() > 2 and x.shape[0] == batch_shape[0]) or x.shape[:-1].numel() == prod(batch_shape)


class InputHessians:
    """Maps module names to Hessians; modules with one input have one Hessian."""

    def __init__(self, *, share: bool) -> None:
        """Start empty; with `share` False every module gets a Hessian of its own."""
        self._share = share
        self._of: dict[str, Hessian] = {}
        self._members: dict[int, list[str]] = {}
        self._calls: dict[str, int] = {}
        self._last: tuple[Tensor, int, Hessian] | None = None

    def observe(self, name: str, x: Tensor, token_mask: Tensor | None, base: Tensor | None = None) -> None:
        """Add one input of one module.

        Args:
            name: dotted module name.
            x: [..., C] input, as the module received it.
            token_mask: [batch, seq] bool, True at real tokens, or None.
            base: as x, what the same tokens are in the uncompressed model; None where nobody knows.

        Raises:
            CalibrationError: the module shared its input in earlier forwards and no longer does.
        """
        if x.numel() == 0:  # an expert that no token of this batch was sent to
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        shared = self._same_as_last(x)
        known = self._of.get(name)
        if known is None and shared is not None and self._calls[self._members[id(shared)][0]] == 1:
            self._of[name] = shared
            self._members[id(shared)].append(name)
            return
        if known is not None and known is shared:
            return
        if known is not None and self._members[id(known)][0] != name:
            leader = self._members[id(known)][0]
            raise CalibrationError(f"{name}: its input was that of {leader} in earlier forwards and no longer is; set share_inputs: false")
        self._add(name, x, token_mask, known, base)

    def take(self, name: str) -> tuple[Hessian, list[str]] | None:
        """Hand over the Hessian of a module, and forget it.

        Args:
            name: dotted module name.

        Returns:
            The Hessian and the names of all modules that share it; None when the module saw no token.

        Raises:
            CalibrationError: the sharing modules were not called equally often.
        """
        hessian = self._of.get(name)
        if hessian is None:
            return None
        members = self._members.pop(id(hessian))
        calls = {member: self._calls.pop(member) for member in members}
        if len(set(calls.values())) > 1:
            raise CalibrationError(f"{name}: modules that share one input were called unequally often, {calls}; set share_inputs: false")
        for member in members:
            del self._of[member]
        self._last = None
        return (hessian, members) if hessian.num_tokens else None

    def _add(self, name: str, x: Tensor, token_mask: Tensor | None, known: Hessian | None, base: Tensor | None) -> None:
        hessian = known
        if hessian is None:
            hessian = self._of[name] = Hessian(x.size(-1), x.device)
            self._members[id(hessian)] = [name]
        sequences = token_sequences(x, token_mask, name)
        for tokens_NC in sequences:
            hessian.add(tokens_NC)
        if base is not None:
            for base_NC, tokens_NC in zip(token_sequences(base, token_mask, name), sequences, strict=True):
                hessian.add_shift(base_NC, tokens_NC)
        self._last = (x, _version(x), hessian)

    def _same_as_last(self, x: Tensor) -> Hessian | None:
        if self._last is None or not self._share:
            return None
        tensor, version, hessian = self._last
        return hessian if tensor is x and version == _version(x) and id(hessian) in self._members else None


def _version(x: Tensor) -> int:
    # Tensors made under inference_mode carry no version; nothing can have been written to them outside it.
    return 0 if torch.is_inference(x) else x._version


class HessianHooks:
    """Hessians of inputs in the compressed model and, where the uncompressed one runs beside it, how far its inputs lie from them.

    Attributes:
        hessians: of the inputs.
    """

    def __init__(self, *, share: bool = True, has_base: bool = False) -> None:
        """Start empty; with `share` False every module gets a Hessian of its own, with `has_base` the hooks see both models."""
        self.hessians = InputHessians(share=share)
        self._base_inputs = BaseInputs() if has_base else None

    def accumulating(self, state: State, name: str) -> InputHook:
        """Return what takes the inputs of a module, in both models.

        Args:
            state: of the run.
            name: dotted module name.

        Returns:
            The hook.
        """

        def accumulate(x: Tensor) -> None:
            if self._base_inputs is None or not state.has_base_stream:
                self.hessians.observe(name, x, mask_of_input(state, name))
                return
            sent = expert_rows(state.model, name)
            rows = None if sent is None else sent.rows
            if state.base_stream:
                self._base_inputs.keep(name, x, rows)
            else:
                base = self._base_inputs.take(name, x, rows, state.batch_shape)
                self.hessians.observe(name, x, mask_of_input(state, name), base)

        return accumulate

    def notes(self, label: str) -> list[str]:
        """Say of which modules the inputs in the uncompressed model are not known.

        Args:
            label: of the modifier.

        Returns:
            One sentence, or none.
        """
        if self._base_inputs is None or not self._base_inputs.unmatched:
            return []
        name, *others = self._base_inputs.unmatched
        return [
            f"{label}: of {name}{f' and {len(others)} more' if others else ''} the inputs in the uncompressed model are not known "
            "for all calls; in the others they count as unchanged"
        ]
