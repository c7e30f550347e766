"""Progress and tables are read at a terminal of 80 columns and in a file."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.table import Table

from compressor.console import Console
from compressor.progress import LineProgress, RichProgress, SilentProgress, progress_of

NOTE = "stage 24 of 24, error up to 0.0028, 1,234 tokens/s, 0.5 GB: model.layers.5.mlp.gate_proj, model.layers.5.mlp.up_proj"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_shows_bars_follows_what_standard_error_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(progress_of(True), LineProgress)
    assert isinstance(progress_of(False), SilentProgress)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(progress_of(True), RichProgress)
    own = SilentProgress()
    assert progress_of(own) is own


def test_80_columns_hold_the_bar_and_the_numbers_of_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress_of(True).task("calibrate", 1184) as task:
        task.advance(1184, NOTE)
    lines = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80
    assert any("calibrate" in line and "1184/1184" in line and line.count("0:00:00") == 2 for line in lines)
    assert any("1,234 tokens/s, 0.5 GB: model.layers" in line for line in lines)


def test_a_file_gets_whole_lines_with_the_time_left_and_no_codes_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress(every_seconds=0.0).task("calibrate", 2) as task:
        task.advance(1, NOTE)
        task.advance(1)
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"calibrate 1/2, 0:00:00, 0:00:00 left: {re.escape(NOTE)}", first)
    assert re.fullmatch(rf"calibrate 2/2, 0:00:00: {re.escape(NOTE)}", last)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_file_gets_tables_and_sentences_uncut(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out, table = stream(), Table("module", "error")
    table.add_row(NOTE, NOTE)
    console = Console(file=out)
    console.print(table)
    console.print(NOTE * 2)
    whole = [line for line in out.getvalue().splitlines() if line.count(NOTE) == 2]
    assert len(whole) == (2 if stream is io.StringIO else 0) and ("\x1b" in out.getvalue()) is (stream is Terminal)


def test_a_file_gets_a_line_now_and_then_only(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress().task("calibrate", 1000) as task:
        for _ in range(1000):
            task.advance()
    assert capsys.readouterr().err == "calibrate 1000/1000, 0:00:00\n"


def test_work_that_fails_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), LineProgress().task("calibrate", 8) as task:
        task.advance(3)
        raise RuntimeError
    assert capsys.readouterr().err.startswith("calibrate 3/8, ")
