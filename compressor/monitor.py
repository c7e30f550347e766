"""What a run has taken so far: time and memory by phase and stage, told to the logger and to trackers, and kept for the result.

Nothing of it is part of the result, so equal runs write equal checkpoints however long they took. A stage costs two readings of a clock
and one of the process's memory; nothing is looked at while a batch runs.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from compressor.tracking import Trackers

logger = logging.getLogger("compressor")


@dataclass(frozen=True)
class Lap:
    """A phase or a stage that has ended.

    Attributes:
        name: of the phase, or of the layer.
        seconds: of wall time.
        host_bytes: of main memory that the process holds at its end; None where the system does not say it.
        host_peak_bytes: the most that it has held since it started.
        device_peak_bytes: the most that torch has held on the GPU since the process started; None without one.
        tokens_per_second: calibration tokens through this stage, compression included; None where none ran.
        error: the largest relative error of its modules; None where none was compressed.
    """

    name: str
    seconds: float
    host_bytes: int | None
    host_peak_bytes: int
    device_peak_bytes: int | None
    tokens_per_second: float | None = None
    error: float | None = None

    def text(self) -> str:
        """Return it in words, as a progress bar and the log show it: numbers first, for a narrow terminal cuts off the end."""
        said = []
        if self.error is not None:
            said.append(f"error up to {self.error:.2g}")
        if self.tokens_per_second is not None:
            said.append(f"{self.tokens_per_second:,.0f} tokens/s")
        said.append(f"{(self.host_bytes or self.host_peak_bytes) / 1e9:.1f} GB")
        if self.device_peak_bytes is not None:
            said.append(f"{self.device_peak_bytes / 1e9:.1f} GB on the GPU")
        return f"{', '.join(said)}: {self.name}"


class Monitor:
    """Follows one run.

    Attributes:
        trackers: get the numbers of stages and steps, too.
        phases: that have ended, in their order.
        stages: of the calibration that have ended, in their order; without those that an earlier run finished.
    """

    def __init__(self) -> None:
        """Begin the first phase."""
        self.phases: list[Lap] = []
        self.stages: list[Lap] = []
        self.trackers = Trackers()
        self._phase_began = self._stage_began = time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase."""
        return {lap.name: lap.seconds for lap in self.phases}

    def end_phase(self, name: str) -> None:
        """Note that a phase has ended; the next one begins.

        Args:
            name: of the phase.
        """
        now = time.perf_counter()
        lap = Lap(name, now - self._phase_began, *_memory())
        self.phases.append(lap)
        self._phase_began = now
        logger.info("%s: %.1f s, %.1f GB", name, lap.seconds, (lap.host_bytes or lap.host_peak_bytes) / 1e9)

    def begin_stage(self) -> None:
        """Note that a stage begins."""
        self._stage_began = time.perf_counter()

    def end_stage(self, number: int, of: int, name: str, errors: Mapping[str, float], num_tokens: int) -> str:
        """Note that a stage has ended.

        Args:
            number: of the stage, from 1.
            of: number of stages.
            name: of its layer.
            errors: relative error by module, of those that it compressed.
            num_tokens: calibration tokens that went through it.

        Returns:
            What it took, in words.
        """
        now = time.perf_counter()
        seconds = now - self._stage_began
        worst = max(errors.values(), default=None)
        lap = Lap(name, seconds, *_memory(), num_tokens / max(seconds, 1e-9) if num_tokens else None, worst)
        self.stages.append(lap)
        text = f"stage {number} of {of}, {lap.text()}"
        logger.info(text)
        for module, error in errors.items():
            logger.debug("%s: relative error %.3g", module, error)
        self.trackers.log(_numbers(lap), number)
        return text

    def end_step(self, step: int, values: Mapping[str, float]) -> None:
        """Note what is known behind a step of training.

        Args:
            step: number of steps that have ended.
            values: by name.
        """
        logger.debug("step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        self.trackers.log({f"train/{name}": value for name, value in values.items()}, step)


def _numbers(lap: Lap) -> dict[str, float]:
    """What a tracker draws of a stage."""
    known = {f"stage/{name}": value for name, value in asdict(lap).items() if name not in ("name", "host_peak_bytes")}
    return {name: float(value) for name, value in known.items() if value is not None}


def _memory() -> tuple[int | None, int, int | None]:
    """Bytes of main memory now and at most, and on the GPU at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    now, peak = _resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return now, max(peak, now or 0), device  # the kernel adds up what its threads count seldom, and the peak can lag behind


def _resident(status: Path = Path("/proc/self/statm")) -> int | None:
    if not status.exists():  # not Linux
        return None
    return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
