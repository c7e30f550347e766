"""Architectures of transformers, layer by layer and linear by linear: the recorded graphs give what the plain model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compressor.tracing import trace
from tests import tiny
from tests.compressor.tracing.graph.conftest import Batch, equal

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}


def llama() -> nn.Module:
    return tiny.llama(**SIZES, num_key_value_heads=1, use_cache=False)


def mixtral() -> nn.Module:
    return tiny.mixtral(**SIZES, num_key_value_heads=1, num_local_experts=3, sliding_window=4, use_cache=False)


def roformer() -> nn.Module:  # hands the shape of its input to a module
    from transformers import RoFormerConfig, RoFormerModel

    return RoFormerModel(RoFormerConfig(**SIZES, max_position_embeddings=16))


def bert() -> nn.Module:
    return tiny.bert(**SIZES, max_position_embeddings=16)


def t5() -> nn.Module:
    return tiny.t5(d_ff=24, use_cache=False)


def batches_for(maker: Callable[[], nn.Module]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows, length, padding in ((2, 7, 0), (2, 7, 3), (1, 9, 0)):
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, length - padding :] = 0
        batch = {"input_ids": torch.randint(1, 64, (rows, length), generator=generator), "attention_mask": mask}
        if maker is t5:
            batch["decoder_input_ids"] = torch.randint(1, 64, (rows, length - 2), generator=generator)
        batches.append(batch)
    return [*batches, {name: value for name, value in batches[2].items() if name != "attention_mask"}]


@pytest.mark.parametrize("maker", [llama, mixtral, bert, roformer, t5])
@pytest.mark.parametrize("level", ["layers", "linears"])
def test_graphs_give_what_the_plain_model_gives(maker: Callable[[], nn.Module], level: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = maker().eval()
    batches = batches_for(maker)
    with torch.no_grad():
        called: dict[str, None] = {}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: called.setdefault(name))
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        expected = [model(**batch) for batch in batches]
        for hook in hooks:
            hook.remove()
    plan = trace(model, batches[:1], None if level == "layers" else list(called), engine="graph")
    with plan.run(batches, keep_outputs=True, watched=lambda: dict.fromkeys(called, False)) as run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    assert equal([dict(one) for one in run.outputs], [dict(one) for one in expected])
    assert plan.verify(batches) == 4 and run.uncalled == ()
    for segment in plan.variants[0].segments:
        segment.graph.lint()
        assert "def forward" in segment.graph_module(model).print_readable(print_output=False)
