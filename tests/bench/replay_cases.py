"""Training steps whose replay is measured: an MLP with batch norm and dropout, Llamas of several sizes, an LSTM; all made from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import UserInputError
from compressor.training import TrainStep, adamw

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its loss and its batches.

    Attributes:
        name: for reports.
        make: makes the model, in train mode, from torch's generator.
        loss_fn: of the model and a batch.
        batch_at: gives the batch of a step by its number, on the CPU.
    """

    name: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    batch_at: Callable[[int], Batch]

    def step(self, device: torch.device, seed: int = 0, model_of: Callable[[nn.Module], nn.Module] | None = None) -> TrainStep:
        """Make a fresh training step with AdamW.

        Args:
            device: to train on.
            seed: of torch's generators, which stand there afterwards.
            model_of: what the loss function calls instead of the model, such as its compiled form.

        Returns:
            The step.
        """
        torch.manual_seed(seed)
        model = self.make().train().to(device)
        loss_fn = self.loss_fn
        if model_of is not None:
            called = model_of(model)
            loss_fn = lambda _, batch: self.loss_fn(called, batch)  # noqa: E731
        return TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-3))

    def batches(self, count: int, device: torch.device) -> list[Batch]:
        """Make batches.

        Args:
            count: how many.
            device: where they are to lie.

        Returns:
            The batches, all of one metadata.
        """
        return [{name: tensor.to(device) for name, tensor in self.batch_at(number).items()} for number in range(count)]


class Mlp(nn.Module):
    """Two linears around batch norm, ReLU and dropout."""

    def __init__(self, width: int = 16) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify rows of 8 numbers."""
        found: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return found


class Lstm(nn.Module):
    """An LSTM over a short sequence, and a linear on its last state."""

    def __init__(self, width: int = 12) -> None:
        """Make the layers."""
        super().__init__()
        self.cell, self.last = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classify sequences of rows of 8 numbers."""
        found: Tensor = self.last(self.cell(x)[0][:, -1])
        return found


def mlp(rows: int = 6) -> Case:
    """Return the MLP that the tests use."""
    return Case("MLP", Mlp, _classify, lambda number: _vectors(number, (rows, 8)))


def lstm(rows: int = 3, length: int = 5) -> Case:
    """Return a small LSTM."""
    return Case("LSTM", Lstm, _classify, lambda number: _vectors(number, (rows, length, 8)))


def llama(name: str, config: Mapping[str, Any], rows: int, length: int) -> Case:
    """Return a random Llama.

    Args:
        name: for reports.
        config: arguments of LlamaConfig.
        rows: of a batch.
        length: tokens of a row.

    Returns:
        The case; a batch holds the whole causal mask, because transformers would look on the host for what is not given.
    """

    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**config, "use_cache": False, "dtype": "float32"})).float()
        return model

    vocabulary = int(config["vocab_size"])
    return Case(name, make, _next_token, lambda number: _ids(number, vocabulary, rows, length))


def small_llama(hidden: int = 64, layers: int = 2, rows: int = 2, length: int = 16) -> Case:
    """Return a Llama whose step is bound by the cost of calling operators, not by arithmetic."""
    heads = max(1, hidden // 16)
    config = {
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": length,
    }
    return llama(f"Llama {layers}x{hidden}", config, rows, length)


def reference(folder: Path, rows: int = 4, length: int = 128) -> Case:
    """Return a Llama of the size of a checkpoint, with random weights.

    Args:
        folder: holds the configuration.
        rows: of a batch.
        length: tokens of a row.

    Returns:
        The case.

    Raises:
        UserInputError: the folder holds no configuration of a Llama.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserInputError(f"--model {folder}: there is no config.json; name the folder of the reference model")
    config = AutoConfig.from_pretrained(folder).to_dict()
    if config.get("model_type") != "llama":
        raise UserInputError(f"--model {folder}: a {config.get('model_type')} is no Llama; name the folder of the reference model")
    return llama(f"{folder.name} size", config, rows, length)


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"]).float(), batch["y"])


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits.float()
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _vectors(number: int, shape: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(1000 + number)
    return {"x": torch.randn(*shape, generator=generator), "y": torch.randint(0, 4, shape[:1], generator=generator)}


def _ids(number: int, vocabulary: int, rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(2000 + number)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length).contiguous()
    return {"input_ids": ids, "attention_mask": mask}
