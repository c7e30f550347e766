"""The goldens of this project as a table: every runtime layer, the packers, the solvers, the reference model per scheme, the graph engine.

A case is a name and a function without arguments; another scheme or shape is another line. Values are drawn with `randint` and scaled by
powers of two, which is the same on every machine; codes, scales and packed words follow from them by operations that IEEE 754 fixes, so
they are held bit by bit (T0) everywhere. Sums are not fixed: what a matrix product gave is held to a limit, measured over instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.nn import quantized, replacement, set_matmul
from compressor.nn.quantized_linear import QuantizedLinear
from compressor.numerics import (
    PRESETS,
    QParams,
    QuantizationArgs,
    QuantizationScheme,
    make_observer,
    preset_scheme,
    quantize,
    weight_qparams,
)
from compressor.numerics.packing import pack_fp4, pack_int32, unpack_fp4, unpack_int32
from harness.tolerance import T0, T1, Tier

SUMS = T1(max_ulp=1, at="tensor")
"""For one matrix product in bf16: the sums run in float32, in an order of the machine's own, and are rounded once."""
SUMS_REASON = "the order of the sums in a matrix product is the machine's own; measured: no bit changes with the instruction set"


@dataclass(frozen=True)
class Result:
    """What a case gives.

    Attributes:
        tensors: to hold against the golden.
        inputs: what they were computed from.
        tiers: of the tensors that are not held bit by bit.
        decoys: tensors that must not pass.
        reason: why some tiers are not T0.
    """

    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    decoys: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""

    @property
    def tier(self) -> dict[str, Tier]:
        """A tier for every tensor."""
        return {"*": T0(), **self.tiers}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw values with heavy tails between -1 and 1, the same on every machine.

    Args:
        *shape: of the tensor.
        seed: of the values.
        dtype: to round them to.

    Returns:
        The tensor; the first of several rows is zero, as the rows of padding and dead experts are.
    """
    values = torch.randint(-4096, 4097, shape, generator=torch.Generator().manual_seed(seed)).float() / 4096
    values = values * values.abs()
    if len(shape) == 2 and shape[0] > 1:
        values[0] = 0
    return values.to(dtype)


def _scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> QuantizationScheme:
    return QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights, "input_activations": inputs})


SCHEMES: dict[str, QuantizationScheme] = {
    **{name: preset_scheme(name) for name in PRESETS if name != "INT8"},  # INT8 is another name of W8A8
    **{f"int{bits} channel": _scheme({"num_bits": bits, "strategy": "channel"}) for bits in range(2, 9)},
    **{f"int{bits} channel asymmetric": _scheme({"num_bits": bits, "strategy": "channel", "symmetric": False}) for bits in range(2, 9)},
    **{f"int{bits} group 16 asymmetric": _scheme({"num_bits": bits, "group_size": 16, "symmetric": False}) for bits in (2, 3, 5, 8)},
    "int4 tensor asymmetric": _scheme({"num_bits": 4, "strategy": "tensor", "symmetric": False}),
    "int4 group 16 mse": _scheme({"num_bits": 4, "group_size": 16, "observer": "mse"}),
    "int8 static": _scheme({"strategy": "channel"}, {}),
    "int8 static asymmetric": _scheme({"strategy": "channel", "symmetric": False}, {"symmetric": False}),
    "int8 dynamic tensor": _scheme({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}),
    "fp8 channel": _scheme({"type": "float", "strategy": "channel"}),
    "fp8 group 16": _scheme({"type": "float", "group_size": 16}, {"type": "float", "strategy": "token", "dynamic": True}),
}
_NUM_TOKENS = 5


def layer_cases() -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield a case for each scheme: every kind of layer that stores it, at one-wide, odd and prime shapes, and with g_idx."""
    for name, scheme in SCHEMES.items():
        yield f"layers/{name}", partial(_layers, scheme)
    for bits in (2, 3, 4, 8):
        yield f"layers/int{bits} g_idx", partial(_layer_with_g_idx, bits)


def _shapes(scheme: QuantizationScheme) -> tuple[tuple[int, int], ...]:
    sizes = [args.group_size for args in (scheme.weights, scheme.input_activations) if args is not None and args.is_grouped]
    width = max((size for size in sizes if size), default=0)
    return ((1, width), (7, 3 * width)) if width else ((1, 1), (7, 33), (3, 131))


def _layers(scheme: QuantizationScheme) -> Result:
    tensors: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for rows, columns in _shapes(scheme):
        label = f"{rows}x{columns}"
        weight, bias, x = drawn(rows, columns, seed=1), drawn(rows, seed=2), drawn(_NUM_TOKENS, columns, seed=3)[1:]
        inputs |= {f"{label}/weight": weight, f"{label}/bias": bias, f"{label}/x": x}
        tensors |= _linear(f"linear {label}", _module(nn.Linear(columns, rows), weight, bias), scheme, x)
    tensors |= _linear(f"conv1d {label}", _conv1d(weight, bias), scheme, x)
    if scheme.input_activations is None:
        ids = torch.tensor([[0, rows - 1, 1]])
        embedding = quantized(_module(nn.Embedding(rows, columns), weight), scheme)
        tensors |= {f"embedding {label}/{key}": value for key, value in embedding.state_dict().items()}
        tensors[f"embedding {label}/out"] = embedding(ids)
    tiers = {name: SUMS for name in tensors if name.endswith("/out") and not name.startswith("embedding")}
    return Result(tensors, inputs, tiers, reason=SUMS_REASON)


def _module(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    module.to(weight.dtype)
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight)
        if bias is not None:
            module.get_parameter("bias").copy_(bias)
    return module.eval()


def _conv1d(weight: Tensor, bias: Tensor) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return _module(Conv1D(*weight.shape), weight.t(), bias)


@torch.no_grad()
def _linear(label: str, module: nn.Module, scheme: QuantizationScheme, x: Tensor) -> dict[str, Tensor]:
    """The buffers of a linear layer and its outputs, by both ways to multiply."""
    layer = quantized(module, scheme, input_qparams=_input_qparams(scheme, x))
    assert isinstance(layer, QuantizedLinear)
    tensors = {f"{label}/{key}": value for key, value in layer.state_dict().items() if key != "bias"}
    tensors[f"{label}/codes"] = layer.codes()
    tensors[f"{label}/out"] = layer(x[None])
    set_matmul(layer, "native")
    if layer.matmul_path(x[None]) != "dequantized":
        tensors[f"{label}/native/out"] = layer(x[None])
    return tensors


def _input_qparams(scheme: QuantizationScheme, x: Tensor) -> QParams | None:
    args = scheme.input_activations
    if args is None or args.dynamic is True:
        return None
    observer = make_observer(args)
    observer.update(x)
    return observer.qparams()


@torch.no_grad()
def _layer_with_g_idx(bits: int) -> Result:
    scheme = _scheme({"num_bits": bits, "group_size": 16, "symmetric": False, "actorder": "group"})
    weight, x = drawn(7, 48, seed=4), drawn(_NUM_TOKENS, 48, seed=5)[1:]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(6))
    g_idx = torch.empty(48, dtype=torch.int32)
    g_idx[order] = torch.arange(48, dtype=torch.int32) // 16
    assert scheme.weights is not None
    qparams = weight_qparams(weight[:, order], scheme.weights)
    codes = quantize(weight, qparams, scheme.weights, g_idx)
    layer = replacement(_module(nn.Linear(48, 7, bias=False), weight), scheme, codes, qparams, g_idx_C=g_idx)
    tensors = {**layer.state_dict(), "codes": layer.codes(), "out": layer(x[None])}
    return Result(tensors, {"weight": weight, "x": x, "g_idx": g_idx}, {"out": SUMS}, reason=SUMS_REASON)


def packer_cases() -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield a case for each packer: odd, one-wide and prime rows, along both dimensions."""
    yield from ((f"packers/int{bits}", partial(_packed_integers, bits)) for bits in range(2, 9))
    yield "packers/fp4", _packed_fp4


def _packed_integers(bits: int) -> Result:
    inputs: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for rows, columns in ((1, 1), (3, 31), (2, 33), (5, 131)):
        codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, columns), generator=torch.Generator().manual_seed(bits)).to(
            torch.int8
        )
        for dim in (0, 1):
            label = f"{rows}x{columns} dim {dim}"
            packed = pack_int32(codes, bits, dim=dim)
            inputs[label] = codes
            tensors |= {label: packed, f"{label} unpacked": unpack_int32(packed, bits, (rows, columns), dim=dim)}
    return Result(tensors, inputs)


def _packed_fp4() -> Result:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    drawn_codes = torch.randint(0, 16, (5, 34), generator=torch.Generator().manual_seed(0))
    codes = torch.cat([values, -values])[drawn_codes].to(torch.float8_e4m3fn)
    packed = pack_fp4(codes)
    return Result({"packed": packed, "unpacked": unpack_fp4(packed)}, {"codes": codes})


KV_SCHEMES: dict[str, QuantizationArgs] = {
    "int8": QuantizationArgs(),
    "int8 asymmetric": QuantizationArgs(symmetric=False),
    "int8 per head": QuantizationArgs(strategy="attn_head"),
    "fp8": QuantizationArgs(type="float"),
    "fp8 per head": QuantizationArgs(type="float", strategy="attn_head"),
    "int8 dynamic": QuantizationArgs(strategy="tensor", dynamic=True),
    "int8 tokens asymmetric": QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
    "fp8 tokens": QuantizationArgs(type="float", strategy="token", dynamic=True),
}
_HEADS, _HEAD_SIZE = 2, 16  # of the tiny model


def kv_cases() -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield a case for each format of keys and values: the codes in the cache, and what attention reads, over two steps."""
    yield from ((f"layers/kv {name}", partial(_kv_cache, args)) for name, args in KV_SCHEMES.items())


def _kv_cache(args: QuantizationArgs) -> Result:
    from compressor.nn.attention.kv_cache import CodesLayer, attach_kv_quantizer, attention_modules
    from harness.goldens.tiny_model import build_tiny_model

    shape = (1,) if args.strategy == "tensor" else (_HEADS, 1, 1)
    steps = torch.arange(1, 1 + len(torch.ones(shape).flatten())).reshape(shape) / 128
    zero = None if args.symmetric else torch.full(shape, 3, dtype=torch.int8)
    scales = None if args.dynamic else {"k": QParams(steps, zero), "v": QParams(steps / 2, zero)}
    attention = next(iter(attention_modules(build_tiny_model()).values()))
    attach_kv_quantizer(attention, args, scales)
    layer, inputs, tensors = CodesLayer(attention), dict[str, Tensor](), dict[str, Tensor]()
    for step, num_tokens in enumerate((3, 1)):
        keys, values = (drawn(2, _HEADS, num_tokens, _HEAD_SIZE, seed=step + place, dtype=torch.float32) for place in (10, 20))
        found = layer.update(keys, values)
        inputs |= {f"step {step}/keys": keys, f"step {step}/values": values}
        tensors |= {f"step {step}/keys": found[0].clone(), f"step {step}/values": found[1].clone()}
    assert layer.values is not None
    return Result({**tensors, "codes of keys": layer.keys, "codes of values": layer.values}, inputs)


ALONE: dict[str, Callable[[], Result]] = {**dict(layer_cases()), **dict(kv_cases()), **dict(packer_cases())}
"""The cases that need nothing but this package, by name of the golden."""
