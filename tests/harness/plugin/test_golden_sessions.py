"""A session collects what its tests find, writes once at its end, and never on a CI machine."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from xml.etree import ElementTree

import pytest

from harness import cli
from harness.goldens.store.listing import unused_goldens

TESTS = """
import torch
from harness.tolerance import T1
VALUE = {value}
def test_one(golden):
    golden.check("one", torch.arange(5000.0) * VALUE)
def test_two(golden):
    golden.check("deep/two", {{"y": torch.ones(3)}}, tier=T1(4), reason="sums")
"""


def _write(project, value: str = "1.0") -> None:
    project.tests(test_it=TESTS.format(value=value))


@pytest.fixture
def filled(project):
    _write(project)
    project.run("--golden-update=new").assert_outcomes(passed=2)
    return project


def test_a_missing_golden_fails_and_writes_nothing(project) -> None:
    _write(project)
    result = project.run()
    result.assert_outcomes(failed=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*goldens*", "one: missing: *", "*reproduce: pytest test_it.py::test_one", "*--golden-update=new"])
    assert not (project.path / "golden").exists()


@pytest.mark.parametrize("options", [(), ("--golden-update=new",)])
def test_a_golden_is_of_no_use_behind_its_test(project, options) -> None:
    project.tests(
        test_it="""
import pytest, torch
kept = []
@pytest.fixture
def late(golden):
    yield
    golden.check("in/teardown", torch.ones(2))
def test_keep(golden, late):
    kept.append(golden)
def test_use():
    kept[0].check("kept/x", torch.ones(3))
"""
    )
    result = project.run(*options)
    result.assert_outcomes(passed=1, failed=1, errors=not options)
    result.stdout.fnmatch_lines(["*GoldenError: kept/x: this golden is that of test_it.py::test_keep, which is over; *"])
    assert ("written: in/teardown" in result.stdout.str()) == bool(options)  # what a fixture of the test asks for comes before its end


@pytest.mark.parametrize("variable", ["CI", "GITHUB_ACTIONS", "BUILD_NUMBER"])
@pytest.mark.parametrize("mode", ["new", "failed", "all"])
def test_ci_never_writes(project, monkeypatch: pytest.MonkeyPatch, variable: str, mode: str) -> None:
    _write(project)
    monkeypatch.setenv(variable, "true")
    result = project.run(f"--golden-update={mode}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--golden-update={mode}: is refused, because {variable} is set" in result.stderr.str()
    project.run().assert_outcomes(failed=2)
    assert not (project.path / "golden").exists()


def test_ci_switched_off_is_no_ci(project, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(project)
    monkeypatch.setenv("CI", "false")
    project.run("--golden-update=new").assert_outcomes(passed=2)


def test_new_writes_what_is_missing_and_leaves_what_fails(filled) -> None:
    assert set(filled.manifest()) == {"one"}
    before = filled.files()
    filled.run().assert_outcomes(passed=2)
    _write(filled, "1.5")
    result = filled.run("--golden-update=new")
    result.assert_outcomes(failed=1, passed=1)
    assert filled.files() == before
    result.stdout.fnmatch_lines(["*max abs*ulp*SQNR dB*changed*share*first index*", "*4,999 of 5,000*[[]1]*"])


@pytest.mark.parametrize("mode", ["failed", "all"])
def test_failed_and_all_write_what_failed(filled, mode: str) -> None:
    _write(filled, "1.5")
    result = filled.run(f"--golden-update={mode}")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["written: one: outputs changed, T0()"])
    filled.run().assert_outcomes(passed=2)
    assert [step["what"] for step in filled.manifest()["one"]["history"]] == ["created", "outputs changed"]


def test_a_second_update_of_the_same_outputs_changes_no_byte(filled) -> None:
    before = filled.files()
    filled.run("--golden-update=all").assert_outcomes(passed=2)
    assert filled.files() == before


def test_loosening_needs_a_reason_on_the_command_line(filled) -> None:
    before = filled.files()
    filled.tests(test_it=TESTS.format(value="1.0").replace("T1(4)", "T1(400)"))
    filled.run().assert_outcomes(passed=1, failed=1)
    result = filled.run("--golden-update=all")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*limit loosened*T1(max_ulp=4) was accepted, T1(max_ulp=400) is asked*"])
    assert filled.files() == before
    filled.run("--golden-update=failed", "--golden-reason=a fused kernel sums in another order").assert_outcomes(passed=2)
    history = json.loads((filled.path / "golden" / "deep" / "manifest.json").read_text())["goldens"]["deep/two"]["history"]
    assert history[-2]["what"] == "tier loosened"
    assert (history[-2]["from"], history[-2]["to"]) == ("T1(max_ulp=4)", "T1(max_ulp=400)")
    assert history[-2]["reason"] == "a fused kernel sums in another order"
    assert filled.manifest()["one"]["history"][-1]["reason"] == "", "the reason is that of what was loosened"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--golden-reason=why"], "--golden-reason: does nothing without --golden-update"),
        (["--golden-variant"], "--golden-variant: does nothing without --golden-update"),
        (["--golden-update=new", "--golden-reason= "], "--golden-reason: is blank"),
        (["--peer-python=nowhere/python3"], "--peer-python=nowhere/python3: is no program"),
        (["--peer-python="], "--peer-python=.: is no program"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(project, arguments: list[str], message: str) -> None:
    _write(project)
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


def test_a_test_that_fails_for_another_reason_writes_nothing(project) -> None:
    project.tests(test_it='import torch\ndef test_x(golden):\n    golden.check("x", torch.ones(2))\n    assert False\n')
    result = project.run("--golden-update=new")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["golden 'x': was not written, because test_it.py::test_x failed; make it pass first"])
    assert not project.files()


TWO = """
import pytest, torch
def test_a(golden): golden.check("same", torch.ones(2))
def test_b(golden): golden.check("same", torch.ones(2) * {factor})
def test_c(golden): golden.check("other", torch.ones(2))
"""


@pytest.mark.parametrize("factor", ["1", "2"])
def test_two_tests_that_write_one_golden_are_told_and_it_is_not_written(project, factor: str) -> None:
    project.tests(test_it=TWO.format(factor=factor))
    result = project.run("--golden-update=new")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["golden 'same': is written by test_it.py::test_a and by test_it.py::test_b; it was not written; *"])
    assert set(project.manifest()) == {"other"}


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_tests_whose_goldens_would_have_one_file_are_told_and_neither_is_written(project, workers: str) -> None:
    tests = TWO.format(factor="2").replace('"same"', '"n/W4A16"', 1).replace('"same"', '"n/w4a16"')
    project.tests(test_it=tests)
    run = partial(project.run_apart, "-p", "xdist", f"-n{workers}", "--dist=load") if workers != "0" else project.run
    result = run("--golden-update=new", "--junitxml=junit.xml")
    assert result.ret == 1
    suite = ElementTree.parse(project.path / "junit.xml").getroot()[0]
    told = suite.findall("testcase/error")
    assert (suite.get("errors"), len(told), "is that of golden" in str(told[0].text)) == ("1", 1, True)
    result.stdout.fnmatch_lines(
        ["golden 'n/[Ww]4[Aa]16': its file n/w4a16.safetensors is that of golden 'n/[Ww]4[Aa]16' too, and is not written*"]
    )
    assert set(project.manifest()) == {"other"}
    assert not (project.path / "golden" / "n").exists()
    project.tests(test_it=tests.replace("n/w4a16", "n/w4a16 doubled"))
    run("--golden-update=new").assert_outcomes(passed=3)
    assert set(project.manifest("golden/n")) == {"n/W4A16", "n/w4a16 doubled"}


def test_a_golden_that_one_test_holds_and_another_fails_is_not_replaced(project) -> None:
    project.tests(test_it=TWO.format(factor="1").replace("def test_b", "def b"))
    project.run("--golden-update=new").assert_outcomes(passed=2)
    before = project.files()
    project.tests(test_it=TWO.format(factor="2"))
    result = project.run("--golden-update=failed")
    assert result.ret == 1
    assert project.files() == before


@pytest.mark.nightly
def test_workers_collect_and_one_process_writes_once(project) -> None:
    tests = "import pytest, torch\n"
    tests += '@pytest.mark.parametrize("n", range(8))\ndef test_n(golden, n): golden.check(f"n/{n}", torch.full((3,), 1.0 + n))\n'
    project.tests(test_it=tests + TWO.format(factor="2"))
    result = project.run_apart("-p", "xdist", "-n2", "--dist=load", "--golden-update=new", "--junitxml=junit.xml")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["golden 'same': is written by test_it.py::test_a and by test_it.py::test_b; it was not written; *"])
    assert len(json.loads((project.path / "golden" / "n" / "manifest.json").read_text())["goldens"]) == 8
    assert set(project.manifest()) == {"other"}
    usage = json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text())
    assert usage["complete"]
    assert len(usage["used"]) == 10
    project.tests(test_it=tests.replace("1.0 + n", "2.0 + n"))
    assert 'name="harness.golden" value="n/3: missing"' in (project.path / "junit.xml").read_text()
    result = project.run()
    result.assert_outcomes(failed=8)
    assert result.stdout.str().count("reproduce: pytest 'test_it.py::test_n[") == 8


def test_a_corrupt_golden_and_a_conflict_are_errors_of_the_test(filled) -> None:
    (filled.path / "golden" / "one.safetensors").write_bytes(b"short")
    result = filled.run("--golden-update=all")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*GoldenError*one.safetensors: is corrupt or cut off*", "one: unreadable: *"])
    assert (filled.path / "golden" / "one.safetensors").read_bytes() == b"short"


def test_a_store_that_cannot_be_written_fails_the_session(project, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.goldens.store import writer

    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(writer, "stage", refuse)
    _write(project)
    result = project.run("--golden-update=new")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*cannot be written (Permission denied); nothing was written; make the folder writable"])
    assert not project.files()


def test_junit_and_the_terminal_say_what_was_checked(filled) -> None:
    filled.tests(
        test_it=TESTS.format(value="2.0").replace(
            "def test_one", "import pytest\n@pytest.mark.check(20)\n@pytest.mark.check(3)\ndef test_one"
        )
    )
    result = filled.run("--junitxml=junit.xml", "--harness-profile=pr", "--harness-device=cpu")
    result.stdout.fnmatch_lines(
        [
            "one: outputs regressed: *",
            "*reproduce: pytest test_it.py::test_one --harness-profile=pr --harness-device=cpu",
            "*harness golden diff one",
        ]
    )
    cases = ElementTree.parse(filled.path / "junit.xml").getroot().iter("testcase")
    properties = {case.get("name"): {(p.get("name"), p.get("value")) for p in case.iter("property")} for case in cases}
    assert properties["test_one"] == {("harness.golden", "one: outputs regressed"), ("harness.check", "3"), ("harness.check", "20")}
    assert properties["test_two"] == {("harness.golden", "deep/two: pass")}


def test_a_pass_by_the_tier_for_elsewhere_is_told(project) -> None:
    project.tests(
        test_it="""
        import torch
        from harness.tolerance import T1
        def test_x(golden): golden.check("x", torch.arange(4.0), elsewhere=T1(2), reason="sums")
    """
    )
    project.run("--golden-update=new").assert_outcomes(passed=1)
    path = project.path / "golden" / "manifest.json"
    data = json.loads(path.read_text())
    data["goldens"]["x"]["variants"][0]["platform"]["instruction_set"] = "SVE256"
    path.write_text(json.dumps(data))
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["passed: x: accepted on cpu-*-SVE256, checked on cpu-*; held to the tier for elsewhere, T1(max_ulp=2)*"])
    project.run("--golden-update=new", "--golden-variant").stdout.fnmatch_lines(["written: x: variant for cpu-*"])
    assert "accepted on" not in project.run().stdout.str()


def test_folders_are_those_of_the_ini_file_or_the_command_line(project) -> None:
    _write(project)
    project.pytester.makeini("[pytest]\nharness_golden_dir = data/goldens\nharness_cache_dir = .left\n")
    project.run("--golden-update=new").assert_outcomes(passed=2)
    assert set(project.manifest("data/goldens")) == {"one"}
    assert (project.path / ".left" / "golden-usage.json").exists()
    project.run("--harness-golden-dir=elsewhere", "--harness-cache-dir=.cache2", "--golden-update=new").assert_outcomes(passed=2)
    assert set(project.manifest("elsewhere")) == {"one"}
    assert (project.path / ".cache2" / "golden-usage.json").exists()
    assert not (project.path / ".harness_cache").exists()


def test_a_variant_can_be_added_beside_another_platforms(filled) -> None:
    path = filled.path / "golden" / "manifest.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    _write(filled, "1.5")
    filled.run("--golden-update=failed", "--golden-variant").assert_outcomes(passed=2)
    assert [variant["platform"]["device"] for variant in filled.manifest()["one"]["variants"]] == ["cuda", "cpu"]


def test_a_project_without_goldens_gets_no_folder(project) -> None:
    project.tests(test_it="def test_nothing(): pass")
    project.run().assert_outcomes(passed=1)
    assert not (project.path / ".harness_cache").exists()


USAGE = """
import pytest, torch
def test_a(golden): golden.check("a", torch.ones(1))
def test_b(golden): golden.check("b", torch.ones(2))
"""


EMPTY = """
import pytest, torch
DEVICES = {}
@pytest.mark.parametrize("kind", ["x", "y"])
@pytest.mark.parametrize("device", DEVICES)
def test_a(golden, device, kind): golden.check(f"{{device}}/{{kind}}", torch.ones(2))
@pytest.mark.parametrize("device", [*DEVICES, "cpu"])
def test_b(golden, device): golden.check(f"b/{{device}}", torch.ones(2))
"""


def test_goldens_of_a_test_that_has_no_parameter_here_are_kept(project) -> None:
    project.tests(test_it=EMPTY.format(["gpu"]))
    project.run("--golden-update=new")
    project.tests(test_it=EMPTY.format([]))
    project.run()
    usage = json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text())
    assert unused_goldens(project.path / "golden", usage) == (["b/gpu"], ["gpu/x", "gpu/y"])


@pytest.mark.parametrize(
    ("arguments", "gap"),
    [
        (["-k", "test_a"], "1 tests were deselected"),
        (["test_it.py::test_a"], "only a part of the tests was asked for"),
        (["--ignore=nothing.py"], "paths were ignored"),
        (["-x", "--maxfail=1", "test_it.py"], "only a part of the tests was asked for"),
    ],
)
def test_a_run_that_left_something_out_is_not_complete(project, arguments: list[str], gap: str) -> None:
    project.tests(test_it=USAGE)
    project.run(*arguments, "--golden-update=new")
    usage = json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text())
    assert not usage["complete"]
    assert gap in usage["gaps"]
    project.run("--ignore-glob=none*", "test_it.py")
    usage = json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text())
    assert usage["gaps"] == ["paths were ignored", "only a part of the tests was asked for"], "of the last run"
    project.run("--golden-update=new")
    usage = json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text())
    assert (usage["complete"], usage["used"]) == (True, ["a", "b"])
    project.run(*arguments)
    assert json.loads((project.path / ".harness_cache" / "golden-usage.json").read_text()) == usage, "a partial run takes nothing away"


INPUTS = """
import torch
def make(): return {"x": torch.full((3,), VALUE)}
VALUE = 1.0
def test_a(golden): golden.inputs("in", make)
def test_b(golden):
    golden.inputs("in", make)
    assert False
def test_c(golden):
    golden.check("out", golden.inputs("in", make)["x"] * 2)
"""


def test_stored_inputs_may_serve_many_tests(project) -> None:
    project.tests(test_it=INPUTS)
    project.run("--golden-update=new").assert_outcomes(passed=2, failed=1)
    assert set(project.manifest()) == {"in", "out"}
    project.tests(test_it=INPUTS.replace("VALUE = 1.0", "VALUE = 5.0"))
    project.run().assert_outcomes(passed=2, failed=1)


def test_stored_inputs_that_differ_from_test_to_test_are_refused(project) -> None:
    project.tests(test_it=INPUTS.replace("VALUE)", "next(NUMBERS))").replace("VALUE = 1.0", "NUMBERS = iter([1.0, 2.0, 3.0])"))
    result = project.run("--golden-update=new")
    result.stdout.fnmatch_lines(["stored inputs 'in': differ from test to test; they were not written; make them depend on a seed"])
    assert set(project.manifest()) == {"out"}


def test_a_complete_run_forgets_what_tests_left_that_are_gone(filled) -> None:
    _write(filled, "1.5")
    filled.run().assert_outcomes(passed=1, failed=1)
    left = filled.path / ".harness_cache" / "golden"
    assert [path.name[:4] for path in left.rglob("*.json")] == ["one@"]
    (filled.path / "test_it.py").rename(filled.path / "test_other.py")
    filled.run("-k", "two").assert_outcomes(passed=1, deselected=1)
    assert len(list(left.rglob("*.json"))) == 1
    filled.run("--golden-update=failed")
    assert not list(left.rglob("*.json"))


LATER_RUNS = {
    "the golden is damaged": TESTS.format(value="1.0"),
    "it stops before its check": TESTS.format(value="1.0").replace("def test_one(golden):", "def test_one(golden):\n    assert not VALUE"),
    "its tensors are none": TESTS.format(value="'x'").replace("torch.arange(5000.0) *", ""),
    "a fixture fails": TESTS.format(value="1.0").replace("test_one(golden)", "test_one(golden, missing)"),
}


@pytest.mark.parametrize("name", LATER_RUNS)
def test_a_run_that_comes_to_no_comparison_forgets_what_an_earlier_one_left(filled, name: str) -> None:
    _write(filled, "1.5")
    filled.run().assert_outcomes(passed=1, failed=1)
    left = filled.path / ".harness_cache" / "golden"
    assert len(list(left.rglob("*.json"))) == 1
    filled.tests(test_it=LATER_RUNS[name])
    if "damaged" in name:
        (filled.path / "golden" / "one.safetensors").write_bytes(b"")
    assert filled.run("-k", "one").ret == 1
    assert not list(left.rglob("*.json"))


def test_a_damaged_cache_does_not_break_the_run(filled) -> None:
    _write(filled, "1.5")
    filled.run()
    (record,) = (filled.path / ".harness_cache" / "golden").rglob("*.json")
    record.write_text("{")
    filled.tests(test_it="def test_nothing(): pass")
    result = filled.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*is no record of a failed check*"])


ADVISED = """
import torch
from harness.tolerance import T1
def test_one(golden): golden.check("one two", torch.arange({}))
def test_two(golden): golden.check("-dash", torch.arange(6.0), tier={})
def test_three(golden): golden.check("drifted", torch.arange(6.0), inputs={{"x": torch.arange({})}})
"""


@pytest.mark.parametrize("cache", [".harness_cache", "left/over", "away"])
def test_every_command_that_a_failure_prints_does_what_it_says(
    project, monkeypatch: pytest.MonkeyPatch, tmp_path_factory, cache: str
) -> None:
    cache = str(tmp_path_factory.mktemp(cache)) if cache == "away" else cache
    project.pytester.makeini(f"[pytest]\nharness_golden_dir = data/goldens\nharness_cache_dir = {cache}\n")
    (project.path / "below").mkdir()
    for below, settings in ((".", ("6.0", "T1(4)", "6.0")), (".", ("6.0", "None", "6.0")), ("below", ("7.0", "T1(4)", "7.0"))):
        project.tests(test_it=ADVISED.format(*settings))
        monkeypatch.chdir(project.path / below)
        found = project.run("--golden-update=new", f"--rootdir={project.path}", str(project.path / "test_it.py"))
        advised = re.findall(r"^E? *(?:look|accept): +harness (golden .*)$", found.stdout.str(), re.MULTILINE)
        failed = found.parseoutcomes().get("failed", 0)
        looks, accepts = ([shlex.split(line) for line in advised if line.split()[1] == verb] for verb in ("diff", "accept"))
        assert len(accepts) == failed and len(looks) == 2 * failed, "of each failure, and once more at the end"
        assert [cli.main(words) for words in looks] == [1] * len(looks), advised
        assert [cli.main(words) for words in accepts] == [0] * len(accepts), advised
    project.run(f"--rootdir={project.path}", str(project.path / "test_it.py")).assert_outcomes(passed=3)
