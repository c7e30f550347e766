"""A proof on a few rows and tokens: what is cut, what is left whole, and that frozen sizes are seen in it as in a whole batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from compressor.tracing import trace
from compressor.tracing.picking import excerpt
from tests import tiny

IDS = torch.arange(8 * 64).reshape(8, 64) % 50


def test_rows_and_tokens_are_cut_alike() -> None:
    cut = excerpt({"input_ids": IDS, "attention_mask": torch.ones(8, 64), "use_cache": False}, 1)
    assert cut["input_ids"].shape == cut["attention_mask"].shape == (2, 17)
    assert torch.equal(cut["input_ids"], IDS[:2, :17])
    assert cut["use_cache"] is False


def test_the_row_with_most_padding_stays_whole() -> None:
    mask = torch.ones(8, 64, dtype=torch.long)
    mask[3, 10:], mask[5, 40:] = 0, 0
    cut = excerpt({"input_ids": IDS, "attention_mask": mask}, 0)
    assert torch.equal(cut["attention_mask"], mask[[0, 3]])


@pytest.mark.parametrize(
    "batch",
    [
        (IDS,),
        {"pixels": torch.ones(8, 3, 4, 4)},
        {"input_ids": IDS, "pixels": torch.ones(8, 3, 4, 4)},
        {"input_ids": IDS, "position_ids": IDS[:1]},
        {"input_ids": IDS[0]},
    ],
    ids=["positional", "no tokens", "tokens beside pixels", "one row for all", "no rows"],
)
def test_what_does_not_line_up_is_left_whole(batch: object) -> None:
    assert excerpt(batch, 0) is batch


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Tokens(nn.Module):
    """A model of tokens; `glue` stands between its layers, and may do what a graph freezes."""

    def __init__(self, glue) -> None:
        super().__init__()
        self.embed, self.layers, self.glue = nn.Embedding(50, 8), nn.ModuleList([Layer(), Layer()]), glue

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.glue(layer(x))
        return x


BATCHES = [{"input_ids": IDS}, {"input_ids": (IDS + 7) % 50}]


def sizes_of_forwards(model: nn.Module) -> Counter[tuple[int, ...]]:
    sizes: Counter[tuple[int, ...]] = Counter()
    model.layers[0].register_forward_pre_hook(lambda module, args: sizes.update([tuple(args[0].shape[:2])]))
    return sizes


def test_the_proof_runs_on_excerpts() -> None:
    model = Tokens(torch.sin)
    sizes = sizes_of_forwards(model)
    plan = trace(model, BATCHES)
    assert plan.engine == "graph", plan.why
    assert sizes[2, 16] > 2
    assert sizes[2, 17] > 2
    assert sizes[8, 64] <= 2  # the recording, and what planning looks at before it


def test_a_model_that_takes_one_size_only_is_proved_on_it() -> None:
    model = Tokens(lambda x: x.reshape(8, 64, 8))
    sizes = sizes_of_forwards(model)
    plan = trace(model, BATCHES)
    assert plan.engine == "graph", plan.why
    assert sizes[8, 64] > 4


def test_what_a_graph_cannot_repeat_is_seen_on_excerpts_as_well() -> None:
    calls = iter(range(10_000))
    model = Tokens(lambda x: x + next(calls))
    with pytest.raises(Exception, match=r"batch|differs|turns"):
        trace(model, BATCHES)


def test_a_llama_of_other_batch_sizes_and_padding_gives_the_same_graph() -> None:
    model = tiny.llama().eval()
    mask = torch.ones(8, 64, dtype=torch.long)
    mask[2, :20] = 0
    batches = [
        {"input_ids": IDS, "attention_mask": torch.ones(8, 64, dtype=torch.long)},
        {"input_ids": IDS[:5] + 1, "attention_mask": mask[:5]},
    ]
    plan = trace(model, batches, engine="graph")
    for run in [plan.run(batches, keep_outputs=True)]:
        for stage in run:
            stage.calibrate()
            stage.propagate()
        for batch, output in zip(batches, run.outputs, strict=True):
            assert torch.equal(output.logits, model(**batch).logits)
