"""What the ranks of the tests do, in processes of their own, and how they are started."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from compressor.algorithms.hessian import Hessian
from compressor.distributed.ranks import Ranks, joined
from compressor.entrypoints.oneshot import oneshot
from compressor.errors import CalibrationError, CompressorError
from compressor.lifecycle import Session
from compressor.modifiers.gptq import GPTQModifier
from compressor.nn import QuantizedLayer
from compressor.numerics import QParams
from compressor.numerics.part_sums import NUM_PARTS, PartSum
from compressor.pipelines.journal import SharedJournal

CONTEXT = multiprocessing.get_context("forkserver")  # imports once, and forks from there, whoever starts the first process
CONTEXT.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])


def run(work: Callable[..., Any], size: int, folder: Path, *given: Any) -> tuple[list[int | None], list[Any], float]:
    """Run `work(ranks, *given)` on so many ranks; return exit codes, results and seconds by the clock of the slowest rank's work."""
    folder.mkdir()
    processes: list[Any] = [CONTEXT.Process(target=_rank, args=(work, rank, size, folder, *given)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:  # a failed test leaves nobody behind
        process.kill()
    results = [json.loads(file.read_text()) if file.exists() else None for file in (folder / f"{rank}.json" for rank in range(size))]
    ends = [file.stat().st_mtime for file in folder.glob("*.json")]
    begun = folder / "failing"
    return codes, results, max(ends, default=0.0) - begun.stat().st_mtime if begun.exists() else 0.0


def _rank(work: Callable[..., Any], rank: int, size: int, folder: Path, *given: Any) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        dist.all_reduce(torch.zeros(1, dtype=torch.float32))  # who refuses at once may not end while others still connect
    try:
        told = work(folder, *given)
    except CompressorError as error:
        notes = getattr(error, "__notes__", [])
        told = {"error": type(error).__name__, "text": str(error), "notes": notes, "mine": getattr(error, "is_mine_to_tell", None)}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # a group whose ranks have failed cannot be taken down in good order


def compress(folder: Path, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of oneshot."""
    result = oneshot(model, **{"progress": False, "output_dir": str(folder / "out"), **settings})
    told = {"output_dir": str(result.output_dir), "resumed": result.resumed, "notes": result.report.notes}
    return told | {"in_memory": _in_memory(result.model)}


def _in_memory(model: nn.Module) -> list[str]:
    """Tensors of compressed layers that are no looks at files of the run folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "/stage-" in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    held = {f"{name}.{key}": tensor.data_ptr() for name, layer in layers.items() for key, tensor in layer.named_buffers()}
    return [name for name, place in held.items() if not any(first <= place < last for first, last in spans)]


def compress_otherwise(folder: Path, model: str, settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One run of oneshot, which rank 1 is asked for with other settings."""
    return compress(folder, model, settings | (other if dist.get_rank() == 1 else {}))


def unshared(folder: Path, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A run with a modifier that does not say how ranks share its samples."""

    class Own(GPTQModifier):
        across_ranks = None

    return compress(folder, model, settings | {"recipe": [Own(scheme="W4A16", ignore=["lm_head"])]})


def killed_after(folder: Path, model: str, settings: dict[str, Any], stages: int, rank: int = 1) -> dict[str, Any]:
    """A run of which a rank is killed in the middle of a stage."""
    finish, done = SharedJournal.finish_stage, []

    def counting(journal: SharedJournal, session: Session) -> None:
        finish(journal, session)
        done.append(1)

    observe = Hessian.add

    def observing(hessian: Hessian, x: torch.Tensor, part: int = 0) -> None:
        if len(done) == stages and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        observe(hessian, x, part)

    SharedJournal.finish_stage, Hessian.add = counting, observing  # type: ignore[method-assign]
    return compress(folder, model, settings)


def resume(folder: Path, model: str, settings: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """A run that goes on in another folder."""
    return compress(folder, model, settings | {"output_dir": output_dir, "resume": True})


def talk(folder: Path) -> dict[str, Any]:
    """What ranks can tell each other, and sums."""
    del folder
    with joined() as ranks:
        own = {"rank": ranks.rank, "half": torch.full((2, 3), ranks.rank + 0.5, dtype=torch.bfloat16), "none": [None, True, "x"]}
        values = ranks.gather([own, QParams(torch.ones(1), None)], (QParams,))
        solved = list(ranks.solved(ranks.share_out([1.0, 5.0, 4.0]), lambda place: [place, ranks.rank], ()))
        return {
            "ranks": [value[0]["rank"] for value in values],
            "halves": [value[0]["half"].float().sum().item() for value in values],
            "rest": [value[0]["none"] for value in values],
            "scales": [isinstance(value[1], QParams) and value[1].zero_point is None for value in values],
            "solved": solved,
            "first": ranks.first(lambda: ranks.rank),
            "long": [len(text) for text in [*ranks.gather("x" * 4000 * ranks.rank), ranks.first(lambda: "\u00e9" * 5000)]],
            "union": ranks.union(["all", f"only {ranks.rank}"]),
            "owned": _summed(ranks, ranks.size - 1),
            "everywhere": _summed(ranks, None),
        }


def _summed(ranks: Ranks, owner: int | None) -> str | None:
    """A sum whose bits depend on the order; of one array the middle parts are missing."""
    values = torch.randn(NUM_PARTS, 1000, generator=torch.Generator().manual_seed(0))
    whole, holed = PartSum(), PartSum()
    for part in range(NUM_PARTS):
        for one in (whole, holed) if part not in (2, 3, 4) else (whole,):
            if ranks.counts(part):
                one.of_part(part, lambda: [torch.zeros(1000), torch.zeros(1)])[0].add_(values[part])
    ranks.add_up([whole, holed], [owner, owner])
    totals = [one.total() for one in (whole, holed)]
    return None if totals[0] is None else "".join(total[0].numpy().tobytes().hex() for total in totals if total is not None)


def fail(folder: Path, how: str) -> dict[str, Any]:
    """The second rank fails in one of several ways, while the others wait for it."""
    with joined() as ranks:
        ranks.gather(None)
        if ranks.rank == 1:
            time.sleep(1.0)  # so that the others have met it
            (folder / "failing").touch()
            if how == "raises":
                raise CalibrationError("layer: a planted error; repair it")
            os.kill(os.getpid(), {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[how])
        while True:
            ranks.gather(ranks.rank)


def disagree(folder: Path) -> dict[str, Any]:
    """Each rank has a sum that sees all samples twice."""
    del folder
    with joined() as ranks:
        twice = PartSum()
        for part in (*range(NUM_PARTS), *range(NUM_PARTS)):
            if ranks.counts(part):
                twice.of_part(part, lambda: [torch.zeros(1)])
        ranks.add_up([twice], [None])
    return {}
