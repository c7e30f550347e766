"""What a plan says about itself: stages, guards, leaves and the ways to choose an engine; plain records without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import Graph

from compressor.errors import TracingError

Engine = Literal["auto", "graph", "suspend"]
Verify = Literal["off", "first", "all"]
ENGINES: tuple[Engine, ...] = ("auto", "graph", "suspend")
VERIFY: tuple[Verify, ...] = ("off", "first", "all")


def check_tracing_options(engine: str, verify: str, max_variants: int) -> None:
    """Refuse choices that do not exist.

    Args:
        engine: of ENGINES.
        verify: of VERIFY.
        max_variants: at least 1.

    Raises:
        TracingError: one of them breaks its rule.
    """
    for name, value, known in (("engine", engine, ENGINES), ("verify", verify, VERIFY)):
        if value not in known:
            raise TracingError(f"{name}: {value!r} does not exist; choose one of {', '.join(known)}")
    if max_variants < 1:
        raise TracingError(f"max_variants: {max_variants} leaves no room for the first graph; give at least 1")


@dataclass(frozen=True)
class Stage:
    """One stop of all samples.

    Attributes:
        index: position among the stages.
        target_names: dotted names of the targets that are calibrated here; the name "" is the model itself.
        modules: dotted names of the targets and of all modules inside them.
        live_in: names of the values that cross into the stage; empty for the suspend engine, which keeps them in paused frames.
        live_out: names of the values that cross out of it.
        mutates: names of the values crossing into it that it writes to.
        live_bytes: memory of what crosses into it, for the first batch; None for the suspend engine.
        num_calls: how often the first batch calls the targets.
        graph: the torch.fx graph of the first batch, from this stage to the next; None for the suspend engine.
    """

    index: int
    target_names: tuple[str, ...]
    modules: tuple[str, ...]
    live_in: tuple[str, ...] = ()
    live_out: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    live_bytes: int | None = None
    num_calls: int = 1
    graph: Graph | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Guard:
    """A value that Python code of the model looked at while it was recorded; every batch must give the same.

    Attributes:
        file: source file of the model's code.
        line: line in it.
        function: function around it.
        value: what was looked at, as an expression over the inputs.
        expected: what it was.
        stage: index of the stage in whose graph it is checked; -1 before the first stage.
        variant: index of the recorded graph that it belongs to.
        is_value: Python decided by a value; False for how a result is built, which is checked when it is there.
        text: what it demands, as a person would write it.
    """

    file: str
    line: int
    function: str
    value: str
    expected: Any
    stage: int = -1
    variant: int = 0
    is_value: bool = True
    text: str = ""

    def __str__(self) -> str:
        """Return `file:line: condition`."""
        return f"{short_file(self.file)}:{self.line}: {self.text or f'{self.value} == {self.expected!r}'}"


@dataclass(frozen=True)
class Leaf:
    """A Python function that is recorded as one node.

    Attributes:
        name: qualified name of the function.
        reason: who made it a leaf, and what for.
    """

    name: str
    reason: str


def short_file(path: str) -> str:
    """Return the last part of a path, which is how messages name files.

    Args:
        path: of a source file.

    Returns:
        Its name without folders.
    """
    return path.replace("\\", "/").rsplit("/", 1)[-1]
