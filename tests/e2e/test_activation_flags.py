"""The memory that a user grants to activations is kept to from the command line, and changes where they lie, never the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli.main import main
from compressor.pipelines.offload.block_pool import ScratchFile


def run(model: Path, tokens: Path, recipe: dict[str, Any], output: Path, *flags: str) -> int:
    paths = ["--dataset", str(tokens), "--output-dir", str(output)]
    return main(["oneshot", str(model), "--recipe", json.dumps(recipe), *paths, "--device", "cpu", "--quiet", "--json", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--activation-memory", "lots"], "activation_memory: 'lots' is no size in bytes"),
        (["--activation-memory", "1e30GB"], "activation_memory: '1e30GB' is more than any machine has"),
        (["--activation-device-memory", "4 bananas"], "activation_device_memory: '4 bananas' is no size in bytes"),
        (["--offload-dir", "/no/such/folder"], "offload_dir: /no/such/folder is no folder that can be written"),
        (["--activation-memory", "1GB", "--engine", "suspend"], "activation_memory: '1GB' was given, but the suspend engine keeps"),
        (["--activation-memory", "1GB", "--pipeline", "basic"], "activation_memory: '1GB' was given, but the basic pipeline"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_in_one_line(
    flags: list[str],
    message: str,
    llama_dir: Path,
    tokens_file: Path,
    w4a16: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "basic" in flags:
        w4a16 = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "scheme": "FP8"}}}}
    assert run(llama_dir, tokens_file, w4a16, tmp_path / "out", *flags) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["cpu", "none", "cuda:1"])
def test_weights_wait_in_main_memory_or_nowhere(
    where: str, llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = llama_dir, tokens_file, w4a16, tmp_path / "out", "--sequential-offload-device", where
    if where == "cuda:1":
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert "'cuda:1' does not exist; choose from cpu, none" in capsys.readouterr().err
        return
    assert run(*words) == 0
    assert (tmp_path / "out" / "config.json").is_file()


def test_activations_on_disk_change_no_byte_of_the_checkpoint(
    llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    plain_write = ScratchFile.write

    def write(self: ScratchFile, data: Any, label: str) -> Any:
        written.append(data.numel())
        return plain_write(self, data, label)

    monkeypatch.setattr(ScratchFile, "write", write)
    offload = tmp_path / "offload"
    offload.mkdir()
    small = ["--engine", "graph", "--batch-size", "2", "--activation-memory", "30kB"]
    assert run(llama_dir, tokens_file, w4a16, tmp_path / "disk", *small, "--offload-dir", str(offload)) == 0
    assert len(written) >= 8 and list(offload.iterdir()) == []
    written.clear()
    assert run(llama_dir, tokens_file, w4a16, tmp_path / "memory", "--engine", "graph", "--batch-size", "2") == 0
    assert not written
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("disk", "memory")]
    assert weights[0] == weights[1]


def test_too_little_memory_and_no_folder_is_refused_with_the_remedies(
    llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engine", "graph", "--batch-size", "2", "--activation-memory", "20kB"]
    assert run(llama_dir, tokens_file, w4a16, tmp_path / "out", *flags) == 1
    error = capsys.readouterr().err
    assert "sample 0 needs" in error and "20,000 bytes" in error and "name an offload_dir" in error
