"""What is recorded of every call of an optimizer, and where in whose code it came from."""

from __future__ import annotations

import sys
from collections import UserList
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_OPTIMIZER_PACKAGES = ("onnxsim", "onnxoptimizer", "onnxruntime", "onnxslim", "onnxscript")
_BETWEEN = ("onnxruntime.capi", "harness.onnx_graph")
"""Python that every session goes through, and this folder."""


@dataclass(frozen=True)
class OptimizerCall:
    """One call of an optimizer's native entry.

    Attributes:
        backend: `onnxsim`, `onnxoptimizer` or `ort`.
        entry: name of the native function.
        asked: what the caller gave: names to skip; for onnxoptimizer the names to run. None where optimizing was switched off.
        used: the same after forced skips.
        caller: `file:line in function` of the innermost frame outside the optimizer.
        seconds: wall time inside native code.
        pid: process.
        thread: name of the thread.
        error: class and text of the exception that the optimizer raised; empty if none.
        broken: what the contract given as `on_call` found; empty if it holds or none was given.
    """

    backend: str
    entry: str
    asked: tuple[str, ...] | None
    used: tuple[str, ...] | None
    caller: str
    seconds: float
    pid: int
    thread: str
    error: str = ""
    broken: str = ""

    @property
    def changed(self) -> bool:
        """Whether a skip was forced on this call."""
        return self.asked != self.used

    def to_dict(self) -> dict[str, Any]:
        """Return the call as JSON types."""
        return asdict(self) | {"changed": self.changed}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> OptimizerCall:
        """Read back what `to_dict` wrote.

        Args:
            fields: JSON types.

        Returns:
            The call.
        """
        lists = {key: None if fields[key] is None else tuple(fields[key]) for key in ("asked", "used")}
        return cls(**{**{key: fields[key] for key in cls.__dataclass_fields__}, **lists})


class Calls(UserList[OptimizerCall]):
    """The calls recorded so far, in the order in which they ended; those of child processes come last, when the context ends."""

    def text(self) -> str:
        """Return one line per call.

        Returns:
            Caller, what it asked for and what was used.
        """
        return "\n".join(_line(call) for call in self)

    def unprotected(self, backends: Collection[str]) -> str:
        """Say why skips protected nothing.

        Args:
            backends: optimizers that have one of the passes.

        Returns:
            In words; empty where one of them was called and did not fail.
        """
        ours = [call for call in self if call.backend in backends]
        if any(not call.error for call in ours):
            return ""
        if ours:
            return f"every call of {' and '.join(dict.fromkeys(call.backend for call in ours))} failed"
        return f"no call of {' or '.join(backends)} was seen"


class GraphContract(Protocol):
    """What `on_call` takes: something that compares a graph before and after an optimizer."""

    def check(self, before: Any, after: Any) -> GraphFinding:
        """Compare.

        Args:
            before: ModelProto.
            after: ModelProto.

        Returns:
            What was found.
        """
        ...


class GraphFinding(Protocol):
    """What a contract returns."""

    @property
    def holds(self) -> bool:
        """Whether the contract was kept."""
        ...

    @property
    def message(self) -> str:
        """What is broken, for people."""
        ...


def calling_line() -> str:
    """Find who called the optimizer.

    Returns:
        `file:line in function` of the innermost frame that lies outside the optimizers and this folder.
    """
    frame = _outside(sys._getframe(1), (*_OPTIMIZER_PACKAGES, *_BETWEEN))
    path = Path(frame.f_code.co_filename)
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def called_by_an_optimizer() -> bool:
    """Whether the session that is being opened is an optimizer's own: to fold constants, or to compare what it made."""
    return _belongs(_outside(sys._getframe(1), _BETWEEN), _OPTIMIZER_PACKAGES)


def _outside(frame: FrameType, packages: tuple[str, ...]) -> FrameType:
    while frame.f_back is not None and _belongs(frame, packages):
        frame = frame.f_back
    return frame


def _belongs(frame: FrameType, packages: tuple[str, ...]) -> bool:
    module = f"{frame.f_globals.get('__name__', '')}."
    return any(module.startswith(f"{package}.") for package in packages)


def _line(call: OptimizerCall) -> str:
    return f"{call.caller}: {call.backend}.{call.entry}, {_difference(call)}, {call.seconds * 1e3:.0f} ms{_ending(call)}"


def _difference(call: OptimizerCall) -> str:
    if call.asked is None or call.used is None:
        return "the call did not come to optimizing" if call.error else "optimizing is off"
    asked, used = set(call.asked), set(call.used)
    if asked == used:
        return "nothing had to be forced"
    if call.backend == "onnxoptimizer":
        return f"asked for {len(asked)} passes, {', '.join(sorted(asked - used))} taken out"
    return f"asked to skip {', '.join(sorted(asked)) or 'nothing'}, forced {', '.join(sorted(used - asked))}"


def _ending(call: OptimizerCall) -> str:
    return f", failed: {call.error}" if call.error else f", {call.broken}" if call.broken else ""
