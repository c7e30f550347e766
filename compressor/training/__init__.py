"""Training steps that mean the same in eager, capture and replay.

step.py          the one definition of a step          trainer.py    warm-up, capture, proof, replay; modes
batch.py         plan keys and fixed input buffers     plan.py       a captured step and its guards
recorder.py      watches a step below autograd         tape.py       operators on fixed storages, and their replay
proof.py         three legs that must agree            snapshot.py   a whole state, compared bit for bit
signature.py     a line per operator, and drift        locate.py     the first operator that differs
engine.py        what a device must offer              devices.py    which engine stands for which device
tape_engine.py   the tape as an engine                 cuda_graph.py the same on CUDA
optimizers.py    AdamW, SGD, schedules of tensors      checkpoint.py the whole training state as one file
facts.py         what the host must not change         whereabouts.py the module of an operator
averages.py      moving averages of weights            digests.py    hashes, and states of generators
identities.py    the quick half of the guards          escapes.py    tensors that outlive the step
operators.py     operators as seen and as repeated     linking.py    how each is repeated
storages.py      the storages of a step and their lives layout.py    where they lie in one arena
ranks.py         what data-parallel ranks do alike     collectives.py their operators
host_tensors.py  what no graph repeats                 intervals.py   which memory a graph writes
capturing.py     how a capture that fails is ended      arena.py      memory that plans take turns in
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
