"""Models: from a folder to modules, from modules to a folder.

load.py           folder or model in memory -> model that may be compressed     folder.py  what can be wrong with a folder
targets.py        patterns -> modules
format.py         schemes -> the config that readers of compressed-tensors need
checkpoint.py     compressed model -> folder, whole or not at all
experts.py        fused experts -> one linear layer each (experts_names.py: what files call them; experts_stages.py: which are stages)
experts_format.py what of that transformers reads back
stand_in.py       a model that runs, from a config alone                        sample_batches.py  random inputs for any model
audit.py          the last look before writing (base.py: what is nobody's is as loaded)   atomic_folder.py  temporary sibling, flush, rename
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
