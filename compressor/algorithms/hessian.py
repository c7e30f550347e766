"""The second-order statistic that GPTQ and SparseGPT share: H = 2 * mean(x x^T) over calibration tokens.

The sum is kept, not the running mean: a sum of float32 products does not depend on how tokens fall into batches, beyond rounding.
Only the block-upper triangle is accumulated and kept, in up to 8 panels (1.6 times faster than the whole product, where panels are wide
enough to keep the product efficient); `matrix` mirrors it once. Sums of the parts of the samples are added in a fixed order (PartSum).

Shapes: N tokens, C columns (in_features).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from compressor.errors import NumericsError
from compressor.numerics.part_sums import PartSum, check_mean_squares

MAX_PANELS = 8
MIN_PANEL_COLUMNS = 192
_BFLOAT16_CAPABILITY = (8, 0)
ERROR_ROWS, EXACT_ROWS = 128, 1024  # of a relative error: in one product, and up to which all of them enter it as they are
_COLUMNS, _NUM_SUMS, _DIRECTIONS = 512, 128, 32  # of one product; of an estimate


class Hessian:
    """Accumulates x x^T of the inputs of one or several linear modules that see the same input."""

    def __init__(self, num_columns: int, device: torch.device | str = "cpu") -> None:
        """Start at zero tokens.

        Args:
            num_columns: in_features of the modules, C.
            device: where the sums live.
        """
        self.num_columns, self.num_tokens = num_columns, 0
        self.panels, self.shifts = PartSum(), PartSum()
        self.peak = torch.zeros((), dtype=torch.float32, device=device)  # the largest absolute input
        self._device = device

    def add(self, x: Tensor, part: int = 0) -> None:
        """Add the inputs of one forward.

        Args:
            x: [..., C], any float dtype; not modified.
            part: of the samples; parts come in their order.
        """
        x_NC = _factor(x)
        if x_NC.numel():
            least, most = x_NC.aminmax()
            self.peak = torch.maximum(self.peak, torch.maximum(-least, most).float())
        panels = self.panels.of_part(
            part, lambda: [self._zeros(stop - start, self.num_columns - start) for start, stop in _spans(self.num_columns)]
        )
        for panel, (start, stop) in zip(panels, _spans(self.num_columns), strict=True):
            _add_product(panel, x_NC[:, start:stop], x_NC[:, start:])
        self.num_tokens += x_NC.shape[0]

    def add_shift(self, base: Tensor, x: Tensor, part: int = 0) -> None:
        """Add what the same tokens would bring from the uncompressed model: (x_base - x)^T x.

        Args:
            base: [..., C], the inputs there; not modified.
            x: [..., C], those that `add` is given; not modified.
            part: of the samples.
        """
        (shift_CC,) = self.shifts.of_part(part, lambda: [self._zeros(self.num_columns, self.num_columns)])
        x_NC = _factor(x)
        difference_NC = base.reshape(x_NC.shape).detach().float() - x_NC.float()
        for share_NC in _shares(difference_NC, x_NC.dtype):
            _add_product(shift_CC, share_NC, x_NC)

    def settle(self) -> None:
        """Add the parts up, of which no more will come: what waits for its solver then takes less."""
        self.panels.total()
        self.shifts.total()

    def shift(self, share: float = 1.0) -> Tensor | None:
        """Return 2 * mean((x_base - x)^T x), or a share of it, and release the sum; call it before `matrix`.

        Args:
            share: by which it is multiplied.

        Returns:
            [C, C] float32; None where nothing was added.
        """
        found, self.shifts = self.shifts.total(), PartSum()
        return None if found is None else found[0].mul_(share * 2.0 / max(1, self.num_tokens))

    def matrix(self, name: str) -> Tensor:
        """Return H = 2 * mean(x x^T) and release the sum: call it once, when all tokens are in.

        Args:
            name: dotted module name, for errors only.

        Returns:
            [C, C] float32, exactly symmetric.

        Raises:
            NumericsError: no token was seen, or an input held NaN or infinity, or values whose squares float32 does not hold.
        """
        panels, self.panels = self.panels.total(), PartSum()
        if self.num_tokens == 0 or panels is None:
            raise NumericsError(f"{name}: 0 calibration tokens reached this module; add data that exercises it or ignore it")
        H_CC = self._zeros(self.num_columns, self.num_columns)
        for panel, (start, stop) in zip(panels, _spans(self.num_columns), strict=True):
            block = panel[:, : stop - start].triu()
            H_CC[start:stop, stop:] = panel[:, stop - start :]
            H_CC[stop:, start:stop] = panel[:, stop - start :].t()
            H_CC[start:stop, start:stop] = block + block.triu(1).t()
        H_CC.mul_(2.0 / self.num_tokens)
        check_mean_squares(H_CC.diagonal(), name)  # which a NaN or infinite input always reaches
        return H_CC

    def _zeros(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.float32, device=self._device)


def _factor(x: Tensor) -> Tensor:
    """The inputs as they are multiplied, [N, C]: float32, but for bfloat16 on GPUs that sum its products, which are exact, in float32."""
    x_NC = x.reshape(-1, x.shape[-1]).detach()
    return x_NC if x.dtype == torch.bfloat16 and x.is_cuda and _sums_bfloat16(x.device) else x_NC.float()


@cache
def _sums_bfloat16(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY


def _shares(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cut float32 into what a dtype holds: bfloat16 holds half of the bits, and another half of what is left."""
    high = values.to(dtype)
    return (high,) if dtype == values.dtype else (high, (values - high).to(dtype))


def _add_product(sums_AC: Tensor, left_NA: Tensor, right_NC: Tensor) -> None:
    if right_NC.dtype == sums_AC.dtype:
        sums_AC.addmm_(left_NA.t(), right_NC)
    else:
        sums_AC.add_(torch.mm(left_NA.t(), right_NC, out_dtype=sums_AC.dtype))


def _spans(num_columns: int) -> Iterator[tuple[int, int]]:
    """The columns of each panel."""
    step = max(MIN_PANEL_COLUMNS, -(-num_columns // MAX_PANELS))
    return ((start, min(start + step, num_columns)) for start in range(0, num_columns, step))


def panel_bytes(num_columns: int) -> int:
    """Say what one sum of x x^T takes.

    Args:
        num_columns: C.

    Returns:
        Bytes: those of the square up to 192 columns, 9/16 of them from 1536 on.
    """
    return sum(4 * (stop - start) * (num_columns - start) for start, stop in _spans(num_columns))


def relative_output_error(weight_RC: Tensor, values_RC: Tensor, hessian_CC: Tensor) -> float:
    """Return tr(E H E^T) / tr(W H W^T), E = W - Q: the relative squared error of the layer's outputs on the calibration data.

    Up to 1024 rows it is computed. Of more it would take longer than a solve, and is estimated from all of them: to 1 or 2 %.

    Args:
        weight_RC: [R, C] the float weight, W.
        values_RC: [R, C] what stands in its place, Q.
        hessian_CC: [C, C] of the layer's input, any positive multiple of mean(x x^T).

    Returns:
        0 for equal outputs, 1 for all zeros. 0 where the outputs are zero.
    """
    largest, runs = weight_RC.abs().amax().float(), [weight_RC.split(ERROR_ROWS), values_RC.split(ERROR_ROWS)]
    energy_of = partial(_exact_energy if len(weight_RC) <= EXACT_ROWS else _estimated_energy, hessian_CC)
    energy = energy_of(near_one(weight.float(), largest) for weight in runs[0])
    error = energy_of(near_one(weight.float() - values.float(), largest) for weight, values in zip(*runs, strict=True))
    return error / energy if energy > 0 else 0.0


def _exact_energy(hessian_CC: Tensor, runs: Iterable[Tensor]) -> float:
    """Return tr(V H V^T) of a matrix that comes in runs of rows, from half of the products: H is symmetric."""
    energy = hessian_CC.new_zeros((), dtype=torch.float64)
    for values_RC in runs:
        for start in range(0, len(hessian_CC), _COLUMNS):
            run = slice(start, start + _COLUMNS)
            own_RS, before_RB = values_RC[:, run], values_RC[:, :start]
            products_RS = torch.addmm(own_RS @ hessian_CC[run, run], before_RB, hessian_CC[:start, run], alpha=2)
            energy += (products_RS * own_RS).sum(dtype=torch.float64)
    return float(energy)


def _estimated_energy(hessian_CC: Tensor, runs: Iterable[Tensor]) -> float:
    """Estimate tr(V H V^T): computed along the few directions in which H is largest, beside them from sums of all rows with random signs.

    Each sum has on average the energy of all rows together, whatever these are, and nothing hangs on a choice among them.

    Source: Hutch++ (Meyer et al. 2021, arXiv:2010.09649), with one basis for all matrices of a Hessian.
    """
    draw = torch.Generator().manual_seed(0)
    start_CM = torch.randn(len(hessian_CC), min(_DIRECTIONS, len(hessian_CC)), generator=draw, dtype=torch.float32).to(hessian_CC)
    basis_CM = torch.linalg.qr(hessian_CC @ torch.linalg.qr(hessian_CC @ start_CM).Q).Q  # twice, or it leaks into what is small
    turned_CM = hessian_CC @ basis_CM
    inner_MM = basis_CM.t() @ turned_CM
    sums_KC, along = hessian_CC.new_zeros(_NUM_SUMS, len(hessian_CC)), hessian_CC.new_zeros((), dtype=torch.float64)
    for values_RC in runs:
        there_RM = values_RC @ basis_CM
        along += (there_RM * (2 * (values_RC @ turned_CM) - there_RM @ inner_MM)).sum(dtype=torch.float64)
        signs_KR = torch.randint(0, 2, (_NUM_SUMS, len(values_RC)), generator=draw, dtype=torch.float32).to(hessian_CC) * 2 - 1
        sums_KC.addmm_(signs_KR, values_RC)
    sums_KC -= (sums_KC @ basis_CM) @ basis_CM.t()
    energy = float(along + ((sums_KC @ hessian_CC) * sums_KC).sum(dtype=torch.float64) / _NUM_SUMS)
    return max(0.0, energy)  # no estimate of what is almost nothing may be less


def near_one(values: Tensor, largest: Tensor) -> Tensor:
    """Scale values whose squares are to be compared, so that these neither overflow nor vanish.

    Args:
        values: float32.
        largest: float32; its largest absolute value comes to lie between a half and one.

    Returns:
        The values times a power of two, which is exact.
    """
    return torch.ldexp(values, -torch.frexp(largest.abs().amax()).exponent)
