"""Models: from a folder to modules, from modules to a folder.

folder.py    what can be wrong with a folder               targets.py   patterns -> modules
loading/     folder or config -> a model that runs         saving.py    what `save_pretrained` writes
experts/     fused experts -> one linear layer each        disk_room.py whether it fits, before the run
checkpoints/ compressed model -> folder, and back
evaluation.py  how a model stands while it is looked at
"""

from __future__ import annotations

from compressor.atomic import check_output_dir
from compressor.model.checkpoints.format import quantization_config
from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.loading.load import LoadedModel, load_model, resolve_device
from compressor.model.targets import resolve_targets

__all__ = [
    "LoadedModel",
    "check_output_dir",
    "load_model",
    "quantization_config",
    "resolve_device",
    "resolve_targets",
    "save_checkpoint",
]
