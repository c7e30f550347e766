"""The schemes that have a name: those of compressed-tensors 0.20, argument for argument."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.errors import SchemeError
from compressor.numerics.observer_settings import suggest
from compressor.numerics.scheme import MX_GROUP_SIZE, NVFP4_GROUP_SIZE, QuantizationArgs, QuantizationScheme


def _preset(weights: QuantizationArgs, input_activations: QuantizationArgs | None = None) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=input_activations)


def _int_groups(num_bits: int, *, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(num_bits=num_bits, strategy="group", group_size=128, symmetric=symmetric)


def _mx(num_bits: int, *, dynamic: bool = False) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=num_bits, type="float", strategy="group", group_size=MX_GROUP_SIZE, scale_dtype="torch.uint8", dynamic=dynamic
    )


_TOKENS = {bits: QuantizationArgs(num_bits=bits, strategy="token", dynamic=True) for bits in (4, 8)}
_FP8_TOKENS = QuantizationArgs(type="float", strategy="token", dynamic=True)
_FP8_GROUPS = QuantizationArgs(type="float", strategy="group", group_size=128, dynamic=True)
_NVFP4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=NVFP4_GROUP_SIZE)
_NVFP4_INPUTS = _NVFP4.model_copy(update={"dynamic": "local", "observer": "static_minmax"})
_W8A8 = _preset(QuantizationArgs(strategy="channel"), _TOKENS[8])

PRESETS: dict[str, QuantizationScheme] = {
    "W4A16_ASYM": _preset(_int_groups(4, symmetric=False)),
    "W8A8": _W8A8,
    "INT8": _W8A8,
    "W4AFP8": _preset(_int_groups(4), _FP8_TOKENS),
    "FP8": _preset(
        QuantizationArgs(type="float", strategy="tensor"),
        QuantizationArgs(type="float", strategy="tensor", observer="static_minmax"),
    ),
    "FP8_DYNAMIC": _preset(QuantizationArgs(type="float", strategy="channel"), _FP8_TOKENS),
    "FP8_BLOCK": _preset(QuantizationArgs(type="float", strategy="block", block_structure=(128, 128)), _FP8_GROUPS),
    "NVFP4A16": _preset(_NVFP4),
    "NVFP4": _preset(_NVFP4, _NVFP4_INPUTS),
    "MXFP4A16": _preset(_mx(4)),
    "MXFP4": _preset(_mx(4), _mx(4, dynamic=True)),
    "MXFP4XFP8": _preset(_mx(4), _FP8_GROUPS),
    "MXFP8A16": _preset(_mx(8)),
    "MXFP8": _preset(_mx(8), _mx(8, dynamic=True)),
    **{f"W{bits}A4": _preset(_int_groups(bits), _TOKENS[4]) for bits in (2, 3, 4)},
    **{f"W{bits}A8": _preset(_int_groups(bits), _TOKENS[8]) for bits in range(2, 8)},
    **{f"W{bits}A16": _preset(_int_groups(bits)) for bits in range(2, 9)},
}


def preset_scheme(name: str, targets: Sequence[str] = ("Linear",)) -> QuantizationScheme:
    """Look a preset up by its compressed-tensors name.

    Args:
        name: a key of PRESETS, in any case.
        targets: the modules that the scheme is for.

    Returns:
        The preset with these targets.

    Raises:
        SchemeError: no preset has this name; the message gives the nearest one.
    """
    if name.upper() not in PRESETS:
        raise SchemeError(f"scheme: {name!r} does not exist; {suggest(name.upper(), list(PRESETS))}")
    return PRESETS[name.upper()].model_copy(update={"targets": list(targets)})
