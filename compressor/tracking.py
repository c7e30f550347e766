"""Experiment trackers: `report_to` sends numbers of a run to TensorBoard, Weights & Biases or MLflow, as transformers names them.

A tracker is asked for by name and imported only then. Where it writes is its own business, by the environment variables of its own:
TENSORBOARD_LOGGING_DIR, WANDB_PROJECT and WANDB_MODE, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from compressor.errors import UserInputError
from compressor.spelling import suggest


class Tracker(Protocol):
    """What draws numbers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers that belong to one step."""


@dataclass(frozen=True)
class _All:
    """Several trackers as one; none at all where the list is empty."""

    trackers: Sequence[Tracker] = ()

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step)


NO_TRACKER: Tracker = _All()
"""Sends nothing."""


@dataclass(frozen=True)
class _Function:
    send: Callable[[Mapping[str, float], int], None]

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.send(values, step)


@contextmanager
def _tensorboard(module: Any, config: Mapping[str, str]) -> Iterator[Tracker]:
    writer = module.SummaryWriter(log_dir=os.environ.get("TENSORBOARD_LOGGING_DIR"))
    writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def send(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield _Function(send)
    finally:
        writer.close()


@contextmanager
def _wandb(module: Any, config: Mapping[str, str]) -> Iterator[Tracker]:
    with module.init(project=os.environ.get("WANDB_PROJECT", "compressor"), config=dict(config)) as run:  # its exit says whether it failed
        yield _Function(lambda values, step: run.log(dict(values), step=step))


@contextmanager
def _mlflow(module: Any, config: Mapping[str, str]) -> Iterator[Tracker]:
    with module.start_run(nested=module.active_run() is not None):  # likewise
        module.log_dict(dict(config), "config.json")  # a parameter holds less than a recipe
        yield _Function(lambda values, step: module.log_metrics(dict(values), step=step))


@dataclass(frozen=True)
class _Known:
    """Which package must be there, which of its modules is used, and how it is opened."""

    package: str
    module: str
    open: Callable[[Any, Mapping[str, str]], Any]


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
def tracked(names: Sequence[str], config: Mapping[str, str]) -> Iterator[Tracker]:
    """Open trackers for the duration of a run.

    Args:
        names: of TRACKERS; none opens none.
        config: what the run was asked for, which each tracker keeps.

    Yields:
        All of them as one.
    """
    with ExitStack() as held:
        known = [_TRACKERS[name] for name in names]
        yield _All([held.enter_context(one.open(importlib.import_module(one.module), config)) for one in known])
