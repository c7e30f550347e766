"""Round trips: the story that this part was built for, in both exporters, and what a failure says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from compressor.errors import ModelError, OutputError, UserInputError
from harness import RoleWeights, SameBlockCount, SeparateQKV, onnx_roundtrip
from harness.cli import main
from harness.errors import ContractViolation
from harness.onnx_graph.census.census import census
from harness.onnx_graph.commands.export import parse_dynamic
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.graph.drawn_inputs import example_inputs
from harness.onnx_graph.roundtrip.export import ExportFailure, export, write_graph
from tests import tiny

pytest.importorskip("onnxsim")
WIDTH = 768


class PreNormAttention(nn.Module):
    """The attention of a ViT or Llama layer: norm, three projections, heads, output."""

    def __init__(self, width: int = WIDTH, heads: int = 12, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.heads = heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        h = self.norm(hidden)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-1, -2) / (h.shape[-1] // self.heads) ** 0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Unexportable(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this model refuses")


@pytest.fixture(scope="module")
def attention() -> PreNormAttention:
    torch.manual_seed(0)
    return PreNormAttention().eval()


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return {"hidden": torch.rand(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_default_settings_make_one_projection_of_three_and_the_declared_skips_keep_them(
    attention: PreNormAttention, inputs: dict[str, torch.Tensor], exporter: str
) -> None:
    trip = onnx_roundtrip(attention, inputs, exporters=[exporter])
    with pytest.raises(ContractViolation) as caught:
        trip.assert_holds(SeparateQKV())
    message = str(caught.value)
    assert "block 0 (self) Q = query: expected a layer of its own [768, 768], found packed as columns 0:768 of MatMul" in message
    assert "[768, 2304]" in message and "block 0 (self) V = value" in message
    assert "SQNR inf dB" in message or "max abs" in message
    assert "kept by skipping fuse_qkv" in message
    trip.assert_holds(SeparateQKV() & RoleWeights() & SameBlockCount(), skip=["fuse_qkv", "fuse_attention"])


def test_skipping_one_pass_is_reported_as_insufficient_where_another_absorbs_the_block(attention_graph: onnx.ModelProto) -> None:
    with pytest.raises(ContractViolation, match="absorbed by Attention") as caught:
        onnx_roundtrip(attention_graph).assert_holds(SeparateQKV(), skip=["fuse_qkv"])
    message = str(caught.value)
    assert "violated after file and onnxsim skipping fuse_qkv" in message
    assert "kept by skipping fuse_qkv, fuse_attention" in message


def test_the_matrix_has_a_row_for_each_way_with_counts_and_numbers(attention_graph: onnx.ModelProto) -> None:
    rows = onnx_roundtrip(attention_graph).matrix(
        SeparateQKV(), optimizers=["onnxsim", "ort-all"], skips=[(), ("fuse_qkv", "fuse_attention")]
    )
    assert [(row.optimizer, row.skips) for row in rows] == [("onnxsim", ()), ("onnxsim", ("fuse_qkv", "fuse_attention")), ("ort-all", ())]
    assert [row.result.holding for row in rows] == [Holding.VIOLATED, Holding.HOLDS, Holding.HOLDS]
    assert rows[0].op_changes["MatMul"] == -2 and rows[0].num_nodes[0] == len(attention_graph.graph.node)
    assert rows[0].numbers["golden"].sqnr_db > 90 and rows[0].seconds > 0


def test_a_failing_exporter_is_not_analysed_and_says_why() -> None:
    trip = onnx_roundtrip(Unexportable(), {"hidden": torch.zeros(1, 2)}, exporters=["dynamo"])
    with pytest.raises(ContractViolation, match=r"not analysed after dynamo[\s\S]*Unexportable cannot be exported"):
        trip.assert_holds(SeparateQKV())
    with pytest.raises(UserInputError, match="a module needs example inputs"):
        onnx_roundtrip(Unexportable())
    with pytest.raises(UserInputError, match="no exporter 'fx'"):
        export(Unexportable(), {"hidden": torch.zeros(1)}, exporter="fx")


def test_an_optimizer_that_loses_a_weight_has_a_row_of_its_own(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Onnxscript drops sparse initializers, which told of the exported graph ended the table."""
    pytest.importorskip("onnxscript")
    sparse = onnx.ModelProto()
    sparse.CopyFrom(attention_graph)
    held = next(one for one in sparse.graph.initializer if len(one.dims) == 2)
    values, size = onnx.numpy_helper.to_array(held).ravel(), list(held.dims)
    places = onnx.numpy_helper.from_array(np.arange(values.size), "places")
    sparse.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(onnx.numpy_helper.from_array(values, held.name), places, size))
    sparse.graph.initializer.remove(held)
    onnx.save(sparse, tmp_path / "sparse.onnx")
    way = ["onnx", "roundtrip", str(tmp_path / "sparse.onnx"), "--contract", "role-weights", "--json"]
    assert main([*way, "--optimizer", "onnxscript", "--optimizer", "ort-basic"]) == 2
    lost, kept = (row["result"] for row in json.loads(capsys.readouterr().out))
    assert lost["holding"] == "not analysed" and kept["holding"] == "holds"
    said = lost["findings"][0]["text"]
    assert said.startswith("onnxscript: it made a graph that cannot run: MatMul") and said.endswith("which nothing computes; leave it out")


@pytest.mark.nightly
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_dynamic_sizes_and_training_mode_survive_the_export(exporter: str) -> None:
    torch.manual_seed(0)
    module = PreNormAttention(width=32, heads=2, bias=True).train()
    sample = {"hidden": torch.rand(2, 5, 32)}
    exported = export(module, sample, exporter=exporter, dynamic={"hidden": {0: "batch", 1: "length"}})
    assert module.training, "the export changed the mode of the module"
    assert [dimension.dim_param for dimension in exported.model.graph.input[0].type.tensor_type.shape.dim][:2] == ["batch", "length"]
    assert census(exported.model).counts == {"SEPARATE": 1}
    with pytest.raises(UserInputError, match="a dynamic size is given for ids"):
        export(module, sample, dynamic={"ids": {0: "batch"}})
    with pytest.raises(ExportFailure, match="cannot be exported"):
        export(Unexportable(), sample, exporter=exporter)


def test_inputs_are_drawn_within_tables_and_masks_are_ones(tiny_text_graph: onnx.ModelProto) -> None:
    drawn = example_inputs(tiny_text_graph, seed=3)
    assert drawn["input_ids"].max() < 11 and drawn["input_ids"].dtype == np.int64
    assert drawn["attention_mask"].min() == 1
    assert all(np.array_equal(drawn[name], array) for name, array in example_inputs(tiny_text_graph, seed=3).items())


@pytest.fixture
def tiny_text_graph() -> onnx.ModelProto:
    from onnx import TensorProto, helper, numpy_helper

    table = numpy_helper.from_array(np.ones((11, 4), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Unsqueeze", ["attention_mask", "last"], ["column"]),
        helper.make_node("Cast", ["column"], ["float_mask"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "float_mask"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 4])]
    graph = helper.make_graph(nodes, "text", inputs, outputs, [table, numpy_helper.from_array(np.array([-1]), "last")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_a_graph_is_written_whole_with_its_data_beside_it_when_large(attention_graph: onnx.ModelProto, tmp_path: Path) -> None:
    write_graph(attention_graph, tmp_path / "small.onnx")
    (tmp_path / "other.onnx.data").write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"other\.onnx\.data: the weights go there, and what is there belongs to no graph other\.onnx"):
        write_graph(attention_graph, tmp_path / "other.onnx", limit_bytes=10)
    for _ in range(2):
        write_graph(attention_graph, tmp_path / "large.onnx", limit_bytes=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data", "other.onnx.data", "small.onnx"]
    assert RoleWeights().check(attention_graph, tmp_path / "large.onnx").holds
    with pytest.raises(OutputError, match="there is no folder"):
        write_graph(attention_graph, tmp_path / "none" / "m.onnx")


@pytest.mark.nightly  # every change exports, counts and goes round by other commands of this folder
def test_the_commands_export_and_go_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.llama(num_key_value_heads=4).save_pretrained(tmp_path / "llama")
    graph = str(tmp_path / "llama.onnx")
    folder = str(tmp_path / "llama")
    length = [word for name in ("input_ids", "attention_mask") for word in ("--dynamic", f"{name}:1=length")]
    assert main(["onnx", "export", folder, graph, "--exporter", "torchscript", "--opset", "17", *length]) == 0
    assert onnx.load(graph).opset_import[0].version == 17
    assert main(["onnx", "export", folder, graph, "--modality", "audio"]) == 3
    assert main(["onnx", "export", str(tmp_path), graph, "--model-class", "LlamaForCausalLM"]) == 3
    assert main(["onnx", "census", folder, "--model-class", "LlamaForCausalLM"]) == 0
    assert main(["onnx", "explain", folder, "--model-class", "LlamaForCausalLM"]) == 0
    assert "kept by skipping: fuse_qkv" in capsys.readouterr().out
    way = [
        "onnx",
        "roundtrip",
        folder,
        "--exporter",
        "torchscript",
        "--optimizer",
        "onnxsim",
        "--opset",
        "17",
        "--model-class",
        "LlamaForCausalLM",
    ]
    assert main([*way, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["result"]["holding"] for row in rows] == ["violated"]
    assert main(["onnx", "roundtrip", graph, "--optimizer", "onnxsim", "--skip", "fuse_qkv", "--contract", "same-block-count"]) == 0
    assert "fuse_qkv" in capsys.readouterr().out
    assert main(["onnx", "roundtrip", graph, "--skip", "fuse_qvk"]) == 3
    assert main(["onnx", "roundtrip", graph, "--optimizer", "none"]) == 3


def test_dynamic_sizes_are_read_strictly() -> None:
    assert parse_dynamic(["input_ids:0=batch", "input_ids:1=length"]) == {"input_ids": {0: "batch", 1: "length"}}
    for text in ("input_ids", "input_ids:x=batch", "input_ids:0=1st", ":0=batch"):
        with pytest.raises(UserInputError, match="is not INPUT:AXIS=NAME"):
            parse_dynamic([text])


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        onnx_roundtrip(tmp_path)
