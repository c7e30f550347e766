"""New pass lists raise an alarm, fusing has a price in dB, and the report shows what happened."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.errors import UserInputError
from harness.cli import main
from harness.errors import HarnessError
from harness.onnx_graph.census.block_picture import picture_of, to_dot, to_svg
from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.roles import SeparateQKV
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import GraphView
from harness.onnx_graph.roundtrip import pass_list_check
from harness.onnx_graph.roundtrip.fusing_cost import fusing_cost, summary
from harness.onnx_graph.roundtrip.optimizers import optimize
from harness.onnx_graph.roundtrip.pass_list_check import FORMS, attention_graph, small_zoo
from harness.onnx_graph.skips.passes import PassList, effective_passes

pytest.importorskip("onnxsim")
SKIPS = ("fuse_qkv", "fuse_attention")


def test_the_passes_on_record_are_those_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a release that is not on record, as another machine may have, it is asked that nothing breaks there."""
    record = Path(__file__).parents[3] / "golden" / "onnx_passes.json"
    status = main(["onnx", "passes", "--golden", str(record), "--json"])
    found, releases = json.loads(capsys.readouterr().out), json.loads(record.read_text(encoding="utf-8"))
    expected = ["known" if one["version"] in releases[one["backend"]] else "new release" for one in found]
    assert [one["state"] for one in found] == expected and not any(one["breaks"] for one in found), found
    assert status == (0 if set(expected) == {"known"} else 2) and "onnxsim" in {one["backend"] for one in found}


def test_a_release_that_nobody_has_seen_is_tried_and_can_be_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "passes.json"
    command = ["onnx", "passes", "--backend", "onnxsim", "--golden", str(record), "--skip", ",".join(SKIPS), "--contract", "separate-qkv"]
    assert main(command) == 2 and not record.exists()
    assert main([*command, "--accept"]) == 0
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["known"]


def test_a_list_on_record_is_tried_for_what_it_was_not_accepted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "passes.json"
    command = ["onnx", "passes", "--backend", "onnxsim", "--golden", str(record)]
    assert main([*command, "--accept"]) == 0
    written = record.read_bytes()
    for other in (["--skip", "fuse_qkv"], ["--skip", "fuse_qkv", "--accept"]):
        capsys.readouterr()
        assert main([*command, *other]) == 1 and record.read_bytes() == written
        assert "known, and not yet tried for SeparateQKV under fuse_qkv" in (text := capsys.readouterr().out) and "BROKEN" in text
    assert main([*command, "--contract", "same-block-count"]) == 0 and record.read_bytes() == written
    assert "not yet tried for SameBlockCount" in capsys.readouterr().out
    assert main([*command, "--contract", "same-block-count", "--accept"]) == 0
    assert len(json.loads(record.read_text())["onnxsim"].popitem()[1]["held"]) == 2
    capsys.readouterr()
    for contract in ("same-block-count", "separate-qkv"):
        assert main([*command, "--contract", contract]) == 0 and "tried" not in capsys.readouterr().out


def test_skips_that_no_longer_hold_break_and_are_not_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "passes.json"
    assert main(["onnx", "passes", "--backend", "onnxsim", "--golden", str(record), "--skip", "fuse_qkv", "--accept"]) == 1
    assert not record.exists()
    assert "pre-norm: BROKEN" in (text := capsys.readouterr().out) and "needs fuse_qkv, fuse_attention" in text


def test_what_is_new_gone_or_reordered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = effective_passes("onnxsim")
    older = [*(name for name in now.effective if name != "fuse_attention"), "fuse_old"]
    records = {"onnxsim": {"0.7.0": {"effective": older, "sha256": "0"}, "0.10.0": {"effective": list(now.effective[::-1]), "sha256": "1"}}}
    newest = pass_list_check.check_passes(records, "onnxsim", SeparateQKV(), SKIPS)
    assert newest.compared_with == "0.10.0" and newest.reordered and not newest.breaks
    del records["onnxsim"]["0.10.0"]
    alarm = pass_list_check.check_passes(records, "onnxsim", SeparateQKV(), SKIPS)
    assert (alarm.state, alarm.added, alarm.removed) == ("new release", ("fuse_attention",), ("fuse_old",))
    assert "new: fuse_attention" in alarm.text() and "gone: fuse_old" in alarm.text()
    changed = {"onnxsim": {now.version: {"effective": older, "sha256": "0"}}}
    assert pass_list_check.check_passes(changed, "onnxsim", SeparateQKV(), SKIPS).state == "changed"
    monkeypatch.setattr(pass_list_check, "effective_passes", lambda backend: PassList("onnxsim", "9.9", now.effective, ()))
    known = {"onnxsim": {"9.9": {"effective": list(now.effective), "sha256": now.sha256}}}
    alarm = pass_list_check.check_passes(known, "onnxsim", SeparateQKV(), SKIPS)
    assert alarm.state == "known" and not alarm.breaks and not alarm.reordered and alarm.trials  # nobody has written what it holds


@pytest.mark.parametrize("text", ["{", "[]", '{"onnxsim": {"1": {"effective": 3}}}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "passes.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserInputError, match=r"passes\.json: this is no record of passes"):
        pass_list_check.read_records(path)


@pytest.mark.parametrize("name", FORMS)
def test_the_small_zoo_is_valid_and_separate(name: str) -> None:
    model = small_zoo()[name]()
    onnx.checker.check_model(model, full_check=True)
    assert census(model).counts == {"SEPARATE": 1}
    assert census(model).blocks[0].kind == ("cross" if FORMS[name].cross else "self")
    assert model.SerializeToString() == attention_graph(FORMS[name]).SerializeToString()


def test_sharing_a_scale_costs_the_smallest_weight_what_it_should() -> None:
    model = attention_graph()
    for tensor in model.graph.initializer:
        if tensor.name == "wv":
            tensor.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(tensor) / 8).astype(np.float32), "wv"))
    rows = {row.role: row for row in fusing_cost(model)}
    assert rows["v"].cost_db == pytest.approx(20 * np.log10(8), abs=3.0), "a scale 8 times too large is 18 dB"
    assert abs(rows["q"].cost_db) < 3 and rows["q"].own_db > 35
    assert summary(list(rows.values()))["v"]["worst_db"] == rows["v"].cost_db
    with pytest.raises(HarnessError, match="nothing to fuse"):
        fusing_cost(optimize(model, "onnxsim"))


def test_the_cost_command_prints_draws_and_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figure = tmp_path / "m.onnx", tmp_path / "cost.svg"
    onnx.save(attention_graph(), path)
    assert main(["onnx", "fusing-cost", str(path), "--bits", "4", "--figure", str(figure)]) == 0
    assert "int4, one scale per tensor" in capsys.readouterr().out and figure.read_text(encoding="utf-8").startswith("<?xml")
    assert main(["onnx", "fusing-cost", str(path), "--json"]) == 0
    assert {row["role"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"q", "k", "v"}


def test_pictures_show_projections_by_role_before_and_one_for_all_after() -> None:
    before = attention_graph()
    after = optimize(before, "onnxsim")
    texts = []
    for model in (before, after):
        view = GraphView(load_graph(model))
        picture = picture_of(view, census(view.model).blocks[0])
        texts.append([box.text for box in picture.boxes])
        assert to_svg(picture) == to_svg(picture) and "<svg" in to_svg(picture)
        assert to_dot(picture).startswith("digraph") and all(above < below for above, below in picture.edges)
    assert any("Q  32 x 32" in text for text in texts[0]) and not any("Q K V" in text for text in texts[0])
    assert any("Q K V  32 x 96" in text for text in texts[1])


def test_the_report_has_a_page_json_and_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(attention_graph(), path)
    command = [
        "onnx",
        "roundtrip",
        str(path),
        "--optimizer",
        "onnxsim",
        "--skip",
        "fuse_qkv,fuse_attention",
        "--output-dir",
        str(tmp_path / "r"),
    ]
    assert main(command) == 1
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml") == 4 and "packed as columns" in page and "http" not in page.replace("http-equiv", "")
    report = json.loads((tmp_path / "r" / "report.json").read_text(encoding="utf-8"))
    assert report["provenance"]["passes"]["onnxsim"]["sha256"] == effective_passes("onnxsim").sha256
    suite = ElementTree.parse(tmp_path / "r" / "junit.xml").getroot()
    assert len(list(suite.iter("testcase"))) == 2 and len(list(suite.iter("failure"))) == 1
    assert "report.html" in capsys.readouterr().err
