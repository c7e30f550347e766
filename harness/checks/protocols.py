"""What a subject has to offer, per kind: small protocols, so that a check runs on anybody's code.

A subject is any object with these members; no base class is needed. Every one has a `kind`, a `name` for reports, and `tags`, what it
promises (see catalogue/registry.py). Errors with which a subject turns down bad input may be of any class.

Shapes: R rows (out features), C columns (in features), G groups, N tokens. Codes are *values*: an int8 code 3 is the number 3, an fp4 code
1.5 is the number 1.5 in whatever dtype holds it.

What a method may meet beyond the ordinary stands in its protocol. Unless it says otherwise: tensors of every dtype that the subject takes,
one row or one column wide, square, subnormal and near the largest number, of zeros only, or of a constant; of any memory layout that
`harness.checks.inputs.presentations` lists (views, steps, offsets, expanded rows); as plain tensors, Parameters and results that have a
gradient, with gradients on and off; with 1,000 columns or 520 rows; in memory, or a module, that held other values in the call before. What
shows beyond these sizes only is not seen.

A call may change nothing beside its result: nothing that is handed in (a transform changes the weights of its model, and nothing else of
it), nothing that an earlier call has returned, and nothing of the process. Numbers are drawn from a generator of one's own; only the making
of modules may draw from the global ones. A second call gives what the first one gave. Results may have a gradient: their values count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from harness.checks.plain_functions import InPlaceTransform as InPlaceTransform
from harness.checks.plain_functions import Pruner as Pruner


@dataclass(frozen=True)
class Quantized:
    """One quantized tensor: value = (code - zero_point) * scale / global_scale.

    Attributes:
        codes: [R, C], the numbers of the codes in any dtype that holds them.
        scale: [1], [R, 1], [R, G] or one per block, in the dtype in which values are computed.
        zero_point: shaped like scale; None where there is none.
        global_scale: one number by which every scale is divided; None where there is none.
        relative_error: what the quantizer says of its error, ||W - Q||^2 / ||W||^2; None where it says nothing.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    relative_error: float | None = None


@runtime_checkable
class Quantizer(Protocol):
    """Turns a weight, or the rows of an activation, into codes.

    `quantize` meets NaN and infinity where `refuses_nonfinite` is promised, in any place, and then raises an error with a message. It meets
    weights whose range is beyond the largest number of their dtype. `encode` meets weights of any dtype and size, one row among them, under
    scales that are powers of two, and values far beyond the range, up to 1e30 times the last code and never infinity; they take the last
    code. Ties are planted where nothing is rounded on the way to them in the dtype of the weight.
    A scale is the rule's down to the smallest normal number of its dtype, without a floor; below that any number above 0 will do.

    Attributes:
        kind: "quantizer".
        name: for reports.
        tags: what it promises: odd, zero, half_even, homogeneous, local, covers, refuses_nonfinite, per_token.
        code_values: all code values in rising order, float64 [K].
        dtypes: dtypes of the weights that it takes.
        scale_rule: how a scale follows from the largest |w| or from the range of its unit; a key of harness.checks.oracles.RULES
            ("max_code": largest |w| over the last code, "half_range": over half of the codes' range, "range": largest less smallest value,
            0 among them, over that range, "mx", "nvfp4"), or None where it is searched.
        stored_scale: dtype in which scales are stored; None: that of the weight.
        column_multiple: columns must be a multiple of this.
    """

    kind: str
    name: str
    tags: frozenset[str]
    code_values: Tensor
    dtypes: Sequence[torch.dtype]
    scale_rule: str | None
    stored_scale: torch.dtype | None
    column_multiple: int

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many rows and columns of a weight of this shape share a scale."""

    def quantize(self, weight: Tensor) -> Quantized:
        """Choose scales and codes of [R, C]; must not change the weight."""

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        """Return the codes of [R, C] under the scales of `like`."""

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return the values [R, C] of the codes, in the dtype of the scale."""


@runtime_checkable
class Packer(Protocol):
    """Puts codes into words, and takes them out again.

    Meets tensors of every rank in `ranks`, views of others, and tensors without rows. Words are contiguous, as files hold them, if need be
    as a slice of more words; under a declared layout the bits behind the last code of a row are zero. Where `refuses_unfit` is promised, a
    code beyond either end, be it by one or by the most that its dtype holds, raises an error with a message, whatever the rank, the layout
    and the place. What else is no code, such as a number between two of them or NaN, is not asked.

    Attributes:
        kind: "packer".
        name: for reports.
        tags: none are defined.
        code_values: all code values in rising order, float64 [K].
        code_dtype: of the codes.
        ranks: ranks of the tensors that it takes.
        column_multiple: columns must be a multiple of this.
        bits: of a code in the packed words; the packed tensor holds no more than a word for each begun word of a row.
        layout: where each code lies; a key of harness.checks.oracles.LAYOUTS, or None where that is the packer's own affair.
        packed_dim: dimension that becomes words, from the end: -1 for columns, -2 for rows.
    """

    kind: str
    name: str
    tags: frozenset[str]
    code_values: Tensor
    code_dtype: torch.dtype
    ranks: Sequence[int]
    column_multiple: int
    bits: int
    layout: str | None
    packed_dim: int

    def pack(self, codes: Tensor) -> Tensor:
        """Return the words of [..., C]."""

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the codes of this shape."""


@dataclass(frozen=True)
class Solved:
    """One weight as a solver has quantized it.

    Attributes:
        quantized: codes in the original order of the columns, and scales.
        values: [R, C], what a loader will read.
        group_C: group of each column where groups are not runs of columns, else None.
        loss: what the solver says that its error is: 1/2 tr(E H' E^T) with H' the damped Hessian; None where it says nothing.
        relative_error: what it says of its outputs: tr(E H E^T) / tr(W H W^T), over 1 to 128 rows; None where it says nothing.
    """

    quantized: Quantized
    values: Tensor
    group_C: Tensor | None = None
    loss: float | None = None
    relative_error: float | None = None


@runtime_checkable
class Solver(Protocol):
    """Quantizes weights against the second-order statistic of their input, column after column.

    `hessian` meets batches of one to four dimensions, [N, C] and [..., C], in float32 and bfloat16, times 2^-30 to 2^13, a single token,
    and batches without tokens among others. It, or `solve`, raises an error with a message for NaN or infinity in any batch, weight or
    place, and in H itself; `hessian` for no token at all. `solve` meets H = c I, H that is singular (fewer tokens than columns), with
    columns and rows of zeros (dead inputs), or times 1e-4 to 1e4; an H that has a negative eigenvalue even when damped is an error. Weights
    come in float32 and bfloat16, with one row and with more rows than columns, times 2^-20 to 2^12 and with groups of very different
    magnitudes. Columns that are no multiple of group_size, so that the last group is not full, are solved or refused with a message.

    Attributes:
        kind: "solver".
        name: for reports.
        tags: what it promises: act_order, rows_apart, half_even, fixed_scales, searches_scales.
        code_values: all code values in rising order, float64 [K].
        group_size: columns that share a scale; None for whole rows.
        damp_frac: share of the mean diagonal, of the columns that are not dead, that it adds to the diagonal.
        dead_value: what the weights of a column that is always zero become; None: they are rounded as they are.
    """

    kind: str
    name: str
    tags: frozenset[str]
    code_values: Tensor
    group_size: int | None
    damp_frac: float
    dead_value: float | None

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        """Return 2 * mean(x x^T) over all tokens of all batches [..., C]; some may have no token, all together have one."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        """Quantize weights [R_i, C] that read one input; changes neither them nor the Hessian.

        With `like` the scales and zero points are given (one weight then); raise NotImplementedError if that cannot be.
        """

    def order(self, hessian: Tensor) -> Tensor:
        """Return the order in which columns are rounded, [C] long."""

    def unsearched(self) -> Solver:
        """Return the same solver without a search of scales; itself where there is none."""


@runtime_checkable
class Observer(Protocol):
    """Finds scale and zero point of a static activation from its batches.

    Meets batches of none to six dimensions in float32, bfloat16 and float16, of one sign, of zeros, of one value and of thousands, some
    without values, tiny, of one row or one number, and all of them in one piece of memory that is used again: nothing may be kept of a
    batch but numbers. Scales are without a floor, as a quantizer's are. No value at all is an error with a message, and so are NaN and
    infinity, in any of these dtypes, where `refuses_nonfinite` is promised.

    Attributes:
        kind: "observer".
        name: for reports.
        tags: what it promises: covers, refuses_nonfinite.
        code_values: all code values in rising order, float64 [K].
        scale_rule: as for a quantizer.
    """

    kind: str
    name: str
    tags: frozenset[str]
    code_values: Tensor
    scale_rule: str | None

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        """Return scale and zero point after these batches, in this order; the codes are empty."""


@runtime_checkable
class Layer(Protocol):
    """Builds a runtime layer from a float one.

    Built layers meet inputs of two to four dimensions, [N, C], [batch, sequence, C] and [A, B, N, C], a single token or step and inputs
    without tokens, views, and one piece of memory with other values in it; up to 130 tokens, rows of zeros, values near the largest and the
    smallest numbers, and subnormal ones where inputs are not quantized; in training and in evaluation mode, with gradients on and off; with
    and without a bias, square, with one output or one input; moved to bfloat16 and float16 and back, copied, and filled from a state dict,
    once and again. A layer that was filled or copied gives what the one gives that it came from, and a copy shares nothing with it. A
    forward may keep what it has unpacked until the layer is moved or filled, and changes nothing else of it: no hook, mode, module or value
    of its state dict. The output has the dtype of the input; -0 counts as 0. NaN in a token comes out as NaN all over that token, or is an
    error with a message; infinity comes out as infinity or NaN, or is one, unless the input quantizer makes it a number. Other tokens stay
    as they are. The bias that counts is that of the float layer; a built layer needs no attribute `bias`, or any other of nn.Linear's.

    Attributes:
        kind: "layer".
        name: for reports.
        tags: none are defined.
        dtypes: dtypes of the float layers that it takes.
        column_multiple: columns must be a multiple of this.
    """

    kind: str
    name: str
    tags: frozenset[str]
    dtypes: Sequence[torch.dtype]
    column_multiple: int

    def build(self, linear: nn.Linear) -> nn.Module:
        """Return the quantized layer that stands in for a float one."""

    def weight(self, layer: nn.Module) -> Tensor:
        """Return the values [R, C] with which the layer multiplies."""

    def expected_weight(self, linear: nn.Linear) -> Tensor:
        """Return what calibration computed for the values [R, C], before anything was stored."""

    def expected_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return x as the layer's input quantizer leaves it; x itself where there is none."""


def members(protocol: type[Any]) -> list[str]:
    """Return the names that a protocol asks for.

    Args:
        protocol: a class of this module.

    Returns:
        Attributes first, then methods.
    """
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [*protocol.__annotations__, *methods]


# What a checkpoint has to offer: two folders, and the model in memory that was saved, where there still is one.


@runtime_checkable
class Artifact(Protocol):
    """A compressed checkpoint.

    Attributes:
        kind: "artifact".
        name: for reports.
        tags: "trained", if the values of the base say nothing of its own.
        base: folder of the base.
        folder: of the checkpoint.
        model: what was saved, with quantized layers of ours or weights that are dequantized; None where it is gone.
        num_shards: for how many devices it is meant to be cut, 1 or more.
    """

    kind: str
    name: str
    tags: frozenset[str]
    base: Path
    folder: Path
    model: nn.Module | None
    num_shards: int

    def uncuttable(self) -> Mapping[str, str]:
        """Return the modules, by their names in the base, that the run says cannot be cut for `num_shards`, with the reason."""


# What a calibration run has to offer: a small model of its own, rows of tokens in, everything that it made out.


@dataclass(frozen=True)
class Calibrated:
    """What one run made.

    Attributes:
        tensors: everything that a checkpoint would hold of the compressed model, by name.
        codes: codes by module.
        statistics: Hessians, or whatever is summed over tokens, by module; empty where none are kept. A module with codes that has none
            where others do must be among the fallbacks.
        num_tokens: tokens that each target module saw, counted by hooks of the subject and not taken from the run's own report; 0 for a
            module with codes that is left out. Empty where none are counted.
        fallbacks: by module, what the run says that it did in place of what was asked for.
        global_scales: by module; empty for formats without one.
    """

    tensors: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    global_scales: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Calibration(Protocol):
    """Calibrates and compresses a small model, the same one every time.

    Attributes:
        kind: "calibration".
        name: for reports.
        tags: none are defined.
        vocabulary: token ids lie below this.
    """

    kind: str
    name: str
    tags: frozenset[str]
    vocabulary: int

    def run(self, rows: Sequence[Tensor], *, batch_size: int = 1, sequential: bool = True, num_layers: int = 2) -> Calibrated:
        """Run on rows of 1 to 130 token ids, layer after layer or all at once; rows of unequal length in one batch are padded."""

    def run_starved(self, *, budget: int | None) -> Calibrated | None:
        """Run so that some targets see no token (experts), where so many fallbacks are allowed; None for any number.

        Returns None where the subject has no such models, and raises where the budget is exceeded.
        """

    def command(self, rows: Path, out: Path) -> Sequence[str] | None:
        """Return a command that reads `rows` (safetensors, `input_ids`), does `run(rows)`, and writes `tensors` to `out` (safetensors)."""


# What a pruner has to offer (magnitude, Wanda, SparseGPT): one weight in, one weight with zeros out.


@runtime_checkable
class Sparsifier(Protocol):
    """Sets weights to zero.

    `prune` meets weights that hold zeros already, which count among those that are asked for, or beside them, weights whose scores tie
    under the Hessian, and Hessians of an input that is always zero, or times 2^-26 and 2^26. One that moves weights (`second_order`) meets
    none whose squares leave the range of float32. One and the same memory comes again with another weight in it, and so does that of the
    Hessian.

    Attributes:
        kind: "sparsifier".
        name: for reports.
        tags: what it promises: reads_hessian.
        pattern: (n, m): n of m neighbours in a row are kept, such as (2, 4), and n of what is left of a row; None for no pattern.
        sparsity: share of zeros, above 0 and below 1; for a pattern 1 - n/m.
        scope: "row" where each row has that share of zeros, "tensor" where only the whole has.
        second_order: it reads the Hessian and moves the weights that it keeps, to make up for those that it drops.
        quantize: weight -> the values that the quantizer behind it leaves of a pruned weight; None where nothing comes behind it.
    """

    kind: str
    name: str
    tags: frozenset[str]
    pattern: tuple[int, int] | None
    sparsity: float
    scope: str
    second_order: bool
    quantize: Callable[[Tensor], Tensor] | None

    def prune(self, weight: Tensor, hessian: Tensor) -> Tensor:
        """Return the pruned weight [R, C]; the Hessian of its input is 2 * mean(x x^T), [C, C]. Changes neither."""


@runtime_checkable
class ExpertPruner(Protocol):
    """Takes experts out of every layer of a mixture.

    Meets models of transformers in float32, on the CPU, and batches whose rows have unequal padding, on the right or on the left, which the
    model must not see either: it takes the mask as `attention_mask`. Ids there are any. Afterwards the model's `save_pretrained`
    writes a checkpoint that its class loads.

    Attributes:
        kind: "expert_pruner".
        name: for reports.
        tags: what it promises: router_weighted, refits.
        sparsity: share of the experts of each layer that go, rounded down; above 0 and below 1.
        architectures: names of `harness trace-audit` that it claims to know.
    """

    kind: str
    name: str
    tags: frozenset[str]
    sparsity: float
    architectures: Sequence[str]

    def prune(self, model: nn.Module, input_ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        """Change a model in place; return the numbers of the experts that stay, by layer.

        Args:
            model: of transformers.
            input_ids: batches [B, T].
            masks: of each batch the places of its tokens, bool [B, T]; None for all.

        Returns:
            In the order of the layers, and in each of the places that the experts then have, whatever order that is.
        """


# What a transform has to offer (SmoothQuant, AWQ, rotations, folded norms): any callable that changes a float model in place will do.


@runtime_checkable
class Transform(Protocol):
    """Changes the weights of a model so that they quantize better.

    Attributes:
        kind: "transform".
        name: for reports.
        tags: what it promises: invariant_fp (the float output stays what it was); incoherent (a weight is turned on
            both sides); online, see `OnlineTransform`.
        architectures: names of `harness trace-audit` that it claims to know, the one to look at most closely first.
        fake_quantize: weight [R, C] -> the values that a quantizer leaves of it; for a transform that searches its scales, else None.
    """

    kind: str
    name: str
    tags: frozenset[str]
    architectures: Sequence[str]
    fake_quantize: Callable[[Tensor], Tensor] | None

    def apply(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        """Transform a model of transformers in place; batches of token ids [B, T] to calibrate on.

        Meets bfloat16, float32 and float64, in which the output stays what it was to a few roundings, evaluation and training mode, and
        gradients that are off, or on while no weight asks for one.
        """

    def targets(self, model: nn.Module) -> Sequence[str]:
        """Return the names of the parameters of the float model that must come out changed."""

    def rotations(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the orthogonal matrices [n, n] that it uses on this model, by name; none where it does not rotate."""


class OnlineTransform(Transform, Protocol):
    """A transform with the tag online: layers whose weight it changes get hooks that change what these layers are handed, or give."""

    def reload(self, model: nn.Module) -> nn.Module:
        """Save a model that it has changed, and return what a loader that knows of the hooks makes of the files, in float32."""
