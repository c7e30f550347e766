"""Counting the calls of watched modules: to stop calibration calls early, and to notice where that, or a stage, misses a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from compressor.errors import CalibrationError
from compressor.tracing.early_stop import Enough, Watched
from compressor.tracing.graph.program import Program

_REMEDY = 'use pipeline="basic" or other sequential targets'


def check_inside(program: Program, segment: int, targets: Collection[str], inside: Collection[str], sample: int) -> None:
    """Refuse watched modules that a forward calls again outside of their stage, after it.

    Args:
        program: of the sample.
        segment: that begins with the stage.
        targets: of the stage.
        inside: watched modules inside the targets.
        sample: number of the batch, for the error.

    Raises:
        CalibrationError: there is one.
    """
    position = {name: index for index, one in enumerate(program.segments) for name in one.targets}
    for name, owner, where in program.calls:
        later = where >= segment if owner is None else owner not in targets and position.get(owner, 0) > segment
        if name in inside and later:
            raise CalibrationError(
                f"{name}: batch {sample} calls it outside {', '.join(targets) or 'the model'}, the sequential target that it was "
                f"calibrated in, and after that, so its statistics miss this call; {_REMEDY}"
            )


class StageWatch:
    """The calls of the watched modules of one stage."""

    def __init__(self, stage: str, inside: Watched) -> None:
        """Start without a call."""
        self._stage, self._inside = stage, dict(inside)
        self._calls: Counter[str] = Counter()
        self._unseen: set[str] = set()
        self._cuts = False
        self._was_cut: Counter[str] | None = None

    @contextmanager
    def calibrating(self, model: nn.Module) -> Iterator[None]:
        """Count calls, and end a call once all have been seen if that is switched on.

        Args:
            model: carries hooks for the duration, behind all that are there already.

        Yields:
            Nothing.
        """
        with ExitStack() as hooks:
            for name, needs_output in self._inside.items():
                module = model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(self._count(name)).remove)
                register = module.register_forward_hook if needs_output else module.register_forward_pre_hook
                hooks.callback(register(self._see(name)).remove)
            yield

    def first_seen(self, stop_early: bool) -> None:
        """Decide by the calls of the first sample whether the others may stop early.

        Args:
            stop_early: False never lets them.
        """
        if stop_early and self._calls == Counter(self._inside.keys()):
            self._cuts, self._was_cut = True, Counter(self._inside.keys())

    def begin(self) -> None:
        """Start the calibration call of another sample."""
        self._calls, self._unseen = Counter(), set(self._inside)

    @contextmanager
    def propagating(self, model: nn.Module, sample: int) -> Iterator[None]:
        """Count the calls of the real pass, and compare them with what the calibration pass took for granted.

        Args:
            model: carries hooks for the duration.
            sample: number of the batch, for the error.

        Yields:
            Nothing.

        Raises:
            CalibrationError: the calibration pass stopped too early.
        """
        if self._was_cut is None:
            yield
            return
        self._calls = Counter()
        modules = dict(model.named_modules())
        with ExitStack() as hooks:
            for name in self._inside:
                if name in modules:
                    hooks.callback(modules[name].register_forward_pre_hook(self._count(name)).remove)
            yield
        odd = sorted(name for name in self._inside if name in modules and self._calls[name] != self._was_cut[name])
        if odd:
            told = ", ".join(f"{name} {self._calls[name]}x instead of {self._was_cut[name]}x" for name in odd)
            raise CalibrationError(
                f"{self._stage or 'the model'}: batch {sample} calls {told}, unlike the first batch, so the calibration pass, which "
                'stopped early, missed calls; use pipeline="basic" or ignore these modules'
            )

    def _count(self, name: str) -> Callable[..., None]:
        def hook(*args: object) -> None:
            del args
            self._calls[name] += 1

        return hook

    def _see(self, name: str) -> Callable[..., None]:
        def hook(*args: object) -> None:
            del args
            self._unseen.discard(name)
            if self._cuts and not self._unseen:
                raise Enough

        return hook
