"""The verb `harness onnx`: what it can do, a file per action."""

from __future__ import annotations

from harness.onnx_graph.commands import census, check, explain, export, fusing_cost, passes, roundtrip, run
from harness.verbs import Actions

COMMAND = Actions(
    "ONNX round-trips by role: what became of Q, K and V, and which pass took them",
    {
        "export": export.COMMAND,
        "roundtrip": roundtrip.COMMAND,
        "census": census.COMMAND,
        "check": check.COMMAND,
        "explain": explain.COMMAND,
        "passes": passes.COMMAND,
        "fusing-cost": fusing_cost.COMMAND,
        "run": run.COMMAND,
    },
)
