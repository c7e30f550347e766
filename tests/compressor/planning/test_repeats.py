"""Layers that are taken for others leave every figure of a plan as it is where all of them run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor.pipelines.settings import cut_at_inputs
from compressor.planning import footprint
from compressor.planning.footprint import Footprint, measure_footprints
from compressor.planning.repeats import repeated_layers
from compressor.tracing import partition

NUM = 6
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
FEW = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # class, its settings, and how many layers need not run
    "LlamaForCausalLM": ({**SMALL, **HEADS}, 3),
    "GptOssForCausalLM": ({**SMALL, **HEADS, "num_hidden_layers": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "DeepseekV3ForCausalLM": ({**SMALL, **LATENT, **FEW, "first_k_dense_replace": 1}, 2),
    "OPTForCausalLM": ({**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, 3),
    "T5ForConditionalGeneration": ({"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": NUM, "num_heads": 4}, 4),
    "Gemma3ForCausalLM": ({**SMALL, **HEADS, "sliding_window": 4}, 2),
    "MambaForCausalLM": ({**SMALL, "state_size": 4}, 3),
}


def _built(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**MODELS[name][0], use_cache=False)).eval()


def _watched(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _followed(model: nn.Module, targets: list[str], watched: list[str]) -> list[Footprint]:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids.clone()} if model.config.is_encoder_decoder else {})
    sources: dict[int, int] = {}
    return [
        replace(one, calls=[replace(call, source=sources.setdefault(call.source, len(sources))) for call in one.calls])
        for one in measure_footprints(model, batch, targets, watched)
    ]


@pytest.mark.parametrize("cut", ["layers", "inputs", "nowhere"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_that_of_all_layers(name: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _built(name)
    watched, layers = _watched(model), partition(model, None)
    targets = {"layers": lambda: [*layers.targets], "inputs": lambda: [*cut_at_inputs(model, watched, layers).targets], "nowhere": list}
    names = [one for one in targets[cut]() if one]
    found = _followed(model, names, watched)
    assert len(repeated_layers(model, {*names, *watched})) == MODELS[name][1]
    monkeypatch.setattr(footprint, "repeated_layers", lambda model, places: {})
    assert found == _followed(model, names, watched)


class _Backward(nn.Module):
    """Goes through its layers from the last to the first, or through each twice."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [0, 2, 3, 4]])
def test_layers_in_another_order_all_run(order: list[int]) -> None:
    with torch.device("meta"):
        model = _Backward(order)
    assert repeated_layers(model, ()) == {"layers.2": "layers.1", "layers.3": "layers.1"}
    names = [f"layers.{number}" for number in range(5)]
    found = measure_footprints(model, {"x": torch.zeros(3, 8)}, names, names)
    assert [call.name for one in found for call in one.calls] == [f"layers.{number}" for number in order]
    assert sum(one.flops for one in found) == len(order) * 2 * 3 * 8 * 8


def test_a_layer_differs_by_what_is_looked_at_and_by_what_it_shares() -> None:
    with torch.device("meta"):
        model = _Backward([])
    assert repeated_layers(model, {"layers.2"}) == {"layers.3": "layers.1"}
    model.layers[2].out_features = 7
    assert repeated_layers(model, ()) == {"layers.3": "layers.1"}
    model.layers[3] = model.layers[0]
    assert repeated_layers(model, ()) == {}
