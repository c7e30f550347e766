"""A quantized checkpoint goes into ONNX with its own codes, bit by bit, and its contracts survive."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from transformers import LlamaForCausalLM

from compressor import oneshot
from compressor.errors import UserInputError
from compressor.nn import QuantizedLinear
from harness import NumericEqual, QDQPreserved, SeparateQKV
from harness.cli import main
from harness.errors import HarnessError
from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts import numbers
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.stored import codes_lost, stored_numbers
from harness.onnx_graph.graph.drawn_inputs import example_inputs, other_inputs
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.run_session import POLICIES, Limit, run_graph, sqnr_db
from harness.onnx_graph.graph.view import GraphView
from harness.onnx_graph.roundtrip import export_quantized as quant_export
from harness.onnx_graph.roundtrip.export import example_batch
from harness.onnx_graph.roundtrip.export_quantized import export_quantized, load_quantized_for_export
from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip
from harness.onnx_graph.roundtrip.optimizers import optimize
from tests import tiny

INT4 = {"num_bits": 4, "group_size": 32}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
SCHEMES: dict[str, tuple[dict[str, Any], int]] = {
    "int4 in groups": ({"weights": INT4}, TensorProto.INT4),
    "int4 in groups, asymmetric": ({"weights": {**INT4, "symmetric": False}}, TensorProto.UINT4),
    "int3 in groups": ({"weights": {**INT4, "num_bits": 3}}, TensorProto.INT4),
    "int8 per channel, dynamic input": (
        {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}},
        TensorProto.INT8,
    ),
    "int8 per tensor, static input": ({"weights": {"num_bits": 8, "strategy": "tensor"}, "input_activations": STATIC}, TensorProto.INT8),
    "fp8 per tensor, static input": (
        {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "input_activations": {**STATIC, "type": "float"}},
        TensorProto.FLOAT8E4M3FN,
    ),
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny.llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1, dtype="bfloat16").to(torch.bfloat16)


def _compress(model: LlamaForCausalLM, folder: Path, scheme: dict[str, Any]) -> Path:
    model.save_pretrained(folder / "base")
    group = {"targets": ["Linear"], **scheme}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"group_0": group}}}}}
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    oneshot(folder / "base", recipe=recipe, dataset=list(ids), output_dir=folder / "quantized", device="cpu")
    return folder / "quantized"


@pytest.mark.parametrize(("scheme", "element"), SCHEMES.values(), ids=SCHEMES.keys())
def test_the_graph_holds_the_codes_of_the_checkpoint(llama: LlamaForCausalLM, tmp_path: Path, scheme: dict[str, Any], element: int) -> None:
    model = load_quantized_for_export(_compress(llama, tmp_path, scheme))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    inputs = example_batch(model)
    exported = export_quantized(model, inputs)
    onnx.checker.check_model(exported.model, full_check=True)
    held = {tensor.name: tensor for tensor in exported.model.graph.initializer}
    for name, layer in layers.items():
        node = next(one for one in exported.model.graph.node if one.name == f"dequantize {name}")
        assert held[node.input[0]].data_type == element
        codes = onnx.numpy_helper.to_array(held[node.input[0]])
        expected = layer.codes()
        if element == TensorProto.FLOAT8E4M3FN:
            found, wanted = codes.view(np.uint8), expected.view(torch.uint8).numpy()
        else:
            found, wanted = codes.astype(np.int32) - (8 if element == TensorProto.UINT4 else 0), expected.numpy().astype(np.int32)
        assert np.array_equal(found, wanted) or np.array_equal(found.T, wanted), f"{name}: other codes"
    found_census = census(exported.model)
    assert found_census.counts == {"SEPARATE": 1} and found_census.blocks[0].projections["q"][0].stored == "codes"
    with torch.no_grad():
        logits = model(**inputs).logits.numpy()
    ties = scheme.get("input_activations", {}).get("dynamic")  # of an input that is rounded as it comes, one may fall the other way
    assert sqnr_db(logits, run_graph(exported.model, exported.inputs or {}, POLICIES["golden"])[0]) > (70 if ties else 100)
    assert {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)} == set(layers), (
        "the export kept float layers"
    )


def test_codes_and_roles_survive_simplifying(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    trip = onnx_roundtrip(_compress(llama, tmp_path, SCHEMES["int4 in groups"][0]), exporters=["torchscript"])
    trip.assert_holds(QDQPreserved() & SeparateQKV(), skip=["fuse_qkv", "fuse_attention"])


def test_every_layer_that_leaves_its_codes_is_told(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    model = load_quantized_for_export(_compress(llama, tmp_path, SCHEMES["int4 in groups"][0]))
    exported = export_quantized(model, example_batch(model)).model
    assert QDQPreserved().check(exported, optimize(exported, "ort-basic")).holds
    held = {one.name: one for one in exported.graph.initializer}
    told = set()
    for place, node in enumerate(exported.graph.node):
        if node.op_type != "DequantizeLinear":
            continue
        alone = helper.make_graph([node], "one", [], [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)])
        alone.initializer.extend(held[name] for name in node.input)
        made = helper.make_model(alone, opset_imports=exported.opset_import, ir_version=exported.ir_version)
        weight = run_graph(made, {}, POLICIES["golden"])[0]
        for factor, holding in ((1.0, Holding.VIOLATED), (1.5, Holding.NOT_ANALYSED)):
            floats = onnx.ModelProto.FromString(exported.SerializeToString())
            del floats.graph.node[place]
            floats.graph.initializer.append(onnx.numpy_helper.from_array(weight * np.float32(factor), node.output[0]))
            result = QDQPreserved().check(exported, floats)
            is_role = any(part in node.name for part in ("q_proj", "k_proj", "v_proj"))
            assert result.holding is (Holding.VIOLATED if is_role else holding), result.message
            told.add(is_role)
    assert told == {True, False}


FORMS = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (int64[2, 5] ids, float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 8, 5] z, float[2, 8, 5] w)
<int8[16, 8] table, int8[8, 8, 1] kernel, int8[8, 8] matrix, float s = {0.5}, int8 zero = {0}, uint8 mid = {128}>
{
  t = DequantizeLinear(table, s, zero)
  e = Gather(t, ids)
  m = DequantizeLinear(matrix, s, zero)
  p = MatMul(e, m)
  y = Add(p, x)
  turned = Transpose<perm = [0, 2, 1]>(x)
  k = DequantizeLinear(kernel, s, zero)
  z = Conv(turned, k)
  codes = QuantizeLinear(turned, s, mid)
  c = QLinearConv(codes, s, mid, kernel, s, zero, s, mid)
  w = DequantizeLinear(c, s, mid)
}
"""


def _forms(changes: dict[str, str]) -> onnx.ModelProto:
    text = FORMS
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    made = onnx.parser.parse_model(text)
    draw = np.random.default_rng(0)
    shapes = {"table": (16, 8), "kernel": (8, 8, 1), "matrix": (8, 8)}
    held = {name: draw.integers(-9, 9, shape).astype(np.int8) for name, shape in shapes.items()}
    held |= {f"float_{name}": (codes * 0.5).astype(np.float32) for name, codes in held.items()}
    kept = [one for one in made.graph.initializer if one.name not in held]
    del made.graph.initializer[:]
    used = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend([*kept, *(onnx.numpy_helper.from_array(one, name) for name, one in held.items() if name in used)])
    return made


LEFT = {
    "a table": ({"  t = DequantizeLinear(table, s, zero)\n": "", "Gather(t, ids)": "Gather(float_table, ids)"}, Holding.VIOLATED),
    "a kernel": ({"  k = DequantizeLinear(kernel, s, zero)\n": "", "Conv(turned, k)": "Conv(turned, float_kernel)"}, Holding.VIOLATED),
    "a matrix": ({"  m = DequantizeLinear(matrix, s, zero)\n": "", "MatMul(e, m)": "MatMul(e, float_matrix)"}, Holding.VIOLATED),
    "a convolution of codes": (
        {"QLinearConv(codes, s, mid, kernel, s, zero, s, mid)": "Conv(turned, float_kernel)", "DequantizeLinear(c, s, mid)": "Identity(c)"},
        Holding.VIOLATED,
    ),
    "a matrix that is quantized as it is read": (
        {"m = DequantizeLinear(matrix, s, zero)": "q = QuantizeLinear(float_matrix, s, zero) m = DequantizeLinear(q, s, zero)"},
        Holding.VIOLATED,
    ),
    "another table": ({"DequantizeLinear(table, s, zero)": "Mul(float_table, s)"}, Holding.NOT_ANALYSED),
    "rows that are dequantized": (
        {"t = DequantizeLinear(table, s, zero)": "t = Gather(table, ids)", "Gather(t, ids)": "DequantizeLinear(t, s, zero)"},
        Holding.HOLDS,
    ),
    "a cast": ({"m = DequantizeLinear(matrix, s, zero)": "f = Cast<to = 1>(matrix) m = Mul(f, s)"}, Holding.HOLDS),
}


@pytest.mark.parametrize("name", LEFT)
def test_whatever_holds_codes_is_seen_to_leave_them(name: str) -> None:
    changes, holding = LEFT[name]
    before, after = (stored_numbers(GraphView(load_graph(_forms(one)))) for one in ({}, changes))
    found = codes_lost(before, after)
    assert (Holding.VIOLATED if found.floats else Holding.NOT_ANALYSED if found.gone else Holding.HOLDS) is holding


ROWS = LEFT["rows that are dequantized"][0]
CAST = {**ROWS, "DequantizeLinear(t, s, zero)": "Mul(u, s)", "t = Gather(table, ids)": "t = Gather(table, ids) u = Cast<to = 1>(t)"}

SHIFTED = {"t = DequantizeLinear(table, s, zero)": "u = Neg(table) t = DequantizeLinear(u, s, zero)"}


@pytest.mark.parametrize(("form", "holding"), [(ROWS, Holding.VIOLATED), (CAST, Holding.NOT_ANALYSED), (SHIFTED, Holding.NOT_ANALYSED)])
def test_a_table_whose_rows_are_dequantized_is_one_in_codes(form: dict[str, str], holding: Holding) -> None:
    for after, expected in ((form, Holding.HOLDS), (LEFT["a table"][0], holding)):
        found = codes_lost(*(stored_numbers(GraphView(load_graph(_forms(one)))) for one in (form, after)))
        assert (Holding.VIOLATED if found.floats else Holding.NOT_ANALYSED if found.gone else Holding.HOLDS) is expected


def test_a_graph_as_deployed_is_held_to_what_it_comes_to_itself(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_quantized_for_export(_compress(llama, tmp_path, SCHEMES["int8 per channel, dynamic input"][0]))
    exported = export_quantized(model, example_batch(model)).model
    inputs = example_inputs(exported)
    own = sqnr_db(*(run_graph(exported, inputs, POLICIES[name])[0] for name in ("golden", "deploy")))
    assert np.isfinite(own)
    worse = onnx.ModelProto.FromString(exported.SerializeToString())
    codes = next(one for one in worse.graph.initializer if one.data_type == TensorProto.INT8)
    codes.raw_data = np.negative(onnx.numpy_helper.to_array(codes)).tobytes()
    monkeypatch.setitem(POLICIES, "deploy", dataclasses.replace(POLICIES["deploy"], limit=Limit.of(own + 3)))
    same, other = (NumericEqual("deploy").check(exported, one) for one in (exported, worse))
    assert same.holds and any("as deployed the exported graph itself" in note for note in same.notes), same.message
    assert other.holding is Holding.VIOLATED
    monkeypatch.setattr(numbers, "LEAST_DB", own + 1)
    same, other = (NumericEqual("deploy").check(exported, one) for one in (exported, worse))
    assert {same.holding, other.holding} == {Holding.NOT_ANALYSED}, same.message
    assert "as deployed the exported graph itself comes to" in same.message and "dB nothing is decided" in same.message
    several = [inputs, *other_inputs(exported, inputs)]
    owns = [sqnr_db(*(run_graph(exported, one, POLICIES[name])[0] for name in ("golden", "deploy"))) for one in several]
    monkeypatch.setattr(numbers, "LEAST_DB", sum(owns) / len(owns))
    assert min(owns) < max(owns)
    same, other = (NumericEqual("deploy").check(exported, one) for one in (exported, worse))
    assert same.holding is Holding.NOT_ANALYSED and other.holding is Holding.VIOLATED  # where it is decided


def test_a_wrong_code_is_noticed_before_the_graph_leaves(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_quantized_for_export(_compress(llama, tmp_path, SCHEMES["int4 in groups"][0]))
    stored = quant_export._stored

    def off_by_one(name: str, layer: QuantizedLinear) -> Any:
        weight = stored(name, layer)
        weight.codes_RC[0, 0] ^= 1
        return weight

    monkeypatch.setattr(quant_export, "_stored", off_by_one)
    with pytest.raises(HarnessError, match="the graph's weight is not the layer's, bit by bit"):
        export_quantized(model, example_batch(model))


def test_what_has_no_form_in_onnx_is_refused_by_name(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    model = load_quantized_for_export(_compress(llama, tmp_path, {"weights": weights}))
    with pytest.raises(UserInputError, match=r"layers\.0\.self_attn\.q_proj: weights in float with strategy 'tensor_group'"):
        export_quantized(model, example_batch(model))
    with pytest.raises(UserInputError, match="it holds no quantized linear layer"):
        export_quantized(llama, example_batch(llama))


@pytest.mark.nightly
def test_the_command_exports_a_compressed_checkpoint(llama: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _compress(llama, tmp_path, SCHEMES["int4 in groups"][0])
    assert main(["onnx", "export", str(folder), str(tmp_path / "q.onnx")]) == 0
    assert "7 weights with the checkpoint's own codes" in capsys.readouterr().out
    assert onnx.load(tmp_path / "q.onnx").opset_import[0].version == 21


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:transformers .* will not load these experts")
@pytest.mark.parametrize(
    ("scheme", "exporter"),
    [
        ("int4 in groups", "dynamo"),
        ("int4 in groups", "torchscript"),
        ("int8 per channel, dynamic input", "torchscript"),
        pytest.param("int8 per channel, dynamic input", "dynamo", marks=pytest.mark.nightly),  # half a minute in torch.export
    ],
)
def test_experts_keep_their_codes_and_route_other_tokens_as_the_model_does(tmp_path: Path, scheme: str, exporter: str) -> None:
    model = tiny.mixtral(
        intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=50, num_hidden_layers=1, num_local_experts=12
    )  # more than the tokens reach
    group = {"targets": ["Linear"], **SCHEMES[scheme][0]}
    recipe = {
        "quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["lm_head", "re:.*gate$"], "config_groups": {"g": group}}}}
    }
    oneshot(model, recipe=recipe, output_dir=tmp_path)
    loaded = load_quantized_for_export(tmp_path)
    inputs = {"input_ids": torch.tensor([[7, 9, 7, 9]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    graph = export_quantized(loaded, inputs, exporter=exporter).model
    assert sum(node.name.startswith("dequantize ") for node in graph.graph.node) == 4 + 12 * 3
    for ids in ([[7, 9, 7, 9]], [[1, 44, 30, 12]]):
        other = inputs | {"input_ids": torch.tensor(ids)}
        with torch.no_grad():
            expected = loaded(**other).logits.numpy()
        found = run_graph(graph, {name: tensor.numpy() for name, tensor in other.items()}, POLICIES["golden"])[0]
        assert sqnr_db(expected, found) > (90 if scheme == "int4 in groups" else 30)
