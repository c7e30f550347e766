"""`forced_skips`: keep passes of an optimizer from running inside of code that cannot be edited.

    with forced_skips("fuse_qkv", "fuse_attention", on_call=SeparateQKV()) as calls:
        third_party.export_and_simplify(model)
    print(calls.text())

Whatever route that code takes to onnxsim, onnxoptimizer or onnxruntime, in this thread or another, in this process or, with
`subprocesses=True`, one that it starts, the named passes are left out. Leaving the context puts everything back, after an exception too.

An interpreter that ignores its environment (`python -I`, `-E`, `-S`) or is given another one runs no hook: inside of `forced_skips` it
goes unnoticed beside a call that was seen, `harness onnx run` sees it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UserInputError
from compressor.settings.kinds import FLAG
from compressor.settings.options import check_kind
from harness.errors import ContractViolation, HarnessError
from harness.onnx_graph.skips.call_records import Calls, GraphContract, OptimizerCall
from harness.onnx_graph.skips.child_processes import Channel
from harness.onnx_graph.skips.intercept import INTERCEPTOR, Judge, Policy, judged
from harness.onnx_graph.skips.native_entries import read_graph
from harness.onnx_graph.skips.passes import resolve_skips


@contextlib.contextmanager
def forced_skips(
    *skips: str,
    subprocesses: bool = False,
    on_call: GraphContract | None = None,
    backends: Sequence[str] | None = None,
    this_thread_only: bool = False,
    require_call: bool = True,
) -> Iterator[Calls]:
    """Force optimizers to skip passes, and record every call of theirs.

    Contexts nest: inner skips come on top of outer ones, and both record. onnxsim keeps its pass list in one global of the process, so
    calls run one at a time inside of the context, whichever thread they come from.

    Args:
        *skips: pass names as the optimizers spell them.
        subprocesses: reach Python processes that are started meanwhile, through `PYTHONPATH`. An interpreter that ignores its environment
            (`python -I`, `-E`, `-S`) or is given another one runs no hook: inside of `forced_skips` it goes unnoticed beside a call that
            was seen, `harness onnx run` sees it.
        on_call: a contract that the result of each call is held against; a call that breaks it raises at once, in the line that called.
            A session of onnxruntime counts as a call if it writes its optimized graph or if one of the passes is onnxruntime's; never if
            an optimizer opens it for itself, to fold constants or to compare outputs.
        backends: where to look the names up (`onnxsim`, `onnxoptimizer`, `ort`); by default wherever they are known.
        this_thread_only: leave the calls of other threads as they are; they still wait their turn.
        require_call: no call of an optimizer that has one of the passes is an error (the code took another way, and nothing was protected);
            calls that all failed are one, too.

    Yields:
        The calls so far; those of child processes are added when the context ends.

    Raises:
        UserInputError: a name that no installed optimizer knows, or an argument of another type.
        ContractViolation: `on_call` does not hold; also when the code inside swallowed the first one.
        HarnessError: no call was made or all failed, or somebody holds a native function where it cannot be replaced.
    """
    _check_arguments(skips, on_call, backends)
    for name, flag in (("this_thread_only", this_thread_only), ("subprocesses", subprocesses), ("require_call", require_call)):
        check_kind(name, flag, FLAG)
    resolved = resolve_skips(skips, backends)
    calls = Calls()
    folder = Path(tempfile.mkdtemp(prefix="forced-skips-"))
    try:
        channel = Channel(folder)
        channel.open(resolved, keep_graphs=on_call is not None)
        policy = _policy(resolved, calls, channel, on_call, threading.get_ident() if this_thread_only else None)
        with INTERCEPTOR.active(policy), channel.in_environment() if subprocesses else contextlib.nullcontext():
            yield calls
        calls.extend(channel.received(_judge(on_call)))
    finally:
        shutil.rmtree(folder)
    _check(calls, resolved, require_call)


def _check_arguments(skips: Sequence[object], on_call: object, backends: object) -> None:
    """Refuse here what would otherwise fail inside of the third party's call."""
    for name in skips:
        if not isinstance(name, str):
            raise UserInputError(
                f"forced_skips: {name!r} is no pass name; give names one by one: forced_skips('fuse_qkv', 'fuse_attention')"
            )
    if isinstance(backends, str):
        raise UserInputError(f"forced_skips: backends={backends!r} is one text and a list is expected; write backends=[{backends!r}]")
    if on_call is not None and (isinstance(on_call, type) or not callable(getattr(on_call, "check", None))):
        raise UserInputError(f"forced_skips: on_call={on_call!r} is no contract; give an object with `check`, SeparateQKV() for example")


def _policy(skips: dict[str, tuple[str, ...]], calls: Calls, channel: Channel, on_call: GraphContract | None, thread: int | None) -> Policy:
    """Record here, or through the channel where this process was forked off the one that opened the context."""
    opener = os.getpid()
    judge = _judge(on_call)

    def record(call: OptimizerCall) -> None:
        if os.getpid() == opener:
            calls.append(call)
        else:
            channel.send(call)

    return Policy(skips, record, judge, _raise_broken, thread)


def _judge(contract: GraphContract | None) -> Judge | None:
    if contract is None:
        return None

    def judge(call: OptimizerCall, before: Any, after: Any) -> OptimizerCall:
        finding = contract.check(read_graph(before), read_graph(after))
        return call if finding.holds else judged(call, finding.message)

    return judge


def _raise_broken(call: OptimizerCall) -> None:
    raise ContractViolation(f"{call.caller}: {call.backend}.{call.entry} broke the contract: {call.broken}")


def _check(calls: Calls, resolved: Mapping[str, Sequence[str]], require_call: bool) -> None:
    for call in calls:
        if call.broken:
            _raise_broken(call)
    if require_call and (reason := calls.unprotected(resolved)):
        names = ", ".join(dict.fromkeys(name for skips in resolved.values() for name in skips))
        raise HarnessError(
            f"forced_skips: {reason}, so {names} protected nothing; if the code starts processes, pass subprocesses=True, and if it ends "
            "before it optimizes, pass require_call=False"
        )
