"""How often a block runs, and which inputs of the graph it reads, belongs to what contracts hold."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.roles import RoleWeights, SameBlockCount

ATTENTION = """
{t}q = MatMul({x}, {w}q) {t}k = MatMul({x}, {w}k) {t}v = MatMul({x}, {w}v) {t}kt = Transpose<perm = [0, 2, 1]>({t}k)
{t}s = MatMul({t}q, {t}kt) {t}p = Softmax({t}s) {t} = MatMul({t}p, {t}v)
"""


def _model(text: str, weights: str, inputs: str = "ab", outputs: str = "yz") -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    given, made = (", ".join(f"float[1, 5, 8] {name}" for name in names) for names in (inputs, outputs))
    graph = parser.parse_graph(f"g ({given}) => ({made}) {{ {text} }}")
    names = [tower + role for tower in weights for role in "qkv"]
    graph.initializer.extend(numpy_helper.from_array(draw.standard_normal((8, 8)).astype(np.float32), name) for name in names)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _towers(first: str, second: str) -> onnx.ModelProto:
    """Two towers with inputs of their own, whose results are added up."""
    blocks = ATTENTION.format(x=first, w="e", t="h") + ATTENTION.format(x=second, w="f", t="j")
    return _model(f"{blocks} y = Add(h, j)", "ef", outputs="y")


def _loop(steps: int) -> onnx.ModelProto:
    body = f"go = Identity(on) {ATTENTION.format(x='s', w='e', t='h')}"
    loop = f"Loop <body = body (int64 i, bool on, float[1, 5, 8] s) => (bool go, float[1, 5, 8] h) {{ {body} }}> (steps, yes, a)"
    return _model(f"steps = Constant<value = int64 {{{steps}}}>() yes = Equal(steps, steps) y = {loop}", "e", "a", "y")


def test_towers_that_exchange_their_inputs_are_told() -> None:
    result = RoleWeights().check(_towers("a", "b"), _towers("b", "a"))
    assert result.holding is Holding.VIOLATED and "reads other inputs of the graph than before: b in the place of a" in str(result.findings)
    assert RoleWeights().check(_towers("a", "b"), _towers("a", "b")).holds


def _plain() -> onnx.ModelProto:
    return _model(ATTENTION.format(x="a", w="e", t="y"), "e", "a", "y")


def _branches() -> onnx.ModelProto:
    """The same attention in both branches, of which one runs."""
    branch = "{0} = {0}() => (float[1, 5, 8] {0}h) {{ {1} }}"
    made = ", ".join(branch.format(name, ATTENTION.format(x="a", w="e", t=f"{name}h")) for name in ("then_branch", "else_branch"))
    return _model(f"one = Constant<value = int64 {{1}}>() yes = Equal(one, one) y = If <{made}> (yes)", "e", "a", "y")


def test_nobody_knows_how_often_what_lies_in_a_subgraph_runs() -> None:
    for before, after in ((_loop(3), _loop(2)), (_loop(3), _loop(3)), (_plain(), _branches()), (_branches(), _plain())):
        result = SameBlockCount().check(before, after)
        assert result.holding is Holding.NOT_ANALYSED and "how often it runs is not read" in str(result.findings), str(result.findings)
