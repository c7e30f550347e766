"""Train the models that only judge: no default of the project was ever chosen on them.

A default that was chosen on the reference model proves little there. So two further families with text of other kinds measure what a
compressed model has lost: an OPT (LayerNorm, biases, tied embeddings, ReLU) that read headers of C and C++, and a Qwen3 mixture of
experts (norms of queries and keys, untied head) that read Perl, JavaScript and documentation. Each has a tokenizer of its own, was
trained with `compressor.train`, and lies with its fixed tokens in `golden/judges/NAME`.

Run `python -m tests.reference_model.judges opt --output-dir golden/judges/opt --work-dir /somewhere/outside/the/repo`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from compressor import train
from compressor.training.trainer import Mode
from tests.reference_model.corpus import list_hash, source_files
from tests.reference_model.train import TrainingPlan, encode, train_tokenizer, windows

NUM_CALIBRATION, NUM_HELDOUT = 128, 256  # windows of 256 tokens; the first are read by compression, the others by the judge
PACKAGE_BYTES = 30_000_000
HEADERS = (".h", ".hpp", ".cuh", ".c", ".cpp")
PERL_AND_TEXTS = (".pm", ".pl", ".pod", ".js", ".md", ".rst", ".txt", ".pyi", ".html", ".tcl")


@dataclass(frozen=True)
class Judge:
    """One judging model: what it reads, and how it is trained."""

    suffixes: tuple[str, ...]
    make: Callable[[], PreTrainedModel]
    plan: TrainingPlan  # seed, vocabulary and length; the loop's own numbers stand below
    num_steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    mode: Mode = "replay"


def _opt() -> PreTrainedModel:
    size = {"vocab_size": 2048, "hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 768, "num_hidden_layers": 6}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return OPTForCausalLM(OPTConfig(**size, **ends, num_attention_heads=6, max_position_embeddings=256, dropout=0.0))


def _qwen3_moe() -> PreTrainedModel:
    size = {"vocab_size": 2048, "hidden_size": 192, "moe_intermediate_size": 160, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "output_router_logits": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = Qwen3MoeConfig(**size, **heads, **experts, **ends, max_position_embeddings=256, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config)


JUDGES = {
    "opt": Judge(HEADERS, _opt, TrainingPlan(seed=11)),
    "qwen3_moe": Judge(
        (".pm", ".pl", ".pod", ".js", ".md", ".rst", ".txt", ".pyi", ".html", ".tcl"), _qwen3_moe, TrainingPlan(seed=12), mode="eager"
    ),
}


def make_judge(name: str, output_dir: Path, work_dir: Path) -> None:
    """Train one judging model; write model, tokenizer, fixed tokens and what made them.

    Args:
        name: a key of `JUDGES`.
        output_dir: gets the checkpoint; must not exist.
        work_dir: gets what is needed on the way.
    """
    judge, start = JUDGES[name], time.monotonic()
    files = source_files(judge.suffixes, PACKAGE_BYTES, of_system=True)
    training, held = [file for file in files if not file.held_out], [file for file in files if file.held_out]
    tokenizer = train_tokenizer(training, judge.plan)
    seen, unseen = windows(encode(training, tokenizer), judge.plan), windows(encode(held, tokenizer), judge.plan)
    calibration, heldout = unseen[:NUM_CALIBRATION], unseen[NUM_CALIBRATION : NUM_CALIBRATION + NUM_HELDOUT]
    torch.manual_seed(judge.plan.seed)
    initial = work_dir / f"{name}-initial"
    judge.make().to(torch.bfloat16).save_pretrained(initial)
    tokenizer.save_pretrained(initial)
    rows = seen[: judge.num_steps * judge.batch_size]
    result = train(
        initial,
        dataset=rows.long(),
        eval_dataset=heldout.long(),
        output_dir=output_dir,
        max_seq_length=judge.plan.seq_len,
        steps=judge.num_steps,
        batch_size=judge.batch_size,
        learning_rate=judge.learning_rate,
        warmup_steps=judge.warmup_steps,
        weight_decay=judge.weight_decay,
        autocast="bf16",
        mode=judge.mode,
        seed=judge.plan.seed,
    )
    _save_tokens(output_dir, calibration=calibration, heldout=heldout)
    record = {
        "command": f"python -m tests.reference_model.judges {name}",
        "corpus": {"files": len(files), "held_out_files": len(held), "suffixes": judge.suffixes, "sha256": list_hash(files)},
        "tokens_trained": rows.numel(),
        "held_out": dict(result.evaluations[-1]),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }
    (output_dir / "training.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _save_tokens(folder: Path, **arrays: Tensor) -> None:
    for name, ids in arrays.items():
        save_file({"input_ids": ids.to(torch.int32).contiguous()}, folder / f"{name}.safetensors")


def main(argv: list[str] | None = None) -> int:
    """Train one judging model; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=JUDGES)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True, help="for what is needed on the way; keep it outside the repository")
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    make_judge(args.name, args.output_dir, args.work_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
