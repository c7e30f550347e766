"""The reader of safetensors folders agrees with the safetensors package on good files and names what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.validation.format.container import read_checkpoint, read_header

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "c.codes": torch.tensor([-128, 127, 0], dtype=torch.int8),
    "d.fp8": torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn),
    "e.scalar": torch.tensor(7, dtype=torch.int64),
    "f.empty": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_reads_what_safetensors_wrote_byte_for_byte(folder):
    checkpoint = read_checkpoint(folder)
    assert checkpoint.problems == []
    assert checkpoint.entries.keys() == TENSORS.keys()
    for name, tensor in load_file(folder / "model.safetensors").items():
        read = checkpoint.tensor(name)
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert read.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def rewrite_header(path: Path, change) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the file has"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "the tensors end at byte"),
        (lambda path: path.write_bytes(b"\xff" * 64), "do not hold the header"),
        (lambda path: path.write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000), "nested too deeply"),
        (lambda path: path.write_bytes(b"abc"), "do not hold the header"),
        (lambda path: rewrite_header(path, lambda h: h["a.weight"].update(shape=[3, 5])), "cannot lie in 48 bytes"),
        (lambda path: rewrite_header(path, lambda h: h["a.weight"].update(dtype="F12")), "unknown dtype F12"),
        (lambda path: rewrite_header(path, lambda h: h.pop("b.weight")), "the one before it ends at"),
        (lambda path: rewrite_header(path, lambda h: h["a.weight"].pop("shape")), "shape"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"b.weight"', b'"a.weight"')), "stands twice"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(folder, spoil, message):
    spoil(folder / "model.safetensors")
    problems = read_checkpoint(folder).problems
    assert len(problems) == 1
    assert problems[0].startswith("model.safetensors")
    assert message in problems[0]


def test_a_folder_without_weights_is_named(tmp_path):
    assert read_checkpoint(tmp_path).problems == [
        "without an index there must be model.safetensors and nothing else, found no safetensors file"
    ]


def shard(folder: Path) -> Path:
    first, second = dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])
    (folder / "model.safetensors").unlink()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, folder / name)
    total = sum(tensor.numel() * tensor.itemsize for tensor in TENSORS.values())
    weight_map = {key: names[0] for key in first} | {key: names[1] for key in second}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return index


def test_a_sound_index_has_no_problem(folder):
    shard(folder)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.problems == []
    assert checkpoint.entries.keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].pop("c.codes"), "c.codes of model-00002-of-00002.safetensors is not listed"),
        (lambda index: index["weight_map"].update({"c.codes": "model-00001-of-00002.safetensors"}), "found in model-00002-of-00002"),
        (lambda index: index["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"}), "ghost should lie in"),
        (lambda index: index["metadata"].update(total_size=1), "total_size is 1"),
        (lambda index: index.pop("weight_map"), "cannot be read as an index"),
    ],
)
def test_a_lying_index_is_caught(folder, change, message):
    path = shard(folder)
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    assert any(message in problem for problem in read_checkpoint(folder).problems)


def test_a_tensor_in_two_shards_and_a_missing_shard_are_caught(folder):
    shard(folder)
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00003-of-00003.safetensors")
    assert any("lies in model-00001-of-00002.safetensors too" in problem for problem in read_checkpoint(folder).problems)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert any("found in no file" in problem for problem in read_checkpoint(folder).problems)


def test_a_header_without_tensors_is_read(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors") == {}


def test_other_arrays_beside_a_base_are_not_its_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"input_ids": torch.ones(2)}, tmp_path / "tokens.safetensors")
    base = read_checkpoint(tmp_path, finished=False)
    assert set(base.entries) == {"w"}
    assert base.problems == []
    assert read_checkpoint(tmp_path).problems


@pytest.mark.parametrize(("make", "problem"), [
    (lambda path: path.mkdir(), "Is a directory"),
    (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
])  # fmt: skip
def test_what_is_no_file_is_a_problem_and_no_crash(tmp_path, make, problem):
    make(tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).problems == [f"model.safetensors: cannot be read ({problem})"]
