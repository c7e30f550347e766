"""A tiny base with everything a release has (chat template, special tokens, biases, settings of generation), and its checkpoint of ours."""

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

from compressor.nn.attention.kv_cache import cache_argument
from harness.release.policy import GenerationLimits, ReleasePolicy
from harness.validation.policy import Policy
from tests import tiny

TEMPLATE = (
    "{% for one in messages %}<s>{{ one.role }} : {{ one.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}"
)
NUM_TOKENS = 96


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Release:
    """Folders and data of one release; `compressed` is a copy that a test may spoil."""

    base: Path
    compressed: Path
    dataset: Path

    def edit(self, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        """Rewrite the tensors."""
        path = self.compressed / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})

    def edit_json(self, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Rewrite a JSON file."""
        path = self.compressed / name
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")


def change_steps_on(model: Any, lengths: Callable[[int], bool]) -> None:
    """Change what one token gives behind a cache of such lengths."""

    def change(module: Any, given: Any, options: Any, output: Any) -> None:
        cache = options[cache_argument(module)]
        if options["input_ids"].shape[1] == 1 and cache is not None and lengths(cache.get_seq_length() - 1):
            output.last_hidden_state = output.last_hidden_state.roll(1, -1)

    model.base_model.register_forward_hook(change, with_kwargs=True)


POLICY = ReleasePolicy(
    limits=Policy(max_perplexity_ratio=1.5, max_mean_kl=0.4, min_top1_agreement=0.6, max_accuracy_drop=0.2),
    generation=GenerationLimits(prompts=2, new_tokens=16),
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Release:
    from compressor import oneshot

    root = tmp_path_factory.mktemp("release")
    model = _base(root / "base")
    ids = _sample(model, 40, 24)
    save_file({"input_ids": ids}, root / "heldout.safetensors")
    recipe = {
        "quant_stage": {
            "quant_modifiers": {
                "QuantizationModifier": {
                    "targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A16",
                    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
                }
            }
        }
    }  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    calibration = torch.randint(3, NUM_TOKENS, (8, 16), generator=generator)
    oneshot(str(root / "base"), recipe=recipe, dataset=calibration, output_dir=root / "compressed", progress=False)
    return Release(root / "base", root / "compressed", root / "heldout.safetensors")


@pytest.fixture
def release(made: Release, tmp_path: Path) -> Release:
    shutil.copytree(made.compressed, tmp_path / "compressed")
    return Release(made.base, tmp_path / "compressed", made.dataset)


def _base(folder: Path) -> torch.nn.Module:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny.llama(
        vocab_size=NUM_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        tie_word_embeddings=False,
        attention_bias=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )
    with torch.no_grad():
        # A token mostly predicts the one behind it in the vocabulary, so that a wrong model shows, and so do predictions that are shifted.
        model.model.embed_tokens.weight.mul_(5)
        model.lm_head.weight.copy_(0.8 * model.model.embed_tokens.weight.roll(1, 0))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.to(torch.bfloat16).eval().save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, NUM_TOKENS - 1)), "<tool>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<pad>", pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left",
        model_max_length=64,
    )  # fmt: skip
    fast.add_tokens([AddedToken("<tool>", special=True)])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return model


@torch.no_grad()
def _sample(model: torch.nn.Module, num_sequences: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, NUM_TOKENS, (num_sequences, 1), generator=generator)
    for _ in range(length - 1):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return ids
