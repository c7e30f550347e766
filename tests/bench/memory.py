"""Two claims about memory: the sequential pipeline needs as much beyond the weights for 32 layers as for 2, and `plan` says how much.

The first is measured on random Llamas that differ in nothing but the number of layers; the second on the reference model and two others.
Measured is what the allocator has given out at most (see `memory_meter`), in a fresh process.

Run `python -m tests.bench.memory [--layers 2 8 32] [--model FOLDER] [--json]`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compressor.errors import CompressorError
from harness.errors import HarnessError

RECIPE = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16"}}}}
LAYERS = (2, 8, 32)
REFERENCE = Path("golden/reference")
TOLERANCE = 0.25  # of the estimate
GROWTH = 0.10  # from the fewest to the most layers, of what is needed beyond the weights
LOG_TAIL_LINES = 8
_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_QWEN = {**_LLAMA, "hidden_size": 384, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 2048}
_OPT = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "ffn_dim": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "word_embed_proj_dim": 256,
    "activation_function": "gelu",
    "max_position_embeddings": 128,
}


def layer_cases(counts: Sequence[int], num_samples: int = 64) -> list[dict[str, Any]]:
    """List runs on models that differ in the number of layers, none of which is copied while it is traced, as larger ones are not.

    Args:
        counts: of layers.
        num_samples: sequences of 128 tokens.

    Returns:
        Cases for `memory_job`.
    """
    shared = {"class": "LlamaForCausalLM", "recipe": RECIPE, "num_samples": num_samples, "seq_len": 128, "copied_bytes": 0}
    return [{"name": f"{count} layers", "config": {**_LLAMA, "num_hidden_layers": count}, **shared} for count in counts]


def estimate_cases(reference: Path, num_samples: int = 64) -> list[dict[str, Any]]:
    """List runs on models of different kinds.

    Args:
        reference: folder of a model.
        num_samples: sequences.

    Returns:
        Cases for `memory_job`.
    """
    shared = {"recipe": RECIPE, "num_samples": num_samples}
    return [
        {"name": reference.name, "model": str(reference.resolve()), "seq_len": 128, **shared},
        {"name": "qwen3", "class": "Qwen3ForCausalLM", "config": _QWEN, "seq_len": 128, **shared},
        {"name": "opt, float32", "class": "OPTForCausalLM", "config": _OPT, "dtype": "float32", "seq_len": 64, **shared},
    ]


def run_cases(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measure cases in a fresh process.

    Args:
        cases: for `memory_job`.

    Returns:
        Its results, one per case.

    Raises:
        HarnessError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings, result = Path(folder) / "settings.json", Path(folder) / "result.json"
        settings.write_text(json.dumps({"cases": cases}), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench.memory_job", str(settings), str(result)]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # each thread would have buffers of its own
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_TAIL_LINES:])
            raise HarnessError(f"memory: the measuring process ended with {done.returncode}; its last lines:\n{tail}")
        return list(json.loads(result.read_text(encoding="utf-8")))


def judge(by_layers: Sequence[Mapping[str, Any]], by_model: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hold what was measured against the two claims.

    Args:
        by_layers: results of `layer_cases`, fewest layers first.
        by_model: results of `estimate_cases`.

    Returns:
        What does not hold, in sentences; empty when both claims do.
    """
    failures = []
    if len(by_layers) > 1:
        first, last = by_layers[0]["beyond_weights_bytes"], by_layers[-1]["beyond_weights_bytes"]
        if last > (1 + GROWTH) * first:
            failures.append(f"beyond the weights, {by_layers[-1]['name']} need {last / first:.2f} times what {by_layers[0]['name']} need")
    for result in (*by_layers, *by_model):
        ratio = result["estimate"]["peak_bytes"] / result["peak_bytes"]
        if abs(ratio - 1) > TOLERANCE:
            failures.append(f"{result['name']}: the estimate is {ratio:.2f} times what was measured")
    return failures


def render(results: Sequence[Mapping[str, Any]]) -> Table:
    """Show results.

    Args:
        results: of `run_cases`.

    Returns:
        A table with a row per case.
    """
    table = Table(
        "model", "weights", "peak measured", "peak estimated", "estimated / measured", "beyond all weights", title="Peak memory in MB"
    )
    for result in results:
        measured, estimated = result["peak_bytes"], result["estimate"]["peak_bytes"]
        sizes = [result["model_bytes"], measured, estimated]
        cells = [f"{size / 1e6:.1f}" for size in sizes]
        table.add_row(result["name"], *cells, f"{estimated / measured:.2f}", f"{result['beyond_weights_bytes'] / 1e6:.1f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both claims and show the table.

    Args:
        argv: the command line, that of the process if None.

    Returns:
        0 when both hold, 1 when one does not, 3 after a one-line error.
    """
    args = _parser().parse_args(argv)
    console = Console()
    try:
        by_layers = run_cases(layer_cases(sorted(args.layers)))
        by_model = run_cases(estimate_cases(args.model))
    except CompressorError as error:
        print(f"tests.bench.memory: error: {error}", file=sys.stderr)
        return 3
    failures = judge(by_layers, by_model)
    if args.json:
        print(json.dumps({"layers": by_layers, "models": by_model, "failures": failures}, indent=1, sort_keys=True))
    else:
        console.print(render([*by_layers, *by_model]))
        console.print("\n".join(failures) or "both claims hold")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.bench.memory", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), metavar="N", help="numbers of layers to compare")
    parser.add_argument("--model", type=Path, default=REFERENCE, metavar="M", help="folder of a model whose estimate is checked, too")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
