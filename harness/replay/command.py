"""The verb `harness replay`: what it can do. `harness replay MODEL` is short for `harness replay equivalence MODEL`."""

from __future__ import annotations

from harness.replay.equivalence import command as equivalence
from harness.replay.hazards import command as hazards
from harness.replay.kernels import command as kernels
from harness.replay.sabotage import command as sabotage
from harness.verbs import Actions

COMMAND = Actions(
    "training steps in eager, capture and replay: equality, hazards, other kernels, sabotage",
    {
        "equivalence": equivalence.COMMAND,
        "hazards": hazards.COMMAND,
        "kernels": kernels.COMMAND,
        "sabotage": sabotage.COMMAND,
    },
    default="equivalence",
)
