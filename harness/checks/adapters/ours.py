"""Our own quantizers, packers, solvers, observers and layers as subjects of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from compressor.algorithms.babai import Grid
from compressor.algorithms.gptq import activation_order, quantize_gptq, solve_gptq
from compressor.algorithms.hessian import Hessian
from compressor.algorithms.rtn import round_to_nearest
from compressor.model.checkpoints.load import load_compressed
from compressor.nn import QuantizedLinear, quantized, replacement, shard_problems
from compressor.numerics.observers import make_observer, weight_qparams
from compressor.numerics.packing import pack_fp4, pack_int32, unpack_fp4, unpack_int32
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, dynamic_qparams, fake_quantize, quantize
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from harness.checks.oracles import e2m1_grid, e4m3_grid, int_grid
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
        return replace(self._quantized(found.codes_RC, qparams), relative_error=_error_of_values(found.relative_error, self.args))

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


def _error_of_values(error: float, args: QuantizationArgs) -> float | None:
    """None for NVFP4: its error is that of what a layer reads, whose values are rounded to bfloat16, and a subject's values are not."""
    return None if args.has_global_scale else error


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
        errors = [_error_of_values(one.relative_error, self.args) for one in found]
        return [replace(one, relative_error=error) for one, error in zip(solved, errors, strict=True)]

    def _solve_on(self, weight: Tensor, hessian: Tensor, block_size: int, like: Quantized) -> Solved:
        if self.actorder == "group":
            raise NotImplementedError("groups formed in the order of activation go with scales of their own")
        rows, columns = weight.shape
        divided = like.scale if like.global_scale is None else like.scale / like.global_scale
        scale = divided.reshape(-1, divided.shape[-1]).expand(rows, -1)
        zero = None if like.zero_point is None else like.zero_point.reshape(-1, like.zero_point.shape[-1]).expand(rows, -1)
        group_C = torch.arange(columns) // -(-columns // scale.shape[1])
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


# Our packers, observers and runtime layers as subjects of the catalogue.


@dataclass
class OurPacker:
    """Integer codes in int32 words, along the columns (dim=1) or the rows (dim=0)."""

    bits: int
    dim: int = 1
    kind: ClassVar[str] = "packer"
    tags: ClassVar[frozenset[str]] = frozenset({"refuses_unfit"})
    code_dtype: ClassVar[torch.dtype] = torch.int8
    column_multiple: ClassVar[int] = 1
    layout: ClassVar[str | None] = "offset_stream"

    def __post_init__(self) -> None:
        """Read what the width says."""
        self.name = f"pack_int32-{self.bits}bit-dim{self.dim}"
        self.code_values = int_grid(self.bits)
        self.ranks: Sequence[int] = (1, 2, 3) if self.dim else (2, 3)
        self.packed_dim = self.dim - 2

    def pack(self, codes: Tensor) -> Tensor:
        """See Packer."""
        return pack_int32(codes, self.bits, self.dim)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See Packer."""
        return unpack_int32(packed, self.bits, shape, self.dim)


@dataclass
class OurFp4Packer:
    """fp4 codes, two to a byte."""

    name: str = "pack_fp4"
    kind: ClassVar[str] = "packer"
    tags: ClassVar[frozenset[str]] = frozenset({"refuses_unfit"})
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    column_multiple: ClassVar[int] = 2
    layout: ClassVar[str | None] = "e2m1_nibbles"
    ranks: ClassVar[Sequence[int]] = (1, 2, 3)
    packed_dim: ClassVar[int] = -1
    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Name the codes."""
        self.code_values = e2m1_grid()

    def pack(self, codes: Tensor) -> Tensor:
        """See Packer."""
        return pack_fp4(codes)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See Packer."""
        return unpack_fp4(packed)


@dataclass
class OurObserver:
    """The observer of a static activation."""

    args: QuantizationArgs
    resumes: bool = False
    kind: ClassVar[str] = "observer"

    def __post_init__(self) -> None:
        """Read what the format says."""
        self.name = f"observer-{label_of(self.args)}{'-resumed' if self.resumes else ''}"
        self.tags = frozenset({"refuses_nonfinite", "covers"} if self.args.observer_kind == "minmax" else {"refuses_nonfinite"})
        self.code_values = grid_of(self.args)
        self.scale_rule = rule_of(self.args)

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        """See Observer; where it resumes, every batch meets an observer that knows the others from a saved state."""
        observer = make_observer(self.args, self.name)
        for x in batches:
            if self.resumes:
                state = {key: value.clone() for key, value in observer.state().items()}
                observer = make_observer(self.args, self.name)
                observer.restore(state)
            observer.update(x)
        qparams = observer.qparams()
        return Quantized(torch.empty(0), qparams.scale, qparams.zero_point, qparams.global_scale)


@dataclass
class OurLayer:
    """QuantizedLinear of a scheme, its weight rounded to nearest; with groups out of order where the scheme says actorder=group."""

    scheme: QuantizationScheme
    matmul: str = "reference"
    kind: ClassVar[str] = "layer"
    tags: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[Sequence[torch.dtype]] = FLOATS

    def __post_init__(self) -> None:
        """Read what the scheme says."""
        assert self.scheme.weights is not None
        self.args = self.scheme.weights
        inputs = self.scheme.input_activations
        self.name = f"layer-{label_of(self.args)}{f'-{label_of(inputs)}' if inputs else ''}-{self.scheme.compression_format}"
        self.name += {"reference": "", "native": "-native"}[self.matmul] + ("-g_idx" if self.args.actorder == "group" else "")
        self.column_multiple = self.args.group_size if self.args.is_grouped and self.args.group_size else 1

    def build(self, linear: nn.Linear) -> nn.Module:
        """See Layer."""
        layer: nn.Module
        if self.args.actorder == "group":
            codes, qparams, g_idx = self._regrouped(linear.weight.detach())
            layer = replacement(linear, self.scheme, codes, qparams, g_idx_C=g_idx, name=self.name)
        else:
            layer = quantized(linear, self.scheme, input_qparams=self._input_qparams(linear.weight.dtype), name=self.name)
        assert isinstance(layer, QuantizedLinear)
        layer.matmul = "native" if self.matmul == "native" else "reference"
        return layer

    def weight(self, layer: nn.Module) -> Tensor:
        """See Layer."""
        assert isinstance(layer, QuantizedLinear)
        return layer.dequantized_weight()

    def expected_weight(self, linear: nn.Linear) -> Tensor:
        """See Layer; fp4 is unpacked in bfloat16, as compressed-tensors does."""
        weight = linear.weight.detach()
        if self.args.actorder == "group":
            codes, qparams, g_idx = self._regrouped(weight)
            return dequantize(codes, qparams, self.args, g_idx)
        qparams = weight_qparams(weight, self.args, self.name)
        codes = round_to_nearest(weight, qparams, self.args).codes_RC
        narrow = self.args.is_mx or self.args.has_global_scale
        stored = qparams._replace(scale=qparams.scale.to(torch.bfloat16)) if narrow else qparams
        return dequantize(codes, stored, self.args).to(weight.dtype)

    def expected_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See Layer."""
        args = self.scheme.input_activations
        if args is None or not x.numel():
            return x
        static = self._input_qparams(x.dtype)
        if args.dynamic:
            return fake_quantize(x, dynamic_qparams(x, args, None if static is None else static.global_scale), args)
        assert static is not None
        return fake_quantize(x, static, args)

    def _regrouped(self, weight: Tensor) -> tuple[Tensor, QParams, Tensor]:
        """Columns in steps of three, and groups of what comes together."""
        columns = weight.shape[1]
        order = torch.cat([torch.arange(start, columns, 3) for start in range(3)])
        g_idx = torch.empty(columns, dtype=torch.int32)
        g_idx[order] = (torch.arange(columns) // self.column_multiple).to(torch.int32)
        qparams = weight_qparams(weight[:, order], self.args, self.name)
        wide = qparams._replace(scale=qparams.scale.float())
        return quantize(weight.float(), wide, self.args, g_idx), qparams, g_idx

    def _input_qparams(self, dtype: torch.dtype) -> QParams | None:
        args = self.scheme.input_activations
        if args is None or args.dynamic is True:
            return None
        zero = None if args.symmetric else torch.tensor([3], dtype=torch.int8)
        largest = 10.0
        global_scale = torch.tensor([448 * 6 / largest]) if args.has_global_scale else None
        return QParams(torch.tensor([largest / args.code_range[1]], dtype=dtype), zero, global_scale)


# A checkpoint of ours as a subject of the catalogue.
#
# from harness import check
# from harness.checks.adapters.ours import OurArtifact
#
# print(check(OurArtifact("MODEL", "MODEL-W4A16")))


@dataclass
class OurArtifact:
    """Two folders; see Artifact."""

    base: Path
    folder: Path
    model: nn.Module | None = None
    num_shards: int = 2
    kind: ClassVar[str] = "artifact"
    tags: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Take texts for paths."""
        self.base, self.folder = Path(self.base), Path(self.folder)

    @property
    def name(self) -> str:
        """See Artifact."""
        return self.folder.name

    def uncuttable(self) -> Mapping[str, str]:
        """See Artifact; what `compressor.nn.shard_problems` says of the checkpoint."""
        return shard_problems(load_compressed(self.folder, device="cpu"), self.num_shards)
