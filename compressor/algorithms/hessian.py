"""The second-order statistic that GPTQ and SparseGPT share: H = 2 * mean(x x^T) over calibration tokens.

The sum is kept, not the running mean: a sum of float32 products does not depend on how tokens fall into batches, beyond rounding.
Only the block-upper triangle is accumulated, in up to 8 panels (1.6 times faster than the whole product, where panels are wide enough to
keep the product efficient); `matrix` mirrors it once.

Shapes: N tokens, C columns (in_features).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import NumericsError

MAX_PANELS = 8
MIN_PANEL_COLUMNS = 192
ERROR_ROWS = 128  # rows on which a relative error is measured; over all rows it would cost as much as a solve


class Hessian:
    """Accumulates x x^T of the inputs of one or several linear modules that see the same input."""

    def __init__(self, num_columns: int, device: torch.device | str = "cpu") -> None:
        """Start at zero tokens.

        Args:
            num_columns: in_features of the modules, C.
            device: where the sum lives.
        """
        self._sum_CC = torch.zeros(num_columns, num_columns, dtype=torch.float32, device=device)
        self._shift_CC: Tensor | None = None
        self.num_tokens = 0

    @property
    def num_columns(self) -> int:
        """C, the number of input features."""
        return self._sum_CC.shape[0]

    def add(self, x: Tensor) -> None:
        """Add the inputs of one forward.

        Args:
            x: [..., C], any float dtype; not modified.
        """
        x_NC = x.reshape(-1, x.shape[-1]).float().detach()
        step = max(MIN_PANEL_COLUMNS, -(-self.num_columns // MAX_PANELS))
        for start in range(0, self.num_columns, step):
            stop = min(start + step, self.num_columns)
            self._sum_CC[start:stop, start:].addmm_(x_NC[:, start:stop].t(), x_NC[:, start:])
        self.num_tokens += x_NC.shape[0]

    def add_shift(self, base: Tensor, x: Tensor) -> None:
        """Add what the same tokens would bring from the uncompressed model: (x_base - x)^T x.

        Args:
            base: [..., C], the inputs there; not modified.
            x: [..., C], those that `add` is given; not modified.
        """
        if self._shift_CC is None:
            self._shift_CC = torch.zeros_like(self._sum_CC)
        x_NC = x.reshape(-1, x.shape[-1]).float().detach()
        self._shift_CC.addmm_((base.reshape(x_NC.shape).float().detach() - x_NC).t(), x_NC)

    def shift(self, share: float = 1.0) -> Tensor | None:
        """Return 2 * mean((x_base - x)^T x), or a share of it, and release the sum; call it before `matrix`.

        Args:
            share: by which it is multiplied.

        Returns:
            [C, C] float32; None where nothing was added.
        """
        shift_CC, self._shift_CC = self._shift_CC, None
        return None if shift_CC is None else shift_CC.mul_(share * 2.0 / max(1, self.num_tokens))

    def matrix(self, name: str) -> Tensor:
        """Return H = 2 * mean(x x^T) and release the sum: call it once, when all tokens are in.

        Args:
            name: dotted module name, for errors only.

        Returns:
            [C, C] float32, exactly symmetric.

        Raises:
            NumericsError: no token was seen, or an input held NaN or infinity.
        """
        if self.num_tokens == 0:
            raise NumericsError(f"{name}: 0 calibration tokens reached this module; add data that exercises it or ignore it")
        H_CC = self._sum_CC
        self._sum_CC = H_CC.new_empty(0, 0)
        upper = torch.triu(H_CC)
        torch.add(upper, torch.triu(upper, 1).t(), out=H_CC)
        H_CC.mul_(2.0 / self.num_tokens)
        # A NaN or infinite input always reaches its own diagonal entry.
        if not bool(torch.isfinite(H_CC.diagonal()).all()):
            raise NumericsError(f"{name}: its calibration inputs hold NaN or infinity; check the model in its own dtype on this data")
        return H_CC


def relative_output_error(weight_RC: Tensor, values_RC: Tensor, hessian_CC: Tensor) -> float:
    """Return tr(E H E^T) / tr(W H W^T), E = W - Q: the relative squared error of the layer's outputs on the calibration data.

    Args:
        weight_RC: [R, C] the float weight, W.
        values_RC: [R, C] what stands in its place, Q.
        hessian_CC: [C, C] of the layer's input, any positive multiple of mean(x x^T).

    Returns:
        0 for equal outputs, 1 for all zeros; over at most 128 evenly spaced rows. 0 where the outputs are zero.
    """
    step = max(1, -(-weight_RC.shape[0] // ERROR_ROWS))
    kept = weight_RC[::step].float()
    error = kept - values_RC[::step].float()
    energy = float(((kept @ hessian_CC) * kept).sum(dtype=torch.float64))
    return float(((error @ hessian_CC) * error).sum(dtype=torch.float64)) / energy if energy > 0 else 0.0
