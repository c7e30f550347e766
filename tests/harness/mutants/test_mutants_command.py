"""`harness mutants`: who kills which planted bug, in order, truthfully, and with an exit code that says whether all died."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main
from harness.mutants.family import Family, Fate, Killer, LookBroke, find_family, listed_families, raised
from harness.mutants.hunt import fate_of, hunt
from harness.mutants.patches import Mutant

LOOKED: list[str] = []


def _killer(name: str, seen: str | None, is_machine: bool = False) -> Killer:
    def look() -> str | None:
        LOOKED.append(name)
        return seen

    return Killer(name, look, is_machine)


def _mutant(name: str) -> Mutant:
    return Mutant(name, "toy", f"{name} is wrong", (), "check.a")


def _family(*killers: Killer, sound: bool = True) -> Family:
    mutants = {"one": _mutant("one"), "two": _mutant("two")}
    control = [_killer("check.a", None if sound else "it is always wrong")]
    return Family("toy", mutants, lambda mutant: list(killers) if mutant else control)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    LOOKED.clear()


def test_the_first_who_sees_it_ends_the_hunt_and_machines_come_last() -> None:
    killers = (_killer("check.a", None), _killer("check.b", "b"), _killer("machine", "m", True))
    fate = fate_of(_family(*killers), _mutant("one"))
    assert (dict(fate.killed_by), list(fate.survived), LOOKED) == ({"check.b": "b"}, ["check.a"], ["check.a", "check.b"])
    assert not fate.only_machines
    everybody = fate_of(_family(*killers), _mutant("one"), all_checks=True)
    assert list(everybody.killed_by) == ["check.b", "machine"]
    assert not everybody.only_machines


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(0), AssertionError(), LookBroke("NumericsError: NaN")], ids=repr)
def test_a_killer_that_breaks_sees_nothing_unless_the_bug_says_that_this_is_its_sign(error: BaseException) -> None:
    def look() -> str | None:
        raise error

    family = Family("toy", {"one": _mutant("one")}, lambda mutant: [Killer("check.a", look), _killer("check.b", None)])
    for mutant in (_mutant("one"), replace(_mutant("one"), raises="ValueError"), None):
        fate = fate_of(family, mutant)
        assert not fate.killed_by and fate.verdict.value == "regression" and list(fate.survived) == ["check.b"]
        assert fate.broken == {"check.a": str(error) if isinstance(error, LookBroke) else raised(error)}
    fate = fate_of(family, replace(_mutant("one"), raises=fate.broken["check.a"].partition(":")[0]))
    assert list(fate.killed_by) == ["check.a"] and fate.verdict.value == "pass" and not fate.broken


def test_who_could_not_look_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Killer("check.a", lambda: str(1 // 0))
    monkeypatch.setattr("harness.mutants.family.find_family", lambda name, table: _family(broken, _killer("check.b", "b")))
    assert main(["mutants", "lifecycle", "--jobs", "1"]) == 0
    assert "one: check.a could not look: ZeroDivisionError: integer" in capsys.readouterr().out


BAD_FAMILIES = {
    "fails": ('lambda mutant: 1 / 0, {"one": SOUND}', "fails: who looks for the control cannot be listed: ZeroDivisionError"),
    "empty": ("lambda mutant: [], {}", "it has no planted bug, and where nothing is looked for nothing is seen"),
    "no Python": ('lambda mutant: [], {"one": WRONG}', "with 'return ((' it is no Python"),
}


@pytest.mark.parametrize("name", BAD_FAMILIES)
def test_a_family_that_cannot_be_hunted_is_told_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, told = BAD_FAMILIES[name]
    place = tmp_path / f"planted_{name.replace(' ', '_')}.py"  # modules of one name would be one
    place.write_text(
        "import textwrap\n"
        "from harness.mutants.patches import bug\n"
        "from harness.mutants.family import Family\n"
        "from harness.mutants.patches import Edit\n"
        "SOUND = bug('one', 'k', 'w', 'c')\n"
        "WRONG = bug('one', 'k', 'w', 'c', Edit('textwrap:dedent', 'return text', 'return (('))\n"
        f"KILLERS, MUTANTS = {arguments}\n"
        "FAMILY = Family('another name', MUTANTS, KILLERS)\n"
        f"FAMILIES = {{{name!r}: {str(place)!r} + ':FAMILY'}}\n"
    )
    code = main(["mutants", name, "--table", f"{place}:FAMILIES", "--jobs", "1"])
    error = capsys.readouterr().err
    assert code == 3 and told in error and "Traceback" not in error


def test_only_a_machine_is_said_after_every_check_has_looked() -> None:
    few, more = _killer("machine", None, True), _killer("machine", "m", True)
    fate = fate_of(_family(_killer("check.a", None), few, more), _mutant("one"))
    assert fate.only_machines
    assert list(fate.survived) == ["check.a"]  # the machine's first look, with few runs, is no survival
    assert LOOKED == ["check.a", "machine", "machine"]


def test_a_machine_that_has_seen_it_does_not_look_again() -> None:
    machine = _killer("machine", "m", True)
    fate_of(_family(machine, machine), _mutant("one"), all_checks=True)
    assert LOOKED == ["machine"]


@pytest.mark.parametrize(("seen", "sound", "code"), [("b", True, 0), (None, True, 1), ("b", False, 1)])
def test_the_exit_code_says_whether_all_died_and_sound_code_passed(
    seen: str | None, sound: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = _family(_killer("check.a", seen), sound=sound)
    monkeypatch.setattr("harness.mutants.family.find_family", lambda name, table: family)
    assert main(["mutants", "lifecycle", "--jobs", "1"]) == code
    out = " ".join(capsys.readouterr().out.split())
    assert f"{2 if seen else 0} of 2 planted bugs were killed" in out
    assert ("nobody: it survives" in out) == (seen is None)
    assert ("it is always wrong" in out) == (not sound)


def test_bugs_that_only_a_machine_saw_are_listed_with_those_who_looked_in_vain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = _family(_killer("check.a", None), _killer("check.b", None), _killer("machine", "m", True))
    monkeypatch.setattr("harness.mutants.family.find_family", lambda name, table: family)
    assert main(["mutants", "lifecycle", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "Only a state machine saw these 2: one, two." in out
    assert "first looked at by check.a, check.b, which saw nothing" in out
    assert "2 of them only by a state machine" in out


@pytest.mark.nightly
def test_a_bug_that_a_check_sees_and_one_that_only_a_machine_sees(capsys: pytest.CaptureFixture[str]) -> None:
    # In two processes, each with the real table.
    names = ["--mutant", "starts_late", "--mutant", "hooks_after_finalize"]
    assert main(["mutants", "lifecycle", *names, "--jobs", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["lifecycle"]
    by_name = {mutant["name"]: mutant for mutant in result["mutants"]}
    assert list(by_name) == ["starts_late", "hooks_after_finalize"]
    assert list(by_name["starts_late"]["killed_by"]) == ["lifecycle.completes"]
    assert by_name["hooks_after_finalize"]["only_machines"]
    assert len(by_name["hooks_after_finalize"]["survived"]) == 13
    assert (result["num_killed"], result["num_mutants"], result["num_only_machines"]) == (2, 2, 1)


@pytest.mark.nightly
def test_all_checks_look_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "lifecycle", "--mutant", "one_of_a_type", "--all-checks", "--jobs", "1", "--json"]) == 0
    (mutant,) = json.loads(capsys.readouterr().out)["lifecycle"]["mutants"]
    assert list(mutant["killed_by"]) == ["lifecycle.recipe"]
    assert len(mutant["survived"]) == 12  # a recipe is nothing that a machine could see


def test_every_family_is_whole() -> None:
    for name in listed_families():
        family = find_family(name)
        assert family.name == name
        assert all(mutant.name == key for key, mutant in family.mutants.items())
        kinds = [killer.is_machine for killer in family.killers(None)]
        assert kinds == sorted(kinds)
        assert {killer.name for killer in family.killers(None)} >= {mutant.killer for mutant in family.mutants.values()}


def test_fates_come_with_their_places() -> None:
    family = _family(_killer("check.a", "a"))
    found = list(hunt(family, [None, *family.mutants.values()]))
    assert [number for number, _ in found] == [0, 1, 2]
    assert all(isinstance(fate, Fate) for _, fate in found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["lifecycle", "--mutant", "starts_lat"], "did you mean 'starts_late'"),
        (["lifecycle", "--jobs", "0"], "is not a whole number above 0"),
        (["lifecycles"], "there is no family 'lifecycles'; did you mean 'lifecycle'"),
    ],
)
def test_bad_input(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["mutants", *given])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 3
    assert says in capsys.readouterr().err


def test_a_table_of_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "somebodys_bugs.py").write_text(
        "from harness.mutants.family import Family, Killer\n"
        "from harness.mutants.patches import Mutant\n"
        "BUG = Mutant('one', 'toy', 'it is wrong', (), 'looks')\n"
        "TOY = Family('toy', {'one': BUG}, lambda mutant: [Killer('looks', lambda: 'seen' if mutant else None)])\n"
        "FAMILIES = {'toy': 'somebodys_bugs:TOY'}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["mutants", "--table", "somebodys_bugs:FAMILIES", "--jobs", "1"]) == 0
    assert "1 of 1 planted bugs were killed" in capsys.readouterr().out
    assert main(["mutants", "tow", "--table", "somebodys_bugs:FAMILIES"]) == 3
    assert "there is no family 'tow'; did you mean 'toy'" in capsys.readouterr().err
    assert main(["mutants", "--table", "somebodys_bugs:TOY"]) == 3
    assert "this is no table of planted bugs" in capsys.readouterr().err
