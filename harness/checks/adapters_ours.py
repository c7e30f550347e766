"""Our own quantizers, packers, solvers, observers and layers as subjects of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from compressor.algorithms.gptq import activation_order, quantize_gptq, solve_gptq
from compressor.algorithms.gptq_forms import Grid
from compressor.algorithms.hessian import Hessian
from compressor.algorithms.rtn import round_to_nearest
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, dynamic_qparams, quantize
from compressor.numerics.scheme import QuantizationArgs
from harness.checks.nearest import e2m1_grid, e4m3_grid, int_grid
from harness.checks.protocols import Quantized, Solved

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def grid_of(args: QuantizationArgs) -> Tensor:
    """Return the values of the codes of a format.

    Args:
        args: the format.

    Returns:
        float64, in rising order.
    """
    if args.type == "int":
        return int_grid(args.num_bits)
    return e2m1_grid() if args.num_bits == 4 else e4m3_grid()


def label_of(args: QuantizationArgs) -> str:
    """Return a format in a few words, such as int4-asym-group32."""
    size = f"{args.group_size or ''}" if args.is_grouped else "x".join(map(str, args.block_structure or ()))
    parts = [f"{'fp' if args.type == 'float' else 'int'}{args.num_bits}", *([] if args.symmetric else ["asym"]), f"{args.strategy}{size}"]
    parts += [*(["mx"] if args.is_mx else []), *(["dynamic"] if args.dynamic else []), *([args.observer] if args.observer else [])]
    return "-".join(parts)


def rule_of(args: QuantizationArgs) -> str | None:
    """Return how scales follow from the range; None where they are searched."""
    if args.observer_kind == "mse":
        return None
    if args.is_mx:
        return "mx"
    if args.has_global_scale:
        return "nvfp4"
    return "half_range" if args.symmetric else "range"


def tags_of(args: QuantizationArgs) -> frozenset[str]:
    """Return what a format of ours promises."""
    tags = {"zero", "half_even", "refuses_nonfinite", "homogeneous"}
    # A search may prefer to cut off on the side of the longer half of the integers.
    if args.symmetric and (args.type == "float" or args.observer_kind == "minmax"):
        tags.add("odd")
    if not args.has_global_scale and args.strategy != "tensor":
        tags.add("local")
    tags.add("covers" if args.observer_kind == "minmax" else "searches_scales")
    return frozenset(tags)


@dataclass
class OurQuantizer:
    """Rounding to nearest with the scales of an observer, as QuantizationModifier does; or an activation, where the args are dynamic."""

    args: QuantizationArgs
    kind: ClassVar[str] = "quantizer"
    dtypes: Sequence[torch.dtype] = FLOATS

    def __post_init__(self) -> None:
        """Read what the format says."""
        self.name = label_of(self.args)
        self.tags = tags_of(self.args)
        self.code_values = grid_of(self.args)
        self.scale_rule = rule_of(self.args)
        self.stored_scale = torch.float8_e4m3fn if self.args.has_global_scale else None
        self.column_multiple = self.args.group_size if self.args.is_grouped and self.args.group_size else 1
        if self.args.dynamic:
            self.tags = self.tags - {"refuses_nonfinite"} | ({"per_token"} if self.args.strategy == "token" else set())

    def unsearched(self) -> OurQuantizer:
        """Return the same quantizer with the scales of the full range."""
        return OurQuantizer(self.args.model_copy(update={"observer": None, "observer_kwargs": {}}), self.dtypes)

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See Quantizer."""
        if self.args.block_structure is not None:
            return self.args.block_structure
        if self.args.is_grouped:
            return 1, self.column_multiple
        return shape if self.args.strategy == "tensor" else (1, shape[1])

    def quantize(self, weight: Tensor) -> Quantized:
        """See Quantizer."""
        if self.args.dynamic:
            qparams = dynamic_qparams(weight[None], self.args).map(lambda part: part.reshape(-1, part.shape[-1]) if part.ndim > 1 else part)
            return self._quantized(quantize(weight.float(), qparams._replace(scale=qparams.scale.float()), self.args), qparams)
        qparams = weight_qparams(weight, self.args, self.name)
        found = round_to_nearest(weight, qparams, self.args)
        return replace(self._quantized(found.codes_RC, qparams), relative_error=found.relative_error)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        """See Quantizer."""
        qparams = QParams(like.scale.float(), like.zero_point, like.global_scale)
        return quantize(values.float(), qparams, self.args)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """See Quantizer."""
        return dequantize(quantized.codes, QParams(quantized.scale, quantized.zero_point, quantized.global_scale), self.args)

    @staticmethod
    def _quantized(codes: Tensor, qparams: QParams) -> Quantized:
        return Quantized(codes, qparams.scale, qparams.zero_point, qparams.global_scale)


@dataclass
class OurSolver:
    """GPTQ as GPTQModifier runs it, in either form."""

    args: QuantizationArgs
    form: Literal["r_form", "reference"] = "r_form"
    actorder: Literal["static", "group"] | None = "static"
    search: bool = False
    damp_frac: float = 0.01
    kind: ClassVar[str] = "solver"
    dead_value: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        """Read what the format says."""
        order = {"static": "actorder", "group": "g_idx", None: "plain"}[self.actorder]
        self.name = f"gptq-{self.form}-{label_of(self.args)}-{order}{'-search' if self.search else ''}"
        tags = {"half_even", "searches_scales" if self.search else "fixed_scales"}
        tags |= {"act_order"} if self.actorder else set()
        self.tags = frozenset(tags | ({"rows_apart"} if self.args.block_structure is None else set()))
        self.code_values = grid_of(self.args)
        self.group_size = self.args.group_size if self.args.is_grouped else None
        if self.args.block_structure is not None:
            self.group_size = self.args.block_structure[1]

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        """See Solver."""
        total = Hessian(batches[0].shape[-1])
        for x in batches:
            total.add(x)
        return total.matrix(self.name)

    def order(self, hessian: Tensor) -> Tensor:
        """See Solver."""
        return torch.arange(len(hessian)) if self.actorder is None else activation_order(hessian)

    def unsearched(self) -> OurSolver:
        """See Solver."""
        return replace(self, search=False)

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        """See Solver."""
        if like is not None:
            return [self._solve_on(weights[0], hessian, block_size or 128, like)]
        found, _ = quantize_gptq(
            list(weights),
            hessian,
            self.args,
            actorder=self.actorder,
            block_size=block_size or 128,
            damp_frac=self.damp_frac,
            solver=self.form,
            scale_search=self.search,
            names=[f"{self.name}.{number}" for number in range(len(weights))],
        )
        solved = [self._solved(one.codes_RC, one.qparams, one.g_idx_C, one.loss) for one in found]
        return [replace(one, relative_error=source.relative_error) for one, source in zip(solved, found, strict=True)]

    def _solve_on(self, weight: Tensor, hessian: Tensor, block_size: int, like: Quantized) -> Solved:
        if self.actorder == "group":
            raise NotImplementedError("groups formed in the order of activation go with scales of their own")
        rows, columns = weight.shape
        divided = like.scale if like.global_scale is None else like.scale / like.global_scale
        scale = divided.reshape(-1, divided.shape[-1]).expand(rows, -1)
        zero = None if like.zero_point is None else like.zero_point.reshape(-1, like.zero_point.shape[-1]).expand(rows, -1)
        group_C = torch.arange(columns) // (columns // scale.shape[1])
        grid = Grid(scale, zero, group_C, self.args)
        order = self.order(hessian)
        found = solve_gptq(
            weight, hessian, grid, order_C=order, block_size=block_size, damp_frac=self.damp_frac, solver=self.form, name=self.name
        )
        qparams = QParams(like.scale, like.zero_point, like.global_scale)
        if self.args.block_structure is not None:
            height = self.args.block_structure[0]
            qparams = qparams.map(lambda part: part[::height])
        return self._solved(found.codes_RC, qparams, None, float(found.loss_R.double().sum()))

    def _solved(self, codes: Tensor, qparams: QParams, group_C: Tensor | None, loss: float) -> Solved:
        values = dequantize(codes, qparams, self.args, group_C)
        if self.args.block_structure is not None:  # a scale for each row and run of columns is what a solver's subject has
            height = self.args.block_structure[0]
            qparams = qparams.map(lambda part: part.repeat_interleave(height, 0)[: len(codes)])
        return Solved(Quantized(codes, qparams.scale, qparams.zero_point, qparams.global_scale), values, group_C, loss)
