"""The fixed arrays: right sizes, no file on both sides, the same bytes every time, and never overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from compressor.errors import DatasetError
from tests.reference_model.arrays import ArrayPlan, cut_arrays, main, own_texts

_SMALL = ["--num-calibration", "4", "--num-heldout", "8", "--seq-len", "16"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Every byte is a token; 0 is kept for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture
def project(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A project of ten files, with a model folder that holds only a tokenizer."""
    root = tmp_path / "project"
    for index in range(9):
        path = root / ("compressor", "harness", "tests/compressor")[index % 3] / f"file_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {index}\n" + f"value_{index} = {index}\n" * 4)
    (root / "README.md").write_text("# A project with a text of its own\n")
    (root / "compressor" / "empty.py").write_text("\n")
    (root / "compressor" / "notes.txt").write_text("not a source\n" * 100)
    (root / "model").mkdir()
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    return root


def test_arrays_have_the_planned_sizes_and_share_no_file(project: Path) -> None:
    assert main([str(project / "model"), "--root", str(project), *_SMALL]) == 0
    calibration = load_file(project / "model" / "calibration.safetensors")["input_ids"]
    heldout = load_file(project / "model" / "heldout.safetensors")["input_ids"]
    assert (calibration.shape, heldout.shape) == ((4, 16), (8, 16))
    assert calibration.dtype == heldout.dtype == torch.int32
    record = json.loads((project / "model" / "arrays.json").read_text())
    sides = [set(record[name]["files"]) for name in ("calibration", "heldout")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {file.label for file in own_texts(project)}


def test_arrays_are_written_without_metadata_and_twice_the_same(project: Path, tmp_path: Path) -> None:
    folders = [project / "model", tmp_path / "again"]
    folders[1].mkdir()
    (folders[1] / "tokenizer.json").write_bytes((folders[0] / "tokenizer.json").read_bytes())
    for folder in folders:
        assert main([str(folder), "--root", str(project), *_SMALL]) == 0
    for name in ("calibration.safetensors", "heldout.safetensors", "arrays.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    with safe_open(folders[0] / "heldout.safetensors", "pt") as opened:
        assert opened.metadata() is None


def test_each_file_begins_with_the_end_of_text_token(project: Path, tokenizer: Tokenizer) -> None:
    files = own_texts(project)
    calibration, _, _ = cut_arrays(files, tokenizer, ArrayPlan(4, 8, 16))
    assert calibration.flatten()[0] == 0
    first = tokenizer.encode(files[0].text).ids
    assert calibration.flatten()[1 : 1 + min(len(first), 63)].tolist() == first[:63]


def test_only_sources_and_the_readme_that_say_something_are_read(project: Path) -> None:
    labels = {file.label for file in own_texts(project)}
    assert len(labels) == 10
    assert "README.md" in labels
    assert not labels & {"compressor/empty.py", "compressor/notes.txt"}


def test_too_little_text_says_how_many_tokens_are_missing(project: Path, tokenizer: Tokenizer) -> None:
    files = own_texts(project)
    available = sum(1 + len(tokenizer.encode(file.text).ids) for file in files)
    with pytest.raises(DatasetError, match=f"{available} tokens in 10 files are {1_000 * 16 + 16 - available} too few"):
        cut_arrays(files, tokenizer, ArrayPlan(1_000, 1, 16))


def test_existing_arrays_are_not_touched(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "model" / "heldout.safetensors").write_bytes(b"measured on")
    assert main([str(project / "model"), "--root", str(project), *_SMALL]) == 2
    assert "heldout.safetensors exist" in capsys.readouterr().err
    assert (project / "model" / "heldout.safetensors").read_bytes() == b"measured on"
    assert not (project / "model" / "calibration.safetensors").exists()


def test_a_folder_without_tokenizer_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no tokenizer.json" in error
