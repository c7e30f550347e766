"""The proof, before the first stage: a few samples go through the stages as they will in the run, and are held against plain forwards.

They take turns, because what passes between modules elsewhere than in arguments (a global, an object, a class, a list) is then another
sample's. Every target is called once without consequences before it is called for real, as calibration does, half of the times with other
numbers inside, as if it was compressed in between: what such a call leaves behind shows. Values are compared by their digests, so nothing
is kept of a large model but a few bytes for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressor.data.layouts import digest, kind_of
from compressor.errors import TracingError
from compressor.tracing.graph.nested_values import parts_of
from compressor.tracing.reads import LeftMemory
from compressor.tracing.targets.out_of_memory import is_out_of_memory
from compressor.tracing.targets.running import Run

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

    def __str__(self) -> str:
        """Say which call it is."""
        return "the result of the forward" if self.name is None else f"{self.side} of {self.name or 'the model'}"


class Found(NamedTuple):
    """What a proof that held has shown beside.

    Attributes:
        kept: attributes of modules by which one batch changes what the next one gives in the plain model.
        left: why few batches prove nothing: where one uses a tensor that another has left, or reads a Python value; empty where none was
            seen or looked for.
    """

    kept: tuple[str, ...]
    left: str


class Difference(NamedTuple):
    """Where a sample leaves the plain forward.

    Attributes:
        sample: its place among those of the proof.
        seen: what it did there.
        what: in words.
        path: to the value inside what the module was given or gave; empty where the call itself is another one.
    """

    sample: int
    seen: Seen
    what: str
    path: str


class OtherNumbers:
    """Lets the modules inside targets give larger or smaller numbers than they would, each sample others, as compression may.

    What Python reads off such numbers then differs from sample to sample where the samples themselves agree.

    Attributes:
        sample: that runs, by its place among those of the proof.
    """

    factors = (8.0, 0.125, -1.0)

    def __init__(self, model: nn.Module, targets: Collection[str]) -> None:
        """Change nothing before `made`.

        Args:
            model: that runs.
            targets: dotted names.
        """
        self.sample = 0
        inside = {id(below) for name in targets for below in model.get_submodule(name).modules()}
        self._modules = [module for module in model.modules() if id(module) in inside and next(module.children(), None) is None]

    @contextmanager
    def made(self, sample: int = 0) -> Iterator[None]:
        """Change numbers, until the model is put back.

        Args:
            sample: that runs first.

        Yields:
            Nothing.
        """
        self.sample = sample

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            is_number = isinstance(output, Tensor) and output.is_floating_point()
            return output * self.factors[self.sample % len(self.factors)] if is_number else None

        with ExitStack() as hooks:
            for module in self._modules:
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.callback(module.register_forward_hook(hook).remove)
            yield


class Comparison:
    """Samples on their way, held against plain forwards. A subclass says how a difference is told."""

    def __init__(
        self,
        expected: Sequence[Sequence[Seen]],
        targets: Collection[str],
        numbers: OtherNumbers | None = None,
        left: LeftMemory | None = None,
    ) -> None:
        """Begin.

        Args:
            expected: of each sample, what the plain forward was seen to do.
            targets: dotted names of the sequential targets.
            numbers: changes what targets compute.
            left: has looked at the plain forwards, and looks at the samples.
        """
        self._expected = expected
        self._left = left
        self._numbers = numbers
        self._targets = frozenset(targets)
        self._positions = [0] * len(expected)
        self._sample = 0
        self._inside: frozenset[str] = frozenset()  # names of the modules that are rehearsed at the moment
        self._halved = 0  # the samples, odd or even ones, that are rehearsed with other numbers
        self._is_first = False
        self._found: TracingError | None = None

    def error(self, difference: Difference) -> TracingError:
        """Make the error that tells of a difference.

        Args:
            difference: the first one.

        Returns:
            The error.
        """
        raise NotImplementedError

    def raised(self, error: Exception, sample: int) -> TracingError:
        """Make the error that tells of what a sample raised, which the plain model does not raise.

        Args:
            error: what it raised.
            sample: its place among those of the proof.

        Returns:
            The error.
        """
        raise NotImplementedError

    def begin(self, sample: int) -> None:
        """Take note of the sample that runs on.

        Args:
            sample: its place among those of the proof.
        """
        self._sample, self._is_first = sample, True
        if self._left is not None:
            self._left.begin(sample, is_trial=bool(self._inside))
        if self._numbers is not None:
            self._numbers.sample = sample

    def follow(self, run: Run, watched: Collection[str], model: nn.Module) -> None:
        """Take all samples through all stages, and compare.

        Args:
            run: of the samples; calls `begin`, and keeps outputs.
            watched: dotted names of the modules to look at.
            model: the model.

        Raises:
            TracingError: the first difference.
        """
        try:
            numbers = nullcontext() if self._numbers is None else self._numbers.made()
            left: AbstractContextManager[Any] = nullcontext() if self._left is None else self._left
            with numbers, _watching(model, watched, self._see, self._wants), self._other_numbers(model), left, run:
                for stage in run:
                    self._inside, self._halved = frozenset(stage.module_names), stage.index.bit_count() % 2  # a sequence without a period
                    stage.rehearse()
                    self._inside = frozenset()
                    stage.propagate()
                    self._raise_found()
            self._check_stops(run)
            for self._sample, output in enumerate(run.outputs):
                self._see(Seen(None, "output", tuple(digests(output))))
        except Exception as error:  # the model's own code raises what it likes
            self._raise_found()
            if isinstance(error, TracingError) or is_out_of_memory(error):
                raise
            raise self.raised(error, self._sample) from error

    def _check_stops(self, run: Run) -> None:
        for sample, calls in enumerate(self._expected):
            missed = next((seen for seen in calls if seen.name in run.uncalled), None)
            if missed is not None:
                self._sample = sample
                self._raise(missed, f"{missed} is seen, but no stage stops there: the model does not call it as modules are called", "")

    def _raise_found(self) -> None:
        if self._found is not None:  # the model may have caught it where it was raised
            raise self._found

    def _wants(self, name: str) -> bool:
        return not self._inside or (name in self._targets and (self._is_first or not self._halves))

    @property
    def _halves(self) -> bool:
        return self._sample % 2 == self._halved

    @contextmanager
    def _other_numbers(self, model: nn.Module) -> Iterator[None]:
        """Let modules inside a target give half of what they would, in every other rehearsal."""

        def halve(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                is_number = name in self._inside and self._halves and isinstance(output, Tensor) and output.is_floating_point()
                return output * 0.5 if is_number else None

            return hook

        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if next(module.children(), None) is None and name not in self._targets and not isinstance(module, torch.jit.ScriptModule):
                    hooks.callback(module.register_forward_hook(halve(name)).remove)
            yield

    def _see(self, got: Seen) -> None:
        if self._inside:  # which call of a target it is, the engines decide; later ones may depend on the numbers of this one
            self._is_first = False
            like = [one for one in self._expected[self._sample] if (one.name, one.side) == (got.name, got.side)]
            if not any(one.parts == got.parts for one in like):
                self._differs(got, like[0] if like else None)
            return
        position = self._positions[self._sample]
        self._positions[self._sample] += 1
        seen = self._expected[self._sample]
        expected = seen[position] if position < len(seen) else None
        if expected is None or (got.name, got.side) != (expected.name, expected.side):
            self._raise(got, f"{got} comes where the plain model has {expected or 'nothing'}", "")
        elif got.parts != expected.parts:
            self._differs(got, expected)

    def _differs(self, got: Seen, expected: Seen | None) -> None:
        if expected is None:
            self._raise(got, f"{got} is seen, which the plain model never calls", "")
            return
        paths = [path for path, _ in expected.parts]
        if paths != [path for path, _ in got.parts]:
            odd = sorted(set(paths) ^ {path for path, _ in got.parts}) or ["their order"]
            self._raise(got, f"{got} has other parts than in the plain model: {', '.join(odd[:4])}", odd[0])
        path, value, plain = next(
            (path, value, plain) for (path, plain), (_, value) in zip(expected.parts, got.parts, strict=True) if value != plain
        )
        kind, plain_kind = _without_digest(value), _without_digest(plain)
        what = f"differs from the plain model's {kind}" if kind == plain_kind else f"is {kind}, in the plain model {plain_kind}"
        self._raise(got, f"{got}{path} {what}", path)

    def _raise(self, got: Seen, what: str, path: str) -> None:
        self._found = self._found or self.error(Difference(self._sample, got, what, path))
        raise self._found


def _without_digest(text: str) -> str:
    """Say a value without the digest, which tells people nothing."""
    return text.partition(" #")[0]


def observe(model: nn.Module, watched: Collection[str], forward: Callable[[], Any]) -> list[Seen]:
    """Run a plain forward, and note all that modules are given and give back.

    Args:
        model: the model.
        watched: dotted names of the modules to look at.
        forward: runs it.

    Returns:
        What was seen, in order; the result of the forward comes last.
    """
    seen: list[Seen] = []
    with _watching(model, watched, seen.append, lambda name: True):
        result = forward()
    seen.append(Seen(None, "output", tuple(digests(result))))
    return seen


@contextmanager
def _watching(model: nn.Module, watched: Collection[str], tell: Callable[[Seen], None], wants: Callable[[str], bool]) -> Iterator[None]:
    """Tell of every call of some modules, for the duration."""

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if wants(name):
                tell(Seen(name, "input", _told((args, kwargs))))

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if wants(name):
                tell(Seen(name, "output", _told(output)))

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name in watched and not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after(name)).remove)
        yield


def _told(value: Any) -> tuple[tuple[str, str], ...]:
    """The digests of a value; inside of a transform of torch.func tensors have no bytes, and what they stand for is seen outside of it."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return (("", "inside a transform of torch.func"),) if inside else tuple(digests(value))


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
        yield path, f"{kind_of(value)} #{digest(value)}"
    elif isinstance(value, _PLAIN):
        yield path, repr(value)
    elif depth == _MAX_DEPTH or isinstance(value, nn.Module | type) or callable(value) or type(value).__name__.endswith("Config"):
        yield path, type(value).__name__
    else:
        yield path, type(value).__name__
        for key, part in parts_of(value):
            yield from digests(part, f"{path}[{key}]", depth + 1)
