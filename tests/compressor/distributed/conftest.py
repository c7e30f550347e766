"""The model that ranks compress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, and 48 sequences of 96 tokens."""

    folder = tmp_path_factory.mktemp("model")
    tiny.llama(intermediate_size=48, num_attention_heads=2, max_position_embeddings=128).save_pretrained(folder)
    save_file({"input_ids": torch.randint(64, (48, 96))}, folder / "data.safetensors")
    return folder
