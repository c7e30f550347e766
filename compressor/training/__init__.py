"""Training steps that mean the same in eager, capture and replay.

trainer.py  warm-up, capture, proof, replay; modes       checkpoint.py  the whole training state as one file
step/       the one definition of a step: batch, optimizer, averages, ranks, snapshot
capture/    watches a step below autograd: operators, storages, signature
engines/    repeats what was captured: the tape on fixed storages, CUDA graphs
guards/     what the host must not change
replay/     a captured step, its proof, and the first operator that differs
audits.py   how often the proof is repeated              remedies.py    code that helps where a step is refused
"""

from __future__ import annotations

from compressor.training.capture.signature import drift, signature_hash
from compressor.training.checkpoint import load_training, save_training
from compressor.training.replay.locate import locate
from compressor.training.replay.plan import Plan
from compressor.training.step.averages import WeightAverages
from compressor.training.step.batch import InputBuffers, batch_key
from compressor.training.step.optimizers import adamw, sgd, warmup_cosine
from compressor.training.step.snapshot import Snapshot
from compressor.training.step.step import HasPlanKey, HasTensors, TrainStep
from compressor.training.trainer import Trainer

__all__ = [
    "HasPlanKey",
    "HasTensors",
    "InputBuffers",
    "Plan",
    "Snapshot",
    "TrainStep",
    "Trainer",
    "WeightAverages",
    "adamw",
    "batch_key",
    "drift",
    "load_training",
    "locate",
    "save_training",
    "sgd",
    "signature_hash",
    "warmup_cosine",
]
