"""The site of a history: a page for the night and one for each metric, which open without a network, JUnit and Markdown."""

from __future__ import annotations

import json
import re
from datetime import date, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compressor.errors import OutputError, UserInputError
from harness.cli import main
from harness.nightly import History
from harness.nightly.environment import Environment
from harness.nightly.measurement import CellRow
from harness.nightly.report.site import page_of, read_night, summary_of, write_site
from harness.reporting.verdict import Verdict
from tests.harness.nightly.report.browser import CONTRASTS, PROGRAM, Browser

HERE = Environment({"device": "cpu"})


def label(night: int) -> str:
    return (date(2026, 1, 1) + timedelta(night)).isoformat()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """40 nights of two metrics, one of which is worse by 5 % in the last three, and a cell that hung."""
    history = History(tmp_path_factory.mktemp("site") / "h.sqlite")
    for night in range(40):
        ripple = 1 + 0.001 * (night % 5)
        history.add("a/<b>&", [ripple * (1.05 if night >= 37 else 1.0)], environment=HERE, night=label(night), revision="f" * 40)
        history.add("a/steady", [ripple], environment=HERE, night=label(night))
    history.accept("a/steady", label(10), "<script>meant</script>")
    for cell, outcome in (("a/compress", "pass"), ("replay", "timeout")):
        history.add_cell(CellRow(label(39), HERE.digest, "f" * 40, cell, 1, outcome, 2.0, 1 << 30, "its log"), [], environment=HERE)
    return history


@pytest.fixture(scope="module")
def site(history: History, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page, night = write_site(history, tmp_path_factory.mktemp("pages") / "site")
    assert night.verdict is Verdict.REGRESSION
    return page.parent


def test_every_link_leads_to_a_page_of_the_site_and_none_leaves_it(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        links = re.findall(r'(?:href|src)="([^"#]+)"', text)
        assert links and all((page.parent / link).is_file() for link in links)
        assert "http" not in text.replace("http://www.w3.org", "") and "<script" not in text
    assert {path.name for path in (site / "metrics").iterdir()} == {page_of("a/<b>&"), page_of("a/steady")}


def test_what_is_worse_stands_first_and_everything_is_said_as_data(site: Path) -> None:
    index = (site / "index.html").read_text()
    assert index.index("a/&lt;b&gt;&amp;") < index.index("a/steady") and f"since {label(37)}" in index
    assert ">timeout</span>" in index and "1 of 2" in index
    summary = (site / "summary.md").read_text()
    assert summary.startswith(f"**regression**, night `{label(39)}` at `ffffffffffff`: 1 of 2 cells passed; 1 of 2 metrics are worse.\n")
    assert "- `replay`: timeout: `its log`\n" in summary
    cases = {case.get("name"): [child.tag for child in case] for case in ElementTree.parse(site / "junit.xml").iter("testcase")}
    expected = {"cell.a/compress": [], "cell.replay": ["failure"], "metric.a/<b>&": ["failure"], "metric.a/steady": []}
    assert cases == expected
    data = json.loads((site / "night.json").read_text())
    assert data["verdict"] == "regression" and [cell["outcome"] for cell in data["cells"]] == ["pass", "timeout"]


def test_what_cannot_be_told_although_there_are_nights_enough_is_named(tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    for night in range(40):
        quick = 1 + night % 3 / 1000
        history.add("noisy", [quick, quick * (1.3 if night > 34 else 1.001)], environment=HERE, night=label(night))
        if night > 34:
            history.add("young", [quick], environment=HERE, night=label(night))
    summary = summary_of(read_night(history)[0])
    assert "of 2 nothing can be told yet" in summary and "- `noisy`: `40 nights: the last nights are worse by" in summary
    assert "`young`" not in summary


@pytest.mark.parametrize(("has_cells", "is_worse", "tag"), [(True, False, "skipped"), (False, True, "skipped"), (False, False, "error")])
def test_too_few_nights_are_an_error_to_a_ci_server_only_where_they_decide_the_exit_code(
    has_cells: bool, is_worse: bool, tag: str, tmp_path: Path
) -> None:
    history = History(tmp_path / "h.sqlite")
    for night in range(50 if is_worse else 2):
        history.add("known", [1.0 + night % 5 / 1000 + 0.1 * (night > 40)], environment=HERE, night=label(night))
    last = label(49 if is_worse else 1)
    history.add("young", [1.0], environment=HERE, night=last)
    if has_cells:
        history.add_cell(CellRow(last, HERE.digest, "f" * 40, "c", 1, "pass", 2.0, 1, ""), [], environment=HERE)
    site, night = write_site(history, tmp_path / "site")
    cases = {case.get("name"): [child.tag for child in case] for case in ElementTree.parse(site.parent / "junit.xml").iter("testcase")}
    assert cases["metric.young"] == [tag]
    assert (night.verdict is Verdict.INCONCLUSIVE) is (tag == "error")


def test_the_evidence_of_a_quarantine_stands_in_every_file(tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    for revision in "ab":
        for night, outcome in enumerate(("pass", "error")):
            history.add_cell(CellRow(label(night), HERE.digest, revision * 40, "c", 1, outcome, 2.0, 1, "its log"), [], environment=HERE)
    site, _ = write_site(history, tmp_path / "site")
    for name in ("index.html", "junit.xml", "summary.md", "night.json"):
        assert "passes and fails at the same revision in 2 of 2" in (site.parent / name).read_text(), name


LINES = {
    "<img src=x> **well** [pass](http://e.vil) @all": "`<img src=x> **well** [pass](http://e.vil) @all`",
    "`</code>` <b>": "`` `</code>` <b> ``",
    "a ``` b` <i>": "````a ``` b` <i>````",
    " <b> ": "`  <b>  `",
}


@pytest.mark.parametrize(("missed", "verdict"), [(1, Verdict.REGRESSION), (8, Verdict.PASS)])
def test_what_is_worse_and_missed_the_last_night_is_worse_still(missed: int, verdict: Verdict, tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    for night in range(50):
        ripple = 1 + 0.001 * (night % 5)
        history.add("steady", [ripple], environment=HERE, night=label(night))
        if night < 50 - missed:
            history.add("worse", [ripple * (1.05 if night >= 37 else 1.0)], environment=HERE, night=label(night))
    assert read_night(history)[0].verdict is verdict


@pytest.mark.parametrize("place", ["the same", "another"])
def test_a_run_of_an_older_commit_in_the_same_night_hides_no_failure(place: str, tmp_path: Path) -> None:
    """As `run --at` does, for a bridge."""
    there = HERE if place == "the same" else Environment({"device": "cpu", "processor": "another"})
    history = History(tmp_path / "h.sqlite")
    for night, environment, revision, outcome in ((0, HERE, "a", "pass"), (1, HERE, "b", "regression"), (1, there, "a", "pass")):
        history.add_cell(CellRow(label(night), environment.digest, revision * 40, "c", 1, outcome, 2.0, 1, ""), [], environment=environment)
    night, _ = read_night(history)
    assert night.verdict is Verdict.REGRESSION
    history.add_cell(CellRow(label(1), HERE.digest, "c" * 40, "c", 1, "pass", 2.0, 1, ""), [], environment=HERE)
    assert read_night(history)[0].verdict is Verdict.PASS


@pytest.mark.parametrize("dirty", ["pass", "regression"])
def test_a_run_with_uncommitted_changes_stands_back_behind_one_of_the_commit(dirty: str, tmp_path: Path) -> None:
    history, revision = History(tmp_path / "h.sqlite"), "a" * 40
    clean = "pass" if dirty == "regression" else "regression"
    rows = [
        CellRow(label(0), HERE.digest, name, "c", 1, word, 2.0, 1, "") for name, word in ((f"{revision}-dirty", dirty), (revision, clean))
    ]
    history.add_cell(rows[0], [], environment=HERE)
    alone, _ = read_night(history)
    assert alone.verdict.value == dirty and f"at `{'a' * 12}-dirty`" in summary_of(alone)
    for row in (rows[1], rows[0]):
        history.add_cell(row, [], environment=HERE)
        assert read_night(history)[0].verdict.value == clean


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_log_is_shown_in_the_summary_as_it_is(line: str, tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    history.add_cell(CellRow(label(0), HERE.digest, "f" * 40, "c", 1, "error", 2.0, 1 << 30, line), [], environment=HERE)
    summary = summary_of(read_night(history)[0])
    assert summary.endswith(f"- `c`: error: {LINES[line]}\n")


def test_the_same_history_gives_the_same_bytes(history: History, site: Path, tmp_path: Path) -> None:
    write_site(history, tmp_path / "again")
    for path in (path for path in site.rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(site)).read_bytes()


def test_the_command_prints_the_summary_and_its_exit_code_is_the_verdict(
    history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nightly", "report", "--history", str(history.path), "--output-dir", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("**regression**") and out.endswith(f"{tmp_path / 'out' / 'index.html'}\n")


def test_a_folder_with_files_and_an_empty_history_are_refused(history: History, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(OutputError, match=r"mine\.txt|not empty"):
        write_site(history, tmp_path)
    with pytest.raises(UserInputError, match="the history is empty"):
        write_site(History(tmp_path / "none.sqlite"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(PROGRAM is None, reason="no chromium on this machine")
def test_a_reader_clicks_from_the_night_to_a_metric_and_back_in_light_and_dark_and_nothing_else_is_fetched(
    site: Path, tmp_path: Path
) -> None:
    index = (site / "index.html").as_uri()
    metric = (site / "metrics" / page_of("a/<b>&")).as_uri()
    with Browser(tmp_path / "profile") as browser:
        browser.open(index)
        _can_be_read(browser)
        browser.click("a/<b>&")
        assert browser.value("location.href") == metric and browser.value("document.querySelector('h1').textContent") == "a/<b>&"
        assert browser.value("document.querySelectorAll('#nights tbody tr').length") == 40
        assert browser.value("document.querySelector('figure svg').getBoundingClientRect().height") > 100
        assert browser.value("document.querySelector('#changes tbody td').textContent") == label(37)
        _can_be_read(browser)
        browser.click("All metrics")
        assert browser.value("location.href") == index and browser.fetched == [index, metric, index]


def _can_be_read(browser: Browser) -> None:
    """Every text stands out from its ground by 4.5 to 1, as WCAG asks, and no page is wider than the screen of a phone."""
    grounds = []
    for scheme in ("dark", "light"):
        browser.set_scheme(scheme)
        grounds.append(browser.value("getComputedStyle(document.body).backgroundColor"))
        contrasts = browser.value(CONTRASTS)
        assert len(contrasts) > 10 and min(contrasts)[0] >= 4.5, (scheme, min(contrasts))
    assert grounds[0] != grounds[1]
    browser.set_width(390)
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    browser.set_width(1200)
