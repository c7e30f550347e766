"""`harness report`: what a run did stands on one page, with the numbers of the checkpoint and of the run."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import GPTQModifier, oneshot
from compressor.cli.main import main as compressor
from harness.cli import main
from tests import tiny

RECIPE = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier: {smoothing_strength: 0.5}
    QuantizationModifier: {scheme: FP8, ignore: [lm_head]}
"""


@dataclass(frozen=True)
class Run:
    """A checkpoint, and what the command printed when it made it."""

    folder: Path
    times: Path
    printed: dict[str, Any]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("run")
    model = tiny.llama(intermediate_size=48, num_attention_heads=2)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1.5  # stands out
    model.save_pretrained(root / "base")
    save_file({"input_ids": torch.randint(0, 64, (4, 12))}, root / "data.safetensors")
    (root / "recipe.yaml").write_text(RECIPE)
    given = ["--recipe", str(root / "recipe.yaml"), "--dataset", str(root / "data.safetensors"), "--device", "cpu"]
    given += ["--pipeline", "sequential", "--quiet", "--json"]
    with redirect_stdout(io.StringIO()) as printed:
        assert compressor(["oneshot", str(root / "base"), *given, "--output-dir", str(root / "made")]) == 0
    (root / "run.json").write_text(printed.getvalue())
    return Run(root / "made", root / "run.json", json.loads(printed.getvalue()))


@pytest.fixture(scope="module")
def page(ran: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page") / "report"
    assert main(["report", str(ran.folder), "--times", str(ran.times), "--output-dir", str(made), "--quiet"]) == 0
    return made


def _rows(page: Path, table: str) -> list[list[str]]:
    text = (page / "report.html").read_text(encoding="utf-8")
    body = re.search(rf'<table id="{table}">.*?</table>', text, re.DOTALL)
    assert body is not None
    rows = re.findall(r"<tr><td.*?</tr>", body.group(), re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]


def test_modules_stand_with_the_numbers_of_run_and_checkpoint(ran: Run, page: Path) -> None:
    rows = {row[0]: row for row in _rows(page, "modules")}
    said = {name: one for name, one in ran.printed["modules"].items() if one["modifier"] == "QuantizationModifier"}
    assert list(rows) == sorted(rows, key=lambda name: -said[name]["error"]) and rows.keys() == said.keys() and len(rows) == 14
    tensors = load_file(ran.folder / "model.safetensors")
    for name, (_, scheme, error, tokens, least, greatest, peak, outliers, _, inputs) in rows.items():
        weight = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()
        root = float(weight.square().mean().sqrt())
        assert (scheme, error, tokens) == ("float8 tensor", f"{said[name]['error']:.2e}", "none")
        assert (least, greatest, peak) == (f"{weight.min():.3g}", f"{weight.max():.3g}", f"{weight.abs().max() / root:.1f}")
        assert outliers == ("0" if weight.abs().max() <= 6 * root else f"{1 / weight.numel():.4%}")
        assert inputs == f"{448 * float(tensors[f'{name}.input_scale']):.3g}"
    assert max(rows.values(), key=lambda row: float(row[6]))[0] == "model.layers.1.mlp.up_proj"


def test_loud_input_channels_are_seen(tmp_path: Path) -> None:
    """One channel that a norm makes loud stands out by what the plain model's inputs say."""
    model = tiny.llama(intermediate_size=48, num_attention_heads=2)
    model.model.layers[0].input_layernorm.weight.data[5] = 30.0
    tokens = torch.randint(0, 64, (4, 12))
    seen: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens)
    hook.remove()
    recipe = GPTQModifier(targets=["Linear"], scheme="W8A8", ignore=["lm_head"], dampening_frac=0.1)
    oneshot(model, recipe=recipe, dataset=list(tokens), output_dir=tmp_path / "made")
    assert main(["report", str(tmp_path / "made"), "--output-dir", str(tmp_path / "report"), "--quiet"]) == 0
    modules = json.loads((tmp_path / "report/report.json").read_text())["modules"]
    data, peaks = ({row["name"]: row[key] for row in modules} for key in ("loudest_input", "peak_input"))
    inputs = torch.cat(seen).flatten(0, -2)
    squares = inputs.square().mean(0)
    peak = float(inputs.abs().max() / squares.mean().sqrt())
    assert peak > 10.0 and peaks["model.layers.0.self_attn.q_proj"] == pytest.approx(peak, rel=1e-3)
    expected = float((squares.max() / squares.mean()).sqrt())
    assert expected > 5.0 and data["model.layers.0.self_attn.q_proj"] == pytest.approx(expected, rel=1e-3)
    assert max(data, key=data.__getitem__).startswith("model.layers.0.self_attn.") and len(data) == 14
    rows = {row[0]: row[-2:] for row in _rows(tmp_path / "report", "modules")}
    assert list(rows["model.layers.0.self_attn.q_proj"]) == [f"{peak:.1f}", f"{expected:.1f}"]
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert "Loudest input channel" in page and "Farthest input" in page


def test_layers_and_laps_add_up(ran: Run, page: Path) -> None:
    layers = _rows(page, "layers")
    errors = {name: one["error"] for name, one in ran.printed["modules"].items() if one["scheme"] != "scales moved"}
    for name, count, largest, worst, _, _, seconds in layers:
        mine = {module: error for module, error in errors.items() if module.startswith(f"{name}.")}
        assert (count, largest) == ("7", f"{max(mine.values()):.2e}") and f"{name}.{worst}" == max(mine, key=mine.__getitem__)
        stages = [stage["seconds"] for stage in ran.printed["stages"] if stage["name"].startswith(f"{name}.")]
        assert stages and seconds == f"{sum(stages):.2f}"
    assert sorted(layers, key=lambda row: -float(row[2])) == layers
    assert [row[:2] for row in _rows(page, "phase")] == [[lap["name"], f"{lap['seconds']:.2f}"] for lap in ran.printed["phases"]]
    seconds = [float(row[1]) for row in _rows(page, "stage")]
    assert len(seconds) == len(ran.printed["stages"]) and seconds == sorted(seconds, reverse=True)


def test_the_page_needs_nothing_else_and_says_what_made_it(ran: Run, page: Path) -> None:
    text = (page / "report.html").read_text(encoding="utf-8")
    assert "GB at most" in text and "of main memory" in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and text.count("<svg") == 5
    assert not re.findall(r'(?:src|href)="(?!#)', text) and "<script" not in text and "@import" not in text
    assert "Scales of 4 modules were moved" in text and "largest factor" in text and "SmoothQuantModifier: {}" in text
    data = json.loads((page / "report.json").read_text(encoding="utf-8"))
    assert data["stages"] == ran.printed["stages"] and data["recipe"] == ran.printed["recipe"] and len(data["modules"]) == 18
    marks = json.loads((ran.folder / "compression.json").read_text(encoding="utf-8"))["data"]["marks"]["hex"]
    assert marks and marks not in text  # thousands of digits that nobody reads


def test_equal_runs_give_equal_bytes_and_times_that_are_not_known_are_said_so(
    ran: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(ran.folder), "--json"]) == 0
    output = capsys.readouterr()
    assert main(["report", str(ran.folder), "--output-dir", "again", "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert json.loads(output.out)["phases"] is None and "weights" in output.err and "weights" not in quiet.err
    assert quiet.out == f"report: {tmp_path / 'again' / 'report.html'}\n"
    for name in ("report.html", "report.json"):
        assert (tmp_path / "made-report" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    text = (tmp_path / "again" / "report.html").read_text(encoding="utf-8")
    assert "Not known: no output of" in text and 'id="phase"' not in text and ">seconds<" not in text


def _foreign(ran: Run) -> dict[str, Any]:
    return ran.printed | {"fingerprint": "0" * 64}


LAP = ("seconds", "host_bytes", "host_peak_bytes", "device_peak_bytes", "tokens_per_second")


def _damaged(ran: Run, field: str, value: Any) -> dict[str, Any]:
    first, *rest = ran.printed["phases"]
    return ran.printed | {"phases": [first | {field: value}, *rest]}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (_foreign, "is of another run than the checkpoint"),
        (lambda ran: {"modules": {}}, "has no phases and stages"),
        (lambda ran: ran.printed | {"stages": [{"seconds": 1.0}]}, "has no phases and stages"),
        (lambda ran: [1], "has no phases and stages"),
        *(
            (partial(_damaged, field=field, value=value), f"(phases.0.{field}: ")
            for field in LAP
            for value in ("x", -1, [], float("nan"), 10**400)
        ),
        (partial(_damaged, field="name", value=1.5), "(phases.0.name: 1.5 is not allowed"),
    ],
)
def test_times_of_something_else_are_refused(ran: Run, said: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(said(ran)))
    given = ["report", str(ran.folder), "--times", str(tmp_path / "run.json"), "--output-dir", str(tmp_path / "out"), "--quiet"]
    assert main(given) == 3
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(ran: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--output-dir", str(tmp_path / "out"), "--quiet"]
    for times in (tmp_path / "nowhere.json", ran.folder / "model.safetensors"):
        assert main(["report", str(ran.folder), "--times", str(times), *given]) == 3
        assert "cannot be read" in capsys.readouterr().err
    assert main(["report", str(ran.folder.parent / "base"), *given]) == 3
    assert "holds no compression.json of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere"), *given]) == 3
    assert "there is no such folder" in capsys.readouterr().err
    shutil.copytree(ran.folder, tmp_path / "odd")
    record = json.loads((tmp_path / "odd" / "compression.json").read_text())
    (tmp_path / "odd" / "compression.json").write_text(json.dumps(record | {"modules": {"lm_head": {"error": 1}}}))
    assert main(["report", str(tmp_path / "odd"), *given]) == 3
    assert "does not say of lm_head what a run says" in capsys.readouterr().err
    for part in ({"fallbacks": "x"}, {"modules": {**record["modules"], "lm_head": {"error": "NaN"}}}, {"notes": 3}):
        (tmp_path / "odd" / "compression.json").write_text(json.dumps(record | part))
        assert main(["report", str(tmp_path / "odd"), *given]) == 3
        assert f"compression.json: {next(iter(part))}" in capsys.readouterr().err
    (tmp_path / "odd" / "compression.json").write_text(json.dumps(record))
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"short")
    assert main(["report", str(tmp_path / "odd"), *given]) == 3
    assert "`harness validate` says what is wrong" in capsys.readouterr().err


def test_a_pruned_model_that_stays_dense_is_read_from_its_files_and_foreign_words_are_escaped(ran: Run, tmp_path: Path) -> None:
    recipe = "{prune_modifiers: {MagnitudePruningModifier: {final_sparsity: 0.5, targets: ['re:.*up_proj$']}}}"
    base = str(ran.folder.parent / "base")
    with redirect_stdout(io.StringIO()):
        assert compressor(["oneshot", base, "--recipe", recipe, "--output-dir", str(tmp_path / "made"), "--device", "cpu", "--quiet"]) == 0
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    (tmp_path / "made" / "compression.json").write_text(json.dumps(record | {"notes": ["<b>bold</b>"]}))
    assert main(["report", str(tmp_path / "made"), "--output-dir", str(tmp_path / "page"), "--quiet"]) == 0
    assert {row[0]: row[8] for row in _rows(tmp_path / "page", "modules")} == {
        f"model.layers.{layer}.mlp.up_proj": "50.0%" for layer in range(2)
    }
    text = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;bold" in text and "<b>bold" not in text


def test_a_record_without_notes_and_fallbacks_has_a_page_without_them(ran: Run, page: Path, tmp_path: Path) -> None:
    shutil.copytree(ran.folder, tmp_path / "made")
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    bare = {key: value for key, value in record.items() if key not in ("notes", "fallbacks", "recipe")}
    (tmp_path / "made" / "compression.json").write_text(json.dumps(bare | {"notes": ["said so"]}))
    for number, expected in enumerate((True, False)):
        assert main(["report", str(tmp_path / "made"), "--output-dir", str(tmp_path / str(number)), "--quiet"]) == 0
        assert ("<h2>Notes</h2>" in (tmp_path / str(number) / "report.html").read_text(encoding="utf-8")) == expected
        (tmp_path / "made" / "compression.json").write_text(json.dumps(bare | {"fallbacks": [{"module": "m", "detail": "why"}]}))
