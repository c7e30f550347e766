"""Models and modifiers that the harness brings along: a tiny language model, a tinier chain, and modifiers that do as they are told."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from compressor.lifecycle import Modifier, State

VOCABULARY, WIDTH = 32, 128


class TinyBlock(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the block computes."""
        return hidden + self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm(hidden))))


class TinyModel(nn.Module):
    """A language model of two blocks, with all that modifiers usually reach for: `config`, `layers`, `embed_tokens`, `lm_head`."""

    def __init__(self, width: int = WIDTH) -> None:
        """Make a model with fixed weights."""
        super().__init__()
        self.config = SimpleNamespace(
            hidden_size=width, vocab_size=VOCABULARY, use_cache=True, model_type="tiny", tie_word_embeddings=False
        )
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(TinyBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits."""
        del attention_mask
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def tiny_batches(count: int = 2) -> list[Tensor]:
    """Return batches of token ids for the tiny model."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (4, 48), generator=generator) for _ in range(count)]


CHAIN_PARTS = ("first", "second")


class Chain(nn.Module):
    """Two linear layers whose modules carry a token, so that a machine can say which module stands where."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first = token_linear("first@original", 0.5)
        self.second = token_linear("second@original", 0.25)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        y: Tensor = self.second(self.first(x))
        return y


def token_linear(token: str, weight: float = 1.0) -> nn.Linear:
    """Return a small layer that carries a token."""
    with torch.device("meta"):  # no random numbers are drawn
        layer = nn.Linear(2, 2, bias=False)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.fill_(weight)
    layer.token = token  # type: ignore[assignment]
    return layer


class Probe(Modifier):
    """A modifier that does nothing of its own; a machine plans what its callbacks do."""

    def on_initialize(self, state: State) -> bool:
        """Be willing."""
        del state
        return True
