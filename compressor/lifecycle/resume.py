"""What an earlier run left of a stage that it finished; see `Modifier.stage_memory` and `Modifier.skip_stage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressor.lifecycle.state import Detail

StageValue = Detail | Tensor


@dataclass(frozen=True)
class FinishedStage:
    """What an earlier run left of a stage that it finished.

    Attributes:
        modules: dotted names of the stage's modules.
        memory: what the modifier's `stage_memory` gave after the stage; tensors are on the CPU.
        tensors: what modules held after the stage, by module and name, on the CPU; at least for every claimed module.
    """

    modules: Sequence[str]
    memory: Mapping[str, StageValue]
    tensors: Mapping[str, Mapping[str, Tensor]]
