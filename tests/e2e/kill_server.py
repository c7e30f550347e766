"""A process that forks one child per run of `oneshot` or `train`, and has it killed at a chosen moment. A script: JSON lines in and out.

A request: {"model", "recipe", "dataset", "output_dir", ...arguments of the verb, "verb", "kill"}. `kill` is null; or {"event": n, "moment":
"before" | "middle" | "after"}, which kills at the n-th call that changes the disk; or {"seconds": s, "signal": "KILL" | "INT"}; or
{"full_from": n}, which fails every write from the n-th call on for lack of space; or {"file_size": n}, which lets no file grow beyond n
bytes. The answer: {"signal", "seconds", "events", "error", "resumed", "modules"}. {"warm": true} runs without forking. Forking saves the
seconds that importing torch takes.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Every call through which the product changes the disk: where it stands, and the position of the argument that names a whole file (for a
# kill in the middle, which leaves half of that file) or None.
CALLS: tuple[tuple[Any, str, int | None], ...] = (
    *((os, name, None) for name in ("write", "fsync", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir")),
    (pathlib.Path, "write_bytes", 0),
    (pathlib.Path, "write_text", 0),
    (shutil, "copyfile", 1),
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def halve(path: Any) -> None:
    with Path(path).open("r+b") as stream:
        stream.truncate(Path(path).stat().st_size // 2)


class Saboteur:
    """Counts the calls that change the disk, and kills at one of them; or makes the disk full from one of them on."""

    def __init__(self, kill: dict[str, Any]) -> None:
        import safetensors.torch

        self.kill, self.events = kill, []
        self.busy = False
        for owner, name, file_argument in (*CALLS, (safetensors.torch, "serialize_file", 1)):
            setattr(owner, name, self.wrapped(getattr(owner, name), name, file_argument))

    def wrapped(self, call: Callable[..., Any], name: str, file_argument: int | None) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.busy:
                return call(*args, **kwargs)
            number = len(self.events)
            self.events.append(f"{name} {shown(args)}")
            self.busy = True
            try:
                return self.act(number, call, name, file_argument, args, kwargs)
            finally:
                self.busy = False

        return watched

    def act(self, number: int, call: Callable[..., Any], name: str, file_argument: int | None, args: Any, kwargs: Any) -> Any:
        if self.kill.get("full_from", number + 1) <= number and name not in ("unlink", "rmdir", "ftruncate"):
            if name == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.kill.get("event") != number:
            return call(*args, **kwargs)
        moment = self.kill["moment"]
        if moment == "before":
            die()
        if moment == "middle" and name == "write":
            call(args[0], bytes(args[1])[: len(args[1]) // 2])
            die()
        if moment == "middle" and name == "serialize_file":  # safetensors writes beside the file first, and is killed while it does
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            call(*args, **kwargs)
            if moment == "middle" and file_argument is not None:
                halve(args[file_argument])
        finally:  # also behind a call that found nothing to do
            die()


def shown(args: tuple[Any, ...]) -> str:
    return " ".join(Path(arg).name for arg in args if isinstance(arg, Path) or (isinstance(arg, str) and "\n" not in arg))


def child(request: dict[str, Any], answer: int) -> None:
    import torch

    # A fork leaves torch's pool of threads behind; it is made anew here, before the threads that load weights ask for it all at once.
    torch.set_num_threads(1)
    kill = request.pop("kill") or {}
    saboteur = Saboteur(kill)
    if "file_size" in kill:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill["file_size"], kill["file_size"]))
    from compressor import CompressorError

    outcome: dict[str, Any] = {"error": None, "resumed": None}
    try:
        result = verb(request)(request.pop("model"), **request)
        outcome["resumed"] = result.resumed
        outcome["modules"] = list(result.report.modules)
    except (CompressorError, KeyboardInterrupt) as error:
        outcome["error"] = "; ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
    saboteur.busy = True
    outcome["events"] = saboteur.events
    with os.fdopen(answer, "w") as stream:
        json.dump(outcome, stream)


def verb(request: dict[str, Any]) -> Callable[..., Any]:
    from compressor import oneshot, train

    return {"oneshot": oneshot, "train": train}[request.pop("verb", "oneshot")]


def warm(request: dict[str, Any]) -> None:
    """Import and load; a backward pass would start threads that a fork leaves behind."""
    from compressor.model.loading.load import load_model

    if request.get("verb") == "train":
        verb(request)
        load_model(request["model"])
    else:
        verb(request)(request.pop("model"), **request)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            child(request, writing)
        finally:
            os._exit(0)
    os.close(writing)
    kill = request.get("kill") or {}
    if "seconds" in kill:
        time.sleep(kill["seconds"])
        os.kill(pid, getattr(signal, f"SIG{kill.get('signal', 'KILL')}"))
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    outcome = json.loads(text) if text else {"events": None, "error": None, "resumed": None}
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    killed = signal.SIGKILL if number == signal.SIGXFSZ else number  # the kernel's kill in the middle of a write counts as one
    return {**outcome, "signal": killed, "seconds": time.perf_counter() - begun}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("warm", False):  # in this process, so that every child finds its imports done
            request.pop("kill", None)
            warm(request)
            gc.freeze()  # or every child's first collection writes to each object, and so copies all of this process
            reply: dict[str, Any] = {}
        else:
            reply = serve(request)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
