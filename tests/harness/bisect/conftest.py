"""A tiny llama, checkpoints of it, and a way to spoil them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny

Spoil = Callable[[dict[str, torch.Tensor]], None]


def make_llama(layers: int = 5, **changes: int):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | changes
    model = tiny.llama(num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.mul_(8)
        model.lm_head.weight.mul_(24)  # sharp predictions, so that a wrong layer shows
    return model.eval()


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bisect") / "base"
    make_llama().save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    save_file({"input_ids": torch.randint(96, (4, 16), generator=generator)}, folder.parent / "tokens.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_tokens(tiny_base: Path) -> Path:
    return tiny_base.parent / "tokens.safetensors"


@pytest.fixture(scope="session")
def tiny_compressed(tiny_base: Path) -> Path:
    return run_oneshot(tiny_base, tiny_base.parent / "w8", "{scheme: W8A8, targets: [Linear], ignore: [lm_head]}", tiny_base.parent)


def run_oneshot(base: Path, folder: Path, settings: str, data: Path) -> Path:
    from compressor import oneshot

    recipe = f"first_stage: {{quant_modifiers: {{QuantizationModifier: {settings}}}}}"
    oneshot(str(base), recipe=recipe, dataset=str(data / "tokens.safetensors"), output_dir=str(folder), device="cpu")
    return folder


@pytest.fixture
def spoiled(tiny_compressed: Path, tmp_path: Path) -> Callable[[Spoil], Path]:
    def spoil(change: Spoil) -> Path:
        return copy_and_spoil(tiny_compressed, tmp_path / "spoiled", change)

    return spoil


def copy_and_spoil(folder: Path, copy: Path, change: Spoil) -> Path:
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture
def build_llama():
    return make_llama


@pytest.fixture
def compress():
    return run_oneshot


@pytest.fixture
def spoil_copy():
    return copy_and_spoil
