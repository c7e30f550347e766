"""Hessians of the inputs of modules, one for all that read the same tensor, and how far these inputs lie from the uncompressed model's.

Sharing (q/k/v, gate/up) is found, not configured: two modules share when they are handed the very same tensor object, unchanged, in every
forward. A module that stops doing so is an error, never a silent mixture. What is written through `.data`, numpy or under inference mode
counts no version, so in the first forward of a module values are compared as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from compressor.algorithms.hessian import Hessian
from compressor.distributed.ranks import Ranks
from compressor.errors import CalibrationError
from compressor.lifecycle import State
from compressor.modifiers.schemes.input_statistics import InputHook, own_sequences
from compressor.nn.experts import expert_rows
from compressor.numerics.checksum import checksum

Target = Literal["base", "propagated"]


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
        self._last: tuple[ref[Tensor], int, Tensor] | None = None
        self._reads_anew: dict[str, bool] = {}

    def keep(self, name: str, x: Tensor, rows: Tensor | None) -> None:
        """Keep an input of the uncompressed model, as it is now.

        Args:
            name: dotted module name.
            x: [..., C], or nested.
            rows: which tokens of the batch an expert was handed; None for all.
        """
        if self._is_taking:  # a new batch; of the one before, the compressed model may have called less
            self._waiting.clear()
            self._is_taking = False
        is_last = self._last is not None and self._last[0]() is x and self._last[1] == _version(x)
        if is_last and name not in self._reads_anew:
            self._reads_anew[name] = self._last is not None and _content(self._last[2]) != _content(x)
        if self._last is None or not is_last or self._reads_anew[name]:
            self._last = (ref(x), _version(x), x.detach().clone())
        self._waiting.setdefault(name, deque()).append((self._last[2], rows))

    def take(
        self, name: str, x: Tensor, rows: Tensor | None, batch_shape: tuple[int, ...] | None, *, is_picked: bool = False
    ) -> Tensor | None:
        """Find the input that belongs to one of the compressed model.

        Args:
            name: dotted module name.
            x: [..., C], or nested; the same batch.
            rows: which tokens of the batch an expert was handed; None for all.
            batch_shape: sequences and tokens of the batch.
            is_picked: the rows of x were picked by values, which are others in the uncompressed model.

        Returns:
            As x, token by token what they are in the uncompressed model; tokens that it sends to another expert count as unchanged.
            None where nothing shows which tokens belong together.
        """
        self._is_taking, self._last = True, None
        waiting = self._waiting.get(name)
        if not waiting:
            self.unmatched[name] = None
            return None
        base, base_rows = waiting.popleft()
        if rows is not None and base_rows is not None and not x.is_nested:
            return _matched(x, rows, base, base_rows)
        if is_picked or x.is_nested or base.is_nested or x.shape != base.shape or not _holds_batch(x, batch_shape):
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
    """True for an input with a place for each sample, or for each token, of the batch: what was picked by values has none."""
    if batch_shape is None:
        return False
    return (x.dim() > 2 and x.shape[0] == batch_shape[0]) or x.shape[:-1].numel() in (batch_shape[0], prod(batch_shape))


class SharedInput(NamedTuple):
    """Modules that read one input, and its Hessian; of 0 tokens where none reached them."""

    members: list[str]
    hessian: Hessian


def join_hessians(ranks: Ranks, hessians: Sequence[Hessian], owners: Sequence[int | None]) -> None:
    """Add up the parts of Hessians over all ranks. Changes them; those of others are empty then.

    Args:
        ranks: of the run.
        hessians: the same ones on all ranks, with the tokens of all.
        owners: the rank that gets each; None: all ranks.
    """
    ranks.add_up(
        [sums for hessian in hessians for sums in (hessian.panels, hessian.shifts)], [one for owner in owners for one in (owner, owner)]
    )
    for hessian in hessians:
        hessian.settle()


def count_all(ranks: Ranks, hessians: Sequence[Hessian]) -> None:
    """Give each Hessian the number of tokens that all ranks have seen. Changes them.

    Args:
        ranks: of the run.
        hessians: the same ones on all ranks.
    """
    counts = ranks.gather([hessian.num_tokens for hessian in hessians])
    for hessian, own in zip(hessians, zip(*counts, strict=True), strict=True):
        hessian.num_tokens = sum(own)


class InputHessians:
    """Maps module names to Hessians; modules with one input have one Hessian."""

    def __init__(self, *, share: bool) -> None:
        """Start empty; with `share` False every module gets a Hessian of its own."""
        self._share = share
        self._of: dict[str, Hessian] = {}
        self._members: dict[int, list[str]] = {}
        self._calls: dict[str, int] = {}
        self._last: tuple[ref[Tensor], int, Hessian] | None = None
        self._content: int | None = None  # of it, in the first forward of its module

    def observe(self, state: State, name: str, x: Tensor, base: Tensor | None = None) -> None:
        """Add one input of one module.

        Args:
            state: of the run; its batch says what is padding, and who counts which sample.
            name: dotted module name.
            x: [..., C] input, as the module received it.
            base: as x, what the same tokens are in the uncompressed model; None where nobody knows.

        Raises:
            CalibrationError: the module shared its input in earlier forwards and no longer does.
        """
        if x.numel() == 0:  # an expert that no token of this batch was sent to
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        shared = self._same_as_last(x)
        known = self._of.get(name)
        if known is None and shared is not None and self._content is not None and self._content == _content(x):
            self._of[name] = shared
            self._members[id(shared)].append(name)
            return
        if known is not None and known is shared:
            return
        if known is not None and self._members[id(known)][0] != name:
            leader = self._members[id(known)][0]
            raise CalibrationError(f"{name}: its input was that of {leader} in earlier forwards and no longer is; set share_inputs: false")
        self._add(state, name, x, known, base)

    def take_all(self, names: Sequence[str], ranks: Ranks) -> list[SharedInput]:
        """Hand over what modules have seen, of which no more will come, and forget it.

        Args:
            names: dotted module names, the same on all ranks.
            ranks: of the run; what each gets are the sums over its own samples, for `join_hessians`.

        Returns:
            Modules with their Hessians, in the order of the names.

        Raises:
            CalibrationError: modules that share an input were not called equally often, or do not share it in all batches.
        """
        self._last = None
        own = {id(self._of[name]): self._of[name] for name in names if name in self._of}
        taken = [self._forget(hessian) for hessian in own.values()]
        found: dict[str, SharedInput] = {}
        for members, num_columns, num_tokens, peak in (one for rank in ranks.gather(taken) for one in rank):
            shared = found.get(members[0]) or SharedInput(members, Hessian(num_columns, ranks.device))
            if shared.members != members or any(found.get(name, shared) is not shared for name in members):
                raise CalibrationError(f"{members[0]}: its input is that of other modules in some batches only; set share_inputs: false")
            shared.hessian.num_tokens += num_tokens
            shared.hessian.peak.clamp_(min=peak)
            found |= dict.fromkeys(members, shared)
        for (members, *_), hessian in zip(taken, own.values(), strict=True):
            found[members[0]].hessian.panels, found[members[0]].hessian.shifts = hessian.panels, hessian.shifts
        blind = {name: SharedInput([name], Hessian(0)) for name in names if name not in found or not found[name].hessian.num_tokens}
        return list({id(one): one for one in ((found | blind)[name] for name in names)}.values())

    def _forget(self, hessian: Hessian) -> tuple[list[str], int, int, float]:
        """Return the modules that share a Hessian, its columns, its tokens and its largest input."""
        members = self._members.pop(id(hessian))
        calls = {member: self._calls.pop(member) for member in members}
        if len(set(calls.values())) > 1:
            said = f"modules that share one input were called unequally often, {calls}"
            raise CalibrationError(f"{members[0]}: {said}; set share_inputs: false")
        for member in members:
            del self._of[member]
        return members, hessian.num_columns, hessian.num_tokens, float(hessian.peak)

    def _add(self, state: State, name: str, x: Tensor, known: Hessian | None, base: Tensor | None) -> None:
        hessian = known
        if hessian is None:
            hessian = self._of[name] = Hessian(x.size(-1), x.device)
            self._members[id(hessian)] = [name]
        sequences = own_sequences(state, x, name)
        for part, tokens_NC in sequences:
            hessian.add(tokens_NC, part)
        if base is not None:
            for (part, base_NC), (_, tokens_NC) in zip(own_sequences(state, base, name), sequences, strict=True):
                hessian.add_shift(base_NC, tokens_NC, part)
        self._last = (ref(x), _version(x), hessian)  # wide inputs that are made anew must not wait for the next ones
        self._content = _content(x) if self._share and self._calls[name] == 1 else None

    def _same_as_last(self, x: Tensor) -> Hessian | None:
        if self._last is None or not self._share:
            return None
        tensor, version, hessian = self._last
        return hessian if tensor() is x and version == _version(x) and id(hessian) in self._members else None


def _version(x: Tensor) -> int:
    # Tensors made under inference_mode carry no version; nothing can have been written to them outside it.
    return 0 if torch.is_inference(x) else x._version


def _content(x: Tensor) -> int:
    return checksum(x.values() if x.is_nested else x)


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
                self.hessians.observe(state, name, x)
                return
            sent = expert_rows(state.model, name)
            rows = None if sent is None else sent.rows
            if state.base_stream:
                self._base_inputs.keep(name, x, rows)
            else:
                base = self._base_inputs.take(name, x, rows, state.batch_shape, is_picked=name in state.picked)
                self.hessians.observe(state, name, x, base)

        return accumulate

    def notes(self, label: str, ranks: Ranks) -> list[str]:
        """Say of which modules the inputs in the uncompressed model are not known.

        Args:
            label: of the modifier.
            ranks: of the run.

        Returns:
            One sentence, or none.
        """
        unmatched = ranks.union(() if self._base_inputs is None else tuple(self._base_inputs.unmatched))
        if not unmatched:
            return []
        name, *others = unmatched
        return [
            f"{label}: of {name}{f' and {len(others)} more' if others else ''} the inputs in the uncompressed model are not known "
            "for all calls; in the others they count as unchanged"
        ]
