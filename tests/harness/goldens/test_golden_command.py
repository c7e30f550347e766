"""`harness golden`: what differs, accepting it, what no test uses, and where a golden comes from; with exit codes and JSON."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from harness import cli
from harness.errors import GoldenError
from harness.goldens.page import MAX_COLUMNS, MAX_ROWS, heat_map
from harness.tolerance import T1

VALUE = torch.arange(1.0, 5001.0).reshape(50, 100)


@pytest.fixture
def run(shelf, no_ci, capsys: pytest.CaptureFixture[str]):
    """Run an action on the store; return exit code, standard output and standard error."""

    def command(action: str, *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["golden", action, *arguments, "--golden-dir", str(shelf.root), "--cache-dir", str(shelf.cache.parent)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def _usage(shelf, used: list[str], *, complete: bool = True, unknown: tuple[str, ...] = ()) -> None:
    record = {"complete": complete, "gaps": [] if complete else ["2 tests were deselected"], "used": used, "unknown_tests": unknown}
    shelf.cache.parent.mkdir(exist_ok=True)
    (shelf.cache.parent / "golden-usage.json").write_text(json.dumps(record))


@pytest.fixture
def failed(shelf):
    """A store of three goldens, one of which a test has failed."""
    for name in ("x", "deep/y", "z"):
        shelf.write(name, VALUE, inputs={"in": torch.ones(2)})
    for name in ("x", "deep/y", "z"):
        shelf.check(name, VALUE, inputs={"in": torch.ones(2)})
    changed = VALUE.clone()
    changed.view(-1)[2500] += 1
    shelf.check("x", changed, inputs={"in": torch.ones(2)})
    _usage(shelf, ["deep/y", "x", "z"])
    return shelf


def test_diff_shows_each_measure_and_the_page_has_a_heat_map(run, failed, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "diff.html"
    code, text, _ = run("diff", "--html", str(page))
    assert code == 1
    for piece in (
        "x: outputs regressed in test_it.py::test_it",
        "T0()",
        "1 of 5,000",
        "0.02%",
        "[25, 0]",
        "reproduce: pytest test_it.py::test_it",
    ):
        assert piece in text
    html = page.read_text()
    assert "heat map of 1 differing elements of 5000" in html
    assert "1 golden differs" in html
    assert not re.search(r"(src|href)=\"?http|<script", html)
    code, text, _ = run("diff", "x", "--json")
    row = json.loads(text)[0]["tensors"][0]
    assert code == 1
    assert (row["max_abs"], row["num_changed"], row["first_index"], row["share"]) == (1.0, 1, [25, 0], 0.0002)
    assert row["max_ulp"] == 4096
    assert row["sqnr_db"] == pytest.approx(106.199, abs=0.001)


def test_diff_of_nothing_is_0_and_without_any_run_2(run, shelf) -> None:
    code, _, error = run("diff")
    assert code == 2
    assert "run pytest first" in error
    _usage(shelf, [])
    assert run("diff")[0] == 0


def test_diff_says_what_else_changed(run, failed) -> None:
    failed.check("z", {"value": VALUE, "more": VALUE}, inputs={"in": torch.zeros(2)}, seed=1)
    failed.check("new one", VALUE)
    failed.check("deep/y", VALUE, inputs={"in": torch.ones(2)}, tier=T1(3))
    text = run("diff")[1]
    for piece in ("input 'in'", "seed: 1 where the golden has None", "only in the outputs: more", "there is no golden yet"):
        assert piece in text
    assert "limit: T1(max_ulp=3) where the golden has T0()" in text


def test_accept_writes_what_failed_and_then_nothing_differs(run, failed) -> None:
    before = failed.content()
    code, text, _ = run("accept", "x", "--json")
    assert (code, json.loads(text)) == (0, {"written": ["x: outputs changed, T0()"], "unchanged": []})
    assert {name for name, data in failed.content().items() if before.get(name) != data} == {"manifest.json", "x.safetensors"}
    assert run("diff")[0] == 0
    assert run("accept")[1] == "nothing to accept\n"


def test_accept_refuses_what_it_must(run, failed, monkeypatch: pytest.MonkeyPatch) -> None:
    before = failed.content()
    assert run("accept", "nonsense")[0] == 3
    failed.check("x", VALUE * 2, inputs={"in": torch.ones(2)}, tier=T1(3))
    code, _, error = run("accept")
    assert code == 3
    assert "without a reason" in error
    assert "--reason" in error
    with monkeypatch.context() as patch:
        patch.setenv("CI", "1")
        code, _, error = run("accept")
        assert code == 3
        assert "CI machine never writes goldens" in error
    failed.check("vacuous", VALUE, tier=T1(1 << 33))
    code, _, error = run("accept", "vacuous", "--reason", "please")
    assert code == 3
    assert "never accepted" in error
    assert failed.content() == before
    code, text, _ = run("accept", "x", "--reason", "a new kernel")
    assert (code, text) == (0, "written: x: outputs changed, tier loosened, elsewhere loosened, T1(max_ulp=3)\n")
    text = run("why", "x")[1]
    assert "tier loosened from T0() to T1(max_ulp=3): a new kernel" in text


def test_two_tests_with_one_golden_cannot_be_accepted_at_once(run, failed) -> None:
    golden = failed.golden(test="other.py::test")
    with pytest.raises(AssertionError):
        golden.check("x", VALUE * 3, inputs={"in": torch.ones(2)})
    before = failed.content()
    code, _, error = run("accept", "x")
    assert code == 3
    assert "is written by other.py::test and by test_it.py::test_it" in error
    assert failed.content() == before


def test_accept_can_add_a_variant(run, failed) -> None:
    path = failed.root / "manifest.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    assert run("accept", "x", "--variant")[0] == 0
    code, text, _ = run("why", "x", "--json")
    assert code == 0
    assert [variant["platform"].split("-")[0] for variant in json.loads(text)["variants"]] == ["cuda", "cpu"]


def test_prune_finds_what_no_test_used_and_deletes_it_when_told(run, failed) -> None:
    _usage(failed, ["x", "z"])
    before = failed.content()
    code, text, _ = run("prune")
    assert (code, text) == (1, "unused: deep/y\n")
    assert failed.content() == before
    assert run("prune", "--delete")[:2] == (0, "deleted: deep/y\n")
    assert sorted(failed.content()) == ["manifest.json", "x.safetensors", "z.safetensors"]
    assert run("prune", "--json")[1] == '{\n "deleted": [],\n "unknown": [],\n "unused": []\n}\n'


@pytest.mark.parametrize("case", ["no record", "incomplete", "unreadable"])
def test_prune_says_when_it_cannot_know(run, failed, case: str) -> None:
    path = failed.cache.parent / "golden-usage.json"
    if case == "no record":
        path.unlink()
    elif case == "unreadable":
        path.write_text("{")
    else:
        _usage(failed, [], complete=False)
    before = failed.content()
    code, _, error = run("prune", "--delete")
    assert code == 2
    assert "cannot be known" in error
    assert failed.content() == before


@pytest.mark.parametrize("unknown", ["test_it.py::test_it", "test_it.py"])
def test_prune_keeps_what_a_skipped_test_wrote(run, failed, unknown: str) -> None:
    _usage(failed, ["x"], unknown=(unknown,))
    code, text, _ = run("prune", "--delete")
    assert code == 0
    assert "kept: deep/y: its test was skipped or failed" in text
    assert len(failed.content()) == 5


def test_prune_deletes_named_goldens_even_corrupt_ones(run, failed) -> None:
    (failed.root / "z.safetensors").write_bytes(b"")
    assert run("prune", "z")[0] == 3
    assert json.loads(run("prune", "z", "--delete", "--json")[1]) == {"deleted": ["z"], "unknown": [], "unused": []}
    assert failed.check("z", VALUE)["verdict"] == "missing"
    assert run("prune", "nonsense", "--delete")[0] == 3


DAMAGES: dict[str, Callable[[Path], object]] = {
    "of another version": lambda file: file.write_bytes(save({"out": VALUE + 1})),
    "of other tensors": lambda file: file.write_bytes(save({"in": VALUE})),
    "with other metadata": lambda file: file.write_bytes(save({"out": VALUE}, metadata={"by": "hand"})),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_error_of_a_damaged_golden_advises_mends_it(run, failed, damage: str) -> None:
    DAMAGES[damage](failed.root / "z.safetensors")
    with pytest.raises(GoldenError) as error:
        failed.check("z", VALUE, inputs={"in": torch.ones(2)})
    delete, write = re.findall(r"`(.*?)`", str(error.value))
    assert run("accept", "z")[0] == 3 and "says what mends" in run("accept", "z")[2]
    assert run(*shlex.split(delete)[2:])[0] == 0 and write == "pytest --golden-update=new"
    failed.write("z", VALUE, inputs={"in": torch.ones(2)})
    assert failed.check("z", VALUE, inputs={"in": torch.ones(2)})["verdict"] == "pass"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_golden_is_no_change_that_could_be_accepted(run, failed, damage: str) -> None:
    DAMAGES[damage](failed.root / "x.safetensors")
    before = failed.content()
    code, _, error = run("accept", "x")
    assert code == 3 and re.search(r"x\.safetensors: golden 'x': file (missing|differs from manifest); nothing was written; take", error)
    assert failed.content() == before
    (delete, _) = re.findall(r"`(.*?)`", error)
    assert run(*shlex.split(delete)[2:])[0] == 0 and run("accept", "x")[0] == 0


def test_what_the_error_of_a_taken_file_advises_frees_it(run, failed) -> None:
    failed.write("old NAME", VALUE)
    with pytest.raises(GoldenError, match="is that of golden 'old NAME' too") as error:
        failed.check("Old Name", VALUE)
    advice = re.search(r"harness golden (prune --delete '.*?')", str(error.value))
    assert advice
    assert run(*shlex.split(advice[1]))[0] == 0
    assert failed.check("Old Name", VALUE)["verdict"] == "missing"


def test_why_tells_the_provenance_and_suggests_names(run, failed) -> None:
    code, text, _ = run("why", "deep/y")
    assert code == 0
    for piece in (
        "written by  test_it.py::test_it",
        "tier        T0()",
        "input       in: float32[2]",
        "accepted on cpu-",
        "torch ",
        "created",
    ):
        assert piece in text
    code, _, error = run("why", "deep/Y")
    assert code == 3
    assert "did you mean 'deep/y'?" in error


def test_list_holds_every_file_against_its_manifest(run, failed) -> None:
    code, text, _ = run("list")
    assert code == 0
    assert "3 goldens, 6" in text
    (failed.root / "x.safetensors").write_bytes(b"short")
    (failed.root / "z.safetensors").unlink()
    (failed.root / "stray.safetensors").write_bytes(b"?")
    code, text, _ = run("list", "--json")
    assert code == 1
    states = {row["name"]: row["state"] for row in json.loads(text)}
    assert states == {
        "deep/y": "ok",
        "x": "file differs from manifest",
        "z": "file missing",
        "stray.safetensors": "in no manifest",
    }


TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a tensor fewer": lambda tensors: tensors.pop("value"),
    "a tensor more": lambda tensors: tensors.update(more=tensors["value"]),
    "another shape": lambda tensors: tensors["value"].update(shape=[2, 1]),
    "another digest": lambda tensors: tensors["value"].update(sha256="0" * 64),
    "another dtype": lambda tensors: tensors["value"].update(dtype="int32"),
    "no dtype": lambda tensors: tensors["value"].update(dtype="x"),
}


@pytest.mark.parametrize("what", TABLES)
def test_list_holds_the_tensors_of_a_file_against_its_manifest(what: str, run, failed) -> None:
    path = failed.root / "deep" / "manifest.json"
    manifest = json.loads(path.read_text())
    TABLES[what](manifest["goldens"]["deep/y"]["variants"][0]["tensors"])
    path.write_text(json.dumps(manifest))
    code, text, _ = run("list", "--json")
    assert code == 1 and {row["name"]: row["state"] for row in json.loads(text)}["deep/y"] == "file differs from manifest"


def test_list_knows_tensors_of_every_kind(run, shelf) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    dtypes += [torch.bool, torch.int8, torch.uint16, torch.uint64, torch.complex64]
    shelf.write("kinds", {f"t{number}": torch.ones(2, 3).to(dtype) for number, dtype in enumerate(dtypes)})
    shelf.write("sizes", {"none": torch.ones(0, 2), "one": torch.tensor(1.0), "bytes": torch.ones(0, 2, dtype=torch.uint16)})
    code, text, _ = run("list")
    assert code == 0 and all(line.endswith("ok") for line in text.splitlines() if line.strip().startswith(("kinds", "sizes")))
    assert "kinds" in text and "sizes" in text


def test_many_tiers_do_not_push_the_state_out_of_sight(run, shelf) -> None:
    names = [f"layer.{index}" for index in range(9)]
    shelf.write("wide", dict.fromkeys(names, VALUE), tier=dict.fromkeys(names, T1(1)))
    row = next(line for line in run("list")[1].splitlines() if "wide" in line)
    assert "layer.0: T1" in row and "layer.8" not in row and row.endswith("ok") and len(row) < 140
    assert "layer.8: T1" in run("list", "--json")[1] and "layer.8: T1" in run("why", "wide")[1]


def test_no_store_is_bad_input(run) -> None:
    code, _, error = run("list")
    assert code == 3
    assert "is no folder of goldens" in error


def test_the_folders_of_the_last_run_are_found(failed, no_ci, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = failed.cache.parent / "golden-usage.json"
    usage.write_text(json.dumps({**json.loads(usage.read_text()), "golden_dir": "golden"}))
    monkeypatch.chdir(failed.folder)
    assert cli.main(["golden", "list", "--cache-dir", "cache"]) == 0
    assert "deep/y" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["diff", "accept", "prune", "why", "rename", "list"])
def test_help_names_the_exit_codes(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["golden", action, "--help"])
    assert "exit codes: 0" in capsys.readouterr().out


def test_listing_and_explaining_need_no_torch(failed) -> None:
    code = """
import sys
from harness.cli import main
for action in (["list"], ["why", "x"], ["prune"], ["rename"]):
    main(["golden", *action, *sys.argv[1:]])
    assert "torch" not in sys.modules, action
"""
    command = [sys.executable, "-c", code, "--golden-dir", str(failed.root), "--cache-dir", str(failed.cache.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (500, 700), (2, 3, 4)], ids=str)
def test_the_heat_map_shows_a_single_element_of_any_shape(shape: tuple[int, ...]) -> None:
    expected = torch.ones(shape)
    actual = expected.clone()
    assert heat_map(actual, expected) == ""
    actual.view(-1)[-1] = torch.nan
    svg = heat_map(actual, expected)
    assert svg.count("<rect") == 1
    width, height = (int(number) for number in re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert width <= 6 * MAX_COLUMNS
    assert height <= 6 * MAX_ROWS
