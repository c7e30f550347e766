"""Small attention graphs, made without torch in a millisecond each: what a new release of an optimizer is tried on.

They differ in what decides whether a pass fires: bias or none, a norm before the projections or a residual beside them, fewer heads of K
and V, another source for K and V, and weights stored in codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

_LENGTH = 5


@dataclass(frozen=True)
class AttentionForm:
    """What an attention graph looks like.

    Attributes:
        width: of the activation.
        heads: of Q.
        kv_heads: of K and V.
        bias: whether projections have one.
        norm: a LayerNormalization before the projections.
        residual: the activation that is projected is added to the output: a fourth use of it.
        cross: K and V come from a second input.
        codes: the projections' weights are int8 codes with DequantizeLinear.
    """

    width: int = 32
    heads: int = 2
    kv_heads: int = 2
    bias: bool = False
    norm: bool = True
    residual: bool = False
    cross: bool = False
    codes: bool = False


FORMS: Mapping[str, AttentionForm] = {
    "pre-norm": AttentionForm(),
    "pre-norm with bias": AttentionForm(bias=True),
    "post-norm": AttentionForm(norm=False, residual=True),
    "grouped queries": AttentionForm(heads=4, kv_heads=2),
    "cross": AttentionForm(cross=True),
    "int8 codes": AttentionForm(codes=True),
}
"""Name to form."""


def attention_graph(form: AttentionForm = FORMS["pre-norm"], seed: int = 0) -> onnx.ModelProto:
    """Make one attention block.

    Args:
        form: what it looks like.
        seed: of the weights.

    Returns:
        A graph with input `x` (and `memory`), output `y`, and projections named `project_q`, `project_k`, `project_v`, `project_out`.
    """
    maker = _Maker(form, np.random.default_rng(seed))
    maker.make()
    inputs = ["x", *(["memory"] if form.cross else [])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, _LENGTH, form.width]) for name in (*inputs, "y")]
    graph = helper.make_graph(maker.nodes, "attention", values[:-1], values[-1:], maker.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def small_zoo() -> dict[str, Callable[[], onnx.ModelProto]]:
    """Return what makes each graph, by name."""
    return {name: functools.partial(attention_graph, form) for name, form in FORMS.items()}


class _Maker:
    """Collects nodes and initializers."""

    def __init__(self, form: AttentionForm, draw: np.random.Generator) -> None:
        self.form, self._draw = form, draw
        self.nodes: list[NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def make(self) -> None:
        form = self.form
        head = form.width // form.heads
        source = "x"
        if form.norm:
            self._add("LayerNormalization", ["x", self._held("gamma", np.ones(form.width, np.float32))], "h", "norm")
            source = "h"
        for role, num_heads, axes in (
            ("q", form.heads, [0, 2, 1, 3]),
            ("k", form.kv_heads, [0, 2, 3, 1]),
            ("v", form.kv_heads, [0, 2, 1, 3]),
        ):
            flat = self._project(role, "memory" if form.cross and role != "q" else source, num_heads * head)
            shape = self._held(f"split_{role}", np.array([1, _LENGTH, num_heads, head]))
            self._add("Reshape", [flat, shape], f"{role}_heads", f"reshape_{role}")
            self._add("Transpose", [f"{role}_heads"], f"{role}_few", f"transpose_{role}", perm=axes)
            self._repeat(role, num_heads)
        self._attend(head)

    def _attend(self, head: int) -> None:
        self._add("MatMul", ["q", "k"], "scores", "scores")
        self._add("Mul", ["scores", self._held("root", np.array(head**-0.5, np.float32))], "scaled", "scale")
        self._add("Softmax", ["scaled"], "weights", "softmax", axis=-1)
        self._add("MatMul", ["weights", "v"], "mixed", "mix")
        self._add("Transpose", ["mixed"], "joined", "join", perm=[0, 2, 1, 3])
        self._add("Reshape", ["joined", self._held("join_heads", np.array([1, _LENGTH, self.form.width]))], "flat", "flatten")
        self._add("MatMul", ["flat", self._weight("wo", self.form.width)], "projected" if self.form.residual else "y", "project_out")
        if self.form.residual:
            self._add("Add", ["projected", "x"], "y", "residual")

    def _project(self, role: str, source: str, width: int) -> str:
        weight = self._weight(f"w{role}", width)
        if self.form.codes:
            weight = self._codes(role)
        self._add("MatMul", [source, weight], f"{role}_flat", f"project_{role}")
        if not self.form.bias:
            return f"{role}_flat"
        self._add(
            "Add",
            [f"{role}_flat", self._held(f"b{role}", self._draw.standard_normal(width).astype(np.float32))],
            f"{role}_biased",
            f"bias_{role}",
        )
        return f"{role}_biased"

    def _codes(self, role: str) -> str:
        held = next(tensor for tensor in self.initializers if tensor.name == f"w{role}")
        weight = numpy_helper.to_array(held)
        self.initializers.remove(held)
        scale = np.float32(np.abs(weight).max() / 127)
        codes = self._held(f"c{role}", np.clip(np.rint(weight / scale), -128, 127).astype(np.int8))
        self._add("DequantizeLinear", [codes, self._held(f"s{role}", np.array(scale))], f"w{role}", f"dequantize_{role}")
        return f"w{role}"

    def _repeat(self, role: str, num_heads: int) -> None:
        """Give every head of Q its head of K or V."""
        if num_heads == self.form.heads:
            self._add("Identity", [f"{role}_few"], role, f"identity_{role}")
        else:
            index = np.repeat(np.arange(num_heads), self.form.heads // num_heads)
            self._add("Gather", [f"{role}_few", self._held(f"heads_{role}", index)], role, f"repeat_{role}", axis=1)

    def _weight(self, name: str, width: int) -> str:
        return self._held(name, self._draw.standard_normal((self.form.width, width)).astype(np.float32))

    def _held(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def _add(
        self, operator: str, inputs: Sequence[str], output: str, name: str, axis: int | None = None, perm: Sequence[int] | None = None
    ) -> None:
        settings = {key: value for key, value in (("axis", axis), ("perm", perm)) if value is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=name, **settings))  # type: ignore[arg-type]
