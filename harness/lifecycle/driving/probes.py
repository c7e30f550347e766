"""Models and modifiers that the harness brings along: a tiny language model, a tinier chain, and modifiers that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.errors import ModelError
from compressor.lifecycle import Event, Modifier, State

VOCABULARY, WIDTH = 32, 128


class TinyBlock(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Add what the block computes, where no padding is."""
        update: Tensor = self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm(hidden))))
        return hidden + (update if attention_mask is None else update * attention_mask.unsqueeze(-1))


class TinyModel(nn.Module):
    """A language model of two blocks, with all that modifiers usually reach for: `config`, `layers`, `embed_tokens`, `lm_head`, buffers."""

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
        self.register_buffer("embed_scale", torch.ones(1))
        self.register_buffer("logit_scale", torch.ones(1), persistent=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
            for name, parameter in self.named_parameters():
                if name.endswith("down_proj.bias"):  # torch draws it from the caller's generator, so each process would have another
                    parameter.copy_((torch.rand(width, generator=generator) - 0.5) / 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits."""
        hidden = self.embed_tokens(input_ids) * self.embed_scale
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=attention_mask)
        logits: Tensor = self.lm_head(self.norm(hidden)) * self.logit_scale
        return logits


def tiny_batches(count: int = 2) -> list[Tensor]:
    """Return batches of token ids for the tiny model."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (4, 48), generator=generator) for _ in range(count)]


def masked_batch() -> dict[str, Tensor]:
    """Return a padded batch for the tiny model by keywords, with other numbers of sequences and tokens than `tiny_batches`."""
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, 13:] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(2)), "attention_mask": mask}


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


class CalibratingWorker(Modifier):
    """A well-behaved modifier of a calibration: it watches every linear layer, and puts a scaled copy in the place of each."""

    calibration = "sequential"

    _watched: dict[str, RemovableHandle] = PrivateAttr(default_factory=dict)
    _largest: dict[str, float] = PrivateAttr(default_factory=dict)

    def on_initialize(self, state: State) -> bool:
        """Refuse a model that was scaled already."""
        if any(isinstance(module, ScaledLinear) for module in state.model.modules()):
            raise ModelError("CalibratingWorker: the model has scaled layers already; give one that has none")
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Watch the inputs of all linear layers."""
        for name, module in state.model.named_modules():
            if isinstance(module, nn.Linear):
                self._watched[name] = self.register_hook(module, self._watching(name), "forward_pre")
        state.claim(self._watched, self.label)

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        """Replace the layers of the stage."""
        for name in event.modules:
            if name in self._watched:
                self.remove_hooks([self._watched.pop(name)])
                layer = state.model.get_submodule(name)
                assert isinstance(layer, nn.Linear)
                state.replace_module(name, ScaledLinear(layer, self._largest.pop(name, 1.0)))

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Stop watching."""
        self.remove_hooks()
        self._watched.clear()

    def _watching(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._largest[name] = max(self._largest.get(name, 0.0), float(args[0].detach().abs().max()))

        return watch


class TrainingWorker(Modifier):
    """A well-behaved modifier of a training: it watches the model's output from `start` to `end`."""

    contract_tags: ClassVar[frozenset[str]] = frozenset({"session_hooks"})

    def on_initialize(self, state: State) -> bool:
        """Be willing."""
        return True

    def on_start(self, state: State, event: Event) -> None:
        """Watch."""
        self.register_hook(state.model, _see_nothing, "forward")

    def on_end(self, state: State, event: Event) -> None:
        """Stop watching."""
        self.remove_hooks()


class ScaledLinear(nn.Module):
    """A linear layer and a number that its inputs do not exceed."""

    def __init__(self, linear: nn.Linear, largest: float) -> None:
        """Copy the weights."""
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach() / 2, requires_grad=linear.weight.requires_grad)
        self.bias = linear.bias
        self.register_buffer("largest", torch.tensor(largest))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returned, but for rounding."""
        y: Tensor = nn.functional.linear(x, self.weight * 2, self.bias)
        return y


def _see_nothing(*args: object) -> None:
    """A hook that changes nothing."""


class Probe(Modifier):
    """A modifier that does nothing of its own; a machine plans what its callbacks do."""

    def on_initialize(self, state: State) -> bool:
        """Be willing."""
        del state
        return True
