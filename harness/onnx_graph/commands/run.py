"""`harness onnx run --skip ... -- python third_party.py`: forced skips for a command, without touching its code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from compressor.atomic import check_output_file, whole_file
from compressor.errors import CheckpointError, UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Kind, Text
from compressor.settings.options import Option, Settings
from harness.onnx_graph.commands.check import NamesAction
from harness.onnx_graph.skips.call_records import Calls
from harness.onnx_graph.skips.child_processes import Channel
from harness.onnx_graph.skips.passes import resolve_skips
from harness.onnx_graph.skips.supervision import OUT_OF_REACH, OUTSIDE, Ended, supervise
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command

_WORDS = Kind(lambda given: isinstance(given, list | tuple) and all(isinstance(one, str) for one in given), "a list of texts")


class RunSettings(Settings):
    """What runs, and what is skipped in it."""

    skip: Annotated[Text, Option(metavar="PASSES", action=NamesAction)]
    """Passes to leave out, with commas between: fuse_qkv,fuse_attention; may be given several times."""
    as_json: Annotated[FilePath | None, Option("--json", metavar="FILE")] = None
    """Write the recorded calls there, a .json file."""
    command: Annotated[Sequence[str], _WORDS, Option(positional=True, nargs=argparse.REMAINDER, metavar="-- COMMAND")] = ()
    """The command and its arguments, after two dashes."""


def run(settings: RunSettings) -> Verdict:
    """Run the command, print the calls of optimizers that it made.

    Args:
        settings: of the verb.

    Returns:
        PASS when it ended well, an optimizer that has one of the passes was called and did not fail, and every program that called one
        was reached; otherwise INCONCLUSIVE. Never REGRESSION: no contract is asked.

    Raises:
        UserInputError: no command, or one that cannot be run, a file that is no .json, or a pass that no optimizer knows.
        HarnessError: this system does not let a command be watched.
    """
    command = list(settings.command[1:] if settings.command[:1] == ["--"] else settings.command)
    if not command:
        raise UserInputError("run: no command was given; put it after two dashes: harness onnx run --skip fuse_qkv -- python deploy.py")
    if shutil.which(command[0]) is None:
        raise UserInputError(
            f"run: {command[0]!r} is no command that can be run; give its path, make it executable, or start it with `python`"
        )
    if settings.as_json is not None:
        check_output_file(settings.as_json, ".json")
    skips = resolve_skips([name.strip() for name in settings.skip.split(",") if name.strip()])
    ended, calls = _run(command, skips)
    verdict = _conclude(command, ended, calls, skips)
    if settings.as_json is not None:
        found = {"calls": [call.to_dict() for call in calls], "unseen": [asdict(one) for one in ended.unseen]}
        report = {"command": command, "exit_code": ended.code, "skips": skips} | found
        try:
            with whole_file(settings.as_json) as partial:
                partial.write_text(to_json(report), encoding="utf-8")
        except CheckpointError as error:  # the command has run: to say that nothing was would be untrue
            print(f"harness onnx run: {error}", file=sys.stderr)
            return Verdict.INCONCLUSIVE
    return verdict


def _run(command: Sequence[str], skips: dict[str, tuple[str, ...]]) -> tuple[Ended, Calls]:
    folder = Path(tempfile.mkdtemp(prefix="forced-skips-"))
    try:
        channel = Channel(folder)
        channel.open(skips, keep_graphs=False)
        ended = supervise(command, os.environ | channel.environment(), skips, channel.reached, channel.forget)
        return ended, Calls(channel.received(None))
    finally:
        shutil.rmtree(folder)


def _conclude(command: Sequence[str], ended: Ended, calls: Calls, skips: dict[str, tuple[str, ...]]) -> Verdict:
    if calls:
        print(calls.text())
    num_forced = sum(call.changed for call in calls)
    counted = f"{len(calls)} call{'' if len(calls) == 1 else 's'}"
    print(f"harness onnx run: {counted} of an optimizer, {num_forced} of them with forced skips", flush=True)
    problems = [f"not every call is known: {one.command}: {one.reason}" for one in ended.unseen]
    if ended.code:
        problems.append(f"{command[0]} ended with exit code {ended.code}")
    elif reason := calls.unprotected(skips):
        problems.append(f"nothing was protected: {reason} in the Python that the command started")
    for problem in problems:
        print(f"harness onnx run: {problem}", file=sys.stderr)
    return Verdict.INCONCLUSIVE if problems else Verdict.PASS


COMMAND = Command(
    "run a command whose code cannot be edited, and keep passes from running in it",
    RunSettings,
    run,
    f"{OUT_OF_REACH}. {OUTSIDE}; "
    + exit_codes("the command ended well and every call was forced", inconclusive="it failed, or a call is not known"),
)
