"""The proof: a recorded graph is run beside the plain model, and what every module is given and gives back is compared, bit for bit.

Values are compared by their digests as the graph runs, so nothing is kept of a large model but a few bytes for each call, and the first
difference stops the graph where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing.graph.execute import run_program
from compressor.tracing.graph.lending import digest
from compressor.tracing.graph.planner import without_traces
from compressor.tracing.graph.program import Program
from compressor.tracing.graph.record import copy_batch, named_inputs
from compressor.tracing.graph.trees import parts_of
from compressor.tracing.out_of_memory import is_out_of_memory

_MAX_DEPTH = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Seen(NamedTuple):
    """What one module call was given, or gave back.

    Attributes:
        name: of the module; None for the result of the whole forward.
        side: `input` or `output`.
        parts: path to the digest of a tensor, or to a plain value in words.
    """

    name: str | None
    side: str
    parts: tuple[tuple[str, str], ...]


class Mismatch(TracingError):
    """A recorded graph computes something else than the plain model."""


@torch.no_grad()
def verify_programs(model: nn.Module, cases: Sequence[Case], targets: Collection[str]) -> None:
    """Run recorded graphs and the plain model on the same batches, and compare all that modules are given and give back.

    All plain forwards come first: a graph that depends on what the forward of its own batch left behind then meets what another left.

    Args:
        model: as it was afterwards.
        cases: what to compare; the graphs are read as they are now.
        targets: dotted names of the sequential targets.

    Raises:
        Mismatch: the first difference: module, value, node and line.
    """
    skipped = _taken_apart(targets)
    expected = [_observe(model, case.batch, skipped) for case in cases]
    for case, seen in zip(cases, expected, strict=True):
        _Comparison(model, case.program, seen, case.sample).run(case.batch, skipped)


class Case(NamedTuple):
    """A batch, the recorded graph that it takes, and its number, for errors."""

    program: Program
    batch: Batch
    sample: int


def _observe(model: nn.Module, batch: Batch, skipped: Collection[str]) -> list[Seen]:
    """Run a plain forward, and note all that modules are given and give back."""
    seen: list[Seen] = []
    with without_traces(), _watching(model, skipped, seen.append):
        result = call_model(model, copy_batch(batch))
        seen.append(Seen(None, "output", tuple(digests(result))))
    return seen


class _Comparison:
    """A run of the graph that is held against what the plain model did."""

    def __init__(self, model: nn.Module, program: Program, expected: list[Seen], sample: int) -> None:
        self._model, self._program, self._expected, self._sample = model, program, expected, sample
        self._position = 0
        self._node: fx.Node | None = None

    def run(self, batch: Batch, skipped: Collection[str]) -> None:
        def call(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._node = node
            return module(*args, **kwargs)

        try:
            with without_traces(), _watching(self._model, skipped, self._compare):
                result = run_program(self._program, named_inputs(copy_batch(batch)), self._model, call)
                self._node = None
                self._compare(Seen(None, "output", tuple(digests(result))))
        except TracingError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            name, _, place = getattr(error, "__notes__", ["the recorded graph, "])[-1].rpartition(", ")
            raise Mismatch(
                f"{place or 'forward'}: verify: batch {self._sample}: {type(error).__name__}: {error} ({name}), which the plain model does "
                f"not raise; {_REMEDY}"
            ) from error

    def _compare(self, got: Seen) -> None:
        expected = self._expected[self._position]
        self._position += 1
        if (got.name, got.side) != (expected.name, expected.side):
            self._raise(f"{_call(got)} comes where the plain model has {_call(expected)}", "")
        if got.parts == expected.parts:
            return
        paths = [path for path, _ in expected.parts]
        if paths != [path for path, _ in got.parts]:
            odd = sorted(set(paths) ^ {path for path, _ in got.parts}) or ["their order"]
            self._raise(f"{_call(got)} has other parts than in the plain model: {', '.join(odd[:4])}", odd[0])
        path, value, plain = next(
            (path, value, plain) for (path, plain), (_, value) in zip(expected.parts, got.parts, strict=True) if value != plain
        )
        kind, plain_kind = _without_digest(value), _without_digest(plain)
        what = f"differs from the plain model's {kind}" if kind == plain_kind else f"is {kind}, in the plain model {plain_kind}"
        self._raise(f"{_call(got)}{path} {what}", path)

    def _raise(self, what: str, path: str) -> None:
        node = self._node or self._program.segments[-1].graph.output_node()
        source = _argument(node, path) or node
        place = source.meta.get("place") or node.meta.get("place") or "the end of forward"
        raise Mismatch(f"{place}: verify: batch {self._sample}: {what} (node {source.name}); {_REMEDY}")


_REMEDY = 'use engine="suspend", or wrap the function at this line with leaf(fn)'


def _call(seen: Seen) -> str:
    return "the result of the forward" if seen.name is None else f"{seen.side} of {seen.name or 'the model'}"


def _without_digest(text: str) -> str:
    """Say a value without the digest, which tells people nothing."""
    return text.partition(" #")[0]


def _argument(node: fx.Node, path: str) -> fx.Node | None:
    """Find the node that made the argument in which a difference was found."""
    keys = [key for key in path.replace("]", "").split("[") if key]
    value: Any = (node.args, node.kwargs) if node.op != "output" else (node.args,)
    for key in keys if node.op != "output" else ["0", "0", *keys]:
        if isinstance(value, fx.Node):
            return value
        value = (
            value.get(key) if isinstance(value, dict) else value[int(key)] if isinstance(value, tuple | list) and key.isdigit() else None
        )
    return value if isinstance(value, fx.Node) else None


def _taken_apart(targets: Collection[str]) -> set[str]:
    """Name the modules that hold a target; a graph does not call them."""
    found = {""} if any(targets) else set()
    for target in targets:
        parts = target.split(".")
        found |= {".".join(parts[:number]) for number in range(1, len(parts))}
    return found - set(targets)


@contextmanager
def _watching(model: nn.Module, skipped: Collection[str], tell: Callable[[Seen], None]) -> Iterator[None]:
    """Tell of every module call, for the duration."""

    def before(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: tell(Seen(name, "input", tuple(digests((args, kwargs)))))

    def after(name: str) -> Callable[..., None]:
        return lambda module, args, output: tell(Seen(name, "output", tuple(digests(output))))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name not in skipped and not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after(name)).remove)
        yield


def digests(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Take a value apart into its tensors and plain values.

    Args:
        value: anything.
        path: of the value.
        depth: how deep this already is.

    Yields:
        Path, and dtype, shape and digest of a tensor or the text of a plain value.
    """
    if isinstance(value, Tensor):
        yield path, f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} #{digest(value)}"
    elif isinstance(value, _PLAIN):
        yield path, repr(value)
    elif depth == _MAX_DEPTH or isinstance(value, nn.Module | type) or callable(value) or type(value).__name__.endswith("Config"):
        yield path, type(value).__name__
    else:
        yield path, type(value).__name__
        for key, part in parts_of(value):
            yield from digests(part, f"{path}[{key}]", depth + 1)
