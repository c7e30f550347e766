"""What inference servers compute with: which weights and inputs vLLM and SGLang have a kernel for, as data.

Read from their loaders for compressed-tensors on 2026-11-25, as facts: `_get_scheme_from_parts` and, for experts, `get_moe_method` of vLLM
0.33.0 (vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py and compressed_tensors_moe/), `get_linear_scheme`
and `get_moe_scheme` of SGLang 0.5.23 (sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py), on NVIDIA GPUs. A kernel
takes what its row allows; the first row that fits is the one that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

ServerName = Literal["vllm", "sglang"]
Arguments = Mapping[str, Any]
"""Quantization arguments as a config.json holds them, or what values of them are allowed."""

ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
"""Formats whose groups may have quantized inputs in either server; vLLM reads inputs of other formats as well where they are given."""

_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None, "scale_dtype": None}
_ANY = None  # in a row: whatever the inputs are, and whether they are quantized at all


@dataclass(frozen=True)
class Kernel:
    """One row.

    Attributes:
        name: of the class in vLLM or SGLang, without `CompressedTensors`.
        layout: which tensors it reads, a name in `harness.validation.serving.contract.LAYOUTS`.
        weights: allowed values by argument; what is not named may be anything.
        inputs: the same of inputs, one mapping per kind that is taken, `{}` for none; None takes whatever there is and none.
        formats: allowed checkpoint formats; empty for all.
        only_on: the hardware that it is bound to, in words; empty where it is not.
    """

    name: str
    layout: str
    weights: Arguments
    inputs: tuple[Arguments, ...] | None
    formats: tuple[str, ...] = ()
    only_on: str = ""

    def fits(self, weights: Arguments, inputs: Arguments | None, format_name: str) -> bool:
        """Say whether it computes with such weights and inputs."""
        takes = self.inputs is _ANY or any(_fits(inputs or {}, wanted) if wanted else inputs is None for wanted in self.inputs)
        return takes and _fits(weights, self.weights) and (not self.formats or format_name in self.formats)


@dataclass(frozen=True)
class Server:
    """A server, by version.

    Attributes:
        title: name and version.
        linear: kernels of linear layers.
        experts: kernels of mixtures of experts.
        drops_inputs: quantized inputs of formats that are not in ACTIVATION_FORMATS are passed over, not refused.
        wants_all_named: a linear layer that no target and no ignore pattern means is an error.
    """

    title: str
    linear: tuple[Kernel, ...]
    experts: tuple[Kernel, ...]
    drops_inputs: bool = False
    wants_all_named: bool = False

    def kernel(self, weights: Arguments, inputs: Arguments | None, format_name: str, *, experts: bool = False) -> Kernel | None:
        """Find the kernel for a scheme.

        Args:
            weights: arguments of the weights; what is left out has the default of compressed-tensors.
            inputs: arguments of the inputs; None where they are not quantized.
            format_name: checkpoint format of the group.
            experts: the weights belong to the experts of a mixture.

        Returns:
            The row; None where there is none, and a checkpoint with such weights is refused.
        """
        if self.drops_inputs and format_name not in ACTIVATION_FORMATS and not experts:
            inputs = None
        rows = self.experts if experts else self.linear
        return next((row for row in rows if row.fits(weights, inputs, format_name)), None)


def _strategy(arguments: Arguments) -> str:
    size = arguments.get("group_size")
    return str(arguments.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group"))


def _fits(arguments: Arguments, wanted: Arguments) -> bool:
    given = {**_DEFAULTS, **{key: value for key, value in arguments.items() if value is not None}, "strategy": _strategy(arguments)}
    return bool(arguments) and all(given[key] in allowed for key, allowed in wanted.items())


def _kind(type_name: str, num_bits: Iterable[int], *strategies: str, **more: tuple[Any, ...]) -> Arguments:
    return {"type": (type_name,), "num_bits": tuple(num_bits), "strategy": strategies, **more}


_YES, _NO = (True,), (False,)
_PACKED, _SYMMETRIC = ("pack-quantized",), {"symmetric": _YES}
_NONE: Arguments = {}
_INTEGERS = _kind("int", range(2, 9), "channel", "group", dynamic=_NO)
_NVFP4 = _kind("float", (4,), "tensor_group", group_size=(16,), symmetric=_YES)
_MXFP4 = _kind("float", (4,), "group", group_size=(32,), symmetric=_YES)
_MXFP8 = _kind("float", (8,), "group", group_size=(32,), symmetric=_YES, scale_dtype=("torch.uint8",))
_FP8 = _kind("float", (8,), "tensor", "channel", "block", symmetric=_YES, dynamic=_NO)
_FP8_ROWS = _kind("float", (8,), "tensor", "channel", symmetric=_YES, dynamic=_NO)
_INT8 = _kind("int", (8,), "tensor", "channel", symmetric=_YES, dynamic=_NO)
_INT4_GROUPS = _kind("int", (4,), "group", symmetric=_YES, dynamic=_NO)
_INT4 = _kind("int", (4,), "channel", "group", symmetric=_YES, dynamic=_NO)

_FP8_DYNAMIC = _kind("float", (8,), "token", "tensor", "group", dynamic=_YES)
_FP8_STATIC = _kind("float", (8,), "tensor", dynamic=_NO, symmetric=_YES)
_FP8_TOKENS = _kind("float", (8,), "token", dynamic=_YES, symmetric=_YES)
_FP8_TOKENS_OR_GROUPS = _kind("float", (8,), "token", "group", dynamic=_YES, symmetric=_YES)
_INT8_STATIC = _kind("int", (8,), "tensor", dynamic=_NO)
_INT8_TOKENS = _kind("int", (8,), "token", dynamic=_YES)


def _int_inputs(num_bits: int) -> Arguments:
    return _kind("int", (num_bits,), "token", "group", dynamic=_YES, symmetric=_YES)


def _only(kind: Arguments, strategy: str) -> Arguments:
    return {**kind, "strategy": (strategy,)}


_HOPPER = "GPUs of compute capability 9.0"
_VLLM_LINEAR = (
    Kernel("W4A4Fp4", "nvfp4", _NVFP4, (_NONE, _NVFP4)),
    Kernel("W4A8Mxfp4", "mxfp4", {**_MXFP4, "dynamic": _NO}, (_FP8_TOKENS_OR_GROUPS,)),
    Kernel("W4A4Mxfp4", "mxfp4", _MXFP4, _ANY),
    Kernel("W8A8Mxfp8", "mxfp8", _MXFP8, _ANY),
    # it asks for no format, but its weights are packed words
    Kernel("W4A8Fp8", "packed", {**_INT4_GROUPS, "group_size": (128,)}, (_FP8_TOKENS,), _PACKED, _HOPPER),
    Kernel("WNA8Int", "packed", _INTEGERS, (_int_inputs(8),), _PACKED),
    Kernel("WNA4Int", "packed", _INTEGERS, (_int_inputs(4),), _PACKED),
    Kernel("WNA16", "packed", _INTEGERS, (_NONE,), _PACKED),
    Kernel("W8A8Fp8", "float8", _FP8_ROWS, (_FP8_DYNAMIC, _FP8_STATIC), ACTIVATION_FORMATS),
    Kernel("W8A8Fp8", "float8", _only(_FP8, "block"), (_FP8_DYNAMIC,), ACTIVATION_FORMATS),  # of blocks no static inputs
    Kernel("W8A16Fp8", "float8", _FP8_ROWS, _ANY, ACTIVATION_FORMATS),  # whatever the config says of inputs, they stay as they are
    Kernel("W8A16Fp8", "float8", _FP8, (_NONE,), ACTIVATION_FORMATS),
    Kernel("W8A8Int8", "int8", _INT8, (_INT8_STATIC, _INT8_TOKENS), ACTIVATION_FORMATS),
    Kernel("W4A8Int", "int8", _INT4, (_INT8_TOKENS,), ACTIVATION_FORMATS),
)
_VLLM_EXPERTS = (
    Kernel("W4A8Mxfp4MoE", "mxfp4", {**_MXFP4, "dynamic": _NO}, (_FP8_TOKENS_OR_GROUPS,)),
    Kernel("W4A4Mxfp4MoE", "mxfp4", _MXFP4, _ANY),
    Kernel("W8A8Mxfp8MoE", "mxfp8", _MXFP8, _ANY),
    Kernel("WNA16MoE", "packed", _INTEGERS, (_NONE,), _PACKED),
    Kernel("W4A4Nvfp4MoE", "nvfp4", _NVFP4, (_NONE, _NVFP4)),
    Kernel("W8A8Fp8MoE", "float8", _only(_FP8, "tensor"), (_FP8_STATIC, _only(_FP8_DYNAMIC, "tensor"))),
    Kernel("W8A8Fp8MoE", "float8", _only(_FP8, "channel"), (_only(_FP8_DYNAMIC, "token"),)),
    Kernel("W8A8Fp8MoE", "float8", _only(_FP8, "block"), (_FP8_DYNAMIC,)),
    Kernel("W8A8Int8MoE", "int8", _only(_INT8, "channel"), (_INT8_TOKENS,)),
    Kernel("W4A8Fp8MoE", "packed", {**_INT4_GROUPS, "group_size": (128,)}, (_FP8_TOKENS,), _PACKED),
    Kernel("W4A8Int8MoE", "int8", _INT4, (_INT8_TOKENS,), ("int-quantized",)),
)

_SGLANG_INTEGERS = _kind("int", (4, 8), "channel", "group", dynamic=_NO)
_SGLANG_LINEAR = (
    Kernel("WNA16", "packed", _SGLANG_INTEGERS, (_NONE,), _PACKED),
    Kernel("W4A16Fp4", "nvfp4", _NVFP4, (_NONE,), ACTIVATION_FORMATS),
    Kernel("W4A4Fp4", "nvfp4", _NVFP4, (_NVFP4,), ACTIVATION_FORMATS),
    Kernel("W8A8Fp8", "float8", _FP8, (_FP8_DYNAMIC, _FP8_STATIC), ACTIVATION_FORMATS),
    Kernel("W8A16Fp8", "float8", _FP8_ROWS, (_NONE,), ACTIVATION_FORMATS),
    Kernel("W8A8Int8", "int8", _INT8, (_INT8_STATIC, _INT8_TOKENS), ACTIVATION_FORMATS),
)
_SGLANG_EXPERTS = (
    Kernel("Mxfp4MoE", "mxfp4", _MXFP4, _ANY),
    Kernel("WNA16MoE", "packed", _SGLANG_INTEGERS, (_NONE,), _PACKED),
    Kernel("W4A16Nvfp4MoE", "nvfp4", _NVFP4, (_NONE,)),
    Kernel("W4A4Nvfp4MoE", "nvfp4", _NVFP4, (_NVFP4,)),
    Kernel("W8A8Fp8MoE", "float8", _FP8, (_FP8_DYNAMIC, _FP8_STATIC)),
    Kernel("W4AFP8MoE", "packed", _INT4, (_FP8_DYNAMIC, _kind("int", (8,), "token", "tensor", "group", dynamic=_YES)), _PACKED),
)

SERVERS: Mapping[ServerName, Server] = MappingProxyType(
    {
        "vllm": Server("vLLM 0.33.0", _VLLM_LINEAR, _VLLM_EXPERTS),
        "sglang": Server("SGLang 0.5.23", _SGLANG_LINEAR, _SGLANG_EXPERTS, drops_inputs=True, wants_all_named=True),
    }
)


def describe_arguments(arguments: Arguments) -> str:
    """Put quantization arguments in a few words: `int4, asymmetric, group of 128`."""
    size = arguments.get("group_size")
    parts = [f"{arguments.get('type') or 'int'}{arguments.get('num_bits') or 8}"]
    parts += ["asymmetric"] if arguments.get("symmetric") is False else []
    parts += ["dynamic"] if arguments.get("dynamic") else []
    return ", ".join([*parts, f"{_strategy(arguments)} of {size}" if size and size > 0 else _strategy(arguments)])


def refusal(server: Server, weights: Arguments, inputs: Arguments | None, format_name: str, *, experts: bool = False) -> str | None:
    """Say that a server has no kernel for a scheme, and what comes nearest.

    Args:
        server: of SERVERS.
        weights: arguments of the weights.
        inputs: arguments of the inputs; None where they are not quantized.
        format_name: checkpoint format.
        experts: the weights belong to the experts of a mixture.

    Returns:
        A sentence; None where it has one.
    """
    if server.kernel(weights, inputs, format_name, experts=experts):
        return None
    with_inputs = f" with inputs {describe_arguments(inputs)}" if inputs else ""
    others = [name for name in ("pack-quantized", "int-quantized") if server.kernel(weights, inputs, name, experts=experts)]
    remedy = (
        f"; with format {others[0]!r} it has one" + (", for inputs as they are" if inputs and server.drops_inputs else "") if others else ""
    )
    what = "experts" if experts else "layers"
    return f"{server.title} has no kernel for {what} of {describe_arguments(weights)} in {format_name!r}{with_inputs}{remedy}"
