"""Everything of ours that the catalogue judges: `harness check harness.checks.ours:SUBJECTS`."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme
from harness.checks.adapters.modifiers import OurExpertPruner, pruners, transforms
from harness.checks.adapters.ours import OurFp4Packer, OurLayer, OurObserver, OurPacker, OurQuantizer, OurSolver

_ARGS: tuple[QuantizationArgs, ...] = (
    *(QuantizationArgs(num_bits=bits, group_size=16, symmetric=symmetric) for bits in range(2, 9) for symmetric in (True, False)),
    QuantizationArgs(strategy="channel"),
    QuantizationArgs(num_bits=4, strategy="channel", symmetric=False),
    QuantizationArgs(strategy="tensor"),
    QuantizationArgs(strategy="tensor", symmetric=False),
    QuantizationArgs(type="float", strategy="tensor"),
    QuantizationArgs(type="float", strategy="channel"),
    QuantizationArgs(type="float", strategy="block", block_structure=(4, 8)),
    QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    QuantizationArgs(num_bits=4, type="float", group_size=32),
    QuantizationArgs(type="float", group_size=32, scale_dtype="torch.uint8"),
    QuantizationArgs(num_bits=4, group_size=16, observer="mse"),
    QuantizationArgs(strategy="token", dynamic=True),
    QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
    QuantizationArgs(num_bits=4, strategy="token", dynamic=True),
    QuantizationArgs(type="float", strategy="token", dynamic=True),
    QuantizationArgs(type="float", strategy="group", group_size=16, dynamic=True),
)
_INT4 = QuantizationArgs(num_bits=4, group_size=16)
_INT4_ASYM = QuantizationArgs(num_bits=4, group_size=16, symmetric=False)
_NVFP4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
_STATIC = QuantizationArgs(strategy="tensor")


def _scheme(weights: QuantizationArgs, inputs: QuantizationArgs | None = None) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


QUANTIZERS: Sequence[OurQuantizer] = tuple(map(OurQuantizer, _ARGS))
PACKERS: Sequence[OurPacker | OurFp4Packer] = (*(OurPacker(bits, dim) for bits in range(1, 9) for dim in (1, 0)), OurFp4Packer())
OBSERVERS: Sequence[OurObserver] = (
    OurObserver(_STATIC),
    OurObserver(QuantizationArgs(strategy="tensor", symmetric=False)),
    OurObserver(QuantizationArgs(strategy="tensor", symmetric=False), resumes=True),
    OurObserver(QuantizationArgs(type="float", strategy="tensor")),
    OurObserver(QuantizationArgs(strategy="tensor", observer="mse")),
    OurObserver(QuantizationArgs(strategy="tensor", observer="mse"), resumes=True),
)
SOLVERS: Sequence[OurSolver] = (
    OurSolver(_INT4),
    OurSolver(_INT4, "reference"),
    OurSolver(_INT4, search=True),
    OurSolver(_INT4_ASYM, search=True),
    OurSolver(_INT4_ASYM, actorder=None),
    OurSolver(_INT4_ASYM, "reference", actorder=None),
    OurSolver(QuantizationArgs(num_bits=3, group_size=16), actorder="group"),
    OurSolver(QuantizationArgs(strategy="channel")),
    OurSolver(QuantizationArgs(type="float", strategy="tensor")),
    OurSolver(QuantizationArgs(type="float", strategy="block", block_structure=(5, 8))),
    OurSolver(_NVFP4),
    OurSolver(QuantizationArgs(num_bits=4, type="float", group_size=32)),
)
LAYERS: Sequence[OurLayer] = (
    *(OurLayer(_scheme(QuantizationArgs(num_bits=bits, group_size=16, symmetric=False))) for bits in range(2, 9)),
    OurLayer(_scheme(_INT4)),
    OurLayer(_scheme(QuantizationArgs(num_bits=4, group_size=16, symmetric=False, actorder="group"))),
    OurLayer(_scheme(QuantizationArgs(num_bits=4, strategy="channel", symmetric=False))),
    OurLayer(preset_scheme("W8A8")),
    OurLayer(preset_scheme("W8A8"), "native"),
    OurLayer(_scheme(QuantizationArgs(strategy="channel"), _STATIC)),
    OurLayer(_scheme(QuantizationArgs(strategy="channel"), QuantizationArgs(strategy="tensor", symmetric=False)), "native"),
    OurLayer(preset_scheme("FP8")),
    OurLayer(preset_scheme("FP8_DYNAMIC")),
    OurLayer(preset_scheme("FP8_DYNAMIC"), "native"),
    OurLayer(_scheme(QuantizationArgs(type="float", strategy="block", block_structure=(4, 8)))),
    OurLayer(preset_scheme("NVFP4A16")),
    OurLayer(preset_scheme("NVFP4")),
    OurLayer(preset_scheme("MXFP4A16")),
    OurLayer(preset_scheme("MXFP4")),
    OurLayer(preset_scheme("MXFP8")),
)
SUBJECTS: Sequence[object] = (
    *PACKERS,
    *OBSERVERS,
    *QUANTIZERS,
    *LAYERS,
    *SOLVERS,
    *pruners(),
    *transforms(),
    OurExpertPruner(0.25),
    OurExpertPruner(refit=False),
)
