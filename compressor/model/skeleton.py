"""The shapes of a model without its weights: what a plan needs, in milliseconds for a model of any size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from compressor.errors import ModelError
from compressor.model.folder import check_not_quantized, one_line, read_config
from compressor.model.load import LOAD_ERRORS, check_in_memory, quiet_transformers, resolve_class


def load_skeleton(source: str | Path | nn.Module, *, trust_remote_code: bool = False, model_class: str | type | None = None) -> nn.Module:
    """Build a model on the meta device from its config alone; a model in memory is returned as it is.

    Args:
        source: folder with a config.json, or a module; neither is changed.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM.

    Returns:
        The model; parameters have shapes and dtypes but, from a folder, no values.

    Raises:
        ModelError: no folder, no usable config, or the model is quantized already.
    """
    if isinstance(source, nn.Module):
        check_in_memory(source, model_class=model_class)
        return source
    folder = Path(source)
    check_not_quantized(read_config(folder), str(folder))
    loader = resolve_class(model_class)
    from transformers import AutoConfig

    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            dtype = getattr(config, "dtype", None) or torch.float32
            if hasattr(loader, "from_config"):
                model: nn.Module = loader.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
            else:
                model = loader(config).to(dtype)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"{folder}: its config gives no model ({one_line(error)}); check config.json or name another model_class"
        ) from error
    return model.eval()
