"""One measured job in a process of its own; `tests.bench.peer` starts it, once per run, under the interpreter of either library.

It stands alone: the peer's environment has neither of our packages. `python -P drive.py JOB SETTINGS.json RESULT.json`.
Imports are done before the clock starts and before the first look at memory, those too that transformers puts off until a model is made:
one library imports early, the other late, and both are to be measured on their work. The time of the whole process is taken outside.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def run_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """Compress with `compressor.oneshot`.

    Args:
        settings: model, recipe, calibration, output_dir, num_samples, seq_len, device; options, what else `oneshot` is given.
    Returns:
        Seconds by phase, memory, versions.
    """
    import compressor
    from compressor import oneshot

    _import_model_class(settings["model"])
    meter = _Meter()
    result = oneshot(
        settings["model"],
        recipe=settings["recipe"],
        dataset=settings["calibration"],
        output_dir=settings["output_dir"],
        num_calibration_samples=settings["num_samples"],
        max_seq_length=settings["seq_len"],
        device=settings["device"],
        **settings.get("options", {}),
    )
    return meter.read(result.seconds, {"compressor-harness": compressor.__version__})


def run_peer(settings: dict[str, Any]) -> dict[str, Any]:
    """Compress with llmcompressor: the four steps of its `oneshot`, called one by one so that each can be timed.

    Args:
        settings: as in `run_ours`; the device is chosen by the peer itself.
    Returns:
        Seconds by phase, memory, versions.
    """
    from datasets import Dataset
    from llmcompressor.datasets import get_calibration_dataloader
    from llmcompressor.entrypoints.oneshot import Oneshot
    from llmcompressor.entrypoints.utils import post_process
    from safetensors.torch import load_file

    _import_model_class(settings["model"])
    meter = _Meter()
    rows = load_file(settings["calibration"])["input_ids"][: settings["num_samples"], : settings["seq_len"]].tolist()
    dataset = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    meter.lap("data")
    runner = Oneshot(
        **_for_peer(settings["model"]),
        recipe=settings["recipe"],
        dataset=dataset,
        output_dir=settings["output_dir"],
        num_calibration_samples=settings["num_samples"],
        max_seq_length=settings["seq_len"],
        shuffle_calibration_samples=False,
    )
    meter.lap("load")
    loader = get_calibration_dataloader(runner.dataset_args, runner.processor)
    meter.lap("data")
    runner.apply_recipe_modifiers(calibration_dataloader=loader, recipe_stage=runner.recipe_args.stage)
    meter.lap("compress")
    post_process(model_args=runner.model_args, recipe_args=runner.recipe_args, output_dir=runner.output_dir)
    meter.lap("save")
    return meter.read(meter.seconds, {"llmcompressor": version("llmcompressor")})


def score(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the mean next-token loss of each held-out sequence, with transformers alone.

    Args:
        settings: model, heldout, device.
    Returns:
        `losses`: nats per token, one number a sequence.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings["model"]).to(settings["device"]).eval()
    losses: list[float] = []
    with torch.no_grad():
        for ids in load_file(settings["heldout"])["input_ids"].long().split(8):
            batch = ids.to(settings["device"])
            logits = model(input_ids=batch).logits[:, :-1].float()
            per_token = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
            losses += per_token.mean(dim=1).tolist()
    return {"losses": losses}


def divergence(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure how far the predictions of a model are from those of its base, with transformers alone where it loads both as they are.

    Args:
        settings: model, base, heldout, device, and `reader`: "ours" for experts that transformers does not unpack.
    Returns:
        `kl`: KL(base || model) and `losses`: cross entropy of the next token, in nats per token, one number a sequence each. Of an
        encoder of sentences: KL of which sentence is found to be next to a sentence, and cosine distance of its embeddings.
    """
    import torch
    from safetensors.torch import load_file

    from compressor import load_compressed

    kind = _class_of(settings["base"])
    base = kind.from_pretrained(settings["base"]).to(settings["device"]).eval()
    if settings["reader"] == "ours":
        model: Any = load_compressed(settings["model"], device=settings["device"]).eval()
    else:
        model = kind.from_pretrained(settings["model"]).to(settings["device"]).eval()
    batches = [ids.to(settings["device"]) for ids in load_file(settings["heldout"])["input_ids"].long().split(8)]
    with torch.no_grad():
        return (_of_tokens if _has_head(settings["base"]) else _of_embeddings)(base, model, batches)


def _of_tokens(base: Any, model: Any, batches: list[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"kl": [], "losses": []}
    for batch in batches:
        theirs, ours = (one(input_ids=batch).logits[:, :-1].float().log_softmax(-1) for one in (base, model))
        found["kl"] += (theirs.exp() * (theirs - ours)).sum(-1).mean(1).tolist()
        found["losses"] += (-ours.gather(-1, batch[:, 1:, None])).mean((1, 2)).tolist()
    return found


def _of_embeddings(base: Any, model: Any, batches: list[Any]) -> dict[str, list[float]]:
    """Each sentence asks for the others by cosine similarity over 0.05, the temperature of contrastive training (SimCSE, 2104.08821)."""
    import torch
    from torch.nn.functional import normalize

    pooled = (torch.cat([one(input_ids=batch).last_hidden_state.double().mean(1) for batch in batches]) for one in (base, model))
    theirs, ours = (normalize(one, dim=-1) for one in pooled)
    itself = torch.eye(len(theirs), dtype=torch.bool, device=theirs.device)
    wanted, found = ((one @ one.T / 0.05).masked_fill(itself, -1e4).log_softmax(-1) for one in (theirs, ours))
    return {"kl": (wanted.exp() * (wanted - found)).sum(-1).tolist(), "losses": (1 - (theirs * ours).sum(-1)).tolist()}


class _Meter:
    """Wall time by phase, and how far the process's memory rose above what the imports took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._rss_at_start = _peak_rss_bytes()
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def read(self, seconds: dict[str, float], library: dict[str, str]) -> dict[str, Any]:
        total = time.perf_counter() - self._start
        peak = _peak_rss_bytes()
        return {
            "seconds": {**seconds, "total": total},
            "rss_peak_bytes": peak,
            "rss_over_start_bytes": peak - self._rss_at_start,
            "versions": library | {name: version(name) for name in ("torch", "transformers", "compressed-tensors")},
        }


def _import_model_class(model: str) -> None:
    """Have transformers import the code of this model's class, and what saves and loads it, without making a weight."""
    import compressed_tensors  # noqa: F401
    import torch
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    with torch.device("meta"):
        _class_of(model).from_config(AutoConfig.from_pretrained(model))


def _has_head(model: str) -> bool:
    from transformers import AutoConfig

    return any(name.endswith("ForCausalLM") for name in AutoConfig.from_pretrained(model).architectures)


def _class_of(model: str) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if _has_head(model) else AutoModel


def _for_peer(model: str) -> dict[str, Any]:
    """Return a folder as it is; what has no head the peer takes in memory only: from a folder it makes a head of random numbers."""
    from transformers import AutoModel, AutoTokenizer

    if _has_head(model):
        return {"model": model}
    return {"model": AutoModel.from_pretrained(model), "tokenizer": AutoTokenizer.from_pretrained(model)}


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ours": run_ours,
    "peer": run_peer,
    "score": score,
    "divergence": divergence,
}

if __name__ == "__main__":
    _job, _settings_file, _result_file = sys.argv[1:]
    _settings = json.loads(Path(_settings_file).read_text(encoding="utf-8"))
    Path(_result_file).write_text(json.dumps(_JOBS[_job](_settings)), encoding="utf-8")
