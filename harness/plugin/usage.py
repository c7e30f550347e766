"""Which goldens the tests used, and whether the run can know: `harness golden prune` deletes only after a complete run.

A run is complete when every test of the project was collected and none was left out. A test that was skipped or failed may use goldens
that it did not come to, so its own are not called unused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from harness.goldens.atomic import write_whole
from harness.goldens.usage_record import USAGE_FILE, read_usage
from harness.plugin.options import folder_setting, setting

_KEY = "harness_deselected"


class Usage:
    """What one run knows about the use of goldens."""

    def __init__(self, config: pytest.Config) -> None:
        """Start with nothing seen."""
        self.config = config
        self.num_deselected = 0
        self.num_run = 0
        self.gaps: list[str] = []
        self.unknown_tests: set[str] = set()
        self.trouble: list[str] = []

    def saw_report(self, report: pytest.TestReport) -> None:
        """Note a test; one that was skipped or failed may have left goldens unused."""
        self.num_run += report.when == "call"
        if not report.passed:
            self.unknown_tests.add(report.nodeid)

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
            old = read_usage(path) or {"complete": False, "gaps": gaps, "used": [], "unknown_tests": []}
            record = {**old, "used": sorted(used | set(old["used"]))}
        record["golden_dir"] = str(setting(self.config, "golden_dir"))
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
