"""The residual basis: found on many architectures, turned without a change of what they compute, refused with what is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor.algorithms.rotations import make_rotation
from compressor.data.collate import call_model
from compressor.errors import TargetError
from compressor.mappings.basis import find_basis, find_values
from compressor.mappings.pairs import pattern_of
from compressor.mappings.probe import find_pairs
from compressor.mappings.turns import Turn, fold_and_turn, has_biases
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import sample_batches
from harness.traceability.architectures import zoo
from tests import tiny

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))


def roughened(model: nn.Module) -> nn.Module:
    """Norms and biases that are no longer ones and zeros."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter)))
    return model.eval()


def text_model(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TEXT, **settings)
    return roughened(transformers.AutoModelForCausalLM.from_config(config))


def turned_difference(model: nn.Module, batch: dict[str, Tensor], *, kind: str = "random-matrix") -> float:
    """How far the logits move when the whole basis is turned."""
    with torch.no_grad():
        before = call_model(model, batch).logits
        basis = find_basis(model, batch, CPU)
        norms = [pair.source for pair in basis.norms if not has_biases(model, pair.readers)]
        readers = (*basis.readers, *(name for pair in basis.norms for name in pair.readers))
        for head in basis.tied:
            module = model.get_submodule(head)
            module._parameters["weight"] = nn.Parameter(module.get_parameter("weight").detach().clone())
        turn = Turn(make_rotation(kind, basis.size, keeps_mean=basis.keeps_mean), (*basis.writers, *norms), readers)
        fold_and_turn(model, basis.norms, [turn])
        after = call_model(model, batch).logits
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize(
    ("kind", "settings", "writers", "keeps_mean", "tied"),
    [
        ("Llama", {"num_key_value_heads": 2}, {"embed_tokens", "o_proj", "down_proj"}, False, []),
        ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"embed_tokens", "o_proj", "down_proj"}, False, ["lm_head"]),
        ("Gemma", {"num_key_value_heads": 2, "head_dim": 8}, {"embed_tokens", "o_proj", "down_proj"}, False, ["lm_head"]),
        ("Phi", {}, {"embed_tokens", "dense", "fc2"}, True, []),
        ("GPT2", {}, {"wte", "wpe", "c_proj"}, True, ["lm_head"]),
        ("GPTNeoX", {}, {"embed_in", "dense", "dense_4h_to_h"}, True, []),
    ],
)
def test_who_writes_is_seen_on_the_forward(kind: str, settings: Any, writers: set[str], keeps_mean: bool, tied: list[str]) -> None:
    model = text_model(kind, **settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    basis = find_basis(model, {"input_ids": IDS}, CPU)
    assert {pattern_of(name).rpartition(".")[2] for name in basis.writers} == writers
    assert basis.keeps_mean is keeps_mean and list(basis.tied) == tied and basis.place.startswith("modeling_")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    ties = [model.get_submodule(head).get_parameter("weight") is model.get_input_embeddings().weight for head in tied]  # type: ignore[operator]
    assert all(ties)
    assert turned_difference(model, {"input_ids": IDS}) < 1e-5


def test_experts_write_though_the_first_of_them_is_never_chosen() -> None:
    model: Any = tiny.qwen3_moe(num_experts=8)
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight.data
        gate[0] = 0
        gate[2::2] = -gate[1:-1:2]  # of each pair one is above zero
    with unfused_experts(model, hold=True):
        basis = find_basis(model, {"input_ids": IDS}, CPU)
    experts = [name for name in basis.writers if name.endswith("down_proj")]
    assert len(experts) == sum(len(gate.weight) for gate in (layer.mlp.gate for layer in model.model.layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_find_the_same_basis(dtype: torch.dtype) -> None:
    wide, narrow = (find_basis(text_model("Llama").to(one), {"input_ids": IDS}, CPU) for one in (torch.float32, dtype))
    assert (wide.writers, wide.norms, wide.readers) == (narrow.writers, narrow.norms, narrow.readers)


class Block(nn.Module):
    """A residual block in which something may be wrong."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        update: Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        if self.flaw == "a scale for each channel":
            update = update * self.scale
        if self.flaw == "a window":
            update = update.roll(1, -1)
        if self.flaw == "a nonlinearity":
            update = torch.tanh(update)
        return hidden + update


class Small(nn.Module):
    """A model of two blocks."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flaw = flaw
        self.embed, self.blocks = nn.Embedding(32, 16), nn.ModuleList([Block(flaw), Block(flaw)])
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 32)
        self.positions = nn.Parameter(torch.randn(64, 16))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        if self.flaw == "positions that no module gives":
            hidden = hidden + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if self.flaw == "an output":
            return torch.cat([logits, hidden], -1)
        return logits


@pytest.mark.parametrize("flaw", ["a scale for each channel", "a window", "a nonlinearity", "positions that no module gives", "an output"])
def test_what_is_in_the_way_is_an_error_that_names_it(flaw: str) -> None:
    with pytest.raises(TargetError, match=r"meets? .*(norm|output)"):
        find_basis(roughened(Small(flaw)), {"input_ids": IDS % 32}, CPU)
    assert find_basis(roughened(Small("")), {"input_ids": IDS % 32}, CPU).size == 16


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (
            "Gemma2",
            {"num_key_value_heads": 2, "head_dim": 8},
            "post_attention_layernorm adds to the hidden states what it multiplies channel by channel",
        ),
        ("Olmo", {}, "whose input is something else then"),
    ],
)
def test_architectures_without_a_basis_say_why(kind: str, settings: Any, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        find_basis(text_model(kind, **settings), {"input_ids": IDS}, CPU)


def test_values_of_heads_are_told_from_what_a_gate_multiplies() -> None:
    model = text_model("Llama", num_key_value_heads=2)
    pairs = find_pairs(model, {"input_ids": IDS}, CPU).pairs
    found = find_values(model, {"input_ids": IDS}, CPU, pairs, None)
    assert [(pattern_of(pair.source), size) for pair, size in found] == [("model.layers.*.self_attn.v_proj", 8)] * 2
    even = text_model("Llama")  # as many heads of keys as of queries: only the config knows their size
    pairs = find_pairs(even, {"input_ids": IDS}, CPU).pairs
    assert len(find_values(even, {"input_ids": IDS}, CPU, pairs, 8)) == 2
    assert find_values(even, {"input_ids": IDS}, CPU, pairs, 16) == ()  # heads would be mixed


# Without a basis: norms behind the residual sum, or of no weight; positions, scales or experts that no module gives; another stream.
WITHOUT = {
    *("bloom", "ctrl", "dbrx", "doge", "ernie4_5_moe", "exaone4", "gemma2", "gemma3", "gemma3n", "git", "glm4", "jetmoe"),
    *("minimax", "moshi", "olmo", "olmo2", "olmo3", "openai_gpt", "rwkv", "xglm", "xlnet", "zamba", "zamba2"),
}


DECODERS = [name for name, entry in zoo().items() if entry.model_class.endswith(("ForCausalLM", "LMHeadModel"))]


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_of_the_zoo_has_a_basis_that_holds_or_is_known_to_have_none(name: str) -> None:
    model = roughened(zoo()[name].build(0))
    with unfused_experts(model, hold=True) as experts:
        if name in WITHOUT:
            with pytest.raises(TargetError):
                turned_difference(model, sample_batches(model, None).batches[0])
        else:
            assert turned_difference(model, sample_batches(model, None).batches[0]) < 1e-3
        experts.restore()


def test_most_decoders_of_the_zoo_have_a_basis() -> None:
    assert set(DECODERS) >= WITHOUT
    assert len(WITHOUT) < 0.32 * len(DECODERS)
