"""Experiment trackers: `report_to` sends numbers of a run to TensorBoard, Weights & Biases or MLflow, as transformers names them.

A tracker is asked for by name and imported only then. Where it writes is its own business, by the environment variables of its own:
TENSORBOARD_LOGGING_DIR, WANDB_PROJECT and WANDB_MODE, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from compressor.errors import UserInputError, reason
from compressor.spelling import suggest

_Send = Callable[[Mapping[str, float], int], None]


class Trackers:
    """Those of one run as one. What one raises once it has started ends its own work, and not the run; it is told once.

    Attributes:
        notes: which have failed, and where. They are no part of the result: equal runs give equal bytes, whoever drew their numbers.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.notes: list[str] = []
        self._sends: dict[str, _Send] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers that belong to one step.

        Args:
            values: by name.
            step: number of the step.
        """
        kind = "stage" if any(name.startswith("stage/") for name in values) else "step"
        for name, send in list(self._sends.items()):
            with self._kept_off(name, f"at {kind} {step}", "nothing is logged after it"):
                send(values, step)

    @contextmanager
    def opened(self, name: str, config: Mapping[str, str]) -> Iterator[None]:
        """Have a tracker take part.

        Args:
            name: of TRACKERS.
            config: what the run was asked for.

        Yields:
            None: while it does.

        Raises:
            UserInputError: it does not start.
        """
        known = _TRACKERS[name]
        with ExitStack() as held:
            try:
                tracker = known.open(importlib.import_module(known.module), config)
                self._sends[name] = tracker.__enter__()
            except Exception as error:  # a tracker is not ours, and raises what it likes
                raise UserInputError(
                    f"report_to: {name!r} does not start ({_said(error)}); correct its settings, or leave report_to out"
                ) from error
            held.push(lambda *error: self._close(name, tracker, error))
            yield

    def _close(self, name: str, tracker: AbstractContextManager[_Send], error: Any) -> None:
        """An error of the run goes on as it is, whatever the tracker makes of it."""
        with self._kept_off(name, "as it finished", "what it was sent may not all be there"):
            tracker.__exit__(*error)

    @contextmanager
    def _kept_off(self, name: str, where: str, what_follows: str) -> Iterator[None]:
        """Keep what a tracker raises off the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - likewise, and hours of work are worth more than a drawing of them
            if self._sends.pop(name, None) is not None:
                note = f"tracker {name} failed {where} ({_said(error)}); {what_follows}"
                self.notes.append(note)
                warnings.warn(note, UserWarning, stacklevel=4)


def _said(error: BaseException) -> str:
    return ": ".join(part for part in (type(error).__name__, reason(error)) if part)


@contextmanager
def _tensorboard(module: Any, config: Mapping[str, str]) -> Iterator[_Send]:
    writer = module.SummaryWriter(log_dir=os.environ.get("TENSORBOARD_LOGGING_DIR"))
    writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def send(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield send
    finally:
        writer.close()


@contextmanager
def _wandb(module: Any, config: Mapping[str, str]) -> Iterator[_Send]:
    with module.init(project=os.environ.get("WANDB_PROJECT", "compressor"), config=dict(config)) as run:  # its exit says whether it failed
        yield lambda values, step: run.log(dict(values), step=step)


@contextmanager
def _mlflow(module: Any, config: Mapping[str, str]) -> Iterator[_Send]:
    with module.start_run(nested=module.active_run() is not None):  # likewise
        module.log_dict(dict(config), "config.json")  # a parameter holds less than a recipe
        yield lambda values, step: module.log_metrics(dict(values), step=step)


@dataclass(frozen=True)
class _Known:
    """Which package must be there, which of its modules is used, and how it is opened."""

    package: str
    module: str
    open: Callable[[Any, Mapping[str, str]], AbstractContextManager[_Send]]


_TRACKERS: Mapping[str, _Known] = {
    "tensorboard": _Known("tensorboard", "torch.utils.tensorboard", _tensorboard),
    "wandb": _Known("wandb", "wandb", _wandb),
    "mlflow": _Known("mlflow", "mlflow", _mlflow),
}
TRACKERS = tuple(_TRACKERS)
"""Names that `report_to` takes."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before any work is done.

    Args:
        names: as given.

    Raises:
        UserInputError: there is no such tracker, or its package is missing.
    """
    for name in names:
        if name not in _TRACKERS:
            raise UserInputError(f"report_to: {name!r} is no tracker; {suggest(name, TRACKERS)}")
        package = _TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise UserInputError(f"report_to: {name!r} needs the package {package}, which is not installed; pip install {package}")


@contextmanager
def tracked(names: Sequence[str], config: Mapping[str, str]) -> Iterator[Trackers]:
    """Open trackers for the duration of a run.

    Args:
        names: of TRACKERS; none opens none.
        config: what the run was asked for, which each tracker keeps.

    Yields:
        All of them as one.

    Raises:
        UserInputError: one does not start.
    """
    trackers = Trackers()
    with ExitStack() as held:
        for name in dict.fromkeys(names):
            held.enter_context(trackers.opened(name, config))
        yield trackers
