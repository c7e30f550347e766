"""Following a model's data flow: where it is cut into sequential targets, and the two engines that stop there."""

from __future__ import annotations

from compressor.tracing.graph.torch_patches import leaf
from compressor.tracing.plan import Engine, Guard, Leaf, Plan, Run, RunningStage, Stage, Verify, trace
from compressor.tracing.suspend.engine import SuspendedRun
from compressor.tracing.targets.partition import Partition, infer_targets, module_names, partition
from compressor.tracing.targets.running import MemoryStore, ValueStore, Watched

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
