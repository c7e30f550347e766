"""From the values of a tensor to its range, and from there to scale and zero point.

Three kinds. "minmax" takes the range as it is. "mse" also tries ranges shrunk by up to a fifth and keeps, for each group on its own, the
one with the least sum of |error|^norm: a few clipped outliers can buy finer steps for everything else. "imatrix", for weights, weighs each
error by the mean square of the input that it meets.

A weight is there as a whole: `weight_qparams`. A static activation comes batch by batch: `make_observer`. An observer keeps no average over
batches but what all values together determine, so neither the order of the batches nor where they are cut changes one bit: the extremes,
and for "mse" a histogram of integer counts whose bins are the 65536 bfloat16 numbers (exact for bfloat16 models, and within 0.4 % of each
value for others).

Shapes: n groups of S values each, whatever the strategy: n = 1 per tensor, n = R per channel, n = R * G per group, one per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from compressor.errors import NumericsError, SchemeError
from compressor.numerics.part_sums import check_mean_squares
from compressor.numerics.qparams import QParams, calculate_global_scale, calculate_qparams, range_qparams
from compressor.numerics.quantize import check_groups, fake_quantize
from compressor.numerics.scheme import QuantizationArgs

# Values that a search or a histogram takes in at once; bounds the memory, not the result.
CHUNK = 1 << 22

_NUM_BINS = 1 << 16


@torch.no_grad()
def weight_qparams(
    weight: Tensor,
    args: QuantizationArgs,
    name: str = "weight",
    global_scale: Tensor | None = None,
    *,
    importance_C: Tensor | None = None,
    kept_RG: Tensor | None = None,
    checked: bool = True,
) -> QParams:
    """Choose scale and zero point for a whole weight, with the observer that args name.

    Args:
        weight: [R, C], floating point; not modified.
        args: the format; strategy "tensor", "channel", "group", "tensor_group" or "block".
        name: what the weight is called, for errors only.
        global_scale: float32 [1], for formats that have one and where it is not to be this weight's own: layers that a runtime fuses
            share theirs.
        importance_C: [C], mean of x^2 of the inputs over calibration tokens, or any multiple of it; for the observer imatrix_mse only.
        kept_RG: [R, G], or [R, 1] per channel: share of its range that each group keeps; for the observer minmax only.
        checked: False reads nothing on the host: NaN or infinity then show in the scale.

    Returns:
        Scale in the dtype of the weight, shaped [1], [R, 1], [R, G] or one per block, zero point if asymmetric, and global scale.

    Raises:
        NumericsError: NaN or infinity in the weight.
        SchemeError: a strategy that is not for weights, a group size that does not divide the columns, a weight without values, or
            imatrix_mse where nothing is known of the inputs.
    """
    groups_nS, shape = _as_groups(weight, args, name)
    min_n, max_n = groups_nS.amin(-1), groups_nS.amax(-1)
    if checked:
        _check_range(min_n, max_n, name)
    if args.has_global_scale and global_scale is None:
        global_scale = calculate_global_scale(min_n, max_n)
    if args.observer_kind != "minmax":
        weights_GS = _importance(importance_C, groups_nS, args, name)
        rows = max(1, CHUNK // groups_nS.shape[-1])
        for start in range(0, len(groups_nS), rows):
            part = slice(start, start + rows)
            min_n[part], max_n[part] = _search_range(
                groups_nS[part], min_n[part], max_n[part], args, _of_groups(weights_GS, start, len(groups_nS[part])), global_scale
            )
    elif kept_RG is not None:
        min_n, max_n = min_n * kept_RG.reshape(-1).to(min_n.dtype), max_n * kept_RG.reshape(-1).to(max_n.dtype)
    qparams = calculate_qparams(min_n, max_n, args, global_scale).map(lambda part: part.reshape(shape))
    return qparams._replace(scale=qparams.scale.to(weight.dtype))


# How what observers have learnt of different batches is put together, none of which depends on an order.
_JOINS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"min": lambda kept: kept.amin(0), "max": lambda kept: kept.amax(0), "counts": lambda kept: kept.sum(0)}
)


class Observer(ABC):
    """Watches one static activation over any number of batches."""

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Take in one batch.

        Args:
            x: any shape; without values it changes nothing. Not modified, not kept.

        Raises:
            NumericsError: NaN or infinity in x.
        """

    @abstractmethod
    def qparams(self) -> QParams:
        """Choose scale and zero point from all batches so far.

        Returns:
            Scale in the dtype of the activation, [1] or [H, 1, 1] per head, and zero point if asymmetric. Where the scales of groups are
            dynamic (NVFP4), the global scale is what counts and the scale is that of one group that spans everything.

        Raises:
            NumericsError: no batch came.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return what it has learnt so far.

        Returns:
            For `restore` of an equal observer: the extremes as "min" and "max", and what else it keeps; empty before the first batch.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what another observer has learnt.

        Args:
            state: what `state` gave.
        """

    def restore_all(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Go on from what several others have learnt of batches of their own.

        Args:
            states: what `state` gave, of each.
        """
        seen = [state for state in states if state]
        if seen:
            self.restore({key: join(torch.stack([state[key] for state in seen])) for key, join in _JOINS.items() if key in seen[0]})


class MinMaxObserver(Observer):
    """Keeps the extremes of everything that it saw."""

    def __init__(self, args: QuantizationArgs, name: str = "activation") -> None:
        self.args = args
        self.name = name
        self._range: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Widen the range by a batch."""
        if x.numel() == 0:
            return
        min_val, max_val = _extremes(x, self.args, self.name)
        _check_range(min_val, max_val, self.name)
        if self._range is not None:
            min_val, max_val = torch.minimum(min_val, self._range[0]), torch.maximum(max_val, self._range[1])
        self._range = min_val, max_val

    def qparams(self) -> QParams:
        """The range of all batches as scale and zero point."""
        return range_qparams(*self._observed_range(), self.args)

    def state(self) -> dict[str, Tensor]:
        """The extremes; empty before the first batch."""
        return {} if self._range is None else {"min": self._range[0], "max": self._range[1]}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the extremes of another."""
        self._range = (state["min"], state["max"]) if state else None

    def _observed_range(self) -> tuple[Tensor, Tensor]:
        if self._range is None:
            raise NumericsError(f"{self.name}: the observer never saw a value; run calibration data through the module or ignore it")
        return self._range


class MSEObserver(MinMaxObserver):
    """Keeps the extremes and a histogram, and searches the range that loses least."""

    def __init__(self, args: QuantizationArgs, name: str = "activation") -> None:
        super().__init__(args, name)
        self._counts: Tensor | None = None

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Widen the range, and count the values in bins of bfloat16."""
        super().update(x)
        if x.numel() == 0:
            return  # counts without a range would be no state that `restore` can take
        if self._counts is None:
            self._counts = torch.zeros(_NUM_BINS, dtype=torch.int64, device=x.device)
        flat = x.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            bins = flat[start : start + CHUNK].to(torch.bfloat16).view(torch.int16).to(torch.int64) + _NUM_BINS // 2
            self._counts += torch.bincount(bins, minlength=_NUM_BINS)

    def state(self) -> dict[str, Tensor]:
        """The extremes and the counts."""
        return super().state() | ({} if self._counts is None else {"counts": self._counts})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the extremes and counts of another."""
        super().restore(state)
        self._counts = state["counts"].clone() if state else None

    @torch.no_grad()
    def qparams(self) -> QParams:
        """The range within the extremes that loses least of what was counted."""
        min_val, max_val = self._observed_range()
        assert self._counts is not None, "update sets both"
        seen = self._counts.nonzero().flatten()
        values = (seen - _NUM_BINS // 2).to(torch.int16).view(torch.bfloat16)
        # A value was rounded to its bin, possibly past the true extremes.
        values = values.to(torch.float64).clamp(min_val.double(), max_val.double()).to(min_val.dtype)
        return calculate_qparams(*_search_range(values.unsqueeze(0), min_val, max_val, self.args, self._counts[seen]), self.args)


def make_observer(args: QuantizationArgs, name: str = "activation") -> Observer:
    """Make the observer that args name, for one static activation.

    Args:
        args: the format; static with strategy "tensor" or "attn_head", or with a static global scale ("tensor_group").
        name: what the activation is called, for errors only.

    Returns:
        An observer that has seen nothing yet.

    Raises:
        SchemeError: the args are for a weight or a dynamic activation, or ask for an observer that does not know their strategy.
    """
    if args.observer_kind == "imatrix":
        raise SchemeError(f"{name}: imatrix_mse is for weights, whose errors it weighs by these inputs; use minmax or mse")
    if args.observer_kind == "mse" and args.strategy != "tensor":
        raise SchemeError(f"{name}: the mse observer knows activations of strategy='tensor', not {args.strategy!r}; use minmax")
    if args.dynamic is True or args.strategy not in ("tensor", "attn_head", "tensor_group"):
        raise SchemeError(
            f"{name}: strategy={args.strategy!r} with dynamic={args.dynamic} has no range to observe; "
            "a static activation has strategy='tensor', dynamic ones need no observer, weights use weight_qparams"
        )
    return MSEObserver(args, name) if args.observer_kind == "mse" else MinMaxObserver(args, name)


def _extremes(x: Tensor, args: QuantizationArgs, name: str) -> tuple[Tensor, Tensor]:
    """Smallest and largest value: [1], or [H, 1, 1] of an x [batch, H, sequence, D] whose heads have scales of their own."""
    if args.strategy != "attn_head":
        min_val, max_val = torch.aminmax(x)
        return min_val.reshape(1), max_val.reshape(1)
    if x.ndim != 4:
        raise SchemeError(f"{name}: {tuple(x.shape)} is not [batch, heads, sequence, D]; strategy='attn_head' is for keys and values")
    return x.amin((0, 2, 3)).reshape(-1, 1, 1), x.amax((0, 2, 3)).reshape(-1, 1, 1)


def _as_groups(weight: Tensor, args: QuantizationArgs, name: str) -> tuple[Tensor, tuple[int, ...]]:
    """View the weight as [n, S], and give the shape that n results take."""
    if weight.numel() == 0 or not weight.is_floating_point():
        raise SchemeError(f"{name}: {weight.dtype} {tuple(weight.shape)} is not a floating-point weight with values; ignore this module")
    if args.strategy == "tensor":
        return weight.reshape(1, -1), (1,)
    if args.strategy == "channel":
        return weight.reshape(-1, weight.shape[-1]), (*weight.shape[:-1], 1)
    if args.block_structure is not None:
        return _as_blocks(weight, *args.block_structure)
    if not args.is_grouped or args.group_size is None:
        raise SchemeError(f"{name}: strategy={args.strategy!r} is not for weights; use 'tensor', 'channel' or 'group'")
    check_groups(weight.shape[-1], args)
    return weight.reshape(-1, args.group_size), (*weight.shape[:-1], weight.shape[-1] // args.group_size)


def _importance(importance_C: Tensor | None, groups_nS: Tensor, args: QuantizationArgs, name: str) -> Tensor | None:
    """The weights of one row's errors, [G, S]; None for an observer that takes all alike."""
    if args.observer_kind != "imatrix":
        return None
    if importance_C is None:
        raise SchemeError(f"{name}: imatrix_mse weighs errors by inputs, and of this weight's inputs nothing is known; use 'mse'")
    check_mean_squares(importance_C, name)
    mean = importance_C.double().mean()
    even = torch.ones_like(importance_C, dtype=torch.float64)
    return (importance_C.double() / mean if float(mean) > 0 else even).reshape(-1, groups_nS.shape[-1])


def _of_groups(weights_GS: Tensor | None, start: int, count: int) -> Tensor | None:
    """The weights of some groups in a row, of which every row of the weight has G."""
    if weights_GS is None:
        return None
    return weights_GS[torch.arange(start, start + count, device=weights_GS.device) % len(weights_GS)]


def _as_blocks(weight: Tensor, height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
    """View the weight as [blocks, H * W]; what sticks out is filled up with zeros, which change neither range nor error."""
    padded = functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
    num_rows, num_columns = padded.shape[0] // height, padded.shape[1] // width
    blocks = padded.reshape(num_rows, height, num_columns, width).transpose(1, 2)
    return blocks.reshape(num_rows * num_columns, height * width), (num_rows, num_columns)


def _check_range(min_vals: Tensor, max_vals: Tensor, name: str) -> None:
    if not bool((min_vals.isfinite() & max_vals.isfinite()).all()):
        raise NumericsError(
            f"{name}: holds NaN or infinity, for which there is no scale; repair the model or the data, or ignore this module"
        )


def _search_range(
    groups_nS: Tensor,
    min_n: Tensor,
    max_n: Tensor,
    args: QuantizationArgs,
    weights_nS: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Try one range after the other, from the widest on; each group keeps the first of its best."""
    settings = args.mse_settings
    flat_args = args.model_copy(update={"strategy": "channel", "group_size": None, "block_structure": None})
    # Errors are counted in steps of the full range, so that 2^k times the weight finds the same range, and nothing underflows.
    unit_n = calculate_qparams(min_n, max_n, args.model_copy(update={"scale_dtype": None})).scale
    best_min_n, best_max_n = min_n, max_n
    best_error_n = torch.full_like(unit_n, torch.inf, dtype=torch.float64)
    stale_n = torch.zeros_like(unit_n, dtype=torch.int32)
    for candidate in range(int(settings.maxshrink * settings.grid)):
        shrink = settings.expand * (1 - candidate / settings.grid)
        tried_min_n, tried_max_n = min_n * shrink, max_n * shrink
        qparams = calculate_qparams(tried_min_n, tried_max_n, args, global_scale).map(lambda part: part.unsqueeze(-1))
        error_n = _sum_errors(groups_nS, qparams, unit_n, flat_args, settings.norm, weights_nS)
        better_n = error_n < best_error_n
        if settings.patience is not None:
            better_n &= stale_n < settings.patience
            stale_n = torch.where(better_n, 0, stale_n + 1)
        best_error_n = torch.where(better_n, error_n, best_error_n)
        best_min_n = torch.where(better_n, tried_min_n, best_min_n)
        best_max_n = torch.where(better_n, tried_max_n, best_max_n)
    return best_min_n, best_max_n


def _sum_errors(
    groups_nS: Tensor, qparams: QParams, unit_n: Tensor, args: QuantizationArgs, norm: float, weights_nS: Tensor | None
) -> Tensor:
    """Sum |error / unit|^norm over each group, each value times its weight, [S] or [n, S]: how often it occurred; float64 [n]."""
    total_n = torch.zeros_like(unit_n, dtype=torch.float64)
    # In 16 bits a quotient is off by a code and more; what is stored are the nearest codes.
    wide = torch.promote_types(groups_nS.dtype, torch.float32)
    qparams = qparams._replace(scale=qparams.scale.to(torch.promote_types(qparams.scale.dtype, torch.float32)))
    for start in range(0, groups_nS.shape[-1], CHUNK):
        piece = groups_nS[:, start : start + CHUNK].to(wide)
        error = fake_quantize(piece, qparams, args).float() - piece.float()
        error = error.div_(unit_n.float().unsqueeze(-1)).abs_().pow_(norm)
        if weights_nS is not None:
            error = error * weights_nS[..., start : start + CHUNK].double()
        total_n += error.sum(-1, dtype=torch.float64)
    return total_n
