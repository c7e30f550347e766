"""Small models, batches and steps for the tests of training; everything is made afresh from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.lifecycle import Event, Modifier, Session, State
from compressor.training import Snapshot, Trainer, TrainStep, WeightAverages, adamw, sgd, warmup_cosine
from tests import tiny

VOCABULARY = 32
NO_AUDITS: dict[str, Any] = {"audit_every": 0}  # guards and replays stand alone here; audits have tests of their own
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: adamw(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: sgd(params, lr=5e-2, momentum=0.9),
}


class Mlp(nn.Module):
    """Batch norm, dropout and two linears."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of an MLP."""
    return cross_entropy(model(batch["x"]).float(), batch["y"])


def predict(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the next token, or of the same one for BERT."""
    logits = model(**batch).logits.float()
    ids = batch["input_ids"]
    if not getattr(model.config, "is_decoder", True) and model.config.model_type == "bert":
        return cross_entropy(logits.flatten(0, 1), ids.flatten())
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def vectors(number: int, rows: int = 6) -> dict[str, Tensor]:
    """A batch of an MLP."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {"x": torch.randn(rows, 8, generator=generator), "y": torch.randint(0, 4, (rows,), generator=generator)}


def tokens(number: int, length: int = 9) -> dict[str, Tensor]:
    """A batch of token ids."""
    generator = torch.Generator().manual_seed(2000 + number)
    ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    return {"input_ids": ids}


def padded(number: int) -> dict[str, Tensor]:
    """A batch of token ids whose second row is padded on the right, by a number of tokens that changes."""
    batch = tokens(number)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 8 - number % 3 :] = 0
    return {**batch, "attention_mask": mask}


def causal(number: int) -> dict[str, Tensor]:
    """A batch of token ids with the whole mask, as scaled dot-product attention takes it."""
    batch = padded(number)
    mask = torch.ones(9, 9, dtype=torch.bool).tril() & batch["attention_mask"][:, None, None, :].bool()
    return {**batch, "attention_mask": mask}


def _transformer(kind: str, **settings: Any) -> nn.Module:
    import transformers as t

    if kind == "llama":
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        return tiny.llama(vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False, **size, **settings)
    if kind == "gpt2":
        return tiny.gpt2(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_head=2, use_cache=False, **settings)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return t.BertForMaskedLM(tiny.config("bert", vocab_size=VOCABULARY, max_position_embeddings=32, **size))


@dataclass(frozen=True)
class Case:
    """A model with its loss and its batches."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch_at: Callable[[int], Any]


CASES = {
    "mlp": Case(Mlp, classify, vectors),
    "bert": Case(lambda: _transformer("bert"), predict, tokens),
    "llama": Case(lambda: _transformer("llama"), predict, causal),
    "gpt2": Case(lambda: _transformer("gpt2", attn_implementation="eager"), predict, padded),
    # transformers asks on the host whether a mask is full, to leave it out where it is
    "mask_on_the_host": Case(lambda: _transformer("llama"), predict, padded),
}


@pytest.fixture(scope="session")
def run_mode() -> Callable[..., tuple[Trainer, Snapshot, list[float]]]:
    """Train a fresh, reseeded instance in one mode; return the trainer, the state at the end and all losses."""

    def run(case: Case, mode: str, num_steps: int = 20, optimizer: str = "adamw", **settings: Any) -> tuple[Trainer, Snapshot, list[float]]:
        trainer = make_trainer(case, mode, optimizer, **settings)
        batch_at = accumulated(case.batch_at, trainer.step.accumulate)
        losses = [trainer.train_step(batch_at(number)) for number in range(num_steps)]
        return trainer, Snapshot.take(trainer.step), [loss.item() for loss in losses]

    return run


def accumulated(batch_at: Callable[[int], Any], accumulate: int) -> Callable[[int], Any]:
    """Give lists of micro-batches where a step takes them."""
    if accumulate == 1:
        return batch_at
    return lambda number: [batch_at(number * accumulate + k) for k in range(accumulate)]


def make_trainer(
    case: Case, mode: str, optimizer: str = "adamw", *, ema: bool = False, schedule: bool = False, trainer: Any = None, **step: Any
) -> Trainer:
    """Make a trainer of a fresh model from a fixed seed."""
    torch.manual_seed(7)
    random.seed(7)
    model = case.make().train()
    averages = WeightAverages(model, 0.9) if ema else None
    train_step = TrainStep(model, case.loss_fn, OPTIMIZERS[optimizer](model.parameters()), averages=averages, **step)
    return Trainer(train_step, mode, schedule=warmup_cosine(3, 20) if schedule else None, **(NO_AUDITS | (trainer or {})))


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """The models by name."""
    return CASES


@pytest.fixture(scope="session")
def new_trainer() -> Callable[..., Trainer]:
    """Make a trainer of a fresh model from a fixed seed."""
    return make_trainer


@pytest.fixture(scope="session")
def mlp_trainer() -> Callable[..., Trainer]:
    """Make a trainer in replay mode for a module, with the loss and the batches of the MLP."""

    def make(
        module: nn.Module | None = None,
        loss_fn: Any = classify,
        optimizer: Any = None,
        params: Sequence[nn.Parameter] | None = None,
        **settings: Any,
    ) -> Trainer:
        torch.manual_seed(7)
        model = Mlp() if module is None else module
        chosen = adamw(model.parameters()) if optimizer is None else optimizer(model.parameters())
        return Trainer(
            TrainStep(model, loss_fn, chosen, settings.pop("session", None)), settings.pop("mode", "replay"), **(NO_AUDITS | settings)
        )

    return make


@pytest.fixture(scope="session")
def batches() -> Callable[..., dict[str, Tensor]]:
    """Batches of the MLP by number."""
    return vectors


class ScalingModifier(Modifier):
    """Multiplies gradients by a tensor that follows the step; hooks the last layer from start to end."""

    def on_initialize(self, state: State) -> bool:
        self._scale, self._weights = torch.ones(()), list(state.model.parameters())
        self._last = state.model.last
        return True

    _scale = _weights = _last = None

    def training_tensors(self):
        return {"scale": self._scale}

    def on_start(self, state: State, event: Event) -> None:
        self.register_hook(self._last, lambda module, args, result: result * 0.5, "forward")

    def on_end(self, state: State, event: Event) -> None:
        self.remove_hooks()

    def on_event(self, state: State, event: Event) -> None:
        if event.type == "batch_start":
            self._scale.fill_(1 + event.step / 10)  # DATA: in place, outside the step
        if event.type == "optim_pre_step":
            for weight in self._weights:
                weight.grad.mul_(self._scale)


@pytest.fixture(scope="session")
def scaled_trainer() -> Callable[[str], Trainer]:
    """Make a trainer of an MLP with a modifier that starts at step 8 and ends at step 16."""

    def make(mode: str) -> Trainer:
        step = make_trainer(CASES["mlp"], mode).step
        session = Session(State(step.model), [ScalingModifier(start=8, end=16)])
        session.initialize()
        return Trainer(TrainStep(step.model, step.loss_fn, step.optimizer, session), mode, **NO_AUDITS)

    return make
