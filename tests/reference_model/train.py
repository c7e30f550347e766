"""Train the reference model of `golden/reference`: a small Llama that has really learned something.

Quantization error shows only in weights that carry information, so a random model proves nothing. This script trains a tokenizer and
a 5.8 M parameter model on the Python sources of this machine (see `reference_corpus`) and records everything that made them.
The steps are those of `compressor.training`: captured once, proved, and replayed.

Run `python -m tests.reference_model.train --output-dir golden/reference --work-dir /somewhere/outside/the/repo`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compressor.model.loading.load import resolve_device
from compressor.progress import Progress, RichProgress
from compressor.training import Trainer, TrainStep, adamw
from compressor.training.trainer import Mode
from compressor.training_run.attention import causal_attention
from harness.errors import HarnessError
from tests.reference_model.corpus import SourceFile, list_hash, source_files

END_OF_TEXT = "<|endoftext|>"
AUDIT_EVERY = 500  # steps after which the replay is proved against eager again


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that decides the result, apart from the corpus and the versions."""

    seed: int = 0
    vocab_size: int = 2048
    seq_len: int = 256  # tokens
    batch_size: int = 16  # sequences a step
    num_steps: int = 6000
    warmup_steps: int = 200
    peak_lr: float = 2.5e-3
    final_lr_frac: float = 0.02
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    num_threads: int = 2
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6

    def lr(self, step: int) -> float:
        """Linear warm-up, then cosine down to `final_lr_frac` of the peak."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_lr * (self.final_lr_frac + (1 - self.final_lr_frac) * cosine)


def reference_config(plan: TrainingPlan) -> LlamaConfig:
    """Return the architecture: grouped-query attention, SwiGLU, rotary positions, untied head."""
    return LlamaConfig(
        vocab_size=plan.vocab_size,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=plan.seq_len,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )


def train_tokenizer(files: list[SourceFile], plan: TrainingPlan, num_bytes: int = 24_000_000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a seeded sample of about `num_bytes` of the training files."""
    shuffled = list(files)
    random.Random(plan.seed).shuffle(shuffled)

    def texts() -> Iterator[str]:
        used = 0
        for file in shuffled:
            if used > num_bytes:
                return
            used += file.num_bytes
            yield file.read()

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, model_max_length=plan.seq_len
    )


def encode(files: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return all files as one int16 token stream, an end-of-text token before each."""
    pieces = []
    for start in range(0, len(files), 256):
        texts = [file.read() for file in files[start : start + 256]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
            pieces.append(torch.tensor([0, *encoding.ids], dtype=torch.int16))
    return torch.cat(pieces)


def windows(tokens: Tensor, plan: TrainingPlan) -> Tensor:
    """Cut a stream into [num_windows, seq_len] and shuffle the windows with the plan's seed."""
    count = tokens.numel() // plan.seq_len
    cut = tokens[: count * plan.seq_len].view(count, plan.seq_len)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(plan.seed))
    return cut[order]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean next-token cross entropy in nats."""
    logits = model(**batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def reference_trainer(plan: TrainingPlan, mode: Mode = "replay", progress: Progress | None = None) -> Trainer:
    """Make the model from the plan's seed, and the trainer of its step; changes torch's seed and number of threads."""
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.num_threads)
    model = LlamaForCausalLM(reference_config(plan)).float().to(resolve_device("auto")).train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    # The schedule gives the rates themselves: the peak is its own factor.
    step = TrainStep(model, loss_of, adamw(groups, lr=1.0, betas=(0.9, 0.95)), clip_norm=plan.clip_norm, autocast=torch.bfloat16)
    return Trainer(step, mode, schedule=plan.lr, audit_every=AUDIT_EVERY, progress=progress)


@contextmanager
def capturable(model: nn.Module, plan: TrainingPlan) -> Iterator[None]:
    """Let attention find its mask without the host while the block runs; refused unless it gives the model's own logits."""
    ids = torch.arange(plan.seq_len)[None] % plan.vocab_size
    attention = causal_attention(model, ids.to(next(model.parameters()).device))
    if attention.kernel is None:
        raise HarnessError(
            f"reference model: attention is {attention.words}, not causal by its kernel; look at transformers' release notes"
        )
    with attention.applied(model):
        yield


def batch_of(plan: TrainingPlan, train_ids: Tensor, step: int, device: torch.device) -> dict[str, Tensor]:
    """Return the windows of a step: the next ones, from the beginning again where they end."""
    rows = torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(train_ids)
    return {"input_ids": train_ids[rows].long().to(device)}


def held_out_loss(trainer: Trainer, held_out: Tensor, plan: TrainingPlan, max_windows: int = 512) -> float:
    """Mean held-out loss in nats per token over at most `max_windows` windows."""
    parts = held_out[:max_windows].split(plan.batch_size)
    return trainer.evaluate(({"input_ids": ids.long().to(trainer.step.device)} for ids in parts), [len(ids) for ids in parts])


def train(
    plan: TrainingPlan, train_ids: Tensor, held_out: Tensor, work_dir: Path, mode: Mode = "replay"
) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Run the plan; return the float32 model and the log of held-out losses."""
    trainer = reference_trainer(plan, mode, RichProgress())
    model: LlamaForCausalLM = trainer.step.model
    log: list[dict[str, float]] = []

    def after(number: int, loss: Tensor) -> None:
        if (number + 1) % 500 == 0 or number + 1 == plan.num_steps:
            log.append({"step": number + 1, "train": loss.item(), "held_out": held_out_loss(trainer, held_out, plan)})
            model.save_pretrained(work_dir / "latest")
            (work_dir / "log.json").write_text(json.dumps(log, indent=1))

    with capturable(model, plan):
        trainer.fit(lambda number: batch_of(plan, train_ids, number, trainer.step.device), plan.num_steps, each=after)
    return model.cpu(), log


def main(argv: list[str] | None = None) -> int:
    """Train and write model, tokenizer and provenance; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True, help="checkpoints on the way; keep it outside the repository")
    parser.add_argument("--num-steps", type=int, default=TrainingPlan.num_steps)
    parser.add_argument("--mode", choices=("replay", "eager", "capture"), default="replay", help="how a step runs; all give the same bits")
    args = parser.parse_args(argv)
    plan = TrainingPlan(num_steps=args.num_steps)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    start = time.monotonic()
    files = source_files()
    training, held = [f for f in files if not f.held_out], [f for f in files if f.held_out]
    tokenizer = train_tokenizer(training, plan)
    train_ids, held_out = windows(encode(training, tokenizer), plan), windows(encode(held, tokenizer), plan)
    model, log = train(plan, train_ids, held_out, args.work_dir, args.mode)
    model.to(torch.bfloat16).save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    bytes_per_token = sum(f.num_bytes for f in held) / (held_out.numel())
    record = {
        "plan": asdict(plan),
        "trainer": f"compressor.training, mode {args.mode}",
        "corpus": {"files": len(files), "held_out_files": len(held), "bytes": sum(f.num_bytes for f in files), "sha256": list_hash(files)},
        "tokens_in_corpus": train_ids.numel(),
        "tokens_trained": plan.num_steps * plan.batch_size * plan.seq_len,
        "held_out": {
            "loss_nats_per_token": log[-1]["held_out"],
            "bits_per_byte": log[-1]["held_out"] / math.log(2) / bytes_per_token,
            "bytes_per_token": bytes_per_token,
        },
        "log": log,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "machine": {"processor": platform.machine(), "device": "cuda" if torch.cuda.is_available() else "cpu"},
    }
    (args.output_dir / "training.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
