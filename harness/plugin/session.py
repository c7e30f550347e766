"""The goldens of a whole session: worker processes collect, the one that runs the session writes once, at its end, and reports.

What a check found travels with the test's report, which every distribution of tests carries; the tensors lie in the cache folder.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from compressor.atomic import write_whole
from harness.errors import GoldenError
from harness.goldens.report import comparison_lines, golden_command
from harness.goldens.store.paths import USAGE_FILE
from harness.plugin.fixtures import GOLDEN
from harness.plugin.options import OPTIONS, folder_setting, setting
from harness.plugin.selection import checks_of

# Which goldens the tests used, and whether the run can know: `harness golden prune` deletes only after a complete run.
#
# A run is complete when every test of the project was collected and none was left out. A test that was skipped or failed may use goldens
# that it did not come to, so its own are not called unused.

_KEY = "harness_deselected"
_EMPTY_SET = re.compile(r"\[(.*-)?NOTSET(-.*)?\]$")  # pytest's word for the parameter of a test that it skips because there is none


class Usage:
    """What one run knows about the use of goldens."""

    def __init__(self, config: pytest.Config) -> None:
        """Start with nothing seen."""
        self.config = config
        self.num_deselected = 0
        self.num_run = 0
        self.gaps: list[str] = []
        self.unknown_tests: set[str] = set()
        self.ran: set[str] = set()
        self.trouble: list[str] = []

    def saw_report(self, report: pytest.TestReport) -> None:
        """Note a test; one that was skipped or failed may have left goldens unused."""
        self.num_run += report.when == "call"
        if report.when == "call" or report.failed:
            self.ran.add(report.nodeid)
        if not report.passed:
            self.unknown_tests.add(_EMPTY_SET.sub("", report.nodeid))

    def saw_collection(self, report: pytest.CollectReport) -> None:
        """Note a file that was skipped or could not be collected."""
        if report.failed:
            self.gaps.append(f"{report.nodeid} could not be collected")
        elif report.skipped:
            self.unknown_tests.add(report.nodeid)

    def hand_over(self, output: dict[str, Any]) -> None:
        """Put what a worker process counted where the session finds it."""
        output[_KEY] = self.num_deselected

    def saw_worker_end(self, output: Mapping[str, Any], error: object) -> None:
        """Take over what a worker process counted; every worker leaves out the same tests."""
        self.num_deselected = max(self.num_deselected, int(output.get(_KEY, 0)))
        if error:
            self.gaps.append("a worker process crashed")

    def save(self, session: pytest.Session, exitstatus: int, outcomes: Iterable[Mapping[str, Any]]) -> bool:
        """Write down which goldens were used.

        A complete run replaces the record. Any other adds what it used to it, so that a golden that was written after the last complete
        run does not look unused.

        Args:
            session: of pytest.
            exitstatus: of the session.
            outcomes: of all checks.

        Returns:
            Whether the run was complete.
        """
        path = folder_setting(self.config, "cache_dir") / USAGE_FILE
        used = {outcome["name"] for outcome in outcomes}
        gaps = self._why_incomplete(session, exitstatus)
        record = {"complete": True, "gaps": [], "used": sorted(used), "unknown_tests": sorted(self.unknown_tests)}
        if gaps:
            from harness.goldens.store.listing import read_usage  # with pydantic, which most runs of others do not need

            old = read_usage(path) or {"complete": False, "used": [], "unknown_tests": []}
            record = {**old, "gaps": [] if old["complete"] else gaps, "used": sorted(used | set(old["used"]))}
        record["golden_dir"] = os.path.relpath(folder_setting(self.config, "golden_dir"), path.parent.parent)
        try:
            marker = path.parent / ".gitignore"
            if not marker.exists():
                write_whole(marker, b"# Made by compressor-harness; nothing here belongs into version control.\n*\n")
            write_whole(path, (json.dumps(record, sort_keys=True, indent=1) + "\n").encode())
        except OSError as error:
            self.trouble.append(f"{path}: cannot be written ({error.strerror}); harness golden prune will not know which goldens are used")
        return not gaps

    def _why_incomplete(self, session: pytest.Session, exitstatus: int) -> list[str]:
        option = self.config.option
        facts = [
            (bool(option.collectonly), "tests were only collected"),
            (self.num_deselected > 0, f"{self.num_deselected} tests were deselected"),
            (bool(option.ignore or option.ignore_glob), "paths were ignored"),
            (bool(session.shouldstop or session.shouldfail), "the run was stopped early"),
            (exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"the run ended with exit status {int(exitstatus)}"),
            (not self._asked_for_all(), "only a part of the tests was asked for"),
            (self.num_run == 0, "no test ran"),
        ]
        return [*self.gaps, *(text for is_so, text in facts if is_so)]

    def _asked_for_all(self) -> bool:
        source = self.config.args_source
        if source is pytest.Config.ArgsSource.TESTPATHS:
            return True
        root = self.config.rootpath
        if source is pytest.Config.ArgsSource.INVOCATION_DIR:
            return self.config.invocation_params.dir == root
        whole = {root.resolve(), *((root / path).resolve() for path in self.config.getini("testpaths"))}
        here = self.config.invocation_params.dir
        asked = {(here / argument).resolve() for argument in self.config.args}
        return root.resolve() in asked or (bool(self.config.getini("testpaths")) and asked >= whole - {root.resolve()})


_ATTRIBUTE = "harness_goldens"
_MAX_NOTES = 5
_UPDATE_REFUSED = 1
"""Exit status of a session whose goldens could not be written: that of a failed test."""


class GoldenSession:
    """Collects what the checks of goldens found, in whatever process they ran."""

    def __init__(self, config: pytest.Config) -> None:
        """Start with nothing collected."""
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.outcomes: list[dict[str, Any]] = []
        self.failed_tests: set[str] = set()
        self.written: list[str] = []
        self.refused: dict[str, str] = {}  # why, and a test that asked for it; empty where it was none
        self.usage = Usage(config)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Hang what the test's goldens said on its report, and on the properties that JUnit shows."""
        golden = item.stash.get(GOLDEN, None)
        outcomes = list(golden.outcomes) if golden else []
        if golden:
            golden.outcomes.clear()
        for outcome in outcomes:
            item.user_properties.append(("harness.golden", f"{outcome['name']}: {outcome['verdict']}"))
        for number in checks_of(item):
            entry = ("harness.check", str(number))
            if entry not in item.user_properties:
                item.user_properties.append(entry)
        report = yield
        setattr(report, _ATTRIBUTE, outcomes)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect, where the session is run."""
        if self.is_worker:
            return
        self.outcomes += getattr(report, _ATTRIBUTE, [])
        if report.failed:
            self.failed_tests.add(report.nodeid)
        self.usage.saw_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        self.usage.saw_collection(report)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note that tests were left out."""
        self.usage.num_deselected += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over what a worker process of pytest-xdist counted."""
        self.usage.saw_worker_end(getattr(node, "workeroutput", {}), error)

    @pytest.hookimpl(tryfirst=True)  # before JUnit is written
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write what the checks want, once, and remember which goldens were used."""
        if self.is_worker:
            output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
            self.usage.hand_over(output)
            return
        if setting(self.config, "update"):
            self._write()
            if self.refused and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = _UPDATE_REFUSED
        if self.outcomes or self._root.is_dir():
            self._drop_stale_candidates(is_complete=self.usage.save(session, exitstatus, self.outcomes))
        if setting(self.config, "update"):
            self._report_refused()

    def _report_refused(self) -> None:
        """Show what could not be written to whoever reads reports, as JUnit does: the tests had passed by then, and the run has not."""
        for text, test in self.refused.items():
            if test not in self.failed_tests:
                report = pytest.TestReport(test or "goldens", (test.partition("::")[0], None, test), {}, "failed", text, "teardown")
                self.config.hook.pytest_runtest_logreport(report=report)

    def _drop_stale_candidates(self, *, is_complete: bool) -> None:
        """Forget what tests left that ran again and compared no such golden; after a complete run, also tests that no longer exist."""
        from harness.goldens.store.candidates import CandidateFolder

        folder = CandidateFolder(folder_setting(self.config, "cache_dir") / "golden")
        compared = {(outcome["name"], outcome["test"]) for outcome in self.outcomes if outcome["verdict"] != "unreadable"}
        try:
            for candidate in list(folder.all()):
                test = candidate.test
                is_over = test in self.usage.ran or (is_complete and test not in self.usage.unknown_tests)
                if is_over and (candidate.name, test) not in compared:
                    folder.drop(candidate.name, test)
        except GoldenError as error:
            self.usage.trouble.append(str(error))

    @property
    def _root(self) -> Path:
        return folder_setting(self.config, "golden_dir")

    def _write(self) -> None:
        from harness.goldens.store.candidates import CandidateFolder, read_candidate
        from harness.goldens.store.writer import accept

        try:
            wanted = self._free_of_conflicts()
            candidates = [read_candidate(Path(outcome["candidate"])) for outcome in wanted.values()]
            reason, variant = setting(self.config, "reason"), bool(setting(self.config, "variant"))
            done = accept(self._root, candidates, reason=reason, add_variant=variant) if candidates else None
        except GoldenError as error:
            self.refused[str(error)] = ""
            return
        self.written += done.written if done else ()
        folder = CandidateFolder(folder_setting(self.config, "cache_dir") / "golden")
        for candidate in candidates:
            folder.drop(candidate.name, candidate.test)

    def _free_of_conflicts(self) -> dict[str, Mapping[str, Any]]:
        """The outcomes to write, by golden; without those of failed tests, and of goldens that two tests lay claim to."""
        claims: dict[str, list[Mapping[str, Any]]] = {}
        for outcome in self.outcomes:
            claims.setdefault(outcome["name"], []).append(outcome)
        wanted: dict[str, Mapping[str, Any]] = {}
        for name, outcomes in self._with_own_files(claims).items():
            writing = [outcome for outcome in outcomes if outcome["candidate"]]
            tests = sorted({outcome["test"] for outcome in outcomes if outcome["kind"] == "outputs"})
            failed = [outcome["test"] for outcome in writing if outcome["test"] in self.failed_tests]
            if not tests and len(failed) < len(writing):  # stored inputs: one test that passed is enough
                writing, failed = [outcome for outcome in writing if outcome["test"] not in self.failed_tests], []
            if not writing:
                continue
            if len(tests) > 1:
                text = f"golden {name!r}: is written by {' and by '.join(tests)}; it was not written; give each its own name"
                self.refused[text] = tests[-1]
            elif failed:
                self.refused[f"golden {name!r}: was not written, because {failed[0]} failed; make it pass first"] = failed[0]
            elif len({_content(outcome) for outcome in writing}) > 1:
                text = f"stored inputs {name!r}: differ from test to test; they were not written; make them depend on a seed"
                self.refused[text] = writing[-1]["test"]
            else:
                wanted[name] = writing[-1]
        return wanted

    def _with_own_files(self, claims: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
        """The goldens to write whose file no other one of them would have."""
        from harness.goldens.store.paths import relative_path, same_file

        names: dict[str, list[str]] = {}
        for name, outcomes in claims.items():
            if any(outcome["candidate"] for outcome in outcomes):
                names.setdefault(relative_path(name), []).append(name)
        for shared in names.values():
            self.refused |= {str(same_file(name, other)): claims[other][-1]["test"] for name, other in itertools.pairwise(shared)}
        return {name: claims[name] for shared in names.values() if len(shared) == 1 for name in shared}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show every golden that does not hold, what was written, and what was held to another platform's tier."""
        bad = [outcome for outcome in self.outcomes if outcome["verdict"] != "pass" and not outcome["candidate"]]
        notes = [f"{outcome['name']}: {outcome['note']}" for outcome in self.outcomes if outcome["note"] and outcome["verdict"] == "pass"]
        if not (bad or notes or self.written or self.refused or self.usage.trouble):
            return
        terminalreporter.section("goldens")
        for outcome in bad:
            for line in self._lines(outcome):
                terminalreporter.write_line(line)
        for note in notes[:_MAX_NOTES]:
            terminalreporter.write_line(f"passed: {note}")
        if len(notes) > _MAX_NOTES:
            terminalreporter.write_line(f"and {len(notes) - _MAX_NOTES} more passed by their tier for elsewhere")
        for line in self.written:
            terminalreporter.write_line(f"written: {line}", green=True)
        for line in [*self.refused, *self.usage.trouble]:
            terminalreporter.write_line(line, red=True)

    def _lines(self, outcome: Mapping[str, Any]) -> list[str]:
        lines = [f"{outcome['name']}: {outcome['verdict']}: {outcome['summary']}"]
        lines += [outcome["note"]] if outcome["note"] else []
        lines += comparison_lines(outcome["comparisons"])
        flags = [f"{OPTIONS[key].flag}={shlex.quote(str(setting(self.config, key)))}" for key in ("profile", "device") if self._given(key)]
        lines.append("  " + " ".join(["reproduce: pytest", shlex.quote(outcome["test"]), *flags]))
        if outcome["verdict"] == "missing":
            lines.append(f"  write it:  pytest {shlex.quote(outcome['test'])} --golden-update=new")
        elif outcome["verdict"] not in ("unreadable", "limit is vacuous"):
            lines.append(f"  look:      {golden_command('diff', outcome['name'], folder_setting(self.config, 'cache_dir'))}")
        return [*lines, ""]

    def _given(self, key: str) -> bool:
        return self.config.getoption(OPTIONS[key].flag) is not None


def _content(outcome: Mapping[str, Any]) -> str:
    from harness.goldens.store.candidates import read_candidate

    return str(sorted(read_candidate(Path(outcome["candidate"])).content().items(), key=str))
