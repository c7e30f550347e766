"""A forward followed on shapes says what is live where; operations that need values or kernels of their own are followed, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.planning.footprint import Footprint, measure_footprints
from compressor.planning.planner import without_values

ROWS, TOKENS, WIDTH = 2, 64, 32
HIDDEN = ROWS * TOKENS * WIDTH * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.out(self.q(x) * table + self.k(x))


class Toy(nn.Module):
    """Embeds, keeps the embedding until the end, hands a table that no batch changes to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids: Tensor) -> Tensor:
        first = hidden = self.embed(input_ids)
        table = torch.arange(input_ids.shape[1] * WIDTH, dtype=torch.float32).view(-1, WIDTH).cos()
        mask = torch.ones_like(input_ids, dtype=torch.bool, device=hidden.device)
        if not mask.all():
            raise AssertionError("this value must be at hand")
        for layer in self.layers:
            hidden = layer(hidden, table)
        return hidden[mask].sum() + first.sum()


def follow(model: nn.Module, targets: list[str], watched: list[str] | None = None) -> list[Footprint]:
    batch = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64)}
    return measure_footprints(without_values(model.eval()), batch, targets, watched or [])


def test_what_crosses_into_a_layer_is_told_apart() -> None:
    stretches = follow(Toy(), ["layers.0", "layers.1"], ["layers.0.q", "layers.0.k", "layers.0.out"])
    assert [stretch.name for stretch in stretches] == ["", "layers.0", "", "layers.1", ""]
    first, second = stretches[1], stretches[3]
    assert first.own_bytes == first.needed_bytes == HIDDEN
    assert second.own_bytes == second.needed_bytes == 2 * HIDDEN  # the embedding is needed again at the end
    assert first.needed_shared_bytes == second.needed_shared_bytes == TOKENS * WIDTH * 4 + ROWS * TOKENS  # table and mask
    assert first.peak_bytes == 3 * HIDDEN
    assert first.flops == 3 * 2 * ROWS * TOKENS * WIDTH * WIDTH
    q, k, out = first.calls
    assert q.source == k.source != out.source
    assert (q.num_tokens, q.columns, q.element_bytes) == (ROWS * TOKENS, WIDTH, 4)
    assert stretches[-1].output_bytes == 4


def test_nothing_is_computed_and_the_model_stays_as_it_is() -> None:
    model = Toy()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    follow(model, ["layers.0"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_forward_that_asks_for_what_weights_decide_cannot_be_followed() -> None:
    class Asking(Toy):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) if bool(self.embed(input_ids).sum() > 0) else input_ids

    with pytest.raises((RuntimeError, NotImplementedError)):
        follow(Asking(), ["layers.0"])


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "opt", "bert", "t5", "mamba2", "gemma3", "qwen2_vl", "whisper"])
def test_architectures_are_followed(name: str) -> None:
    from compressor.tracing import partition
    from harness.traceability.architectures import zoo

    architecture = zoo()[name]
    model = without_values(architecture.build())
    targets = [target for target in partition(model, None).targets if target]
    batch: dict[str, Any] = dict(architecture.batches()["same"])
    stretches = [stretch for stretch in measure_footprints(model, batch, targets, []) if stretch.name]
    assert stretches and all(stretch.own_bytes >= stretch.needed_bytes > 0 and stretch.peak_bytes > 0 for stretch in stretches)
