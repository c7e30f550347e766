"""Blocks of the same weights are told apart by the data flow: no contract blames one that nobody touched, or says that it moved."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.onnx_graph.contracts.base import ContractResult, Holding
from harness.onnx_graph.contracts.roles import RoleWeights, SeparateQKV

WIDTH = 8
FLOAT, LOCAL = TensorProto.FLOAT, "local"
MATRICES = {
    f"{role}{name}": np.random.default_rng(ord(name) + 7 * ord(role)).standard_normal((WIDTH, WIDTH)) for role in "qkv" for name in "ABCD"
}


@dataclass(frozen=True)
class _Block:
    """One block to build: which weights, where, and which roles lie packed."""

    weights: str
    where: str = "main"
    packed: str = ""


def _blocks(text: str, where: Sequence[str] = ()) -> list[_Block]:
    """`A B` are two blocks, `A:kv` is one with K and V packed."""
    parts = [part.partition(":") for part in text.split()]
    places = where or ["main"] * len(parts)
    return [_Block(weights, place, packed) for (weights, _, packed), place in zip(parts, places, strict=True)]


def _value(name: str, rank: int = 3, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [2, 5, WIDTH] if rank else [])


class _Graph:
    """Blocks one after the other; each adds its result to what comes in."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.held: dict[str, np.ndarray] = {"once": np.array(1), "true": np.array(True)}

    def add(self, name: str, value: str, block: _Block) -> str:
        """Add a block that reads a value; gives what it makes."""
        held = self._body(name, f"{name}_in" if block.where in ("loop", "function") else value, block)
        out = f"{name}_out"
        if block.where == "main":
            self.nodes += held
            return f"{name}_y"
        if block.where == "function":
            weights = [one for node in held for one in node.input if one in self.held]
            self.functions.append(
                helper.make_function(LOCAL, name, [f"{name}_in", *weights], [f"{name}_y"], held, [helper.make_opsetid("", 17)])
            )
            self.nodes.append(helper.make_node(name, [value, *weights], [out], domain=LOCAL))
        elif block.where == "if":
            other = helper.make_graph([helper.make_node("Identity", [value], [f"{name}_else"])], "else", [], [_value(f"{name}_else")])
            body = helper.make_graph(held, "then", [], [_value(f"{name}_y")])
            self.nodes.append(helper.make_node("If", ["condition"], [out], then_branch=body, else_branch=other))
        else:
            given = [_value(f"{name}_i", 0, TensorProto.INT64), _value(f"{name}_c", 0, TensorProto.BOOL), _value(f"{name}_in")]
            held.append(helper.make_node("Identity", [f"{name}_c"], [f"{name}_d"]))
            body = helper.make_graph(held, "body", given, [_value(f"{name}_d", 0, TensorProto.BOOL), _value(f"{name}_y")])
            self.nodes.append(helper.make_node("Loop", ["once", "true", value], [out], body=body))
        return out

    def _body(self, name: str, value: str, block: _Block) -> list[onnx.NodeProto]:
        nodes = []
        for roles in [block.packed, *(role for role in "qkv" if role not in block.packed)]:
            if roles:
                layer, outputs = f"{name}_w{roles}", [f"{name}_{role}" for role in roles]
                self.held[layer] = np.concatenate([MATRICES[role + block.weights] for role in roles], axis=1).astype(np.float32)
                joined = outputs[0] if len(roles) == 1 else f"{name}_{roles}"
                nodes.append(helper.make_node("MatMul", [value, layer], [joined], name=f"{name}_{roles}"))
                nodes += [helper.make_node("Split", [joined], outputs, axis=-1)] if len(roles) > 1 else []
        q, k, v, turned, scores, weights, mixed = (f"{name}_{one}" for one in ("q", "k", "v", "t", "s", "p", "m"))
        return [
            *nodes,
            helper.make_node("Transpose", [k], [turned], perm=[0, 2, 1]),
            helper.make_node("MatMul", [q, turned], [scores]),
            helper.make_node("Softmax", [scores], [weights]),
            helper.make_node("MatMul", [weights, v], [mixed]),
            helper.make_node("Add", [value, mixed], [f"{name}_y"]),
        ]

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """Close the graph."""
        inputs = [_value("x"), _value("condition", 0, TensorProto.BOOL)]
        held = [numpy_helper.from_array(array, name) for name, array in self.held.items()]
        graph = helper.make_graph(self.nodes, "blocks", inputs, [_value(name) for name in outputs], held)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(LOCAL, 1)]
        return helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=8)


def _chain(blocks: Sequence[_Block]) -> onnx.ModelProto:
    graph, value = _Graph(), "x"
    for number, block in enumerate(blocks):
        value = graph.add(f"b{number}", value, block)
    return graph.model([value])


def _violated(result: ContractResult) -> set[int]:
    """Which blocks of the exported graph are blamed."""
    return {int(re.findall(r"block (\d+)", one.text)[0]) for one in result.findings if one.holding is Holding.VIOLATED}


def _both(before: Sequence[_Block], after: Sequence[_Block]) -> tuple[ContractResult, ContractResult]:
    exported, optimized = _chain(before), _chain(after)
    return SeparateQKV().check(exported, optimized), RoleWeights().check(exported, optimized)


@pytest.mark.parametrize("roles", ["qkv", "kv"])
@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("where", ["main", "function", "if", "loop"])
def test_the_block_that_was_packed_is_blamed_and_no_equal_one(where: str, packed: int, roles: str) -> None:
    before = _blocks("A A A", ["main", "main", where])
    after = [replace(block, packed=roles) if number == packed else block for number, block in enumerate(before)]
    for result in _both(before, after):
        assert _violated(result) == {packed} and "data flow" not in result.message, result
        assert ("not followed" in result.message) is (where in ("if", "loop"))


@pytest.mark.parametrize(
    ("before", "after", "gone", "packed"),
    [
        ("A B A", "B A", {0}, set()),
        ("A B A", "A B", {2}, set()),
        ("A B A C C C", "A B", {2, 3, 4, 5}, set()),
        ("B B B A", "B B A:qkv", {2}, {3}),
        ("A B C", "B:qkv C", {0}, {1}),
    ],
)
def test_the_block_that_is_gone_is_named_and_no_other_one(before: str, after: str, gone: set[int], packed: set[int]) -> None:
    separate, weights = _both(_blocks(before), _blocks(after))
    assert _violated(weights) == packed, weights
    assert {one.block for one in weights.findings if one.text.endswith("no such block")} == gone
    assert separate.holding is Holding.VIOLATED and "cannot be found again" in separate.message


def test_where_no_block_is_left_all_are_gone() -> None:
    rest = _Graph()
    rest.nodes.append(helper.make_node("Identity", ["x"], ["y"]))
    result = RoleWeights().check(_chain(_blocks("A A")), rest.model(["y"]))
    assert {one.block for one in result.findings if one.text.endswith("no such block")} == {0, 1}


@pytest.mark.parametrize(("after", "moved"), [("A B A", {1}), ("B A A", {0, 1}), ("A A B", set())])
def test_weights_that_are_exchanged_are_still_seen_among_equal_blocks(after: str, moved: set[int]) -> None:
    separate, weights = _both(_blocks("A A B"), _blocks(after))
    assert separate.holds and _violated(weights) == moved, weights


def test_a_packed_block_is_known_by_the_columns_it_holds() -> None:
    separate, _ = _both(_blocks("A B C"), _blocks("B:qkv A:qkv C"))
    assert [one.text.count("found packed as columns") for one in separate.findings] == [1] * 6, separate


def test_blocks_in_reverse_order_are_all_found_and_all_moved() -> None:
    _, weights = _both(_blocks("A B C D"), _blocks("D C B A"))
    assert [one.block for one in weights.findings] == [0, 1, 2] and weights.message.count("elsewhere in the data flow") == 3, weights


def _towers(texts: Sequence[str], listed: Sequence[int] = (0, 1), joined: bool = False) -> onnx.ModelProto:
    """Two chains of blocks over one input; the nodes of which is listed first makes no difference."""
    graph, outputs = _Graph(), ["", ""]
    for tower in listed:
        outputs[tower] = "x"
        for number, block in enumerate(_blocks(texts[tower])):
            outputs[tower] = graph.add(f"t{tower}b{number}", outputs[tower], block)
    if joined:
        graph.nodes.append(helper.make_node("Add", outputs, ["sum"]))
    return graph.model(["sum"] if joined else outputs)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_towers_are_told_apart_by_their_outputs(order: tuple[int, int]) -> None:
    before, after = _towers(["A A", "A A"]), _towers(["A A", "A:qkv A"], order)
    for contract in (SeparateQKV(), RoleWeights()):
        assert _violated(contract.check(before, after)) == {2}


@pytest.mark.parametrize(("before", "packed"), [(["A B", "A C"], {3}), (["A B B", "A B C"], {5}), (["B A", "C A"], {3})])
def test_equal_blocks_of_two_towers_are_told_apart_by_those_that_differ(before: list[str], packed: set[int]) -> None:
    after = [before[0], f"{before[1]}:kv"]
    result = RoleWeights().check(_towers(before, joined=True), _towers(after, (1, 0), joined=True))
    assert _violated(result) == packed and "data flow" not in result.message, result


@pytest.mark.parametrize(("after", "gone"), [(["A", "A A"], {0, 1}), (["A A", "A"], {2, 3})])
def test_a_block_that_is_gone_is_gone_from_its_tower(after: list[str], gone: set[int]) -> None:
    result = RoleWeights().check(_towers(["A A", "A A"]), _towers(after))
    assert len(lost := {one.block for one in result.findings}) == 1 and lost < gone and result.holding is Holding.NOT_ANALYSED, result


@pytest.mark.parametrize("seed", range(12))
def test_drawn_blocks_that_are_packed_or_dropped_are_blamed_and_no_others(seed: int) -> None:
    draw = random.Random(seed)
    before = [_Block(draw.choice("AB")) for _ in range(draw.randint(3, 6))]
    for number in draw.sample(range(len(before)), draw.randint(0, 1)):
        before[number] = replace(before[number], where=draw.choice(["if", "loop"]))
    order = sorted(range(len(before)), key=lambda number: before[number].where != "main")  # those of subgraphs come last
    after = dict(enumerate(before))
    for number in draw.sample(range(len(before)), 2):
        after[number] = replace(after[number], packed=draw.choice(["qkv", "kv"]))
    if draw.random() < 0.5:
        after.pop(draw.randrange(len(before)))
    expected = sorted(block.weights for block in after.values() if block.packed and block.where == "main")
    _, weights = _both(before, list(after.values()))
    assert sorted(before[order[number]].weights for number in _violated(weights)) == expected, weights
    assert "data flow" not in weights.message
    if len(after) == len(before):
        assert _violated(weights) == {at for at, number in enumerate(order) if after[number].packed and after[number].where == "main"}
