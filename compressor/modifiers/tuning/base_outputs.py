"""What the uncompressed model predicts on the calibration data, kept from before it is compressed, and how far another state is from it.

Where the logits are one linear map of the last hidden states, those are kept, with a reference to the output head as it was: a thousandth
of the bytes, and logits are made of a few tokens at a time. Where something comes behind the head (a soft cap, a scale), the logits are
kept. A model without logits is judged by the squared error of its first output, most often the last hidden states of an encoder.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.algorithms.costs import FLOAT32_BYTES, Memory, Work
from compressor.algorithms.scale_tuning import divergence
from compressor.data import Batch, CalibrationData, batch_to
from compressor.data.collate import call_model, leading_tensor
from compressor.errors import CalibrationError, NumericsError
from compressor.modifiers.tuning.gradients import send_back
from compressor.modifiers.tuning.sequences import Axes, Piece, Split, cut, find_axes, joined, sequences_at_once
from compressor.pages import raw_bytes
from compressor.tracing.picking import check_model

Kind = Literal["hidden", "logits", "states"]

_LOGITS_AT_ONCE = 1 << 23  # numbers of one chunk of logits: 32 MB, of which a backward holds a handful


_COMPARED_ALIVE = 8  # of one chunk of logits: both models', their logarithms, what the divergence keeps, and gradients


def training_memory(work: Work, batch_size: int, tried_bytes: int) -> Memory:
    """Say what a training towards the outputs of the uncompressed model takes.

    Args:
        work: on the whole model.
        batch_size: sequences in a step, at most.
        tried_bytes: of the values that stand in the place of weights meanwhile.

    Returns:
        What the base gave for all samples; and beyond it, when a forward has come to its end and logits are made.
    """
    rows = sequences_at_once(min(batch_size, work.num_samples), work.num_tokens)
    compared = rows * work.stream_bytes
    if work.vocabulary:
        compared = FLOAT32_BYTES * work.vocabulary * min(rows * work.num_tokens, max(1, _LOGITS_AT_ONCE // work.vocabulary))
    working = tried_bytes + rows * work.saved_bytes + _COMPARED_ALIVE * compared
    return Memory(work.num_samples * work.stream_bytes, 0, working, "train")


class _Reached(Exception):
    """A forward has come to the output head."""

    def __init__(self, hidden: Tensor) -> None:
        """Carry the input of the head."""
        super().__init__()
        self.hidden = hidden


class BaseOutputs:
    """The predictions of a model as it is now, on all sequences; kept in main memory.

    Attributes:
        where: who asks, for errors.
        kind: `hidden`, `logits` or `states`.
        sequences: that count a token, in the order of the data, each of (inputs, what the base gave, mask of tokens that count); whole
            batches where these cannot be cut.
        num_bytes: of what is kept.
    """

    def __init__(self, model: nn.Module, data: CalibrationData, device: torch.device, where: str) -> None:
        """Run every batch once.

        Args:
            model: uncompressed, in evaluation mode; not changed.
            data: the calibration data.
            device: of the model.
            where: who asks, for errors.

        Raises:
            CalibrationError: the model gives no tensor that could be compared, or another one whenever it is run.
            NumericsError: NaN or infinity in what it gives for a token that counts.
            TracingError: the model is compiled: its head cannot be stopped at.
        """
        check_model(model)
        self.where, self._model, self._device = where, model, device
        self._head = _head_of(model)
        self.kind: Kind = "states"
        self.sequences: list[Piece] = []
        known: dict[tuple[object, ...], Axes | None] = {}
        with torch.no_grad():
            for number, (batch, mask) in enumerate(zip(data.batches, data.token_masks, strict=True)):
                own = batch_to(batch, device)
                if number == 0:
                    self.kind = self._kind(own)
                kept = self._output(own).detach().to("cpu", copy=True)
                if not bool(_rows(kept, mask).isfinite().all()):
                    raise NumericsError(
                        f"{where}: the uncompressed model gives NaN or infinity on batch {number} of the calibration data; check the model "
                        "in its own dtype on this data"
                    )
                leading = leading_tensor(batch)
                rows = leading.shape[0] if leading.dim() else 1
                shapes = tuple(one.shape for one in (*(batch.values() if isinstance(batch, dict) else batch), kept))
                if shapes not in known:
                    known[shapes] = find_axes(batch, kept, rows, lambda one: self._output(batch_to(one, device)), f"{where}: the model")
                tokens = kept[..., 0].numel() if leading.is_floating_point() else leading.numel()
                axes, mask_axis = known[shapes], None if mask is None else 0
                self.sequences += cut((batch, kept, mask), rows, tokens, None if axes is None else (*axes, mask_axis))
        self._num_batches = len(data.batches)
        self.sequences = [one for one in self.sequences if len(_rows(*_kept_of(one)))]  # what counts no token teaches and judges nothing
        self._counted = [len(_rows(*_kept_of(one))) for one in self.sequences]
        self.num_bytes = sum(_kept_of(one)[0].nbytes for one in self.sequences)

    def split(self, held_out_frac: float, seed: int) -> Split:
        """Draw what is trained on and what only judges.

        Args:
            held_out_frac: share of the sequences that judges.
            seed: of the drawing.

        Returns:
            Numbers of sequences; a copy of one that judges is in neither list.

        Raises:
            CalibrationError: there are not two that differ.
        """
        if len(self.sequences) < 2:
            found = f"{self._num_batches} batches hold {len(self.sequences)} sequences that can be cut out and count a token"
            raise CalibrationError(f"{self.where}: {found}, and one is held out; give more batches, or masks that let more tokens count")
        split = Split.of(len(self.sequences), held_out_frac, seed)
        judging = {_content(self.sequences[number]) for number in split.held_out}
        trained = [number for number in split.trained if _content(self.sequences[number]) not in judging]
        if not trained:
            found = f"its {len(self.sequences)} sequences are copies of the {len(split.held_out)} that are held out"
            raise CalibrationError(f"{self.where}: {found}, and nothing is left to train on; give data in which sequences differ")
        return Split(trained, split.held_out)

    @property
    def measure(self) -> str:
        """What is measured, in words."""
        return "squared error of the output" if self.kind == "states" else "KL(base || compressed)"

    @torch.no_grad()
    def error(self, numbers: Sequence[int]) -> float:
        """Measure the mean error per token of the model as it is now.

        Args:
            numbers: of the sequences.

        Returns:
            Nats per token, or the mean square.
        """
        total = sum(self._measured(tree, kept, mask, None) for tree, kept, mask in self._groups(numbers))
        return total / max(1, self._count(numbers))

    def backward(self, numbers: Sequence[int]) -> float:
        """Measure the mean error per token of some sequences, and add its gradients to whatever asks for them.

        Args:
            numbers: of the sequences.

        Returns:
            What `error` would have given.

        Raises:
            CalibrationError: there are no gradients.
        """
        count = max(1, self._count(numbers))
        return sum(self._measured(tree, kept, mask, 1.0 / count) for tree, kept, mask in self._groups(numbers)) / count

    def _count(self, numbers: Sequence[int]) -> int:
        return sum(self._counted[number] for number in numbers)

    def _groups(self, numbers: Sequence[int]) -> Iterator[tuple[Batch, Tensor, Tensor | None]]:
        """Sequences that run together, on the device of the model."""
        for inputs, kept, mask in joined([self.sequences[number] for number in numbers]):
            yield batch_to(inputs, self._device), kept.to(self._device), None if mask is None else mask.to(self._device)

    def _measured(self, inputs: Batch, kept: Tensor, mask: Tensor | None, share: float | None) -> float:
        """Sum the error over tokens; with a share, gradients of that share of it flow back."""
        output = self._output(inputs)
        own, base = _rows(output, mask), _rows(kept, mask)
        leaf = own.detach() if share is None or own.is_inference() else own.detach().requires_grad_()
        total = 0.0
        for own_part, base_part in self._chunks(leaf, base):
            loss = self._loss(own_part, base_part)
            total += float(loss.detach())
            if share is not None and leaf.requires_grad:
                (loss * share).backward()
        if share is not None and (leaf.grad is not None or not leaf.requires_grad):
            send_back(own, leaf.grad, self.where)
        return total

    def _chunks(self, own: Tensor, base: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        width = len(self._head[1].get_parameter("weight")) if self.kind == "hidden" and self._head is not None else own.shape[-1]
        size = max(1, _LOGITS_AT_ONCE // max(1, int(width)))
        yield from zip(own.split(size), base.split(size), strict=True)

    def _loss(self, own: Tensor, base: Tensor) -> Tensor:
        if self.kind == "states":
            return (own.float() - base.float()).square().mean(-1).sum()
        if self.kind == "logits":
            return divergence(base, own).sum()
        assert self._head is not None
        with torch.no_grad():
            expected = self._head[1](base)
        return divergence(expected, self._model.get_submodule(self._head[0])(own)).sum()

    def _kind(self, batch: Batch) -> Kind:
        """Look at one forward: is there a head, and are the logits what it gives?"""
        logits = getattr(call_model(self._model, batch), "logits", None)
        if not isinstance(logits, Tensor):
            return "states"
        if self._head is not None:
            try:
                with _ends_at(self._model.get_submodule(self._head[0])):
                    call_model(self._model, batch)
            except _Reached as reached:
                found = self._head[1](reached.hidden)
                if found.shape == logits.shape and torch.equal(found.float(), logits.float()):
                    return "hidden"
        return "logits"

    def _output(self, batch: Batch) -> Tensor:
        """Run a forward as far as needed."""
        if self.kind == "hidden" and self._head is not None:
            try:
                with _ends_at(self._model.get_submodule(self._head[0])):
                    call_model(self._model, batch)
            except _Reached as reached:
                return reached.hidden
            raise CalibrationError(f"{self.where}: a batch does not reach the output head {self._head[0]}; leave {self.where} out")
        found = call_model(self._model, batch)
        if self.kind == "logits":
            return found.logits
        first = next((one for one in _values(found) if isinstance(one, Tensor) and one.is_floating_point() and one.dim()), None)
        if first is None:
            raise CalibrationError(f"{self.where}: the model gives a {type(found).__name__} without a floating point tensor to compare")
        return first


def _values(found: Any) -> Sequence[Any]:
    if isinstance(found, dict):
        return tuple(found.values())
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _head_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The output embedding by name, and a twin that keeps its weight: a compressed one will take its place, or it gets another weight."""
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None:
        return None
    twin = copy.copy(head)
    twin._parameters = dict(head._parameters)
    return name, twin


@contextmanager
def _ends_at(head: nn.Module) -> Iterator[None]:
    """End a forward at the first call of a module."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        raise _Reached((*args, *kwargs.values())[0])

    handle = head.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _content(piece: Piece) -> tuple[object, ...]:
    """What the model is given, for comparison."""
    given = [one for one in piece.leaves[:-2] if isinstance(one, Tensor)]
    return tuple((one.dtype, one.shape, raw_bytes(one.cpu()).numpy().tobytes()) for one in given)


def _kept_of(piece: Piece) -> tuple[Tensor, Tensor | None]:
    """What the base gave, and the mask."""
    return piece.leaves[-2], piece.leaves[-1]


def _rows(output: Tensor, mask: Tensor | None) -> Tensor:
    """[N, ...]: the tokens that count, where the mask has the shape of the output; else all rows."""
    rows = output.reshape(-1, output.shape[-1])
    return rows if mask is None or mask.numel() != len(rows) else rows[mask.reshape(-1)]
