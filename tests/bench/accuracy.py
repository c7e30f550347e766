"""How close compressed models are to their base, ours and the peer's: on the reference model, and on those that only judge.

Each model is compressed to 4 and to 3 bits, or to the formats that are asked for, by the peer, and by us in each of the given ways, from
the same tokens. Judged is the mean KL(base || model) per token on held-out text, sequence by sequence: the ratio to the peer's has an
interval from resampled sequences. Time and memory are of single runs, each in a process of its own.

Run `python -m tests.bench.accuracy --peer-python PATH --output-dir O`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compressor.errors import CompressorError
from tests.bench.peer import BenchPlan, run_job
from tests.reference_model.minilm import make_minilm

GOLDEN = Path("golden")
NUM_RESAMPLES = 10_000
PEER = "peer"


@dataclass(frozen=True)
class Judged:
    """A model, the sizes of groups that its weights take, the class of its layers, and formats in which transformers does not load it.

    A folder of None is made in the output folder.
    """

    folder: Path | None
    group_sizes: Mapping[int, int]
    layer: str
    ignore: tuple[str, ...] = ("lm_head",)
    only_ours: tuple[str, ...] = ()
    loss: str = "loss"
    options: Mapping[str, Any] = field(default_factory=dict)  # of our `oneshot`


MODELS = {
    "reference": Judged(GOLDEN / "reference", {4: 128, 3: 64}, "LlamaDecoderLayer"),
    "opt": Judged(GOLDEN / "judges" / "opt", {4: 32, 3: 32}, "OPTDecoderLayer"),
    "qwen3_moe": Judged(
        GOLDEN / "judges" / "qwen3_moe", {4: 32, 3: 32}, "Qwen3MoeDecoderLayer", ("lm_head", "re:.*mlp.gate$"), ("NVFP4", "NVFP4A16")
    ),
    "minilm": Judged(None, {4: 128, 3: 64}, "BertLayer", ("pooler.dense",), loss="1 - cosine", options={"model_class": "BertModel"}),
}

# Symmetric integers of so many bits in groups, or a preset that both know.
FORMATS: dict[str, int | str] = {
    "4": 4,
    "3": 3,
    "W4A8": 4,
    **{name: name for name in ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16")},
}
INT8_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_GROUP32 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
# Recipes of other modifiers, beside the layers that they leave.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "SparseGPT 50 %": {"SparseGPTModifier": {"sparsity": 0.5}},
    "SparseGPT 2:4": {"SparseGPTModifier": {"sparsity": 0.5, "mask_structure": "2:4"}},
    "Wanda 50 %": {"WandaPruningModifier": {"sparsity": 0.5}},
    "Wanda 2:4": {"WandaPruningModifier": {"sparsity": 0.5, "mask_structure": "2:4"}},
    # Of models without experts there is nothing to prune.
    "REAP 25 %": {"REAPPruningModifier": {"sparsity": 0.25}},
    "REAP 50 %": {"REAPPruningModifier": {"sparsity": 0.5}},
    "SmoothQuant W8A8": {
        "SmoothQuantModifier": {"smoothing_strength": 0.8},
        "GPTQModifier": {"targets": ["Linear"], "scheme": "W8A8"},
    },
    # In random Hadamard matrices: of the others the peer has powers of two only. Groups of 32 divide the columns of all models.
    "SpinQuant 4 bits, rounded": {
        "SpinQuantModifier": {"rotations": ["R1", "R2"], "transform_type": "random-hadamard"},
        "QuantizationModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_GROUP32}}},
    },
    "SpinQuant 4 bits": {
        "SpinQuantModifier": {"rotations": ["R1", "R2"], "transform_type": "random-hadamard"},
        "GPTQModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_GROUP32}}},
    },
    "SpinQuant W8A8": {
        "SpinQuantModifier": {"rotations": ["R1", "R2"], "transform_type": "random-hadamard"},
        "GPTQModifier": {"targets": ["Linear"], "scheme": "W8A8"},
    },
    "SpinQuant R4 W4A8": {
        "SpinQuantModifier": {"rotations": ["R1", "R2", "R4"], "transform_type": "random-hadamard"},
        "GPTQModifier": {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_GROUP32, "input_activations": INT8_PER_TOKEN}}
        },
    },
    "QuIP 4 bits": {
        "QuIPModifier": {"rotations": ["v", "u"], "transform_type": "random-hadamard"},
        "GPTQModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_GROUP32}}},
    },
    "QuIP 3 bits": {
        "QuIPModifier": {"rotations": ["v", "u"], "transform_type": "random-hadamard"},
        "GPTQModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {**INT4_GROUP32, "num_bits": 3}}}},
    },
}
ONLINE = {"SpinQuant R4 W4A8", "QuIP 4 bits", "QuIP 3 bits"}  # rotations in the forward, which transformers passes over, the peer's too

# What our runs are given beside model, data and format: settings of the modifier, and of `oneshot`.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "alpha 0.5": ({"alpha": 0.5}, {}),
    "no search": ({"scale_search": False}, {}),
    "base, two passes": ({"target": "base"}, {"passes": "two"}),
    "propagated": ({"target": "propagated"}, {}),
    "propagated, no search": ({"target": "propagated", "scale_search": False}, {}),
    "propagated, two passes": ({"target": "propagated"}, {"passes": "two"}),
    "tuned": ({"tuning": {}}, {}),
    "without refit": ({"refit": False}, {}),
    "learned rounding": ({"modifier": "AutoRoundModifier"}, {}),
    "learned rounding, tuned": ({"modifier": "AutoRoundModifier", "iters": 100, "tuning": {}}, {}),
}


def recipe_of(model: Judged, form: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe that both libraries read.

    Args:
        model: the model.
        form: one of FORMATS or RECIPES.
        settings: more of the modifier's, for ours; `tuning` is those of a ScaleTuningModifier behind it, `modifier` another than GPTQ.

    Returns:
        The recipe.
    """
    if form in RECIPES:
        found = {name: dict(own) for name, own in RECIPES[form].items()}
        solver = next(reversed(found))
        if solver == "REAPPruningModifier":
            scope: dict[str, Any] = {}
        elif "sparsity" in found[solver]:  # of targets that are linear layers themselves the peer's pruning ignores none
            scope = {"targets": [model.layer]}
        else:
            scope = {"ignore": list(model.ignore)}
        found[solver] |= {**scope, **settings}
        return {"quant_stage": {"quant_modifiers": found}}
    own = dict(settings)
    tuning = own.pop("tuning", None)
    chosen = FORMATS[form]
    if isinstance(chosen, int):
        weights = {"num_bits": chosen, "type": "int", "symmetric": True, "strategy": "group", "group_size": model.group_sizes[chosen]}
        group = {"targets": ["Linear"], "weights": weights} | ({"input_activations": INT8_PER_TOKEN} if form == "W4A8" else {})
        what: dict[str, Any] = {"config_groups": {"group_0": group}}
    else:
        what = {"targets": ["Linear"], "scheme": chosen}
    modifiers: dict[str, Any] = {own.pop("modifier", "GPTQModifier"): {"ignore": list(model.ignore), **what, **own}}
    if tuning is not None:
        modifiers["ScaleTuningModifier"] = tuning
    return {"quant_stage": {"quant_modifiers": modifiers}}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Compare two means over the same sequences.

    Args:
        ours: one number a sequence.
        theirs: of the same sequences.

    Returns:
        Ratio of the means, and the ends of its 95 % interval: the same sequences are drawn for both.
    """
    pair = np.array([ours, theirs])
    drawn = np.random.default_rng(0).integers(pair.shape[1], size=(NUM_RESAMPLES, pair.shape[1]))
    means = pair[:, drawn].mean(-1)
    low, high = np.percentile(means[0] / means[1], [2.5, 97.5])
    return float(pair[0].mean() / pair[1].mean()), float(low), float(high)


def judge(name: str, form: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compress one model in one way, and compare it with its base; what an earlier call has measured is taken from its file.

    Args:
        name: of the model.
        form: one of FORMATS.
        way: key of WAYS, or the peer.
        args: of the command line.

    Returns:
        Divergence and loss of each sequence, seconds, memory.
    """
    kept = args.output_dir / re.sub(r"[ ,%:]+", "-", f"{name}-{form}-{way}.json")
    if kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    model, work = MODELS[name], args.output_dir / "work"
    work.mkdir(parents=True, exist_ok=True)
    if (folder := model.folder) is None:
        make_minilm(folder := args.output_dir / name)
    settings, options = WAYS.get(way, ({}, {}))
    recipe = work / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_of(model, form, settings)), encoding="utf-8")
    tokens = {kind: folder / f"{kind}.safetensors" for kind in ("calibration", "heldout")}
    plan = BenchPlan(folder, recipe, tokens["calibration"], tokens["heldout"], args.peer_python, num_threads=args.num_threads)
    plan.check()
    shutil.rmtree(work / "out", ignore_errors=True)
    paths = {"model": folder, "recipe": recipe, "calibration": plan.calibration, "output_dir": work / "out"}
    job = {key: str(path.resolve()) for key, path in paths.items()}
    job |= {"num_samples": plan.num_samples, "seq_len": plan.seq_len, "device": plan.device, "options": {**model.options, **options}}
    run, _ = run_job(plan, "peer" if way == PEER else "ours", "compress", job, work)
    reader = "ours" if form in model.only_ours or form in ONLINE else "transformers"
    compared = {"base": job["model"], "model": job["output_dir"], "heldout": str(plan.heldout.resolve())}
    compared |= {"device": plan.device, "reader": reader}
    found, _ = run_job(plan, "divergence", "divergence", compared, work)
    result = {**found, "seconds": run["seconds"]["total"], "megabytes": run["rss_over_start_bytes"] / 1e6, "versions": run["versions"]}
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and show all of it.

    Args:
        argv: the command line, that of the process if None.

    Returns:
        0, or 3 after a one-line error.
    """
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        for name in args.models:
            for form in args.formats:
                console.print(f"{name}, {form}: {PEER}")
                peer = judge(name, form, PEER, args)
                rows = {PEER: peer}
                for way in args.ways:
                    console.print(f"{name}, {form}: {way}")
                    rows[way] = judge(name, form, way, args)
                Console(width=110).print(_table(f"{name}, {form}", rows, MODELS[name].loss))
    except CompressorError as error:
        console.print(f"tests.bench.accuracy: {error}", markup=False, soft_wrap=True)
        return 3
    return 0


def _table(title: str, rows: Mapping[str, Mapping[str, Any]], loss: str) -> Table:
    table = Table("way", "KL to the base", "to the peer's", "95 % interval", loss, "s", "MB", title=title, title_justify="left")
    for way, row in rows.items():
        value, low, high = ratio(row["kl"], rows[PEER]["kl"])
        cells = [f"{statistics.fmean(row['kl']):.6f}", f"{value:.3f}", f"{low:.3f} to {high:.3f}", f"{statistics.fmean(row['losses']):.4f}"]
        table.add_row(way, *cells, f"{row['seconds']:.1f}", f"{row['megabytes']:.0f}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", type=Path, required=True, help="interpreter of an environment with llmcompressor")
    parser.add_argument("--output-dir", type=Path, required=True, help="keeps every measurement, so that a call goes on where one ended")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS, *RECIPES], default=["4", "3"], help="bits in groups, or another format")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["default"], help="how ours runs")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
