"""A tiny base model, data that it predicts well (sampled from itself) and checkpoints made with compressed-tensors, not with our writer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny

IGNORED = ["lm_head"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Workspace:
    """Folders of the tiny model; `dataset` is a safetensors token array."""

    base: Path
    dataset: Path


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:

    root = tmp_path_factory.mktemp("tiny")
    model = tiny.llama(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(24)  # sharp predictions, so that a wrong model shows
    model.to(torch.bfloat16).eval().save_pretrained(root / "base")
    _tokenizer().save_pretrained(root / "base")
    save_file({"input_ids": _sample(model, 40, 24)}, root / "heldout.safetensors")
    return Workspace(root / "base", root / "heldout.safetensors")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


@torch.no_grad()
def _sample(model: torch.nn.Module, num_sequences: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(96, (num_sequences, 1), generator=generator)
    for _ in range(length - 1):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return ids


@dataclass
class Checkpoint:
    """A compressed folder that a test may spoil."""

    folder: Path

    def edit(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Rewrite model.safetensors after `change` has had its way with the tensors."""
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})

    def edit_config(self, change: Callable[[dict], None]) -> None:
        """Rewrite config.json after `change`."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))


def write_compressed(base: Path, folder: Path, preset: str, group_size: int | None = 16, num_bits: int | None = None) -> None:
    """Compress by round-to-nearest with the functions of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if num_bits:
        scheme.weights.num_bits = num_bits
    if scheme.weights.group_size and group_size:
        scheme.weights.group_size = group_size
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    shutil.copytree(base, folder)
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if tensor.ndim == 2 and "layers" in name:
            module = name.removesuffix(".weight")
            parts = BaseCompressor.get_value_from_registry(scheme.format.value).compress(_with_qparams(tensor, scheme), scheme)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=IGNORED, format=scheme.format.value, quantization_status=QuantizationStatus.COMPRESSED
    )
    Checkpoint(folder).edit_config(lambda data: data.update(quantization_config=config.model_dump(mode="json")))


def _with_qparams(weight: torch.Tensor, scheme) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    if args.strategy == "group":
        grouped = weight.unflatten(-1, (-1, args.group_size))
        low, high = grouped.amin(-1), grouped.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero_point = calculate_qparams(low, high, args)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    inputs = scheme.input_activations
    if inputs is not None and not inputs.dynamic:
        parts["input_scale"] = torch.tensor([0.05], dtype=weight.dtype)
    return parts


@pytest.fixture(scope="session")
def pristine(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of a checkpoint by preset; made once, not to be changed."""
    made: dict[tuple, Path] = {}

    def make(preset: str = "W4A16", **options: int) -> Path:
        key = (preset, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("compressed") / preset
            write_compressed(workspace.base, made[key], preset, **options)
        return made[key]

    return make


@pytest.fixture
def compressed(pristine: Callable[..., Path], tmp_path: Path) -> Callable[..., Checkpoint]:
    """Return a function that gives a copy of a checkpoint, to be spoiled."""

    def copy(preset: str = "W4A16", **options: int) -> Checkpoint:
        folder = tmp_path / f"{preset}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(pristine(preset, **options), folder)
        return Checkpoint(folder)

    return copy
