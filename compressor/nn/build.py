"""From a float module to the quantized layer that takes its place: which kinds there are, and the ways to make one.

replacement    codes and scales that an algorithm has chosen -> layer
quantized      rounding to nearest -> layer: the shortest way from a module to a layer, for users and tests
empty_layer    a layer without values, for a loader to fill
float_layer    the way back: a float module with the values of the codes
from_buffers   the buffers of an equal layer -> layer
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import SchemeError
from compressor.nn.layer import SCHEME, STORED, QuantizedLayer
from compressor.nn.quantized_embedding import QuantizedEmbedding, check_plain_embedding
from compressor.nn.quantized_linear import Matmul, QuantizedLinear, is_conv1d, linear_shape
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.scheme import QuantizationScheme
from compressor.settings.kinds import MODULE, NAME, TENSOR, TEXT, Kind, object_of
from compressor.settings.options import checked, wrong_kind


def is_quantizable(module: nn.Module) -> bool:
    """Tell whether there is a quantized layer for a module.

    Args:
        module: any module.

    Returns:
        True for nn.Linear, nn.Embedding and Conv1D of transformers.
    """
    return isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a quantizable module as [R, C].

    Args:
        module: see `is_quantizable`.

    Returns:
        The weight, one row per output; a view (for Conv1D of the transpose).

    Raises:
        UserInputError: it has none.
    """
    weight = getattr(module, "weight", None)  # a parameter, or computed
    if not isinstance(weight, Tensor):
        raise wrong_kind("module", module, "a module with a weight")
    return weight.t() if is_conv1d(module) else weight


# What stands beside a weight that a hook of torch computes, and what puts it back.
_BAKED_BY = {
    "weight_mask": "prune.remove(module, 'weight')",
    "weight_g": "remove_weight_norm(module)",
    "weight_u": "remove_spectral_norm(module)",
}


def missing_parameter(module: nn.Module) -> str:
    """Say why the weight of a quantizable module is no parameter of its own, and what makes it one.

    Args:
        module: see `is_quantizable`.

    Returns:
        A sentence without its subject; empty where the weight is a parameter.
    """
    if "weight" in module._parameters:
        return ""
    if is_parametrized(module, "weight"):
        return "is computed by a parametrization; bake it in with torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    for of_it, undo in _BAKED_BY.items():
        if hasattr(module, of_it):
            return f"is computed in every forward, from {of_it} and others; bake it in with torch.nn.utils.{undo}"
    return (
        "is a buffer or a plain tensor, not a parameter; make it one (weight = module.weight; del module.weight; module.weight = "
        "torch.nn.Parameter(weight, requires_grad=False))"
    )


@checked(**STORED)
def replacement(
    module: nn.Module,
    scheme: QuantizationScheme,
    codes_RC: Tensor,
    qparams: QParams,
    *,
    g_idx_C: Tensor | None = None,
    input_qparams: QParams | None = None,
    name: str = "",
) -> QuantizedLayer:
    """Put codes in the place of a float weight.

    Args:
        module: the linear layer, Conv1D or embedding that is replaced.
        scheme: formats of weight and input.
        codes_RC: [R, C] int8 or float8_e4m3fn.
        qparams: scale, zero point and global scale of the weight.
        g_idx_C: [C] int32 group of each column, for activation-ordered groups; None for groups in order.
        input_qparams: of a statically quantized input, or the global scale of a locally dynamic one.
        name: dotted name of the module, for errors.

    Returns:
        The layer, in the training mode of the module.

    Raises:
        SchemeError: nothing stores this, or codes or scales do not fit.
    """
    _check_kind(module, name)
    layer: QuantizedLayer
    if isinstance(module, nn.Embedding):
        layer = QuantizedEmbedding.from_embedding(module, scheme, codes_RC, qparams, g_idx_C=g_idx_C, name=name)
    else:
        layer = QuantizedLinear.from_linear(module, scheme, codes_RC, qparams, g_idx_C=g_idx_C, input_qparams=input_qparams, name=name)
    _hand_over(module, layer, name)
    return layer


@checked(**STORED)
@torch.no_grad()
def quantized(module: nn.Module, scheme: QuantizationScheme, *, input_qparams: QParams | None = None, name: str = "") -> QuantizedLayer:
    """Quantize one module by rounding to nearest; it is not changed.

    Args:
        module: a linear layer, Conv1D or embedding with a float weight.
        scheme: formats of weight and input.
        input_qparams: of a statically quantized input, or the global scale of a locally dynamic one.
        name: dotted name of the module, for errors.

    Returns:
        The layer, which shares the module's bias.

    Raises:
        SchemeError: the scheme does not fit the module.
        NumericsError: the weight holds NaN or infinity.

    Example:
        >>> from compressor.numerics import preset_scheme
        >>> quantized(nn.Linear(256, 8), preset_scheme("W4A16")).codes().dtype
        torch.int8
    """
    _check_kind(module, name)
    if scheme.weights is None:
        raise SchemeError(f"{name or type(module).__name__}: a scheme without weights was given; it needs weight arguments")
    check_fit(module, scheme, name)
    weight_RC = weight_of(module)
    qparams = weight_qparams(weight_RC, scheme.weights, name or type(module).__name__)
    codes_RC = round_to_nearest(weight_RC, qparams, scheme.weights).codes_RC
    return replacement(module, scheme, codes_RC, qparams, input_qparams=input_qparams, name=name)


@checked(
    scheme=SCHEME,
    buffers=Kind(lambda value: isinstance(value, Mapping) and all(map(TENSOR.holds, value.values())), "a mapping of names to tensors"),
    name=NAME,
)
def from_buffers(module: nn.Module, scheme: QuantizationScheme, buffers: Mapping[str, Tensor], *, name: str = "") -> QuantizedLayer:
    """Put the buffers of an equal layer in the place of a float weight.

    Args:
        module: the linear layer, Conv1D or embedding that is replaced; its bias parameter is shared, its weight is not kept.
        scheme: formats of weight and input.
        buffers: what `named_buffers` gave; moved to the module's device, else taken as they are, in this order.
        name: dotted name of the module, for errors.

    Returns:
        The layer, in the training mode of the module.

    Raises:
        SchemeError: the scheme does not fit the module.
    """
    layer = _bare_layer(module, scheme, name)
    for key, buffer in buffers.items():
        layer.register_buffer(key, buffer.to(module.get_parameter("weight").device))
    return layer


@checked(scheme=SCHEME, name=NAME)
def empty_layer(module: nn.Module, scheme: QuantizationScheme, *, name: str = "") -> QuantizedLayer:
    """Make the layer that a scheme puts in a module's place, without values.

    Args:
        module: a linear layer, Conv1D or embedding, usually on the meta device; it is not changed.
        scheme: formats of weight and input.
        name: dotted name of the module, for errors.

    Returns:
        The layer, its buffers on the device and in the dtype of the module's weight.

    Raises:
        SchemeError: the scheme does not fit the module.
    """
    layer = _bare_layer(module, scheme, name)
    layer.register_empty(module.get_parameter("weight").device)
    return layer


@torch.no_grad()
@checked(layer=object_of(QuantizedLayer, words="a quantized layer"))
def float_layer(layer: QuantizedLayer) -> nn.Module:
    """Make the float module that holds what a quantized layer's weight stands for.

    Args:
        layer: it is not changed; of quantized inputs the result knows nothing.

    Returns:
        nn.Linear, nn.Embedding, or Conv1D of transformers where the layer stands for one; the bias is shared.
    """
    weight = layer.dequantized_weight()
    rows, columns = layer.weight_size
    found: nn.Module
    if isinstance(layer, QuantizedEmbedding):
        return nn.Embedding(rows, columns, padding_idx=layer.padding_idx, _weight=weight).train(layer.training)
    assert isinstance(layer, QuantizedLinear)
    with torch.device("meta"):
        if layer.is_transposed:
            from transformers.pytorch_utils import Conv1D

            found, weight = Conv1D(rows, columns), weight.t().contiguous()
        else:
            found = nn.Linear(columns, rows, bias=False)
    found.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    found.register_parameter("bias", layer.bias)
    return found.train(layer.training)


@checked(model=MODULE, matmul=TEXT)
def set_matmul(model: nn.Module, matmul: Matmul) -> int:
    """Choose how all quantized linear layers of a model multiply. Changes the model.

    Args:
        model: any module.
        matmul: "reference" (as transformers computes) or "native" (codes times codes where both are int8 or fp8).

    Returns:
        How many layers were set.

    Raises:
        SchemeError: an unknown way.
    """
    if matmul not in ("reference", "native"):
        raise SchemeError(f"matmul: {matmul!r} does not exist; use 'reference' or 'native'")
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    for layer in layers:
        layer.matmul = matmul
    return len(layers)


@checked(scheme=SCHEME, name=NAME)
def check_fit(module: nn.Module, scheme: QuantizationScheme, name: str = "") -> None:
    """Refuse a scheme that a module cannot have; nothing is computed or changed.

    Args:
        module: a linear layer, Conv1D or embedding.
        scheme: formats of weight and input.
        name: dotted name of the module, for errors.

    Raises:
        SchemeError: a group size does not divide the columns, or there is no layer for this.
    """
    _bare_layer(module, scheme, name)


def _bare_layer(module: nn.Module, scheme: QuantizationScheme, name: str) -> QuantizedLayer:
    """The layer without its buffers."""
    _check_kind(module, name)
    dtype = module.get_parameter("weight").dtype
    layer: QuantizedLayer
    if isinstance(module, nn.Embedding):
        check_plain_embedding(module, name)
        kind = QuantizedEmbedding.class_of(scheme)
        layer = kind(module.num_embeddings, module.embedding_dim, scheme, module.padding_idx, dtype, name)
    else:
        bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
        layer = QuantizedLinear.class_of(scheme)(*linear_shape(module), scheme, bias, dtype, name)
        layer.is_transposed = is_conv1d(module)
    _hand_over(module, layer, name)
    return layer.train(module.training)


# What goes with the weight: torch.nn.utils.prune, parametrizations and weight_norm keep it there.
_OF_THE_WEIGHT = {"weight", "bias", "weight_mask", "bias_mask", "parametrizations"}
_OF_THE_SIZE = {"in_features", "out_features", "num_embeddings", "embedding_dim", "nx", "nf"}
_OF_AN_EMBEDDING = {"padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"}


def _hand_over(module: nn.Module, layer: nn.Module, name: str) -> None:
    """Give a layer what the model's author has put on the module beside its weight: attributes, buffers, modules."""
    usual = {*vars(nn.Module()), *_OF_THE_WEIGHT, *_OF_THE_SIZE, *(_OF_AN_EMBEDDING if isinstance(module, nn.Embedding) else ())}
    found = {key: value for key, value in (vars(module) | module._buffers | module._modules).items() if key not in usual}
    taken = sorted(key for key in found if hasattr(layer, key))
    if taken:
        raise SchemeError(f"{name or 'module'}: it has a {taken[0]!r} of its own, which a quantized layer has, too; give it another name")
    for key, value in found.items():
        if key in module._buffers:
            layer.register_buffer(key, module._buffers[key], key not in module._non_persistent_buffers_set)
        else:
            setattr(layer, key, value)


def _check_kind(module: nn.Module, name: str) -> None:
    if not is_quantizable(module):
        raise SchemeError(f"{name or 'module'}: {type(module).__name__} has no quantized layer; give a Linear, Embedding or Conv1D")
