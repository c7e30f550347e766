"""A whole run of a modifier in other processes, where the hashes of texts, and with them the order of sets of texts, are others.

Python draws these hashes anew in every process, so within one nothing can tell that a result depends on them. Two of them order a set of
two texts alike every second time, four once in eight. Importing torch and the harness takes seconds; so each does that once, all at a time,
and a copy of it (`os.fork`) makes each run. They end with the one that asks.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from compressor.json_text import from_json
from compressor.pages import raw_bytes
from compressor.recipe import load_recipe
from harness.lifecycle.driving.compare import describe
from harness.lifecycle.driving.time_limit import Stopwatch, run_limited
from harness.lifecycle.subject import Subject

_SECONDS, _SECONDS_TO_END = 300.0, 2.0
HASH_SEEDS = ("326", "97", "311")
"""Fixed, so that what they say of each other is the same every time, whatever the hashes of the process that asks are; and chosen such that
every two of the linear layers of the model of `harness verify` stand in both orders: by the hash of their names, and in a set of them."""


class NoAnswerError(Exception):
    """The other process could not make the run; the message says why."""


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor: dtype, shape and bits."""
    texts = {name: f"{one.dtype}{tuple(one.shape)}".encode() for name, one in tensors.items()}
    return {name: hashlib.sha256(texts[name] + raw_bytes(one).cpu().numpy().tobytes()).hexdigest() for name, one in tensors.items()}


def run_elsewhere(recipe: str, subject: Subject, seed: int) -> list[dict[str, str]]:
    """Make a whole run over the tiny model in each of three other processes.

    Args:
        recipe: of the modifier, and its followers.
        subject: with what the modifier declares, how its runs go, and the stopwatch: importing the modifier, and each call of it, may take
            as long there.
        seed: of the global generators.

    Returns:
        Of each the digest of every tensor of the model afterwards.

    Raises:
        NoAnswerError: the modifier cannot be made there, a call of it hangs, or no answer came in five minutes.
    """
    life = {"steps_per_epoch": subject.steps_per_epoch, "has_batches": subject.has_batches, "in_calibration": subject.in_calibration}
    asked = {"recipe": recipe, "tags": sorted(subject.tags), "seed": seed, "life": life, "limit": subject.stopwatch.limit}
    asked |= {"path": sys.path, "threads": torch.get_num_threads()}
    return [_ask(process, asked, subject.stopwatch.restart) for process in [_started(os.getpid(), one) for one in HASH_SEEDS]]


def _ask(process: subprocess.Popen[bytes], asked: Mapping[str, Any], still_alive: Callable[[], None]) -> dict[str, str]:
    assert process.stdin is not None and process.stdout is not None  # both are pipes
    answer: dict[str, Any] = {}
    try:
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        begun = time.monotonic()
        while not select.select([process.stdout], [], [], 0.1)[0]:
            still_alive()
            if time.monotonic() - begun > _SECONDS:
                raise NoAnswerError(f"it gave no answer within {_SECONDS:g} s")
        answer = from_json(process.stdout.readline())
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"it ended without an answer ({describe(error)})") from error
    finally:
        if not answer:  # nor will it give one, to this question or another
            _kill(process)
            _started.cache_clear()
    if "error" in answer:
        raise NoAnswerError(answer["error"])
    found: dict[str, str] = answer["digests"]
    return found


@functools.cache
def _started(pid: int, hash_seed: str) -> subprocess.Popen[bytes]:
    """The process that waits for questions of this one; a fork of this one has its own."""
    del pid
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.lifecycle.other_process"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)},
        start_new_session=True,  # ctrl-C is for the one that asks, whose end this one sees
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes both pipes and waits
        if process.stdin is not None:
            process.stdin.close()  # where its input ends, it ends, unless a run in it hangs
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it and the copy of it that makes a run: they are a group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    sys.path[:] = asked["path"]
    torch.set_num_threads(asked["threads"])
    watch = Stopwatch(asked["limit"])
    try:
        template, *_ = run_limited(lambda: load_recipe(asked["recipe"]).modifiers, watch)  # and its followers
    except BaseException as error:  # noqa: BLE001 - importing somebody's module may raise anything, SystemExit too
        return {"error": f"there it cannot be made: {describe(error)}"}
    subject = Subject(template, tags=frozenset(asked["tags"]), stopwatch=watch, **asked["life"])
    try:
        return {"digests": digests(run_limited(lambda: subject.result(seed=asked["seed"]), watch, subject.running))}
    except BaseException as error:  # noqa: BLE001 - as above; another check says what is wrong with the run itself
        return {"error": f"there the run failed: {describe(error)}"}


def _main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modifiers print is no answer
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            out.write(json.dumps(_answer(from_json(line))) + "\n")
            out.flush()
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            out.write('{"error": "there the process died"}\n')
            out.flush()


if __name__ == "__main__":
    _main()
