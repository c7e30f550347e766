"""Of what kind each entry of config.json is that the checks read, held once, so that all of them may take it for granted.

Not what a value means: who reads it says which are known. What nobody reads here may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from compressor.errors import UserInputError
from harness.settings_file import read_as
from harness.validation.format.scheme import block_sizes


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)


def _as_list(value: Any) -> Any:
    """One name alone, which compressed-tensors takes for a list of it."""
    return [value] if isinstance(value, str) else value


def _as_sizes(value: Any) -> Any:
    return list(block_sizes(value)) if isinstance(value, str) else value


_Names = Annotated[list[str], BeforeValidator(_as_list)]
_Size = Annotated[int, Field(ge=-1, lt=2**31)]
_Block = Annotated[list[Annotated[_Size, Field(gt=0)]], Field(min_length=2, max_length=2), BeforeValidator(_as_sizes)]


class _Arguments(_Part):
    """Of weights, inputs, or keys and values."""

    num_bits: _Size = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: _Size | None = None
    block_structure: _Block | None = None


class _Group(_Part):
    targets: list[str] | None = None
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _Place(_Part):
    location: str
    targets: _Names | None = None
    ignore: _Names | None = None


class _Transform(_Part):
    type: str | None = None
    apply: list[_Place] | None = None


class _Transforms(_Part):
    config_groups: dict[str, _Transform] | None = None


class _Sparsity(_Part):
    format: str | None = None


class _Quantization(_Part):
    config_groups: dict[str, _Group] | None = None
    ignore: list[str] | None = None
    format: str | None = None
    kv_cache_scheme: _Arguments | None = None
    sparsity_config: _Sparsity | None = None
    transform_config: _Transforms | None = None


class _Config(_Part):
    architectures: list[str] | None = None
    quantization_config: _Quantization | None = None


_CONFIG = TypeAdapter(_Config)


def misshapen(config: Mapping[str, Any]) -> str | None:
    """Say which entry is of another kind than all who read it take it for.

    Args:
        config: of config.json.
    Returns:
        Its place, what stands there and what belongs there; None where there is none.
    """
    try:
        read_as(_CONFIG, config)
    except UserInputError as error:
        return str(error)
    return None
