"""Hazards of whole models: those of transformers, compiled modules, and threads beside the step."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import GuardDriftError, HostReadError, ReplayError, SignatureDriftError
from compressor.training import Trainer, TrainStep, adamw
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, default_optimizer, stage, tokens
from harness.replay.hazards.registry import Hazard

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def _llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"vocab_size": 32, "max_position_embeddings": 32, "use_cache": False, "num_key_value_heads": 1, **_SIZES, **settings}
    return LlamaForCausalLM(LlamaConfig(**config))


def _gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **settings))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=32, **_SIZES))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_SIZES, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=32, max_position_embeddings=32, use_cache=False, **sizes))


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    logits, ids = model(**batch).logits.float(), batch["input_ids"]
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _masked(number: int, full: bool) -> dict[str, Tensor]:
    batch = tokens(number)
    mask = torch.ones_like(batch["input_ids"])
    if not full:
        mask[1, 6 - number % 3 :] = 0
    return {**batch, "attention_mask": mask}


def _masked_4d(number: int) -> dict[str, Tensor]:
    batch = _masked(number, full=False)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    return {**batch, "attention_mask": causal & batch["attention_mask"][:, None, None, :].bool()}


def _checkpointed() -> nn.Module:
    model: Any = _llama()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the new name, and the old
    enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def _lowered() -> nn.Module:
    return _llama().to(torch.bfloat16)


def _cached(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch, use_cache=True, labels=batch["input_ids"]).loss
    return loss


def _compiled(trainer: Trainer) -> None:
    trainer.step.model.first.compile(backend="eager")  # type: ignore[union-attr]


def _compiled_loss() -> Subject:
    model = Net()
    compiled = torch.compile(model, backend="eager")

    def loss_fn(module: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(compiled(batch["x"]), batch["y"])

    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _in_thread(module: Any, h: Tensor) -> Tensor:
    """Computes a part in another thread, where no recorder looks."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(h.detach() * 0.5 + module.first.bias.detach().sum()))
    thread.start()
    thread.join()
    return h + found[0]


class _Tied(nn.Module):
    """An embedding that is its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.head(self.norm(self.embed(input_ids))))


def _of(make: Any, loss_fn: Any = _next_token, **step: Any) -> Any:
    return stage(model=make, loss_fn=loss_fn, optimizer=lambda parameters: adamw(parameters, lr=1e-2), step=step)


_HF = "huggingface/transformers: masking_utils"
HAZARDS: tuple[Hazard, ...] = (
    Hazard("llama_whole_mask", "Llama with a mask of four dimensions", _of(_llama), source=_HF, batches=_masked_4d, steps=6),
    Hazard(
        "llama_padding_mask",
        "Llama with a padding mask, into which transformers looks on the host",
        _of(_llama),
        HostReadError,
        "masking_utils.py",
        _HF,
        batches=partial(_masked, full=False),
        steps=6,
    ),
    Hazard("llama_no_mask", "Llama without a mask", _of(_llama), HostReadError, "masking_utils.py", _HF, batches=tokens, steps=6),
    Hazard(
        "llama_eager_attention",
        "Llama with eager attention and no mask",
        _of(partial(_llama, attn_implementation="eager")),
        HostReadError,
        "masking_utils.py",
        _HF,
        batches=tokens,
        steps=6,
    ),
    Hazard(
        "llama_checkpointing",
        "Llama with gradient checkpointing, without dropout",
        _of(_checkpointed),
        source="pytorch/pytorch#162504",
        batches=_masked_4d,
        steps=6,
    ),
    Hazard("llama_bfloat16", "Llama in bfloat16", _of(_lowered), source=_HF, batches=_masked_4d, steps=6),
    Hazard(
        "llama_autocast",
        "Llama under autocast, two micro-batches",
        _of(_llama, autocast=torch.bfloat16, accumulate=2),
        source=_HF,
        batches=lambda number: [_masked_4d(2 * number), _masked_4d(2 * number + 1)],
        steps=6,
    ),
    Hazard(
        "llama_cache",
        "Llama with its key-value cache and its own loss",
        _of(partial(_llama, use_cache=True), _cached),
        source="huggingface/transformers: use_cache",
        batches=_masked_4d,
        steps=6,
    ),
    Hazard(
        "gpt2",
        "GPT-2 with dropout and eager attention",
        _of(partial(_gpt2, attn_implementation="eager")),
        source=_HF,
        batches=partial(_masked, full=False),
        steps=6,
    ),
    Hazard(
        "bert",
        "BERT with dropout",
        _of(_bert, lambda model, batch: cross_entropy(model(**batch).logits.flatten(0, 1), batch["input_ids"].flatten())),
        source=_HF,
        batches=tokens,
        steps=6,
    ),
    Hazard(
        "mixtral",
        "experts that are chosen by data",
        _of(partial(_mixtral)),
        source="huggingface/transformers: MoE",
        batches=_masked_4d,
        steps=6,
    ),
    Hazard("tied_embeddings", "a head that shares its weight with the embedding", _of(_Tied), source=_HF, batches=tokens),
    Hazard(
        "compiled_module",
        "a layer is compiled from the beginning",
        stage(before=lambda number, trainer: _compiled(trainer) if number == 0 else None),
        ReplayError,
        "it is compiled by torch.compile",
        "torch docs: torch.compile, torch_dispatch modes",
    ),
    Hazard(
        "compiled_later",
        "a layer is compiled while a plan is in use",
        stage(before=lambda number, trainer: _compiled(trainer) if number == 6 else None),
        GuardDriftError,
        "module first was _compiled_call_impl",
        "torch docs: torch.compile, torch_dispatch modes",
    ),
    Hazard(
        "compiled_closure",
        "the loss function calls a model compiled by a backend that changes no bit",
        _compiled_loss,
        source="torch docs: torch.compile, torch_dispatch modes",
    ),
    Hazard(
        "other_thread",
        "a part of the step runs in another thread",
        stage(_in_thread),
        SignatureDriftError,
        "neither parameter, buffer",
        "torch docs: notes/cuda, CUDA graphs, constraints",
    ),
)
