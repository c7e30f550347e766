"""Doing one unit: from a stretch of a file to a stretch of another, with the arithmetic that `oneshot` uses.

A weight is taken block by block. Each row, group or block of it has scales of its own, so that the bytes do not depend on where it is
cut; what the whole weight shares (one scale of a tensor, a global scale) has been read before. Observers that search take the weight as a
whole. Memory is that of one block of `BLOCK_VALUES` and what rounding makes of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from compressor.algorithms.rtn import nearest_codes, squared_sums
from compressor.conversion.files import Files
from compressor.conversion.units import Done, Target, Unit
from compressor.errors import NumericsError
from compressor.model.headers import DTYPES
from compressor.nn import replacement
from compressor.numerics import QParams, QuantizationArgs, calculate_global_scale, check_qparams, weight_qparams
from compressor.numerics.packing import WORD_BITS
from compressor.pages import raw_bytes

BLOCK_VALUES = 1 << 19  # 2 MB of float32, which stay near the processor
_SHAPE = "weight_shape"


def needs_ranges(args: QuantizationArgs) -> bool:
    """Tell whether a whole weight must be read before the first of its rows can be rounded.

    Args:
        args: format of the weight.

    Returns:
        True where a scale is that of the whole weight, or of several.
    """
    return args.has_global_scale or (args.strategy == "tensor" and args.observer_kind == "minmax")


@torch.no_grad()
def run_unit(unit: Unit, base: Files, made: Files, device: torch.device) -> Done:
    """Do one unit.

    Args:
        unit: what to do.
        base: files that are read.
        made: files that are written; they have their size already.
        device: where weights are rounded.

    Returns:
        What came of it.

    Raises:
        NumericsError: a weight holds NaN or infinity.
        ModelError: a file ends too early.
        OSError: a file cannot be read or written.
    """
    return _KINDS[unit.kind](unit, base, made, device)


class _Written:
    """The tensors of one unit, as far as they have been written."""

    def __init__(self, targets: Mapping[str, Target], made: Files) -> None:
        self._targets, self._made = targets, made
        self._places = dict.fromkeys(targets, 0)
        self._hashes = {key: hashlib.sha256() for key in targets}

    def add(self, key: str, values: Tensor) -> None:
        raw = raw_bytes(values.cpu())
        self._made.write(self._targets[key], self._places[key], raw)
        self._hashes[key].update(raw.numpy().data)
        self._places[key] += raw.numel()

    def digests(self) -> dict[str, str]:
        return {target.name: f"{target.label} {self._hashes[key].hexdigest()}" for key, target in self._targets.items()}


def _hash(unit: Unit, base: Files, made: Files, device: torch.device) -> Done:
    del made, device
    with (base.folder / unit.name).open("rb") as stream:
        return Done(kind=unit.kind, name=unit.name, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _copy(unit: Unit, base: Files, made: Files, device: torch.device) -> Done:
    del device
    (target,) = unit.targets.values()
    dtype, written = DTYPES[target.dtype], _Written({"": target}, made)
    is_finite = True
    for view in unit.views:
        for values in base.flat(view, BLOCK_VALUES):
            cast = values.to(dtype)
            if cast.is_floating_point():
                low, high = cast.aminmax()
                is_finite &= bool(low.isfinite() & high.isfinite())
            written.add("", cast)
    return Done(kind=unit.kind, name=unit.name, digests=written.digests(), is_finite=is_finite)


def _range(unit: Unit, base: Files, made: Files, device: torch.device) -> Done:
    del made, device
    extremes = [block.aminmax() for block in _blocks(unit, base)]
    low, high = (float(torch.stack(list(ends)).aminmax()[side]) for side, ends in enumerate(zip(*extremes, strict=True)))
    if not (torch.isfinite(torch.tensor([low, high], dtype=torch.float64)).all()):
        raise NumericsError(
            f"{unit.name}.weight: holds NaN or infinity, for which there is no scale; repair the model, or ignore {unit.name}"
        )
    return Done(kind=unit.kind, name=unit.name, extremes=(low, high))


def _blocks(unit: Unit, base: Files) -> Iterator[Tensor]:
    """The weight in the dtype of the model, by rows."""
    (view,) = unit.views
    num_rows = view.shape[0]
    rows = rows_at_once(view.shape, view.strides, unit.scheme.weights if unit.scheme is not None else None)
    for first in range(0, num_rows, rows):
        yield base.rows(view, first, min(first + rows, num_rows), DTYPES[unit.dtype])


def rows_at_once(shape: Sequence[int], strides: Sequence[int], args: QuantizationArgs | None) -> int:
    """Say in which blocks a weight is taken.

    Args:
        shape: rows and columns.
        strides: in values.
        args: format of the weight; None where it is only looked at.

    Returns:
        Rows of a block, which may be more than there are.
    """
    num_rows, columns = shape
    step = 1 if args is None or args.symmetric else WORD_BITS  # zero points of rows share words
    step = math.lcm(step, args.block_structure[0]) if args is not None and args.block_structure is not None else step
    searches = args is not None and args.observer_kind != "minmax"
    # A weight that lies as [in, out] has its rows all over the file.
    return num_rows if searches or strides[1] != 1 else max(1, BLOCK_VALUES // columns // step) * step


def _round(unit: Unit, base: Files, made: Files, device: torch.device) -> Done:
    assert unit.scheme is not None and unit.scheme.weights is not None
    args, written = unit.scheme.weights, _Written(unit.targets, made)
    shared, error, squares, is_first = _shared(unit, args, device), 0.0, 0.0, True
    for weight_RC in _blocks(unit, base):
        weight_RC = weight_RC.to(device)
        qparams = _qparams(weight_RC, unit, args, shared)
        check_qparams(qparams, unit.name)
        codes_RC = nearest_codes(weight_RC, qparams, args)
        sums = squared_sums(weight_RC, codes_RC, qparams, args)
        error, squares = error + sums[0], squares + sums[1]
        layer = replacement(_linear(weight_RC), unit.scheme, codes_RC, qparams, name=unit.name)
        for key, values in layer.named_buffers():
            if key == _SHAPE:
                values = torch.tensor(unit.views[0].shape, dtype=values.dtype)
            if is_first or not (key == _SHAPE or unit.targets[key].shape == (1,)):
                written.add(key, values)
        is_first = False
    return Done(kind=unit.kind, name=unit.name, digests=written.digests(), errors=(error, squares))


def _shared(unit: Unit, args: QuantizationArgs, device: torch.device) -> Tensor | QParams | None:
    """What all rows have in common: the global scale, or the scale of the tensor."""
    if not needs_ranges(args):
        return None
    dtype = DTYPES[unit.dtype]
    ends = torch.tensor(unit.extremes, dtype=torch.float64, device=device).to(dtype)
    if args.has_global_scale:
        largest = ends.abs().amax(-1)
        return calculate_global_scale(largest, largest)
    return weight_qparams(ends[:1], args, unit.name)


def _qparams(weight_RC: Tensor, unit: Unit, args: QuantizationArgs, shared: Tensor | QParams | None) -> QParams:
    if isinstance(shared, QParams):
        return shared
    return weight_qparams(weight_RC, args, f"{unit.name}.weight", shared)


def _linear(weight_RC: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight_RC.shape[1], weight_RC.shape[0], bias=False, dtype=weight_RC.dtype)
    linear.weight = nn.Parameter(weight_RC, requires_grad=False)
    return linear


_KINDS = {"hash": _hash, "copy": _copy, "range": _range, "round": _round}
