"""`harness nightly` at the command line: each action, its exit code, and what it says to wrong input."""

from __future__ import annotations

import json
import re
import zipfile
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from harness.cli import main
from harness.nightly import History
from harness.nightly.environment import Environment, current_environment
from harness.nightly.judging.judge import judge


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """50 nights of two metrics; one is worse by 5 % since the 47th."""
    path = tmp_path / "h.sqlite"
    written, here = History(path), current_environment()
    for night in range(50):
        label = (date(2026, 1, 1) + timedelta(night)).isoformat()
        ripple = 1 + 0.001 * (night % 5)
        written.add("steady", [ripple, ripple * 1.01], environment=here, night=label)
        written.add("slower", [ripple * (1.05 if night >= 47 else 1.0)], environment=here, night=label, revision=f"r{night}")
    return path


def nightly(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    code = main(["nightly", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out + err


def test_judge_names_what_is_worse_and_its_exit_code_says_so(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = nightly(capsys, "judge", "--history", history)
    assert code == 1 and "since 2026-02-17" in text and "2 metrics: regression" in text
    code, text = nightly(capsys, "judge", "steady", "--history", history, "--json")
    found = json.loads(text)
    assert code == 0 and found["verdict"] == "pass" and found["metrics"][0]["num_nights"] == 50


def test_a_change_that_is_accepted_passes_and_its_reason_is_shown(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept = ("accept", "slower", "2026-02-17", "--reason", "checks more", "--history", history)
    assert nightly(capsys, *accept) == (0, "slower: the level since 2026-02-17 is accepted for good: checks more\n")
    code, text = nightly(capsys, "judge", "slower", "--history", history)
    assert code == 2 and "too few" in " ".join(text.split())  # nights at the new level
    assert "accepted since 2026-02-17: checks more" in nightly(capsys, "show", "slower", "--history", history)[1]


def test_an_acceptance_that_means_no_change_says_so(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept = ("--reason", "typo", "--history", history)
    code, text = nightly(capsys, "accept", "slower", "2026-02-16", *accept)
    assert code == 0 and "a level that begins on 2026-02-16 or before is accepted for good: typo" in text
    assert "none is seen that begins there: worse by" in text and "since 2026-02-17" in text
    late = nightly(capsys, "accept", "slower", "2026-02-18", *accept)[1]
    assert (
        "the level since 2026-02-17 is accepted" in late and "it begins on 2026-02-17, not on 2026-02-18, the night that was named" in late
    )


@pytest.mark.parametrize("last", ["here", "there"])
def test_of_two_machines_that_pass_the_one_that_sees_less_is_told(last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The noise of the one that was written last had been told, as if a step showed on both."""
    path, rng = tmp_path / "two.sqlite", np.random.default_rng(0)
    for night in range(40):
        label = (date(2026, 1, 1) + timedelta(night)).isoformat()
        for name in sorted(("here", "there"), key=lambda name: name == last):
            values = np.exp(rng.normal(0, 0.003 if name == "here" else 0.04, 1))
            History(path).add("slower", values.tolist(), environment=Environment({"machine": name}), night=label)
    found = json.loads(nightly(capsys, "judge", "--json", "--history", path)[1])["metrics"][0]
    assert found["verdict"] == "pass" and found["noise"] > 0.02 and found["detectable"] > 0.05


@pytest.mark.parametrize("worse", ["here", "there"])
def test_a_change_on_one_of_two_machines_is_accepted_by_its_night(worse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was judged among the changes of the machine that is worst then, which is another one once it is accepted."""
    path, rng = tmp_path / "two.sqlite", np.random.default_rng(0)
    for night in range(50):
        label = (date(2026, 1, 1) + timedelta(night)).isoformat()
        for name in ("here", "there"):
            values = np.exp(rng.normal(0, 0.003, 5)) * (1.05 if name == worse and night >= 47 else 1.0)
            History(path).add("slower", values.tolist(), environment=Environment({"machine": name}), night=label)
    assert nightly(capsys, "judge", "--history", path)[0] == 1
    told = nightly(capsys, "accept", "slower", "2026-02-17", "--reason", "meant", "--history", path)[1]
    assert told == "slower: the level since 2026-02-17 is accepted for good: meant\n"


def test_the_later_of_two_levels_is_accepted_by_its_own_night(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An acceptance means what came before it, too, and is told by the level that begins on its night."""
    path, noise = tmp_path / "steps.sqlite", np.random.default_rng(0).normal(0, 0.003, (50, 5))
    labels = [(date(2026, 1, 1) + timedelta(days=day)).isoformat() for day in range(50)]
    for place, label in enumerate(labels):
        values = np.exp(noise[place]) * 1.05 ** ((place >= 30) + (place >= 45))
        History(path).add("slower", values.tolist(), environment=current_environment(), night=label)
    for place in (30, 45):
        told = nightly(capsys, "accept", "slower", labels[place], "--reason", "meant", "--history", path)[1]
        assert told == f"slower: the level since {labels[place]} is accepted for good: meant\n"


def test_a_change_is_accepted_for_a_while(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept = ("accept", "slower", "2026-02-17", "--reason", "until the fix", "--until", "2999-02-18", "--history", history)
    assert "is accepted until 2999-02-18" in nightly(capsys, *accept)[1]
    codes = [nightly(capsys, "judge", "slower", "--history", history)[0]]
    for label in ("2999-02-18", "2999-02-19"):
        History(history).add("slower", [1.05], environment=current_environment(), night=label)
        codes.append(nightly(capsys, "judge", "slower", "--history", history)[0])
    assert codes == [2, 0, 1]  # too few nights at the new level, the level, the change again


def test_a_change_is_accepted_until_the_last_day_that_there_is(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = nightly(capsys, "accept", "slower", "2026-02-17", "--reason", "meant", "--until", "9999-12-31", "--history", history)
    assert told[0] == 0 and "is accepted until 9999-12-31" in told[1]


def test_a_word_that_is_made_shorter_tells_of_one_on_another_night_that_goes_on(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def accept(night: str, *until: str) -> str:
        return nightly(capsys, "accept", "slower", night, "--reason", "meant", *until, "--history", history)[1]

    short = ("--until", "2999-02-18")
    accept("2026-02-18")
    assert "behind 2999-02-18 an earlier word goes on for good, that on 2026-02-18; say it again" in accept("2026-02-17", *short)
    assert "goes on" in accept("2026-02-17", *short)
    accept("2026-02-18", *short)
    assert "goes on" not in accept("2026-02-17", *short)
    changes = judge(History(history).series("slower"), History(history).acceptances("slower"), date(2999, 2, 19)).changes
    assert [one.acceptance for one in changes] == [None]


def test_of_sequences_too_it_is_said_that_no_change_begins_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, losses = tmp_path / "kl.sqlite", np.random.default_rng(0).uniform(1, 2, 32)
    for place, factor in enumerate((1.0, 1.0, 1.1, 1.1, 1.0)):
        History(path).add("kl", (losses * factor).tolist(), environment=current_environment(), night=f"{place}", kind="paired")
    told = [nightly(capsys, "accept", "kl", f"{place}", "--reason", "meant", "--history", path)[1] for place in range(5)]
    assert ["none is seen that begins there" in text for text in told] == [True, True, False, True, True]
    assert "equal to 2, the baseline" in told[3] and "-9.09%" in told[4]


def test_add_writes_a_night_and_leaves_the_verdict_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.sqlite"
    code, text = nightly(capsys, "add", "m", "1.0", "1.5", "--history", path, "--revision", "abc", "--better", "higher", "--night", "7")
    assert code == 0 and "31 more in this environment are needed" in " ".join(text.split())
    (one,) = History(path).series("m")
    assert (one.night, one.values, one.revision, one.better) == ("7", (1.0, 1.5), "abc", "higher")


def test_a_metric_whose_sequences_mostly_lost_nothing_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    History(tmp_path / "h").add("kl", [0.0] * 8 + [0.5], environment=current_environment("a\udcff"), night="7", kind="paired")
    code, text = nightly(capsys, "show", "kl", "--history", tmp_path / "h")
    assert code == 0 and ["7", "0", "-", "9"] in [line.split()[:4] for line in text.splitlines()]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nightly", "add", "m", "5", "--device", "cuda:99", "--history", str(tmp_path / "h")]) == 3
    assert "device: 'cuda:99' cannot be used here" in capsys.readouterr().err and not (tmp_path / "h").exists()


def test_nights_are_listed_and_come_back_from_an_export(history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nightly(capsys, "export", tmp_path / "all.csv", "--history", history) == (0, f"{tmp_path / 'all.csv'}: 150 readings\n")
    nightly(capsys, "accept", "slower", "2026-02-17", "--reason", "checks more", "--history", history)
    said = nightly(capsys, "export", tmp_path / "all.csv", "--history", history)[1]
    assert said.endswith("not in it: 1 acceptance; export to a .zip takes them along\n")
    said = nightly(capsys, "export", tmp_path / "all.zip", "--history", history)[1]
    assert said == f"{tmp_path / 'all.zip'}: 150 readings, 1 acceptance\n"
    (accepted,) = json.loads(nightly(capsys, "show", "slower", "--history", history, "--json")[1])["acceptances"]
    assert accepted == {"metric": "slower", "night": "2026-02-17", "until": "", "reason": "checks more"}
    other = tmp_path / "other.sqlite"
    assert nightly(capsys, "import", tmp_path / "all.csv", "--history", other) == (0, f"{other}: 100 new measurements\n")
    rows = [json.loads(nightly(capsys, "history", "--history", path, "--json")[1]) for path in (history, other)]
    assert rows[0] == rows[1] and rows[0][0] == {"night": "2026-01-01", "metrics": 2, "readings": 3}
    assert json.loads(nightly(capsys, "show", "slower", "--history", other, "--json")[1])["nights"][3]["revision"] == "r3"
    said = nightly(capsys, "import", tmp_path / "all.zip", "--history", other)
    assert said == (0, f"{other}: 0 new measurements, 1 new acceptance\n")


@pytest.mark.parametrize("name", ["mine.csv", "mine.zip", "photos.zip"])
def test_export_keeps_what_it_did_not_write(name: str, history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "photos.zip":
        with zipfile.ZipFile(tmp_path / name, "w") as photos:
            photos.writestr("sea.jpg", "blue")
    else:
        (tmp_path / name).write_text("name,price\ntea,3\n", "utf-8")
    before = (tmp_path / name).read_bytes()
    code, text = nightly(capsys, "export", tmp_path / name, "--history", history)
    assert code == 3 and name in text and (tmp_path / name).read_bytes() == before


def test_simulate_prints_a_row_a_noise(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = nightly(capsys, "simulate", "--series", "1", "--quiet", "--recorded", history)
    assert code == 0 and all(noise in text for noise in ("white", "drifting", "bimodal", "heavy", "autocorrelated", "recorded"))


def test_simulate_needs_the_history_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = nightly(capsys, "simulate", "--series", "1", "--recorded", "nowhere.sqlite")
    assert code == 3 and "nowhere.sqlite: there is no history" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("judge", "stedy"), "stedy: .* has no such metric; did you mean 'steady'"),
        (("accept", "steady", "1999-01-01", "--reason", "r"), "night '1999-01-01' has no measurement of it"),
        (("accept", "steady", "2026-01-02", "--reason", " "), "reason: it is blank"),
        (("add", "steady", "-1"), "the value -1.0 is not finite and above 0"),
        (("add", "steady", "1", "--better", "higher"), "better='higher' was given, and its nights so far say 'lower'"),
        (("export", "all.txt"), r"all.txt"),
        (("import", "nowhere.csv"), "nowhere.csv: cannot be read"),
    ],
)
def test_wrong_input_is_told_in_a_line(history: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    code, text = nightly(capsys, *args, "--history", history)
    assert code == 3 and re.search(message, text) and "Traceback" not in text


def test_a_history_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = nightly(capsys, "judge", "--history", tmp_path / "none.sqlite")
    assert code == 3 and "there is no history; write one with harness nightly add" in text
    assert not list(tmp_path.iterdir())


def test_long_names_go_on_behind_a_slash(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = nightly(capsys, "add", "reference/w4a16/cpu/compress/time.compress", "1", "--history", tmp_path / "h.sqlite")[1]
    lines = [line.split()[0] for line in text.splitlines() if "/" in line[:26]]
    assert lines == ["reference/w4a16/cpu/", "compress/time.compress"]
