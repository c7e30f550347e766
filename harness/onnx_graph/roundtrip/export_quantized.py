"""Export a quantized checkpoint with its own codes: what GPTQ chose goes into the graph, nothing is rounded again.

The model is exported with its dequantized weights in float32. Then each of these initializers is found by its content and replaced by
codes, scale and DequantizeLinear at opset 21; after that the weight that the graph computes is compared with the layer's, bit by bit.
Static inputs get QuantizeLinear and DequantizeLinear before the layer; dynamic ones are computed by the operators that compute them in
the layer, since no operator of the standard quantizes per token.

Shapes: R rows (out features), C columns (in features), G groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compressor.errors import UserInputError
from compressor.model.checkpoints.load import load_compressed
from compressor.nn import QuantizedLinear
from compressor.numerics.quantize import dynamic_qparams, fake_quantize
from compressor.numerics.scheme import QuantizationArgs
from harness.errors import HarnessError
from harness.onnx_graph.census.projections import fingerprint
from harness.onnx_graph.roundtrip.export import Dynamic, Exported, export

OPSET = 21
"""The first with 4-bit types and with blocks in DequantizeLinear."""

_FP8 = TensorProto.FLOAT8E4M3FN


@dataclass(frozen=True)
class StoredWeight:
    """The codes of one layer, as DequantizeLinear takes them.

    Attributes:
        name: dotted name of the layer.
        codes_RC: [R, C]; int8 values whatever the type, or the bytes of fp8.
        element: TensorProto type of codes and zero point.
        scale: float32: scalar, [R], or [R, G].
        zero_point: like scale, or None.
        block_size: columns of a block, 0 without blocks.
        weight_RC: what the layer computes with, float32.
    """

    name: str
    codes_RC: np.ndarray
    element: int
    scale: np.ndarray
    zero_point: np.ndarray | None
    block_size: int
    weight_RC: np.ndarray


def load_quantized_for_export(folder: str | Path, model_class: str | None = None) -> nn.Module:
    """Load a compressed checkpoint in float32: scales widen exactly, so that code times scale is exact as well.

    Args:
        folder: of the checkpoint.
        model_class: class of transformers; None for AutoModelForCausalLM.

    Returns:
        The model on the CPU.

    Raises:
        ModelError: it is no compressed checkpoint.
    """
    return load_compressed(folder, device="cpu", model_class=model_class).float()


def export_quantized(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], *, exporter: str = "dynamo", dynamic: Dynamic | None = None
) -> Exported:
    """Export a model with quantized layers, with their own codes.

    Args:
        model: in float32, with QuantizedLinear layers; not modified.
        inputs: example inputs by the names of the forward's arguments.
        exporter: `dynamo` or `torchscript`.
        dynamic: sizes that may change, by input and axis.

    Returns:
        The graph, checked, with the quantized model as its module.

    Raises:
        UserInputError: no quantized layer, or one that the operators of the standard cannot express.
        ExportFailure: the exporter raised.
        HarnessError: a weight was not found again, or does not come out of the graph bit by bit.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    if not layers:
        raise UserInputError(f"{type(model).__name__}: it holds no quantized linear layer; use export, or give a compressed checkpoint")
    weights = [_stored(name, layer) for name, layer in layers.items()]
    with _float_layers(model, layers):
        exported = export(model, inputs, exporter=exporter, opset=20, dynamic=dynamic)
    graph = _with_codes(exported.model, weights)
    _quantize_inputs(graph, layers)
    graph.opset_import[0].version, graph.ir_version = OPSET, max(10, graph.ir_version)
    onnx.checker.check_model(graph, full_check=True)
    return Exported(graph, model, exported.inputs, exporter, exported.notes)


class _FloatLinear(nn.Linear):
    """A layer with the dequantized weight; a dynamic input is quantized and dequantized by torch's operators, which export."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight = nn.Parameter(layer.dequantized_weight().detach().clone(), requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        args = layer.scheme.input_activations
        self._args: QuantizationArgs | None = args if args is not None and args.dynamic else None
        self._by_row = layer.tokens_are_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._args is not None:
            x = fake_quantize(x, dynamic_qparams(x, self._args, by_row=self._by_row), self._args)
        return super().forward(x)


@contextlib.contextmanager
def _float_layers(model: nn.Module, layers: Mapping[str, QuantizedLinear]) -> Iterator[None]:
    """Let float layers stand in for quantized ones during the export."""
    try:
        for name, layer in layers.items():
            model.set_submodule(name, _FloatLinear(layer).eval())
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def _stored(name: str, layer: QuantizedLinear) -> StoredWeight:
    args = layer.weight_args
    if "weight_g_idx" in dict(layer.named_buffers()) or args.strategy not in _SCALES:
        order = " in activation order" if args.actorder == "group" else ""
        raise UserInputError(
            f"{name}: weights in {args.type} with strategy {args.strategy!r}{order} have no form in DequantizeLinear; compress with a "
            "scale per tensor, channel, group or block"
        )
    if args.type == "float" and args.num_bits != 8:
        raise UserInputError(f"{name}: fp{args.num_bits} codes have no form in opset {OPSET}; compress to int4, int8 or fp8")
    qparams = layer.weight_qparams()
    shaped = _SCALES[args.strategy]
    scale = shaped(qparams.scale.float().numpy(), layer)
    zero = None if qparams.zero_point is None else shaped(qparams.zero_point.numpy(), layer)
    codes = layer.codes()
    element = _FP8 if args.type == "float" else TensorProto.INT4 if args.num_bits <= 4 else TensorProto.INT8
    array = codes.view(torch.uint8).numpy() if args.type == "float" else codes.numpy()
    if zero is not None and element == TensorProto.INT4:  # asymmetric: as unsigned, which is what kernels take
        element, array, zero = TensorProto.UINT4, array + 8, zero + 8
    size = {"group": args.group_size or 0, "block": args.block_structure[1] if args.block_structure else 0}.get(args.strategy, 0)
    return StoredWeight(name, array, element, scale, zero, size, layer.dequantized_weight().numpy())


_SCALES: Mapping[str, Callable[[np.ndarray, QuantizedLinear], np.ndarray]] = {
    "tensor": lambda scale, layer: scale.reshape(()),
    "channel": lambda scale, layer: scale.reshape(-1),
    "group": lambda scale, layer: scale,
    "block": lambda scale, layer: np.repeat(scale, layer.weight_args.block_structure[0], axis=0)[: layer.out_features],  # type: ignore[index]
}
"""Strategy to the scale's shape in DequantizeLinear; blocks run along one axis there, so a block of rows repeats its scale."""


def _with_codes(model: onnx.ModelProto, weights: Iterable[StoredWeight]) -> onnx.ModelProto:
    """Replace every initializer that is a dequantized weight, in either orientation."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model)
    by_content: dict[str, tuple[StoredWeight, bool]] = {}
    for weight in weights:
        by_content[fingerprint(weight.weight_RC)] = (weight, False)
        by_content.setdefault(fingerprint(np.ascontiguousarray(weight.weight_RC.T)), (weight, True))
    found = set()
    for tensor in list(graph.graph.initializer):
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        match = by_content.get(fingerprint(numpy_helper.to_array(tensor)))
        if match is not None:
            weight, transposed = match
            _replace(graph.graph, tensor, weight, transposed)
            found.add(weight.name)
    missing = sorted({weight.name for weight, _ in by_content.values()} - found)
    if missing:
        raise HarnessError(f"{', '.join(missing)}: the exporter changed the weight, so the codes have no place; try the other exporter")
    return graph


def _replace(graph: onnx.GraphProto, tensor: onnx.TensorProto, weight: StoredWeight, transposed: bool) -> None:
    name = tensor.name
    graph.initializer.remove(tensor)
    inputs = [f"{name}.codes", f"{name}.scale"]
    graph.initializer.append(_tensor(inputs[0], weight.element, weight.codes_RC.T if transposed else weight.codes_RC))
    graph.initializer.append(numpy_helper.from_array(_turned(weight.scale, transposed), inputs[1]))
    if weight.zero_point is not None:
        inputs.append(f"{name}.zero_point")
        graph.initializer.append(_tensor(inputs[2], weight.element, _turned(weight.zero_point, transposed)))
    axis = 0 if transposed == bool(weight.block_size) else 1
    settings: dict[str, Any] = {"axis": axis} if weight.scale.ndim else {}
    if weight.block_size:
        settings["block_size"] = weight.block_size
    node = helper.make_node("DequantizeLinear", inputs, [name], name=f"dequantize {weight.name}", **settings)
    graph.node.insert(0, node)
    _check_equal(graph, node, weight, transposed)


def _check_equal(graph: onnx.GraphProto, node: onnx.NodeProto, weight: StoredWeight, transposed: bool) -> None:
    """Evaluate the node with onnx's own reference, and compare with the layer, bit by bit."""
    from onnx.reference import ReferenceEvaluator

    held = [tensor for tensor in graph.initializer if tensor.name in node.input]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    small = helper.make_model(helper.make_graph([node], "weight", [], [output], held), opset_imports=[helper.make_opsetid("", OPSET)])
    outputs: Any = ReferenceEvaluator(small).run(None, {})
    actual = outputs[0].T if transposed else outputs[0]
    if actual.shape != weight.weight_RC.shape or not np.array_equal(actual, weight.weight_RC):
        raise HarnessError(f"{weight.name}: the graph's weight is not the layer's, bit by bit; report this with the scheme")


def _quantize_inputs(graph: onnx.ModelProto, layers: Mapping[str, QuantizedLinear]) -> None:
    """Put QuantizeLinear and DequantizeLinear before layers with a static input scale."""
    for name, layer in layers.items():
        args = layer.scheme.input_activations
        if args is None or args.dynamic:
            continue
        weight = next(node for node in graph.graph.node if node.name == f"dequantize {name}").output[0]
        element = _FP8 if args.type == "float" else TensorProto.INT8
        zero = getattr(layer, "input_zero_point", None)
        value = np.zeros((), np.int8) if zero is None else zero.numpy().reshape(())
        graph.graph.initializer.append(
            numpy_helper.from_array(layer.get_buffer("input_scale").float().numpy().reshape(()), f"{name}.input_scale")
        )
        graph.graph.initializer.append(_tensor(f"{name}.input_zero_point", element, value))
        for node in _users(graph.graph, weight):
            _insert_pair(graph.graph, node, name)


def _users(graph: onnx.GraphProto, value: str) -> list[onnx.NodeProto]:
    """The products that a weight goes into, through a Transpose too."""
    users = [node for node in graph.node if value in node.input]
    return [below for node in users for below in (_users(graph, node.output[0]) if node.op_type == "Transpose" else [node])]


def _insert_pair(graph: onnx.GraphProto, node: onnx.NodeProto, name: str) -> None:
    scale, zero = f"{name}.input_scale", f"{name}.input_zero_point"
    codes, value = f"{name}.{node.name}.input_codes", f"{name}.{node.name}.input"
    position = list(graph.node).index(node)
    graph.node.insert(position, helper.make_node("DequantizeLinear", [codes, scale, zero], [value], name=f"dequantize input of {name}"))
    graph.node.insert(position, helper.make_node("QuantizeLinear", [node.input[0], scale, zero], [codes], name=f"quantize input of {name}"))
    node.input[0] = value


def _turned(array: np.ndarray, transposed: bool) -> np.ndarray:
    return np.ascontiguousarray(array.T if transposed and array.ndim == 2 else array)


def _tensor(name: str, element: int, array: np.ndarray) -> onnx.TensorProto:
    """Store codes in any type; 4-bit types are packed by helper, fp8 comes as its bytes."""
    if element == _FP8:
        return helper.make_tensor(name, element, array.shape, np.ascontiguousarray(array).astype(np.uint8).tobytes(), raw=True)
    if element in (TensorProto.INT4, TensorProto.UINT4):
        return helper.make_tensor(name, element, array.shape, array.flatten().tolist())
    return numpy_helper.from_array(np.ascontiguousarray(array).astype(np.int8), name)
