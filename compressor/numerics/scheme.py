"""What a tensor is to become: format, granularity and how its scales are found. Plain, frozen, checked data.

Field names, defaults and preset names are those of compressed-tensors, so that a recipe or a checkpoint's config carries over. What this
project cannot do is refused here, when the scheme is made and before any work, with a pydantic ValidationError whose lines name the field.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from compressor.errors import SchemeError
from compressor.numerics import formats
from compressor.numerics.formats import NumberType
from compressor.spelling import suggest

# Every observer name that a recipe may use -> what it does here. In llm-compressor they differ in how they average batches; ours never do.
ObserverKind = Literal["minmax", "mse", "imatrix"]
OBSERVER_KINDS: dict[str, ObserverKind] = {
    "minmax": "minmax",
    "memoryless_minmax": "minmax",
    "static_minmax": "minmax",
    "mse": "mse",
    "memoryless_mse": "mse",
    "imatrix_mse": "imatrix",
    "nvfp4_expanded_mse": "mse",
    "fouroversix": "mse",
    "nvfp4_expanded_imatrix": "imatrix",
}

# Wider ranges than the weights fill, from 1.8 times down to 0.8: the steps of 4-bit floats are not even, so that a group may fit better
# below the largest value ("four over six").
_EXPANDED = {"expand": 1.8, "maxshrink": 1 - 0.8 / 1.8, "grid": 200}
# What a name in a recipe stands for, as llm-compressor has it, apart from its own settings.
_SETTINGS: dict[str, dict[str, float]] = {
    "imatrix_mse": {"maxshrink": 0.95, "grid": 20, "norm": 3.0, "patience": 5},
    "nvfp4_expanded_mse": _EXPANDED,
    "fouroversix": _EXPANDED,
    "nvfp4_expanded_imatrix": _EXPANDED,
}

# Beyond these a search would not end, or every error would be infinite.
_LARGEST = {"grid": 10_000.0, "norm": 16.0, "expand": 4.0}


@dataclasses.dataclass(frozen=True)
class MSESettings:
    """Settings of the MSE observer, which tries the full range times `expand`, that times 1 - 1/grid, 1 - 2/grid ..., and keeps the best.

    Attributes:
        maxshrink: the largest share of the range that may be cut off, in (0, 1].
        grid: candidates per unit of shrinkage; maxshrink * grid candidates are tried.
        norm: exponent of the absolute error, > 0; 2 gives the mean squared error.
        patience: a group stops after this many candidates in a row without gain; None searches the whole grid.
        expand: how much wider than the full range the first candidate is, >= 1.
    """

    maxshrink: float = 0.20
    grid: float = 100.0
    norm: float = 2.4
    patience: int | None = None
    expand: float = 1.0

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> MSESettings:
        """Check a recipe's observer_kwargs.

        Args:
            kwargs: name -> number.

        Returns:
            The settings, defaults filled in.

        Raises:
            SchemeError: an unknown name, or a number out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in kwargs.items():
            if name not in names:
                raise SchemeError(f"observer_kwargs: {name!r} is not a setting of the mse observer; {suggest(name, names)}")
            if name == "patience" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf") or (name == "patience" and int(value) != value):
                raise SchemeError(f"observer_kwargs: {name}={value!r} is not a positive number; leave it out for the default")
            if name in _LARGEST and value > _LARGEST[name]:
                raise SchemeError(f"observer_kwargs: {name}={value!r} is above {_LARGEST[name]:g}; leave it out for the default")
        settings = cls(**kwargs)
        if settings.maxshrink > 1 or settings.maxshrink * settings.grid < 1:
            raise SchemeError(
                f"observer_kwargs: maxshrink={settings.maxshrink} with grid={settings.grid} leaves nothing to search; "
                "maxshrink must be at most 1 and maxshrink * grid at least 1"
            )
        if settings.expand < 1:
            raise SchemeError(f"observer_kwargs: expand={settings.expand} would narrow the range; give at least 1, and maxshrink for less")
        return settings


Strategy = Literal["tensor", "channel", "group", "token", "block", "tensor_group", "attn_head"]
CompressionFormat = Literal[
    "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
]
ScaleDtype = Literal["torch.uint8", "torch.float8_e4m3fn"]

MX_GROUP_SIZE = 32
NVFP4_GROUP_SIZE = 16
_GROUPED = ("group", "tensor_group")
_WEIGHT_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_INPUT_STRATEGIES = ("tensor", "token", "group", "tensor_group")


def refuse_flag(value: Any, annotation: Any) -> Any:
    """Refuse true and false where a number is wanted: pydantic would take them for 1 and 0.

    Args:
        value: that was given.
        annotation: of the field.

    Returns:
        The value.

    Raises:
        SchemeError: it is a flag, and the field takes numbers and no flags.
    """
    kinds = {annotation, *get_args(annotation)}
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise SchemeError(f"{value} stands where a number is wanted; give a number")
    return value


def plain_settings(data: Any) -> Any:
    """Take objects of compressed-tensors, of which recipes in Python are made, for the settings that they hold; all else as it is."""
    return data.model_dump(exclude_none=True) if type(data).__module__.startswith("compressed_tensors.") else data


class QuantizationArgs(BaseModel):
    """How one tensor (a weight, the input of a module, or the keys and values of a cache) is quantized.

    Attributes:
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.
        type: "int", or "float" for fp4 and fp8.
        symmetric: True: codes are centred on zero and there is no zero point.
        group_size: columns that share a scale; -1 stands for the whole row.
        strategy: what shares a scale; inferred from group_size where it is not given.
        block_structure: rows and columns of a block, strategy "block" only.
        dynamic: True: an activation's scales are computed anew in every forward pass; "local": those of its groups are, under a global
            scale that is not.
        actorder: the order in which GPTQ takes the columns; "weight" and "static" mean the same, "group" also stores the order as g_idx.
        scale_dtype: how scales are stored where that is not the dtype of the weight: "torch.uint8" for the exponents of the MX formats,
            "torch.float8_e4m3fn" for NVFP4. Inferred for 4-bit floats.
        observer: how the range is found, a key of OBSERVER_KINDS; None means "minmax".
        observer_kwargs: settings of the observer, see MSESettings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bits: int = Field(default=8, ge=2, le=8)
    type: NumberType = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: Strategy = Field(default=None, validate_default=True)
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    actorder: Literal["static", "weight", "group"] | None = None
    scale_dtype: ScaleDtype | None = Field(default=None, validate_default=True)
    observer: str | None = None
    observer_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_compressed_tensors(cls, data: Any) -> Any:
        return plain_settings(data)

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        return formats.code_range(self.type, self.num_bits)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the codes, one per byte: int8, or float8_e4m3fn for fp8 and for fp4, whose values it holds."""
        return formats.storage_dtype(self.type)

    @property
    def is_grouped(self) -> bool:
        """Whether runs of `group_size` columns share a scale."""
        return self.strategy in _GROUPED

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two, stored as their exponents (the MX formats)."""
        return self.scale_dtype == "torch.uint8"

    @property
    def has_global_scale(self) -> bool:
        """Whether one more scale, in float32, stands above those of the groups (NVFP4)."""
        return self.strategy == "tensor_group"

    @property
    def observer_kind(self) -> ObserverKind:
        """What `observer` does: "minmax", "mse", or "imatrix", which is "mse" with errors weighted by the inputs that they meet."""
        return OBSERVER_KINDS[self.observer or "minmax"]

    @property
    def mse_settings(self) -> MSESettings:
        """The settings for an observer that searches: those that its name stands for, where none are given."""
        return MSESettings.from_kwargs({**_SETTINGS.get(self.observer or "", {}), **self.observer_kwargs})

    @field_validator("num_bits", "group_size", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_flag(value, cls.model_fields[str(info.field_name)].annotation)

    @field_validator("type", mode="before")
    @classmethod
    def _lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("group_size", mode="after")
    @classmethod
    def _check_group_size(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise SchemeError(f"group_size={value} is neither a positive number nor -1; give -1 for one scale per row")
        return value

    @field_validator("strategy", mode="before")
    @classmethod
    def _infer_strategy(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            group_size = info.data.get("group_size")
            return "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _take_zero_point_dtype(cls, data: Any) -> Any:
        """Recipes of llm-compressor may name the dtype of the zero point: there is none in a symmetric format, and int8 is ours."""
        if not isinstance(data, Mapping) or "zp_dtype" not in data:
            return data
        named = str(data["zp_dtype"]).removeprefix("torch.")
        means_nothing = data.get("symmetric", True) and isinstance(getattr(torch, named, None), torch.dtype)
        if named not in ("int8", "None") and not means_nothing:
            raise SchemeError(f"zp_dtype={named!r} is not how zero points are stored here, which is int8; leave zp_dtype out")
        return {key: value for key, value in data.items() if key != "zp_dtype"}

    @field_validator("block_structure", mode="before")
    @classmethod
    def _check_block(cls, value: Any) -> Any:
        text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value).lower()  # "128x128" to compressed-tensors, too
        if value is not None and re.fullmatch(r"[1-9]\d*x[1-9]\d*", text) is None:
            raise SchemeError(f"block_structure={value!r} is not two positive numbers; give rows and columns, such as [128, 128]")
        return None if value is None else text.split("x")

    @field_validator("actorder", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value

    @field_validator("scale_dtype", mode="before")
    @classmethod
    def _infer_scale_dtype(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == "float" and info.data.get("num_bits") == 4:
            return "torch.float8_e4m3fn" if info.data.get("strategy") == "tensor_group" else "torch.uint8"
        if isinstance(value, torch.dtype):
            return str(value)
        return f"torch.{value.removeprefix('torch.')}" if isinstance(value, str) else value

    @field_validator("observer", mode="after")
    @classmethod
    def _check_observer(cls, value: str | None) -> str | None:
        if value is not None and value not in OBSERVER_KINDS:
            raise SchemeError(f"observer: {value!r} does not exist; {suggest(value, list(OBSERVER_KINDS))}")
        return value

    @model_validator(mode="after")
    def _check_strategy(self) -> QuantizationArgs:
        positive = self.group_size is not None and self.group_size > 0
        if self.is_grouped and not positive:
            raise SchemeError(
                f"strategy={self.strategy!r} with group_size={self.group_size} has no groups; give a positive group_size, or "
                "strategy='channel'"
            )
        if not self.is_grouped and positive:
            raise SchemeError(f"group_size={self.group_size} does not go with strategy={self.strategy!r}; give strategy='group'")
        if (self.strategy == "block") != (self.block_structure is not None):
            unfit = f"block_structure={self.block_structure} does not go with strategy={self.strategy!r}"
            raise SchemeError(f"{unfit}; give strategy='block' with a block_structure such as [128, 128]")
        if self.strategy == "block" and (self.type, self.num_bits) != ("float", 8):
            raise SchemeError(f"strategy='block' is for fp8, not for {self.type}{self.num_bits}; give type='float' and num_bits=8")
        if self.actorder == "group" and self.strategy != "group":
            raise SchemeError(f"actorder='group' does not go with strategy={self.strategy!r}; use strategy='group' or actorder='static'")
        return self

    @model_validator(mode="after")
    def _check_float(self) -> QuantizationArgs:
        if self.type == "float" and (self.num_bits not in (4, 8) or not self.symmetric):
            raise SchemeError("type='float' means symmetric fp8 (e4m3) or fp4 (e2m1); give num_bits=8 or 4, and symmetric=True")
        is_nvfp4 = (self.type, self.num_bits, self.group_size) == ("float", 4, NVFP4_GROUP_SIZE)
        if self.has_global_scale != (self.scale_dtype == "torch.float8_e4m3fn") or (self.has_global_scale and not is_nvfp4):
            raise SchemeError(
                f"strategy={self.strategy!r}, group_size={self.group_size} with scale_dtype={self.scale_dtype!r} is not NVFP4; give "
                f"type='float', num_bits=4, strategy='tensor_group', group_size={NVFP4_GROUP_SIZE}"
            )
        if self.is_mx and (self.type != "float" or self.group_size != MX_GROUP_SIZE or self.strategy != "group"):
            raise SchemeError(
                f"{self.type}{self.num_bits} with strategy={self.strategy!r} and group_size={self.group_size}: fp4 and scale_dtype=uint8 "
                f"go in groups of {MX_GROUP_SIZE} (MX formats), fp4 also of {NVFP4_GROUP_SIZE} ('tensor_group'); give one, or num_bits=8"
            )
        return self

    @model_validator(mode="after")
    def _check_dynamic(self) -> QuantizationArgs:
        if self.strategy == "token" and self.dynamic is not True:
            raise SchemeError("strategy='token' needs scales of its own in every forward pass; give dynamic=True")
        if self.dynamic is True and self.strategy not in ("token", "tensor", "group"):
            raise SchemeError(f"dynamic=True is not supported with strategy={self.strategy!r}; use 'token', 'group' or 'tensor'")
        if self.dynamic is True and self.observer_kind != "minmax":
            raise SchemeError(f"observer: {self.observer} would see nothing, since dynamic scales are those of each forward; leave it out")
        if self.dynamic == "local" and not self.has_global_scale:
            raise SchemeError(f"dynamic='local' needs strategy='tensor_group', not {self.strategy!r}; give dynamic=True")
        return self

    @model_validator(mode="after")
    def _check_expanded(self) -> QuantizationArgs:
        if _SETTINGS.get(self.observer or "") is _EXPANDED and not (self.type == "float" and self.num_bits == 4):
            raise SchemeError(f"observer: {self.observer} is for floats of 4 bits, whose steps are not even; use 'mse' or 'imatrix_mse'")
        return self

    @model_validator(mode="after")
    def _check_settings_of_observer(self) -> QuantizationArgs:
        if self.observer_kind != "minmax":
            MSESettings.from_kwargs(self.observer_kwargs)
        elif self.observer_kwargs:
            raise SchemeError(f"observer_kwargs: {self.observer or 'minmax'} takes none, got {[*self.observer_kwargs]}; leave them out")
        if self.observer_kind == "imatrix" and self.strategy not in ("channel", "group", "tensor_group"):
            raise SchemeError(
                f"observer: imatrix_mse weighs the columns of a weight in groups or rows, not strategy={self.strategy!r}; use 'mse'"
            )
        return self


class QuantizationScheme(BaseModel):
    """What happens to the modules that `targets` names: their weights, and the inputs of their products.

    Attributes:
        targets: class names, module names or "re:<regex>".
        weights: how the weight is quantized, static.
        input_activations: how the input is quantized; None leaves it as it is. Without weights: queries, keys and values of attention.
        output_activations: not supported; there so that a config that has it is refused by name.
        format: the checkpoint format; None picks it, see compression_format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: list[str]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: None = None
    format: CompressionFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_compressed_tensors(cls, data: Any) -> Any:
        return plain_settings(data)

    @property
    def compression_format(self) -> CompressionFormat:
        """The checkpoint format: `format`, or else what compressed-tensors infers.

        Integer weights alone are packed into int32 words; with quantized inputs they stay int8; fp8 stays fp8; fp4 is packed two to a byte.
        (For fp8 weights alone compressed-tensors infers "naive-quantized", which is the same bytes as "float-quantized" under a name that
        fewer readers know.)

        Raises:
            SchemeError: the scheme leaves the weights as they are, so that nothing is compressed.
        """
        if self.weights is None:
            raise SchemeError("weights: None leaves nothing to compress; give the weights a QuantizationArgs")
        return self.format or _default_format(self.weights, self.input_activations)

    @model_validator(mode="after")
    def _check_weights(self) -> QuantizationScheme:
        weights = self.weights
        if weights is None:
            return self
        if weights.dynamic:
            raise SchemeError("weights: dynamic=True is for activations; give dynamic=False")
        if weights.strategy not in _WEIGHT_STRATEGIES:
            raise SchemeError(f"weights: strategy={weights.strategy!r} is not for weights; use one of {', '.join(_WEIGHT_STRATEGIES)}")
        default = _default_format(weights, self.input_activations)
        either = ("pack-quantized", "int-quantized")
        if self.format is not None and self.format != default and not (self.format in either and default in either):
            raise SchemeError(
                f"format={self.format!r} does not store weights of type={weights.type!r} with num_bits={weights.num_bits} and "
                f"strategy={weights.strategy!r}; leave format out"
            )
        return self

    @model_validator(mode="after")
    def _check_inputs(self) -> QuantizationScheme:
        inputs = self.input_activations
        if inputs is None or self.weights is None:
            return self
        if inputs.strategy not in _INPUT_STRATEGIES:
            raise SchemeError(f"input_activations: strategy={inputs.strategy!r} is not supported; use 'token' (dynamic) or 'tensor'")
        if inputs.is_grouped and not inputs.dynamic:
            raise SchemeError(
                f"input_activations: strategy={inputs.strategy!r} has no static scales; give dynamic=True, or 'local' for 'tensor_group'"
            )
        if inputs.actorder is not None:
            raise SchemeError(f"input_activations: actorder={inputs.actorder!r} is for weights; leave it out")
        return self


def _default_format(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> CompressionFormat:
    if weights.type == "int":
        return "pack-quantized" if inputs is None else "int-quantized"
    if weights.num_bits == 4:
        return "mxfp4-pack-quantized" if weights.is_mx else "nvfp4-pack-quantized"
    return "mxfp8-quantized" if weights.is_mx else "float-quantized"


# The schemes that have a name: those of compressed-tensors 0.20, argument for argument.


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


# Presets of compressed-tensors that do not exist here, and what to do instead.
LEFT_OUT: Mapping[str, str] = {
    "UNQUANTIZED": "put its targets into ignore",
    **dict.fromkeys(("MXFP6A16", "MXFP6A8"), "take MXFP8 or MXFP4, for floats of 6 bits are not supported"),
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
    if name.upper() in LEFT_OUT:
        raise SchemeError(f"scheme: {name!r} is a preset of compressed-tensors that does not exist here; {LEFT_OUT[name.upper()]}")
    if name.upper() not in PRESETS:
        raise SchemeError(f"scheme: {name!r} does not exist; {suggest(name.upper(), list(PRESETS))}")
    return PRESETS[name.upper()].model_copy(update={"targets": list(targets)})
