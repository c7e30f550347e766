"""Following a model's data flow: where it is cut into sequential targets, and the suspended forwards that stop there."""

from __future__ import annotations

from compressor.tracing.calls import Watched
from compressor.tracing.partition import Partition, infer_targets, module_names, partition
from compressor.tracing.suspend import Stage, SuspendedRun

__all__ = ["Partition", "Stage", "SuspendedRun", "Watched", "infer_targets", "module_names", "partition"]
