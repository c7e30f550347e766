"""`compressor train`: a model, data and a recipe go in; a trained and compressed checkpoint comes out, whatever stops the run on its way.

run.py       THE main path; read first      phases.py    load, read, train
settings.py  what a user chooses            place.py     the folders of a run
loop.py      steps, evaluations, saved states, interruptions
states.py    the run folder                 result.py    weights to checkpoint, and what compression.json says
attention.py causal masks without the host
"""

from __future__ import annotations

from compressor.training_run.phases import TrainResult
from compressor.training_run.run import train

__all__ = ["TrainResult", "train"]
