"""Pictures: equal layers become one box, kinds that take turns too, every number is right, and the same picture has the same bytes."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from compressor.errors import OutputError
from compressor.tracing.flow import BEFORE, Stop, Value
from compressor.tracing.picture import Box, Picture, dot_source, draw, make_picture, shortened, size


def _stops(kinds: Sequence[str]) -> list[Stop]:
    stops = []
    for index, kind in enumerate(kinds):
        hidden = Value("hidden_states", (2, 12, 64), "float32", 6144, index - 1 if index else BEFORE, index)
        mask = Value("attention_mask", (2, 12), "bool", 24, BEFORE, 0)
        output = Value("output", (2, 12, 64), "float32", 6144, index, index)
        between = ("embed_tokens",) if index == 0 else ()
        stops.append(Stop(index, (f"layers.{index}",), (kind,), 7, 1000, (hidden, mask), (output,), 6168, 1, between))
    return stops


def _picture(kinds: Sequence[str], ignored: Sequence[str] = ()) -> Picture:
    return make_picture(("Model: traced",), "input_ids (2, 12)", _stops(kinds), ["norm"], ignored)


def _titles(picture: Picture) -> list[str]:
    return [box.title for box in picture.boxes]


def test_a_few_layers_are_drawn_one_by_one() -> None:
    picture = _picture(["Layer"] * 2)
    assert _titles(picture) == [
        "before the first target",
        "subgraph 1: layers.0",
        "subgraph 2: layers.1",
        "subgraph 3: after the last target",
    ]
    assert picture.boxes[1].arrow == ("hidden_states: 2 x 12 x 64 float32, 6.1 kB", "attention_mask: 2 x 12 bool, 24 B")
    assert picture.boxes[2].arrow == ("hidden_states: 2 x 12 x 64 float32, 6.1 kB", "the same attention_mask (24 B)")
    assert picture.boxes[0].lines == ("input_ids (2, 12)", "runs embed_tokens")
    assert picture.boxes[-1].lines == ("runs norm",)


def test_many_equal_layers_become_three_boxes() -> None:
    assert _titles(_picture(["Layer"] * 60))[1:-1] == ["subgraph 1: layers.0", "subgraphs 2 to 59: 58 alike", "subgraph 60: layers.59"]


def test_kinds_that_take_turns_are_drawn_once() -> None:
    titles = _titles(_picture([*(["Mamba", "Mamba", "Attention"] * 5), "Mamba"]))
    first = [f"subgraph {number}: layers.{number - 1}" for number in (1, 2, 3)]
    assert titles[1:-1] == [*first, "subgraphs 4 to 15: the 3 above, 4 times more", "subgraph 16: layers.15"]


def test_no_stage_is_lost_whatever_the_order() -> None:
    for kinds in ("AB", "ABAB", "AABBAABB", "ABCABCABCA", "AAAABBBBAAAA", "ABABABABC", "A", "AAAA"):
        numbers: list[int] = []
        for box in _picture(list(kinds)).boxes[1:-1]:
            found = [int(word) for word in box.title.replace(":", " ").split() if word.isdigit()]
            first, *last = found[: 2 if " to " in box.title else 1]
            numbers += range(first, (last[0] if last else first) + 1)
        assert numbers == list(range(1, len(kinds) + 1)), kinds


@pytest.mark.parametrize("num_layers", [2, 28, 60])
def test_the_svg_holds_every_box_and_is_the_same_each_time(tmp_path: Path, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    picture = _picture([f"Kind{number}" for number in range(num_layers)], ["lm_head", "vision"])
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    assert [draw(picture, path) for path in paths] == ["matplotlib", "matplotlib"]
    text = paths[0].read_text()
    assert text == paths[1].read_text()
    ElementTree.fromstring(text)
    assert all(f">{box.title}<" in text for box in picture.boxes)
    assert ">ignored: stays as it is<" in text and ">lm_head<" in text


def test_a_pair_has_an_arrow_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    rows = [(Box(f"from {place}", (), "stage"), Box("is read by", (f"to {place}",), "outside")) for place in range(3)]
    picture = Picture(("Model",), pairs=rows, ignored=Box("may not move", ("lm_head",), "ignored"))
    assert draw(picture, tmp_path / "a.svg") == "matplotlib"
    text = (tmp_path / "a.svg").read_text()
    assert all(f">from {place}<" in text and f">to {place}<" in text for place in range(3)) and ">lm_head<" in text
    assert dot_source(picture).count("->") == 3 and "{rank=same; from2 -> to2;}" in dot_source(picture)
    assert draw(Picture(("Model", "of which nothing is known")), tmp_path / "a.svg") == "matplotlib"


def test_dot_is_taken_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "<svg>"; cat; printf "</svg>"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    picture = _picture(["Layer"] * 5, ["lm_head"])
    assert draw(picture, tmp_path / "a.svg") == "dot"
    assert (tmp_path / "a.svg").read_text() == f"<svg>{dot_source(picture)}</svg>"
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(OutputError, match="dot failed"):
        draw(picture, tmp_path / "b.svg")


def test_the_dot_source_names_boxes_and_what_crosses() -> None:
    source = dot_source(_picture(["Layer"] * 5, ['odd"name']))
    assert source.startswith("digraph trace {") and source.endswith("}\n")
    assert 'box0 -> box1 [label="hidden_states: 2 x 12 x 64 float32, 6.1 kB\\lattention_mask: 2 x 12 bool, 24 B\\l"];' in source
    assert 'odd\\"name' in source


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    picture = _picture(["Layer"])
    for path, told in ((tmp_path / "a.png", "no .svg file"), (tmp_path / "none" / "a.svg", "is not there")):
        with pytest.raises(OutputError, match=told):
            draw(picture, path)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        draw(picture, tmp_path / "folder.svg")


def test_numbers_and_lists_are_spelled_shortly() -> None:
    assert [size(number) for number in (0, 999, 1000, 2_500_000, 7_000_000_000)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "7.0 GB"]
    assert shortened(["a", "b", "c", "d", "e"]) == "a, b, c, d and 1 more"
