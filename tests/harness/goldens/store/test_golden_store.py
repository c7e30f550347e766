"""The store tells apart what passed, regressed, drifted, is missing or loosened; files hold every bit and nothing of the moment."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from harness.errors import GoldenError
from harness.goldens.golden import GoldenMismatch
from harness.goldens.store.candidates import read_candidate
from harness.goldens.store.manifest import read_manifest
from harness.goldens.store.store import GoldenStore
from harness.tolerance import T0, T1, T2, T3
from harness.tolerance.bits import from_bytes, to_bytes

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def every_kind() -> dict[str, Tensor]:
    raw = torch.arange(96, dtype=torch.uint8)
    plain = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, *FLOAT8]
    plain += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    plain += [torch.float4_e2m1fn_x2, torch.int4]
    tensors = {str(dtype): from_bytes(raw, dtype, (2, 48 // torch.empty(0, dtype=dtype).element_size())) for dtype in plain}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors["half complex"] = torch.tensor([1 + 2j]).to(torch.complex32)
    payloads = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 1 << 29], dtype=torch.int32).view(torch.float32)
    return {
        **tensors,
        "bool": torch.arange(9) % 2 == 0,
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "NaN payloads, -0": payloads,
        "every fp8 byte": torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "with gradient": torch.ones(2, requires_grad=True),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


def test_every_kind_of_tensor_comes_back_bit_by_bit(shelf) -> None:
    tensors = every_kind()
    shelf.write("kinds", tensors)
    assert shelf.check("kinds", tensors)["verdict"] == "pass"
    entry = read_manifest(shelf.root).goldens["kinds"]
    loaded = GoldenStore(shelf.root).load(entry, entry.variants[0])
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().contiguous()
        assert (loaded[name].dtype, loaded[name].shape) == (plain.dtype, plain.shape), name
        assert torch.equal(to_bytes(loaded[name]), to_bytes(plain)), name


@pytest.mark.parametrize("name", sorted(set(every_kind()) - {"empty"}))
def test_one_bit_of_any_kind_is_a_regression(shelf, name: str) -> None:
    tensors = every_kind()
    shelf.write("kinds", tensors)
    raw = to_bytes(tensors[name].detach().resolve_conj()).clone()
    raw[-1, -1] ^= 1
    dtype, shape = tensors[name].dtype, tuple(tensors[name].shape)
    found = shelf.check("kinds", {**tensors, name: from_bytes(raw, dtype, shape)})
    assert found["verdict"] == "outputs regressed"
    assert name in found["summary"]


def test_a_golden_is_one_file_without_metadata_and_one_sorted_manifest(shelf) -> None:
    shelf.write("b/two", {"y": torch.ones(2), "x": torch.ones(3)}, inputs={"in": torch.ones(1)}, recipe="stage: {}", seed=3)
    shelf.write("b/one", torch.ones(2))
    assert sorted(shelf.content()) == ["b/manifest.json", "b/one.safetensors", "b/two.safetensors"]
    with safe_open(shelf.root / "b" / "two.safetensors", "pt") as file:
        assert file.metadata() is None
        assert sorted(file.keys()) == ["x", "y"]
    text = (shelf.root / "b" / "manifest.json").read_text()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, indent=1) + "\n"
    entry = data["goldens"]["b/two"]
    variant = entry["variants"][0]
    assert variant["tensors"]["x"]["shape"] == [3]
    assert variant["tensors"]["x"]["dtype"] == "float32"
    assert len(variant["tensors"]["x"]["sha256"]) == len(entry["inputs"]["in"]["sha256"]) == len(entry["recipe"]) == 64
    assert entry["seed"] == 3
    assert {"device", "architecture", "instruction_set"} == set(variant["platform"])
    assert {"python", "torch"} <= set(variant["versions"])
    assert entry["tier"] == {"*": {"tier": "T0"}}


def test_equal_tensors_give_equal_bytes_and_a_second_write_changes_nothing(shelf) -> None:
    tensors = every_kind()
    shelf.write("x", tensors)
    before = shelf.content()
    done = shelf.write("x", dict(reversed(tensors.items())), update="all")
    assert (done.written, done.unchanged) == ((), ("x",))
    assert shelf.content() == before


def test_inputs_that_drifted_do_not_read_as_a_regression(shelf) -> None:
    shelf.write("x", torch.ones(2), inputs={"a": torch.ones(3), "text": "abc", "n": 3}, recipe={"scheme": "W4A16"}, seed=1)
    same = {"inputs": {"a": torch.ones(3), "text": "abc", "n": 3}, "recipe": {"scheme": "W4A16"}, "seed": 1}
    assert shelf.check("x", torch.ones(2), **same)["verdict"] == "pass"
    assert shelf.check("x", torch.zeros(2), **same)["verdict"] == "outputs regressed"
    for change in (
        {"inputs": {**same["inputs"], "a": torch.ones(3).to(torch.bfloat16)}},
        {"inputs": {**same["inputs"], "a": torch.ones(1, 3)}},
        {"inputs": {**same["inputs"], "text": "abd"}},
        {"inputs": {"a": torch.ones(3), "text": "abc"}},
        {"inputs": {}},
        {"recipe": {"scheme": "W8A16"}},
        {"recipe": None},
        {"seed": 2},
    ):
        for outputs in (torch.zeros(2), torch.ones(2)):
            found = shelf.check("x", outputs, **{**same, **change})
            assert found["verdict"] == "inputs drifted", change
            assert "not judged" in found["message"]


def test_a_missing_golden_fails_and_nothing_is_written(shelf) -> None:
    found = shelf.check("nothing/here", torch.ones(2))
    assert found["verdict"] == "missing"
    assert "--golden-update=new" in found["message"]
    assert not shelf.root.exists()


def test_tensors_that_came_or_went_are_named(shelf) -> None:
    shelf.write("x", {"a": torch.ones(2), "b": torch.ones(2)})
    assert "lacks the tensors ['b']" in shelf.check("x", {"a": torch.ones(2)})["summary"]
    assert "has more tensors: ['c']" in shelf.check("x", {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)})["summary"]


def test_the_message_has_the_whole_difference_and_what_to_do(shelf) -> None:
    shelf.write("x", {"out": torch.arange(1.0, 7.0).reshape(2, 3)})
    changed = torch.arange(1.0, 7.0).reshape(2, 3)
    changed[1, 0] += 0.5
    found = shelf.check("x", {"out": changed})
    for piece in ("outputs regressed", "max abs", "0.5", "SQNR", "1 of 6", "16.67%", "[1, 0]", "harness golden diff --cache-dir"):
        assert piece in found["message"]


def test_a_looser_limit_in_the_test_fails_until_there_is_a_reason(shelf) -> None:
    shelf.write("x", torch.ones(4))
    assert shelf.check("x", torch.ones(4), tier=T1(4))["verdict"] == "limit loosened"
    assert shelf.check("x", torch.ones(4), elsewhere=T1(4))["verdict"] == "limit loosened"
    before = shelf.content()
    with pytest.raises(GoldenMismatch, match="limit loosened"):
        shelf.write("x", torch.ones(4), tier=T1(4))
    with pytest.raises(GoldenMismatch, match="limit loosened"):
        shelf.write("x", torch.ones(4), tier=T1(4), reason="  ")
    assert shelf.content() == before
    shelf.write("x", torch.arange(1.0, 5.0), tier=T1(4), reason="sums run in another order")
    entry = read_manifest(shelf.root).goldens["x"]
    assert entry.history[-2]["what"] == "tier loosened" or entry.history[-1]["what"] in ("tier loosened", "elsewhere loosened")
    assert {step["reason"] for step in entry.history[1:]} == {"sums run in another order"}
    assert shelf.check("x", torch.arange(1.0, 5.0), tier=T1(4))["verdict"] == "pass"
    assert shelf.check("x", torch.arange(1.0, 5.0), tier=T1(2))["verdict"] == "pass", "a stricter test needs nobody's leave"


def test_loosening_and_a_regression_together_need_a_reason_too(shelf) -> None:
    shelf.write("x", torch.arange(1.0, 5.0), inputs={"a": 1})
    with pytest.raises(GoldenMismatch, match="limit loosened"):
        shelf.write("x", torch.arange(2.0, 6.0), inputs={"a": 2}, tier=T1(4))


@pytest.mark.parametrize("tier", [T3(min_sqnr_db=3.0), T1(1 << 24), T3(max_relative_error=2.0)], ids=str)
def test_a_limit_that_lets_decoys_through_is_never_written_and_never_passes(shelf, tier) -> None:
    tensor = torch.arange(1.0, 9.0)
    assert shelf.check("x", tensor, tier=tier)["verdict"] == "limit is vacuous"
    with pytest.raises(GoldenMismatch, match="plainly wrong"):
        shelf.write("x", tensor, tier=tier)
    assert not shelf.root.exists()
    shelf.write("y", tensor)
    path = shelf.root / "manifest.json"
    path.write_text(path.read_text().replace('"tier": "T0"', json.dumps(tier.to_dict())[1:-1]))
    assert shelf.check("y", tensor, tier=tier)["verdict"] == "limit is vacuous"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([math.inf, -math.inf], "infinity"),
        ([math.nan, math.inf], "NaN and infinity"),
        ([math.nan], "NaN"),
        ([math.nan, 0.0, -0.0], "NaN and zeros"),
        ([0.0, math.inf], "infinity and zeros"),
        ([0.0, -math.inf, math.nan], "NaN and infinity and zeros"),
        ([complex(math.nan, 0.0)] * 2, "NaN"),
        ([complex(0.0, math.inf), 0j], "infinity and zeros"),
        (0.0, "zeros"),
        ([0.0], "zeros"),
        (math.inf, "infinity"),
        (0, "zeros"),
        (False, "zeros"),
    ],
)
def test_what_no_computation_meant_is_never_written(shelf, values, said) -> None:
    with pytest.raises(GoldenMismatch, match=f"is nothing but {said}, which says that nothing was computed"):
        shelf.write("x", torch.tensor(values))
    shelf.write("mask", torch.tensor([0.0, -math.inf]))
    shelf.write("one number", torch.tensor([math.nan, 0.0, 1e-30]))


def test_zeros_and_a_limit_are_kept_beside_values_only(shelf) -> None:
    lone = {"zero_point": torch.zeros(3, dtype=torch.int8), "loss": torch.tensor(0.0), "largest": torch.tensor([math.inf])}
    shelf.write("x", {**lone, "scale": torch.ones(3)})
    for beside in ({}, {"none": torch.ones(0)}, {"twin": torch.tensor(0.0)}):
        with pytest.raises(GoldenMismatch, match="is nothing but"):
            shelf.write("y", {**lone, **beside})
    for word, dead in (("NaN", torch.tensor(math.nan)), ("zeros", torch.zeros(2)), ("infinity", torch.tensor([math.inf] * 2))):
        with pytest.raises(GoldenMismatch, match=f"dead: is nothing but {word}"):
            shelf.write("y", {"scale": torch.ones(3), "dead": dead})


def test_the_neighbouring_layers_tensor_is_a_decoy_but_not_a_second_way_to_compute_one(shelf) -> None:
    layer, other = torch.full((8,), 1.0), torch.full((8,), 1.2)
    assert shelf.check("x", {"a": layer, "b": other}, tier=T3(min_sqnr_db=10.0))["verdict"] == "limit is vacuous"
    shelf.write("y", {"eager": layer, "compiled": layer + 1e-6}, tier=T3(min_sqnr_db=60.0))
    decoy = {"the layer below": layer * 1.0001}
    assert shelf.check("z", layer, tier=T3(min_sqnr_db=60.0), decoys=decoy)["verdict"] == "limit is vacuous"


def test_tiers_by_tensor_and_ties_read_from_the_golden(shelf) -> None:
    weight = torch.tensor([[0.5, 1.2, 2.5, -3.0]])
    scale = torch.tensor([[1.0]])
    tiers = {"codes": T2("weight", scale="scale"), "*": T0()}
    golden = {"codes": torch.tensor([[0, 1, 2, -3]], dtype=torch.int8), "weight": weight, "scale": scale}
    shelf.write("codes", golden, tier=tiers)
    moved = {**golden, "codes": torch.tensor([[1, 1, 3, -3]], dtype=torch.int8)}
    assert shelf.check("codes", moved, tier=tiers)["verdict"] == "pass"
    wrong = {**golden, "codes": torch.tensor([[0, 2, 2, -3]], dtype=torch.int8)}
    assert shelf.check("codes", wrong, tier=tiers)["verdict"] == "outputs regressed"
    excused_by_its_own_scale = {**wrong, "scale": scale * 0.8}
    assert shelf.check("codes", excused_by_its_own_scale, tier=tiers)["verdict"] == "outputs regressed"
    with pytest.raises(GoldenError, match="names \\['cods'\\]"):
        shelf.check("codes", golden, tier={"cods": T1(1)})


def test_a_golden_without_a_value_and_a_reason_of_none(shelf) -> None:
    assert shelf.check("x", torch.empty(0, 4))["verdict"] == "limit is vacuous"
    shelf.golden("new").check("y", torch.arange(4.0), reason=None)
    with pytest.raises(GoldenError, match="not tensors by name"):
        shelf.golden("new").inputs("in", lambda: torch.ones(2))


def test_stored_inputs_are_made_once_and_then_read(shelf) -> None:
    calls = []

    def make() -> dict[str, Tensor]:
        calls.append(1)
        return {"x": torch.rand(3)}

    with pytest.raises(GoldenMismatch, match="no stored inputs"):
        shelf.golden().inputs("in", make)
    assert not calls
    golden = shelf.golden("new")
    first = golden.inputs("in", make)
    from harness.goldens.store.writer import accept

    accept(shelf.root, [read_candidate(Path(golden.outcomes[-1]["candidate"]))])
    for update in ("", "new", "failed", "all"):
        assert torch.equal(shelf.golden(update).inputs("in", make)["x"], first["x"])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no tensors were given"),
        ({"": torch.ones(1)}, "is no name"),
        ({"__metadata__": torch.ones(1)}, "is where a file of safetensors has its metadata; give the tensor another name"),
        ({"a": 3.0}, "float is no tensor"),
        ({"a": [1, 2]}, "list is no tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({"a": torch.ones(2, device="meta")}, "meta tensor"),
        ({"a": np.array(["x"])}, "give a tensor"),
    ],
)
def test_what_is_no_tensor_is_refused(shelf, given, message: str) -> None:
    with pytest.raises(GoldenError, match=message):
        shelf.check("x", given)


def test_numpy_arrays_count_as_tensors(shelf) -> None:
    shelf.write("x", np.arange(6.0).reshape(2, 3))
    assert shelf.check("x", torch.arange(6.0, dtype=torch.float64).reshape(2, 3))["verdict"] == "pass"
    assert shelf.check("x", np.arange(6.0, dtype=np.float32).reshape(2, 3))["verdict"] == "outputs regressed"


@pytest.mark.parametrize("inputs", [{"a": {1, 2}}, {"a": {3: 4}}, {"a": object()}], ids=["set", "int keys", "object"])
def test_inputs_without_bytes_of_their_own_are_refused(shelf, inputs) -> None:
    with pytest.raises(GoldenError, match="give a tensor, a text"):
        shelf.check("x", torch.ones(1), inputs=inputs)


def test_a_failed_check_keeps_its_tensors_and_a_passed_one_clears_them(shelf) -> None:
    shelf.write("x", torch.ones(2))
    shelf.check("x", torch.zeros(2))
    kept = [path.name for path in shelf.cache.rglob("*.safetensors")]
    assert len(kept) == 1
    shelf.check("x", torch.ones(2))
    assert not list(shelf.cache.rglob("x@*"))


def test_a_cache_that_cannot_be_written_does_not_hide_the_failure(shelf) -> None:
    shelf.cache.parent.mkdir()
    shelf.cache.write_text("a file where the folder should be")
    found = shelf.check("x", torch.ones(2))
    assert found["verdict"] == "missing"
    assert "could not be kept" in found["message"]
