"""What a tensor is to become: format, granularity and how its scales are found. Plain, frozen, checked data.

Field names, defaults and preset names are those of compressed-tensors, so that a recipe or a checkpoint's config carries over. What this
project cannot do is refused here, when the scheme is made and before any work, with a pydantic ValidationError whose lines name the field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from compressor.errors import SchemeError
from compressor.numerics import formats
from compressor.numerics.formats import NumberType

Strategy = Literal["tensor", "channel", "group", "token"]
CompressionFormat = Literal["pack-quantized", "int-quantized", "float-quantized"]

# Every observer name that a recipe may use -> what it does here. In llm-compressor they differ in how they average batches; ours never do.
OBSERVER_KINDS: dict[str, Literal["minmax", "mse"]] = {
    "minmax": "minmax",
    "memoryless_minmax": "minmax",
    "static_minmax": "minmax",
    "mse": "mse",
    "memoryless_mse": "mse",
}


@dataclasses.dataclass(frozen=True)
class MSESettings:
    """Settings of the MSE observer, which tries the full range times 1, 1 - 1/grid, 1 - 2/grid ... and keeps the one with the least error.

    Attributes:
        maxshrink: the largest share of the range that may be cut off, in (0, 1].
        grid: candidates per unit of shrinkage; maxshrink * grid candidates are tried.
        norm: exponent of the absolute error, > 0; 2 gives the mean squared error.
        patience: a group stops after this many candidates in a row without gain; None searches the whole grid.
    """

    maxshrink: float = 0.20
    grid: float = 100.0
    norm: float = 2.4
    patience: int | None = None

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
                raise SchemeError(f"observer_kwargs: {name!r} is not a setting of the mse observer; {_suggest(name, names)}")
            if name == "patience" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf") or (name == "patience" and int(value) != value):
                raise SchemeError(f"observer_kwargs: {name}={value!r} is not a positive number; leave it out for the default")
        settings = cls(**kwargs)
        if settings.maxshrink > 1 or settings.maxshrink * settings.grid < 1:
            raise SchemeError(
                f"observer_kwargs: maxshrink={settings.maxshrink} with grid={settings.grid} leaves nothing to search; "
                "maxshrink must be at most 1 and maxshrink * grid at least 1"
            )
        return settings


class QuantizationArgs(BaseModel):
    """How one tensor (a weight, or the input of a module) is quantized.

    Attributes:
        num_bits: width of a code: 2 to 8 for integers, 8 for floats.
        type: "int", or "float" for fp8 e4m3.
        symmetric: True: codes are centred on zero and there is no zero point.
        group_size: columns that share a scale; -1 stands for the whole row.
        strategy: what shares a scale; inferred from group_size where it is not given.
        dynamic: True: an activation's scales are computed anew in every forward pass.
        actorder: the order in which GPTQ takes the columns; "weight" and "static" mean the same, "group" also stores the order as g_idx.
        observer: how the range is found, a key of OBSERVER_KINDS; None means "minmax".
        observer_kwargs: settings of the observer, see MSESettings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bits: int = Field(default=8, ge=2, le=8)
    type: NumberType = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: Strategy = Field(default=None, validate_default=True)
    dynamic: bool = False
    actorder: Literal["static", "weight", "group"] | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        return formats.code_range(self.type, self.num_bits)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the codes: int8 or float8_e4m3fn."""
        return formats.storage_dtype(self.type)

    @property
    def observer_kind(self) -> Literal["minmax", "mse"]:
        """What `observer` does: "minmax" or "mse"."""
        return OBSERVER_KINDS[self.observer or "minmax"]

    @property
    def mse_settings(self) -> MSESettings:
        """The settings for an observer of kind "mse"."""
        return MSESettings.from_kwargs(self.observer_kwargs)

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

    @field_validator("actorder", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value

    @field_validator("observer", mode="after")
    @classmethod
    def _check_observer(cls, value: str | None) -> str | None:
        if value is not None and value not in OBSERVER_KINDS:
            raise SchemeError(f"observer: {value!r} does not exist; {_suggest(value, list(OBSERVER_KINDS))}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> QuantizationArgs:
        positive = self.group_size is not None and self.group_size > 0
        if self.type == "float" and (self.num_bits != 8 or not self.symmetric):
            raise SchemeError("type='float' means symmetric fp8 e4m3; give num_bits=8 and symmetric=True")
        if self.strategy == "group" and not positive:
            raise SchemeError(f"strategy='group' with group_size={self.group_size} has no groups; give a positive group_size")
        if self.strategy != "group" and positive:
            raise SchemeError(f"group_size={self.group_size} does not go with strategy={self.strategy!r}; give strategy='group'")
        if self.strategy == "token" and not self.dynamic:
            raise SchemeError("strategy='token' needs scales of its own in every forward pass; give dynamic=True")
        if self.dynamic and self.strategy not in ("token", "tensor"):
            raise SchemeError(f"dynamic=True is not supported with strategy={self.strategy!r}; use 'token' or 'tensor'")
        if self.actorder == "group" and self.strategy != "group":
            raise SchemeError(f"actorder='group' does not go with strategy={self.strategy!r}; use strategy='group' or actorder='static'")
        if self.observer_kind == "mse":
            MSESettings.from_kwargs(self.observer_kwargs)
        elif self.observer_kwargs:
            raise SchemeError(f"observer_kwargs: the minmax observer takes no settings, got {sorted(self.observer_kwargs)}; leave them out")
        return self


class QuantizationScheme(BaseModel):
    """What happens to the modules that `targets` names: their weights, and the inputs of their products.

    Attributes:
        targets: class names, module names or "re:<regex>".
        weights: how the weight is quantized, static.
        input_activations: how the input is quantized; None leaves it as it is.
        output_activations: not supported; there so that a config that has it is refused by name.
        format: the checkpoint format; None picks it, see compression_format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: list[str]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: None = None
    format: CompressionFormat | None = None

    @property
    def compression_format(self) -> CompressionFormat:
        """The checkpoint format: `format`, or else what compressed-tensors infers.

        Integer weights alone are packed into int32 words; with quantized inputs they stay int8; floats stay fp8. (For fp8 weights alone
        compressed-tensors infers "naive-quantized", which is the same bytes as "float-quantized" under a name that fewer readers know.)

        Raises:
            SchemeError: the scheme leaves the weights as they are, so that nothing is compressed.
        """
        if self.weights is None:
            raise SchemeError("weights: None leaves nothing to compress; give the weights a QuantizationArgs")
        if self.format is not None:
            return self.format
        if self.weights.type == "float":
            return "float-quantized"
        return "pack-quantized" if self.input_activations is None else "int-quantized"

    @model_validator(mode="after")
    def _check_weights(self) -> QuantizationScheme:
        if self.weights is None:
            return self
        if self.weights.dynamic:
            raise SchemeError("weights: dynamic=True is for activations; give dynamic=False")
        if self.format is not None and (self.format == "float-quantized") != (self.weights.type == "float"):
            raise SchemeError(f"format={self.format!r} does not store weights of type={self.weights.type!r}; leave format out")
        return self

    @model_validator(mode="after")
    def _check_inputs(self) -> QuantizationScheme:
        inputs = self.input_activations
        if inputs is None:
            return self
        if inputs.strategy not in ("token", "tensor"):
            raise SchemeError(f"input_activations: strategy={inputs.strategy!r} is not supported; use 'token' (dynamic) or 'tensor'")
        if inputs.actorder is not None:
            raise SchemeError(f"input_activations: actorder={inputs.actorder!r} is for weights; leave it out")
        return self


def _suggest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    listed = "one of " + ", ".join(known)
    return f"did you mean {nearest[0]!r}? ({listed})" if nearest else f"use {listed}"


def _preset(weights: QuantizationArgs, input_activations: QuantizationArgs | None = None) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=input_activations)


_W8A8 = _preset(QuantizationArgs(strategy="channel"), QuantizationArgs(strategy="token", dynamic=True))

PRESETS: dict[str, QuantizationScheme] = {
    "W4A16": _preset(QuantizationArgs(num_bits=4, strategy="group", group_size=128)),
    "W4A16_ASYM": _preset(QuantizationArgs(num_bits=4, strategy="group", group_size=128, symmetric=False)),
    "W3A16": _preset(QuantizationArgs(num_bits=3, strategy="group", group_size=128)),
    "W8A16": _preset(QuantizationArgs(num_bits=8, strategy="group", group_size=128)),
    "W8A8": _W8A8,
    "INT8": _W8A8,
    "FP8": _preset(
        QuantizationArgs(type="float", strategy="tensor"),
        QuantizationArgs(type="float", strategy="tensor", observer="static_minmax"),
    ),
    "FP8_DYNAMIC": _preset(
        QuantizationArgs(type="float", strategy="channel"),
        QuantizationArgs(type="float", strategy="token", dynamic=True),
    ),
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
        raise SchemeError(f"scheme: {name!r} does not exist; {_suggest(name.upper(), list(PRESETS))}")
    return PRESETS[name.upper()].model_copy(update={"targets": list(targets)})
