"""Forced skips in child processes: an import hook that Python runs at start, and a folder through which the calls come back.

The environment names a folder with a `sitecustomize.py`. Every Python that a child starts imports it, be it a script, `python -m onnxsim`,
the command `onnxsim` or a worker of multiprocessing; nothing heavy is imported before an optimizer is. An interpreter that ignores its
environment (`python -I`, `-E`, `-S`) or that is given another one escapes: `harness onnx run` sees that (supervision.py), `forced_skips`
only if no call is recorded at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.json_text import from_json
from harness.onnx_graph.skips.call_records import OptimizerCall

VARIABLE = "HARNESS_FORCED_SKIPS"
"""Names the folder, in the environment of child processes."""

_SITE = '''\
"""Forces optimizer skips in this process, then hands on to any other sitecustomize."""
import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
if os.environ.get({variable!r}) == _here:
    if importlib.util.find_spec("harness") is None:
        sys.path.append({package_root!r})
    from harness.onnx_graph.skips.child_processes import start_in_child
    start_in_child(_here)
'''


@dataclass(frozen=True)
class Channel:
    """The folder that parent and children share.

    Attributes:
        folder: holds `sitecustomize.py`, `policy.json`, `calls.jsonl`, a file `reached-PID` of every process that ran the hook and, if
            graphs are wanted, two files per call.
    """

    folder: Path

    def open(self, skips: Mapping[str, tuple[str, ...]], keep_graphs: bool) -> None:
        """Write what children read.

        Args:
            skips: names by backend.
            keep_graphs: whether children store the graphs before and after each call, for a contract that is checked here.
        """
        root = str(Path(__file__).resolve().parents[3])
        (self.folder / "sitecustomize.py").write_text(_SITE.format(variable=VARIABLE, package_root=root), encoding="utf-8")
        policy = {"skips": {backend: list(names) for backend, names in skips.items()}, "keep_graphs": keep_graphs}
        (self.folder / "policy.json").write_text(json.dumps(policy), encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Return the variables that a child needs, on top of the current ones."""
        others = os.environ.get("PYTHONPATH")
        return {VARIABLE: str(self.folder), "PYTHONPATH": os.pathsep.join([str(self.folder), *([others] if others else [])])}

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Set the variables for whatever this process starts; they are as before afterwards.

        Yields:
            Nothing.
        """
        new = self.environment()
        before = {key: os.environ.get(key) for key in new}
        os.environ.update(new)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value

    def reached(self, process: int) -> bool:
        """Say whether a process has run the hook.

        Args:
            process: identifier.

        Returns:
            Whether it has, since `forget`.
        """
        return self._sign(process).exists()

    def sign(self, process: int) -> None:
        """Say that a process has run the hook.

        Args:
            process: identifier.
        """
        self._sign(process).touch()

    def forget(self, process: int) -> None:
        """Take `sign` back: the process begins another program.

        Args:
            process: identifier.
        """
        self._sign(process).unlink(missing_ok=True)

    def _sign(self, process: int) -> Path:
        return self.folder / f"reached-{process}"

    def send(self, call: OptimizerCall, stem: str = "") -> None:
        """Append one call to the log; one write, so that lines of several processes do not mix.

        Args:
            call: finished.
            stem: name of the stored graphs; empty if there are none.
        """
        line = json.dumps({"call": call.to_dict(), "graphs": stem}) + "\n"
        handle = os.open(self.folder / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def store(self, call: OptimizerCall, before: Any, after: Any) -> OptimizerCall:
        """Keep both graphs of a call for the parent, and send the call. Used as a policy's judge: it finds nothing itself.

        Args:
            call: finished.
            before: bytes or path.
            after: bytes or path.

        Returns:
            The call.
        """
        import onnx

        from harness.onnx_graph.skips.native_entries import read_graph

        stem = uuid.uuid4().hex
        for side, source in (("before", before), ("after", after)):
            onnx.save(read_graph(source), self.folder / f"{stem}.{side}.onnx")
        self.send(call, stem)
        return call

    def received(self, judge: Callable[[OptimizerCall, Any, Any], OptimizerCall] | None) -> list[OptimizerCall]:
        """Read the calls of all children.

        Args:
            judge: looks at (call, path before, path after); None looks at nothing.

        Returns:
            Calls in the order in which they ended.
        """
        log = self.folder / "calls.jsonl"
        calls = []
        for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
            fields = from_json(line)
            call = OptimizerCall.from_dict(fields["call"])
            if judge is not None and fields["graphs"]:
                sides = [self.folder / f"{fields['graphs']}.{side}.onnx" for side in ("before", "after")]
                call = judge(call, *sides)
            calls.append(call)
        return calls


def start_in_child(folder: str) -> None:
    """Apply the policy of the parent to this process, to its end; called by `sitecustomize.py`.

    Args:
        folder: of the channel.
    """
    from harness.onnx_graph.skips.intercept import INTERCEPTOR, Policy

    channel = Channel(Path(folder))
    policy = from_json((channel.folder / "policy.json").read_text(encoding="utf-8"))
    skips = {backend: tuple(names) for backend, names in policy["skips"].items()}
    keep_graphs = policy["keep_graphs"]

    def record(call: OptimizerCall) -> None:
        if not keep_graphs or call.error:  # with graphs, the judge has sent it already
            channel.send(call)

    INTERCEPTOR.add(Policy(skips, record, judge=channel.store if keep_graphs else None))
    channel.sign(os.getpid())
