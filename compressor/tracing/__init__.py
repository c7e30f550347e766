"""Following a model's data flow: where it is cut into sequential targets, and the two engines that stop there."""

from __future__ import annotations

from compressor.tracing.graph.leaves import leaf
from compressor.tracing.partition import Partition, infer_targets, module_names, partition
from compressor.tracing.plan import Engine, Guard, Leaf, Plan, Run, RunningStage, Stage, Verify, trace
from compressor.tracing.running import Watched
from compressor.tracing.store import MemoryStore, ValueStore
from compressor.tracing.suspend import SuspendedRun

__all__ = [
    "Engine",
    "Guard",
    "Leaf",
    "MemoryStore",
    "Partition",
    "Plan",
    "Run",
    "RunningStage",
    "Stage",
    "SuspendedRun",
    "ValueStore",
    "Verify",
    "Watched",
    "infer_targets",
    "leaf",
    "module_names",
    "partition",
    "trace",
]
