"""`harness onnx` refuses before it works: other files stay as they are, unknown words get the nearest or none, exporters talk plainly."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from compressor.errors import CheckpointError, UserInputError
from harness.cli import main
from harness.onnx_graph.census import streams
from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.contracts.roles import SeparateQKV
from harness.onnx_graph.graph.drawn_inputs import example_inputs
from harness.onnx_graph.graph.run_session import POLICIES, Limit, output_row, run_graph
from harness.onnx_graph.roundtrip.export import ExportFailure, export
from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip
from harness.onnx_graph.roundtrip.optimizers import optimize
from harness.onnx_graph.skips import supervision
from harness.onnx_graph.skips.context import forced_skips
from harness.reporting.text import plain_text
from tests import tiny

BAD = {
    "export dir keep.txt": "keep.txt: a file of the kind .onnx goes there",
    "export dir out": "end the name in .onnx",
    "export dir folder.onnx": "folder.onnx: it is a folder",
    "export dir keep.onnx": "keep.onnx: what is there is no .onnx, and nothing of another kind is replaced",
    "export dir zipped.onnx": "zipped.onnx: what is there is no .onnx",
    "export dir a.onnx": "dir: no config.json was found",
    "export dir none/out.onnx": "there is no folder none",
    "export dir out.onnx": "dir: no config.json was found",
    "census none": "none: there is no such file or folder",
    "census a.onnx --model-class BertModel": "model_class: BertModel was given for a graph",
    "explain a.onnx --model-class BertModel": "model_class: BertModel was given for a graph",
    "check a.onnx dir": "dir: this is a folder; give an .onnx file",
    "check a.onnx a.onnx --contract SeparateQKV": "did you mean 'separate-qkv'? choose from separate-qkv, same-block-count",
    "check a.onnx a.onnx --contract all": "there is no 'all'; choose from",
    "roundtrip a.onnx --optimizer onnxsin": "did you mean 'onnxsim'?",
    "roundtrip a.onnx --optimizer tensorrt": "'tensorrt' is none that is known; choose from",
    "roundtrip a.onnx --exporter dynamo": "--exporter: a.onnx is a graph already",
    "roundtrip a.onnx --opset 21": "opset: 21 was given for a graph",
    "roundtrip a.onnx --output-dir full": "full: it is not empty (report.html), and not an earlier report",
    "roundtrip a.onnx --output-dir keep.txt": "keep.txt: it is a file",
    "fusing-cost a.onnx --figure keep.txt": "end the name in .svg or .png",
    "fusing-cost a.onnx --figure keep.svg": "keep.svg: what is there is no .svg",
    "fusing-cost a.onnx --figure zipped.png": "zipped.png: what is there is no .png",
    "fusing-cost a.onnx --figure none/out.svg": "there is no folder none",
    "run --skip fuse_qkv --json keep.txt -- true": "keep.txt: a file of the kind .json goes there",
    "run --skip fuse_qkv --json keep.json -- true": "keep.json: what is there is no .json",
    "run --skip fuse_qkv --json folder.json -- true": "folder.json: it is a folder",
    "run --skip FuseQKV -- true": "did you mean 'fuse_qkv'?",
    "run --skip foo -- true": "would ignore it in silence; `harness onnx passes --json` lists all",
    "run --skip fuse_qkv -- ./keep.txt": "is no command that can be run",
}


@pytest.fixture
def _place(attention_graph: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(attention_graph, tmp_path / "a.onnx")
    for folder in ("dir", "full", "folder.onnx", "folder.json"):
        (tmp_path / folder).mkdir()
    for file in ("keep.txt", "keep.onnx", "keep.svg", "keep.json", "full/report.html"):
        (tmp_path / file).write_text("precious", encoding="utf-8")
    for file in ("zipped.onnx", "zipped.png"):
        (tmp_path / file).write_bytes(b"PK\x03\x04 such as torch.save writes")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("command", BAD)
def test_bad_words_and_places_are_refused_and_nothing_is_written(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["onnx", *command.split()]) == 3
    printed = capsys.readouterr()
    assert BAD[command] in printed.err and printed.err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("_place")
def test_a_report_is_replaced_and_an_optimizer_named_twice_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxslim")
    command = ["onnx", "roundtrip", "a.onnx", "--optimizer", "onnxslim", "--optimizer", "onnxslim", "--output-dir", "report"]
    assert main(command) == 0 and main(command) == 0
    assert capsys.readouterr().out.count("onnxslim") == 2
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "report.json", "junit.xml"}


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            raise RuntimeError("\x1b[31mred\x1b[0m alert\nand more")
        return x


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_what_an_exporter_wraps_in_colours_and_step_counts_comes_out_plain(exporter: str) -> None:
    with pytest.raises(ExportFailure) as caught:
        export(_Fails(), {"x": torch.ones(2)}, exporter=exporter)
    assert f"{exporter}: _Fails cannot be exported: RuntimeError: red alert; try" in str(caught.value)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_forward_that_fails_by_itself_is_not_sent_to_the_other_exporter(exporter: str) -> None:
    with pytest.raises(ExportFailure, match=r"for it fails on these inputs by itself: RuntimeError: .*; give inputs"):
        export(nn.Linear(3, 3), {"input": torch.ones(2, 4)}, exporter=exporter)


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.plus(x) if x.sum() > 0 else self.minus(x)
        return chosen


class _Rows(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(ids.shape)
        for value in ids.unique().tolist():
            total = total + torch.where(ids == value, float(value), 0.0)
        return total


class _Length(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = ids[ids == 7]
        return found.view(found.shape[0], 1).float() + torch.zeros(int(found.numel()), 1)


class _Size(_Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.plus(x) if x.abs().sum() < 7 else self.minus(x)
        return chosen


class _Ids(_Branch):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.float()[None] - 6)


class _Table(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float() * {(3, 5): 1.0}[tuple(ids[:2].tolist())]


class _Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cos(x) * mask


class _Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) + x


@pytest.mark.parametrize(
    ("module", "inputs", "unseen"),
    [
        (_Ids(), {"ids": torch.full((3,), 7)}, "no other values to draw for ids; give one that holds several"),
        (_Table(), {"ids": torch.tensor([3, 5, 4])}, "the model fails (KeyError)"),
        (_Noise(), {"x": torch.ones(3)}, "other outputs for the same inputs"),
        (_Masked(), {"x": torch.ones(3), "mask": torch.ones(3, dtype=torch.int64)}, "mask had the example's values throughout"),
        (nn.Linear(3, 2), {"input": torch.ones(1, 3)}, ""),
        (nn.Sequential(nn.Linear(3, 8), nn.Dropout()), {"input": torch.ones(1, 3)}, ""),
    ],
)
def test_what_the_search_for_frozen_choices_did_not_see_is_said(module: nn.Module, inputs: dict[str, torch.Tensor], unseen: str) -> None:
    trip = onnx_roundtrip(module, inputs, exporters=["torchscript"])
    notes = trip.exported("torchscript").notes
    assert [unseen in note for note in notes] == ([True] if unseen else [])
    row = trip.run(NumericEqual(), "torchscript", "onnxsim")
    assert set(notes) <= set(row.result.notes) and set(notes) <= set(trip.notes())


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) / int(x.shape[0])


def test_a_size_is_open_only_where_the_graph_follows_it() -> None:
    x = {"x": torch.rand(2, 3)}
    with pytest.raises(ExportFailure, match=r"at other sizes the graph gives .* dB .*, with one more of rows \(x \[3, 3\]\)"):
        export(_Mean(), x, exporter="torchscript", dynamic={"x": {0: "rows"}})
    assert not export(_Mean(), x, exporter="torchscript", dynamic={"x": {1: "columns"}}).notes
    both = {**x, "mask": torch.rand(2, 3)}
    assert not export(_Masked(), both, exporter="torchscript", dynamic={name: {0: "rows"} for name in both}).notes
    (note,) = export(_Masked(), both, exporter="torchscript", dynamic={"x": {0: "rows"}}).notes
    assert "the model fails (RuntimeError), so rows may be open in vain" in note


def test_the_size_that_holds_an_open_one_fixed_is_named() -> None:
    inputs = {name: torch.rand(4, 3) for name in ("x", "mask")}
    rows, columns = (
        rf"{name} \(x axis {axis}\) is open, and the forward fixes it at {4 - axis}, the fixed size of mask axis {axis}"
        for axis, name in enumerate(("rows", "columns"))
    )
    with pytest.raises(ExportFailure, match=rf"exported: {rows}; open what changes with that size, too, or leave it fixed"):
        export(_Masked(), inputs, dynamic={"x": {0: "rows"}})
    with pytest.raises(ExportFailure, match=rf"exported: {rows}, and {columns}; open what changes"):
        export(_Masked(), inputs, dynamic={"x": {0: "rows", 1: "columns"}})


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_branch_is_not_sent_to_the_other_exporter(exporter: str) -> None:
    with pytest.raises(ExportFailure, match=r"compute a branch with torch\.where") as caught:
        export(_Branch(), {"x": torch.ones(2, 3)}, exporter=exporter)
    assert not re.search("try (the other|dynamo|torchscript)|neither", str(caught.value))


class _Dropped(_Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


@pytest.mark.parametrize("module", [_Branch(), _Size(), _Rows(), _Length(), _Dropped()])
def test_what_torchscript_freezes_is_found(module: nn.Module) -> None:
    inputs = {"x": torch.ones(2, 3)} if isinstance(module, _Branch) else {"ids": torch.tensor([[0, 90, 7], [7, 0, 90]])}
    with pytest.raises(ExportFailure, match=r"torchscript: .* on other inputs the graph gives (.* dB|no output).* is frozen in it"):
        export(module, inputs, exporter="torchscript")


class _Exporting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() if torch.compiler.is_exporting() else x


def test_a_graph_of_dynamo_that_is_not_what_the_model_computes_is_refused() -> None:
    with pytest.raises(ExportFailure, match=r"dynamo: _Exporting cannot be exported: .* gives .* dB .* try torchscript"):
        export(_Exporting(), {"x": torch.tensor([1.0, -2.0])})


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_every_part_is_in_its_mode_after_an_export(exporter: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
    module[2].eval()
    export(module, {"input": torch.ones(2, 3)}, exporter=exporter)
    assert [one.training for one in module.modules()] == [True, True, True, False]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_experts_are_exported_and_route_other_tokens_as_the_model_does(exporter: str) -> None:
    model = tiny.mixtral(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        num_local_experts=8,
    )
    model.set_experts_implementation("grouped_mm")
    inputs = {"input_ids": torch.full((1, 6), 7), "attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    graph = export(model, inputs, exporter=exporter).model
    assert model.config._experts_implementation == "grouped_mm"
    other = inputs | {"input_ids": torch.arange(6)[None] * 8}
    with torch.no_grad():
        expected = model(**other).logits.numpy()
    found = run_graph(graph, {name: tensor.numpy() for name, tensor in other.items()}, POLICIES["golden"])[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def _exchanged(graph: onnx.GraphProto) -> None:
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(reversed(nodes))


def _in_a_circle(graph: onnx.GraphProto) -> None:
    graph.node[0].input[0] = graph.node[-1].output[0]


def _undefined(graph: onnx.GraphProto) -> None:
    graph.node[3].input[0] = "nirvana"


def _no_output(graph: onnx.GraphProto) -> None:
    del graph.node[-1].output[:]


def _other_output(graph: onnx.GraphProto) -> None:
    graph.output[0].name = "nirvana"


def _inside(graph: onnx.GraphProto) -> None:
    branch = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["nirvana"], ["inner"])], "branch", [], [])
    branch.output.append(onnx.helper.make_tensor_value_info("inner", 1, None))
    flag = onnx.numpy_helper.from_array(np.array(True), "flag")
    graph.initializer.append(flag)
    graph.node.insert(0, onnx.helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=branch))


def _two_initializers(graph: onnx.GraphProto) -> None:
    graph.initializer.append(graph.initializer[0])


def _two_inputs(graph: onnx.GraphProto) -> None:
    graph.input.append(graph.input[0])


def _computes_an_initializer(graph: onnx.GraphProto) -> None:
    graph.node[-1].output.append(graph.initializer[0].name)


DISORDER: Mapping[Callable[[onnx.GraphProto], None], str] = {
    _exchanged: "computed later: its nodes are out of order, or run in a circle; sort them",
    _in_a_circle: "computed later",
    _undefined: "uses 'nirvana', which nothing computes",
    _no_output: "has no output",
    _other_output: "its output is 'nirvana', which nothing computes",
    _two_initializers: "is the name of another value, too, and of an initializer; give each its own name",
    _two_inputs: "is the name of another value, too, and of an input",
    _computes_an_initializer: "is the name of another value, too, and of an output of a node",
    _inside: "Abs inner uses 'nirvana', which nothing computes",
}


@pytest.mark.parametrize("damage", DISORDER)
@pytest.mark.parametrize("verb", ["census {}", "check a.onnx {}", "explain {}", "fusing-cost {}", "roundtrip {} --optimizer ort-basic"])
@pytest.mark.usefixtures("_place")
def test_a_graph_out_of_order_is_refused_in_one_line(
    damage: Callable[[onnx.GraphProto], None], verb: str, attention_graph: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(attention_graph)
    damage(broken.graph)
    Path("broken.onnx").write_bytes(broken.SerializeToString())
    assert main(["onnx", *verb.format("broken.onnx").split()]) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("harness onnx: error: broken.onnx: ")
    assert DISORDER[damage] in printed and printed.count("\n") == 1


def test_operators_without_a_version_are_refused(attention_graph: onnx.ModelProto) -> None:
    bare = onnx.ModelProto()
    bare.CopyFrom(attention_graph)
    del bare.opset_import[:]
    with pytest.raises(UserInputError, match="opset_import is empty"):
        census(bare)


def _as_text(node: onnx.NodeProto) -> None:
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("axis", "last"))


MISUSED: dict[str, tuple[str, Callable[[onnx.NodeProto], None]]] = {
    "has axis of type STRING, where INT belongs": ("Softmax", _as_text),
    "lacks equation, which it needs": ("Softmax", lambda node: setattr(node, "op_type", "Einsum")),
    "which is no order of axes": ("Transpose", lambda node: node.attribute[0].ints.__setitem__(0, 1)),
    "of which no version is named": ("Softmax", lambda node: setattr(node, "domain", "foo.bar")),
    "inputs and needs 1": ("Softmax", lambda node: node.input.append(node.input[0])),
}


@pytest.mark.parametrize("message", MISUSED)
def test_an_operator_against_its_definition_is_refused(message: str, attention_graph: onnx.ModelProto) -> None:
    damaged = onnx.ModelProto()
    damaged.CopyFrom(attention_graph)
    operator, damage = MISUSED[message]
    damage(next(node for node in damaged.graph.node if node.op_type == operator))
    with pytest.raises(UserInputError, match=message):
        census(damaged)


def _matmul_nbits(**attributes: Any) -> onnx.ModelProto:
    packed = numpy_helper.from_array(np.zeros((8, 1, 16), np.uint8), "packed")
    scales = numpy_helper.from_array(np.ones(8, np.float32), "scales")
    node = onnx.helper.make_node("MatMulNBits", ["x", "packed", "scales"], ["y"], domain="com.microsoft", **attributes)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "one", [value("x", onnx.TensorProto.FLOAT, [2, 32])], [value("y", onnx.TensorProto.FLOAT, [2, 8])], [packed, scales]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)])


@pytest.mark.parametrize("wrong", [{"bits": 1 << 40}, {"bits": "a"}, {"N": 0}, {"block_size": -32}], ids=str)
def test_a_packed_layer_with_impossible_numbers_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"K": 32, "N": 8, "bits": 4, "block_size": 32}
    assert census(_matmul_nbits(**right)).blocks == ()
    unnamed = _matmul_nbits(**right)
    del unnamed.opset_import[1]  # as onnxruntime's optimizer of transformers leaves it in memory, and onnxruntime reads it
    assert census(unnamed).blocks == ()
    with pytest.raises(UserInputError, match="no number that it takes"):
        census(_matmul_nbits(**(right | wrong)))


def test_a_graph_without_outputs_and_one_of_a_later_opset_are_refused(attention_graph: onnx.ModelProto) -> None:
    for damage, message in ((lambda one: one.graph.ClearField("output"), "holds no output"), (_later, "is none that onnx")):
        damaged = onnx.ModelProto()
        damaged.CopyFrom(attention_graph)
        damage(damaged)
        with pytest.raises(UserInputError, match=message):
            census(damaged)


def _later(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def _short(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 77


def _sparse(model: onnx.ModelProto) -> None:
    values, places = numpy_helper.from_array(np.ones(1, np.float32), "sparse"), numpy_helper.from_array(np.array([99]), "places")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [5]))


def _sparse_tensor(array: np.ndarray, name: str = "") -> onnx.SparseTensorProto:
    values, places = array[array != 0], np.flatnonzero(array)
    return onnx.helper.make_sparse_tensor(numpy_helper.from_array(values, name), numpy_helper.from_array(places, "places"), array.shape)


def _sparse_constant(model: onnx.ModelProto) -> None:
    sparse = _sparse_tensor(np.ones(5, np.float32))
    sparse.dims[0] = 3
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["sparse"], sparse_value=sparse))


def test_sparse_constants_are_read_as_what_they_hold(attention_graph: onnx.ModelProto) -> None:
    """Of nodes, of a branch, and among a branch's initializers."""
    sparse = onnx.ModelProto()
    sparse.CopyFrom(attention_graph)
    matrices = [one for one in sparse.graph.initializer if len(one.dims) == 2]
    for one in matrices:
        held = _sparse_tensor(numpy_helper.to_array(one))
        sparse.graph.node.insert(0, onnx.helper.make_node("Constant", [], [one.name], sparse_value=held))
        sparse.graph.initializer.remove(one)
    branches = []
    for name in ("yes", "no"):
        made = onnx.helper.make_node("Constant", [], [f"{name}_other"], sparse_value=_sparse_tensor(np.eye(3, dtype=np.float32)))
        added = onnx.helper.make_node("Add", [f"{name}_other", f"{name}_held"], [name])
        out = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 3])
        branches.append(onnx.helper.make_graph([made, added], name, [], [out]))
        branches[-1].sparse_initializer.append(_sparse_tensor(np.eye(3, dtype=np.float32), f"{name}_held"))
    sparse.graph.initializer.append(numpy_helper.from_array(np.array(True), "which"))
    sparse.graph.node.append(onnx.helper.make_node("If", ["which"], ["chosen"], then_branch=branches[0], else_branch=branches[1]))
    assert matrices and census(sparse).to_dict()["blocks"] == census(attention_graph).to_dict()["blocks"]


def _function(model: onnx.ModelProto) -> None:
    opset = onnx.helper.make_opsetid("own", 1)
    model.opset_import.append(opset)
    model.functions.append(onnx.helper.make_function("own", "F", ["x"], ["y"], [onnx.helper.make_node("Abs", ["nirvana"], ["y"])], []))
    model.graph.node.append(onnx.helper.make_node("F", ["x"], ["z"], domain="own"))


@pytest.mark.parametrize(
    "damage", [_later, _short, _unknown_type, _sparse, _sparse_constant, _function, lambda one: one.graph.ClearField("output")]
)
@pytest.mark.parametrize("names", [("a.onnx", "broken.onnx"), ("broken.onnx", "a.onnx")], ids=" ".join)
@pytest.mark.usefixtures("_place")
def test_an_error_about_one_of_two_graphs_names_its_file(
    damage: Callable[[onnx.ModelProto], None], names: tuple[str, str], attention_graph: onnx.ModelProto, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(attention_graph)
    damage(broken)
    Path("broken.onnx").write_bytes(broken.SerializeToString())
    assert main(["onnx", "check", *names]) == 3
    assert capsys.readouterr().err.startswith("harness onnx: error: broken.onnx: ")


def test_control_characters_of_names_are_written_as_escapes(attention_graph: onnx.ModelProto) -> None:
    named = onnx.ModelProto()
    named.CopyFrom(attention_graph)
    for node in named.graph.node:
        node.name = f"\x1b[31m{node.name}\n"
    text = census(named).text()
    assert "\x1b" not in text and "\\x1b[31m" in text
    assert text.count("\n") == len(census(named).blocks) - 1


def _compared(kind: int, before: float, after: float, *, output: str = "y") -> Any:
    """Two graphs whose truth values are all the same, whatever they compare with."""

    def graph(limit: float) -> onnx.ModelProto:
        nodes = [onnx.helper.make_node("Greater", ["x", "limit"], ["t"]), onnx.helper.make_node("Cast", ["t"], [output], to=kind)]
        value = onnx.helper.make_tensor_value_info
        held = [numpy_helper.from_array(np.float32(limit), "limit")]
        made = onnx.helper.make_graph(nodes, "g", [value("x", onnx.TensorProto.FLOAT, [2, 4])], [value(output, kind, [2, 4])], held)
        return onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)

    return graph(before), graph(after)


@pytest.mark.parametrize("kind", [onnx.TensorProto.BOOL, onnx.TensorProto.STRING])
def test_a_constant_truth_value_or_text_is_no_evidence(kind: int) -> None:
    before, after = _compared(kind, -50.0, -100.0)
    report = NumericEqual().check(before, after)
    assert report.holding is Holding.NOT_ANALYSED
    assert "nothing was compared" in report.message
    drawn = _compared(kind, 0.0, 0.0)
    assert NumericEqual().check(*drawn).holding is Holding.HOLDS


def test_an_output_that_came_or_went_is_a_violation() -> None:
    before, after = _compared(onnx.TensorProto.BOOL, 0.0, 0.0)
    after.graph.output.append(onnx.helper.make_tensor_value_info("t", onnx.TensorProto.BOOL, [2, 4]))
    report = NumericEqual().check(before, after)
    assert report.holding is Holding.VIOLATED
    assert "output t is new" in report.message


def test_sizes_that_nobody_can_draw_are_refused_and_minus_one_is_open(attention_graph: onnx.ModelProto) -> None:
    graph = onnx.ModelProto()
    graph.CopyFrom(attention_graph)
    size = graph.graph.input[0].type.tensor_type.shape.dim[0]
    size.dim_value = -1
    assert next(iter(example_inputs(graph).values())).shape[0] == 2
    size.dim_value = 10**12
    with pytest.raises(UserInputError, match="are too many elements to draw"):
        example_inputs(graph)


def test_what_is_no_contract_and_no_list_is_refused(attention_graph: onnx.ModelProto) -> None:
    trip = onnx_roundtrip(attention_graph)
    with pytest.raises(UserInputError, match="'separate-qkv' is no contract; give an object of one"):
        trip.assert_holds("separate-qkv")  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match=r"is one text; give a list of names: \['fuse_qkv', 'fuse_attention'\]"):
        trip.assert_holds(SeparateQKV(), skip="fuse_qkv, fuse_attention")


@pytest.mark.skipif(sys.platform != "linux", reason="asks for a folder that takes no file, whoever asks")
@pytest.mark.parametrize("verb", ["fusing-cost a.onnx --figure {}.svg", "run --skip fuse_qkv --json {}.json -- true", "export dir {}.onnx"])
@pytest.mark.usefixtures("_place")
def test_a_folder_that_takes_no_file_is_known_before_the_work(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", *verb.format("/proc/out").split()]) == 3
    assert "/proc takes no file" in capsys.readouterr().err


def test_a_record_of_calls_that_cannot_be_written_does_not_deny_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "calls.json"
    monkeypatch.setattr("harness.onnx_graph.commands.run.whole_file", _full)
    assert main(["onnx", "run", "--skip", "fuse_qkv", "--json", str(target), "--", "true"]) == 2
    said = capsys.readouterr().err
    assert f"{target}: cannot be written" in said and "nothing was run" not in said


@contextlib.contextmanager
def _full(target: Path) -> Iterator[Path]:
    yield target
    raise CheckpointError(f"{target}: cannot be written (No space left on device); make room or repair the disk")


@pytest.mark.parametrize("text", ["[]", '{"ort": 1}', '{"ort": {"1": 2}}', '{"ort": {"1": {"effective": 3}}}'])
@pytest.mark.usefixtures("_place")
def test_what_is_no_record_of_passes_is_said_in_our_words(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("passes.json").write_text(text, encoding="utf-8")
    assert main(["onnx", "passes", "--golden", "passes.json"]) == 3
    said = capsys.readouterr().err
    assert "passes.json: this is no record of passes (" in said and "object" not in said


def test_an_opset_and_an_axis_that_do_not_exist_are_refused() -> None:
    inputs = {"input": torch.ones(2, 3)}
    for opset in (-1, 0, 99):
        with pytest.raises(ValueError, match=f"there is no opset {opset}; choose from 1 to"):
            export(nn.Linear(3, 3), inputs, opset=opset)
    with pytest.raises(UserInputError, match=r"input is bfloat16, which numpy does not have; give module\.float\(\)"):
        export(torch.nn.Linear(3, 3).bfloat16(), {"input": torch.zeros(2, 3, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"input has no axis 2; its sizes are \[2, 3\]"):
        export(nn.Linear(3, 3), inputs, dynamic={"input": {2: "rows"}})
    with pytest.raises(ValueError, match=r"given for inputs, which is no input; did you mean .input.. the inputs are input \[2, 3\]"):
        export(nn.Linear(3, 3), inputs, dynamic={"inputs": {0: "rows"}})


@pytest.mark.nightly
def test_sizes_and_a_raised_opset_are_said(repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.onnx"
    assert main(["onnx", "export", str(repo_root / "golden" / "reference"), str(target), "--opset", "17"]) == 0
    said = capsys.readouterr().out
    assert "opset 18, inputs input_ids [2, 12], attention_mask [2, 12], checked" in said
    assert "note: opset 18, not 17: the exporter dynamo" in said and "note: these sizes are fixed" in said
    dynamic = ["--dynamic", "input_ids:0=batch", "--dynamic", "attention_mask:0=batch"]
    assert main(["onnx", "export", str(repo_root / "golden" / "reference"), str(target), *dynamic]) == 0
    assert "inputs input_ids [batch, 12], attention_mask [batch, 12], checked\n" in capsys.readouterr().out


def test_colours_and_line_breaks_of_another_library_are_left_out() -> None:
    assert plain_text("\x1b[96mThis is step\x1b[0m 1/3\n of") == "This is step 1/3 of"


SAID = {
    "NOT_SEEN": (["census", "check", "roundtrip", "explain", "passes"], [streams.__doc__, census.__doc__]),
    "EVIDENCE": (["check", "roundtrip", "explain", "passes"], [NumericEqual.__doc__]),
    "OUTSIDE": (["run"], []),
    "OUT_OF_REACH": (["run"], [sys.modules[forced_skips.__module__].__doc__, forced_skips.__doc__]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_not_promised_is_said_in_the_same_words_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    actions, texts = SAID[name]
    readme = (Path(__file__).parents[3] / "harness" / "onnx_graph" / "README.md").read_text(encoding="utf-8")
    for action in actions:
        with pytest.raises(SystemExit):
            main(["onnx", action, "--help"])
    printed = capsys.readouterr().out.split("usage: ")[1:]
    words = "".join(getattr(supervision, name).split())
    missing = [text for text in (readme, *texts, *printed) if words not in "".join((text or "").split())]
    assert len(printed) == len(actions) and not missing, missing


@pytest.mark.parametrize(
    ("error", "limit_db", "is_wrong"), [(0.03, 90.0, False), (0.033, 90.0, True), (1.0, 90.0, True), (1.0, 35.0, False)]
)
def test_the_boundary_of_numeric_equal_lies_where_it_is_said(error: float, limit_db: float, is_wrong: bool) -> None:
    """A slice with so little energy that the whole output does not notice it."""
    expected = np.random.default_rng(0).standard_normal((8, 1000))
    expected[0] *= 1e-5
    actual = expected.copy()
    actual[0] *= 1 + error
    row = output_row("y", expected, actual)
    assert row.wrong(Limit.of(limit_db)) is is_wrong and row.sqnr_db > 100


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.bool_])
@pytest.mark.parametrize(("wrong", "limit_db", "is_wrong"), [(1, 90.0, True), (1000, 35.0, True), (10, 35.0, False), (0, 90.0, False)])
def test_of_ids_each_is_right_or_another_however_large_they_are(dtype: type, wrong: int, limit_db: float, is_wrong: bool) -> None:
    expected = np.random.default_rng(0).integers(0, 250_000 if dtype is not np.bool_ else 2, 1000).astype(dtype)
    actual = expected.copy()
    actual[:wrong] = ~actual[:wrong] if dtype is np.bool_ else actual[:wrong] + 1
    assert output_row("next token", expected, actual).wrong(Limit.of(limit_db)) is is_wrong


def test_codes_of_one_byte_are_rounded_like_numbers() -> None:
    expected = np.random.default_rng(0).integers(0, 250, (10, 100)).astype(np.uint8)
    assert not output_row("codes", expected, expected + np.uint8(1)).wrong(Limit.of(35.0))


def test_every_contract_of_a_flag_that_is_given_again_is_checked(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")
    onnx.save(attention_graph, before)
    onnx.save(optimize(attention_graph, "onnxsim"), after)
    assert main(["onnx", "check", before, after, "--contract", "numeric-equal"]) == 0
    assert main(["onnx", "check", before, after, "--contract", "separate-qkv", "--contract", "numeric-equal"]) == 1
    assert "SeparateQKV" in capsys.readouterr().out
    assert main(["onnx", "check", before, after, "--contract", "separate-qkv", "--contract", "nothing"]) == 3


@pytest.mark.parametrize(
    "words",
    [
        ["export", "m", "o.onnx", "--opset", "17", "--opset", "18"],
        ["roundtrip", "m.onnx", "--output-dir", "a", "--output-dir", "b"],
        ["explain", "m.onnx", "--backend", "ort", "--backend", "onnxoptimizer"],
    ],
)
def test_a_flag_of_one_value_is_refused_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["onnx", *words])
    assert ended.value.code == 3
    assert f"{words[-2]}: {words[-3]} and {words[-1]} were given, and it holds one value; give it once" in capsys.readouterr().err
