"""Every kind of bad input: one clear line, a non-zero exit, nothing half-written, the input untouched, no hook left behind."""

from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import compressor.modifiers.gptq
import harness.cli
from compressor import oneshot
from compressor.cli.main import main
from compressor.errors import CheckpointError, CompressorError, ModelError


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def recipe_text(**settings: Any) -> str:
    merged = {"scheme": "W4A16", "ignore": ["lm_head"], **settings}
    return json.dumps({"quant_stage": {"quant_modifiers": {"GPTQModifier": merged}}})


GOOD = recipe_text()

CASES: dict[str, tuple[Callable[[Path], dict[str, str]], str]] = {
    "missing folder": (lambda tmp: {"model": str(tmp / "nowhere")}, "nowhere"),
    "unknown preset": (lambda tmp: {"recipe": recipe_text(scheme="W4A17")}, "W4A16"),
    "typo in a field": (lambda tmp: {"recipe": recipe_text(dampening_fraq=0.1)}, "dampening_frac"),
    "typo in a modifier": (lambda tmp: {"recipe": GOOD.replace("GPTQModifier", "GTPQModifier")}, "GPTQModifier"),
    "target that matches nothing": (lambda tmp: {"recipe": recipe_text(targets=["Linaer"])}, "Linear"),
    "ignore that matches nothing": (lambda tmp: {"recipe": recipe_text(ignore=["lm_haed"])}, "lm_head"),
    "missing dataset": (lambda tmp: {"dataset": str(tmp / "none.jsonl")}, "none.jsonl"),
    "empty dataset": (lambda tmp: {"dataset": write(tmp / "empty.jsonl", "")}, "empty.jsonl"),
    "dataset without text or ids": (lambda tmp: {"dataset": write(tmp / "d.jsonl", '{"body": "x"}\n')}, "body"),
    "unknown kind of dataset": (lambda tmp: {"dataset": write(tmp / "d.docx", "x")}, ".docx"),
    "sequence longer than the model": (lambda tmp: {"max-seq-length": "65"}, "64"),
    "group size that does not divide": (
        lambda tmp: {"recipe": recipe_text(scheme=None, config_groups={"g": {"targets": ["Linear"], "weights": {"group_size": 96}}})},
        "14 modules",
    ),
    "a column order that no reader knows": (lambda tmp: {"recipe": recipe_text(actorder="group")}, "actorder='static'"),
    "two schemes of which one is read only alone": (
        lambda tmp: {"recipe": recipe_text(scheme={"W4A16_ASYM": ["re:.*mlp.*_proj"], "W8A16": ["re:.*attn.*_proj"]})},
        "one scheme",
    ),
    "output inside something else": (lambda tmp: {"output-dir": str(_occupied(tmp))}, "occupied"),
}


def _occupied(tmp: Path) -> Path:
    folder = tmp / "occupied"
    folder.mkdir()
    (folder / "keep.txt").write_text("mine")
    return folder


def arguments(llama_dir: Path, tokens_file: Path, tmp_path: Path, changes: dict[str, str]) -> list[str]:
    options = {"recipe": GOOD, "dataset": str(tokens_file), "output-dir": str(tmp_path / "out")} | changes
    model = options.pop("model", str(llama_dir))
    return ["oneshot", model, "--quiet", *(item for name, value in options.items() for item in (f"--{name}", value))]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_line(
    name: str, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, hint = CASES[name]
    changes = make(tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    inputs = {path.name: path.read_bytes() for path in llama_dir.iterdir()}
    assert main(arguments(llama_dir, tokens_file, tmp_path, changes)) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("compressor oneshot: error: ")
    assert hint in lines[0]
    assert captured.out == ""
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert {path.name: path.read_bytes() for path in llama_dir.iterdir()} == inputs


def test_an_already_quantized_model_is_refused(llama_dir: Path, tokens_file: Path, tmp_path: Path) -> None:
    result = oneshot(llama_dir, recipe=GOOD, dataset=tokens_file, output_dir=tmp_path / "out")
    for model in (tmp_path / "out", result.model):
        with pytest.raises(ModelError, match="quantized already"):
            oneshot(model, recipe=GOOD, dataset=tokens_file)


def test_a_full_disk_leaves_nothing_but_the_finished_stages(
    llama_dir: Path, tokens_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"(?i)space") as caught:
        oneshot(llama_dir, recipe=GOOD, dataset=tokens_file, output_dir=tmp_path / "out")
    assert "8 of 8 stages are finished and kept" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "out.partial-run"]


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_restores_a_model_in_memory(
    error: type[BaseException], llama_dir: Path, tokens_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    original, calls = compressor.modifiers.gptq.quantize_gptq, iter(range(100))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:  # in the second layer: the first one is compressed already
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(compressor.modifiers.gptq, "quantize_gptq", interrupted)
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="auto")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error):
        oneshot(model, recipe=GOOD, dataset=tokens_file, output_dir=tmp_path / "out")
    assert hooks_on(model) == 0
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "out.partial-run"]  # holds the first layer, for --resume


def test_ctrl_c_on_the_command_line(
    llama_dir: Path, tokens_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(compressor.modifiers.gptq, "quantize_gptq", interrupted)
    assert main(arguments(llama_dir, tokens_file, tmp_path, {})) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nan_in_the_model_names_the_module(llama_dir: Path, tokens_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="auto")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(CompressorError, match=r"model\.layers\.1\.mlp\.up_proj.*NaN"):
        oneshot(model, recipe=GOOD, dataset=tokens_file)
    assert hooks_on(model) == 0


def test_a_model_in_memory_is_not_moved(llama_dir: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="auto")
    monkeypatch.setattr(
        importlib.import_module("compressor.entrypoints.oneshot"), "resolve_device", torch.device
    )  # as on a machine with a GPU
    with pytest.raises(ModelError, match=r"device='cuda' was given for a model that is on cpu"):
        oneshot(model, recipe=GOOD, dataset=tokens_file, device="cuda")
    monkeypatch.undo()
    assert oneshot(model, recipe=GOOD, dataset=tokens_file, device="cpu").model is model


def test_tokens_outside_the_vocabulary_are_refused(llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"input_ids": torch.full((2, 8), 4000)}, path)
    with pytest.raises(CompressorError, match="4000"):
        oneshot(llama_dir, recipe=GOOD, dataset=path)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "compressor plan x --recipe r --recip-arg a=1",
            "compressor plan: error: --recip-arg: there is no such option; did you mean --recipe-arg?",
        ),
        ("compressor plan x --recipe r -j", "compressor plan: error: -j: there is no such option; see compressor plan --help"),
        ("compressor plan x y --recipe r", "compressor plan: error: 'y' is one argument too many; leave it out"),
        ("compressor recipe chek r", "compressor recipe: error: VERB: 'chek' does not exist; did you mean 'check'?"),
        ("compressor plan x", "compressor plan: error: --recipe is missing; see compressor plan --help"),
        ("compressor oneshot x --recipe", "compressor oneshot: error: --recipe: expected one argument; see compressor oneshot --help"),
        ("harness onnx exprt", "harness onnx: error: ACTION: 'exprt' does not exist; did you mean 'export'?"),
        ("harness check --nn 3", "harness check: error: --nn: there is no such option; see harness check --help"),
    ],
)
def test_wrong_words_of_a_command_line_are_one_line_with_a_remedy(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = arguments.split()
    with pytest.raises(SystemExit) as stop:
        (main if program == "compressor" else harness.cli.main)(words)
    assert stop.value.code == (2 if program == "compressor" else 3)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", line + "\n")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "oneshot"),
        (["oneshot", "--help"], 0, "--num-calibration-samples"),
        (["plan", "--help"], 0, "--recipe"),
        (["oneshot", "model"], 2, "are missing"),
        (["oneshot", "m", "--recipe", "r", "--output-dir", "o", "--batch-size", "0"], 2, "above 0"),
        (["onshot"], 2, "does not exist; "),
    ],
)
def test_help_and_wrong_arguments_answer_without_torch(arguments: list[str], code: int, text: str) -> None:
    script = (
        "import sys\nfrom compressor.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
