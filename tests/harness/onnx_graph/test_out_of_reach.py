"""What the hook of `harness onnx run` does not reach is seen: no exit code 0 beside a program that optimized on its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import onnx
import pytest

from harness.cli import main
from harness.errors import HarnessError
from harness.onnx_graph.skips import supervision

pytest.importorskip("onnxsim")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are watched through ptrace")

PYTHON = sys.executable
EXTENSION = importlib.util.find_spec("onnxsim.onnxsim_cpp2py_export")
LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("onnxsim_cpp2py_export", {EXTENSION and EXTENSION.origin!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""  # without the package around it, which takes two seconds to import
CALL = f"""{LOAD}
rest = dict.fromkeys(("target_opset_version", "rewriter", "overwrite_input_shapes", "unused_output", "extra_optimizers"))
with open("in.onnx", "rb") as file:
    native.simplify(native.ModelExecutor(), file.read(), [], False, False, tensor_size_threshold=1 << 30, **rest)
"""
INDENTED = CALL.replace("\n", "\n    ")
WORKERS = f"""
import multiprocessing, sys
def work(number):
    {INDENTED}
if __name__ == "__main__":
    workers = [multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(number,)) for number in range(2)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    sys.exit(max(worker.exitcode for worker in workers))
"""  # one each: a worker of a pool may be given both calls, and the extension is not loaded twice
THREADS = f"""
import subprocess, threading
def start():
    subprocess.run(["true"])
    try:
        subprocess.run(["./no-such-program"])
    except FileNotFoundError:
        pass
threads = [threading.Thread(target=start) for _ in range(8)]
{CALL}
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
COPIES = """
import importlib.util, onnx, onnxsim
import onnxsim.onnx_simplifier as wrapper
for name in ("onnxsim.onnxsim_cpp2py_export", "mine.onnxsim_cpp2py_export", "onnxsim_cpp2py_export"):
    spec = importlib.util.spec_from_file_location(name, wrapper.C.__file__)
    wrapper.C = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrapper.C)
    kept = onnxsim.simplify(onnx.load("in.onnx"))[0]
    assert sum(node.op_type == "MatMul" for node in kept.graph.node) == 6, name
"""
REACHED = {
    "a shell and programs that are no Python": ["sh", "-c", '"$PY" -c "$CALL"; uname; seq 30 | xargs -n1 true'],
    "spawned workers": [PYTHON, "workers.py", "spawn"],
    "workers of a fork server": [PYTHON, "workers.py", "forkserver"],
    "forked workers": [PYTHON, "workers.py", "fork"],
    "threads that start programs, and fail to": [PYTHON, "threads.py"],
    "a program that becomes another": [
        PYTHON,
        "-c",
        CALL + "import os, sys; os.execv(sys.executable, ['python', '-c', os.environ['CALL']])",
    ],
    "what goes on in the background": ["sh", "-c", '(sleep 0.5; "$PY" -c "$CALL") & true'],
    "an interpreter without the hook that loads no optimizer": ["sh", "-c", '"$PY" -c "$CALL"; "$PY" -I -c "import json"'],
    "the extension loaded again and again": [PYTHON, "copies.py"],
    "a process that is stopped and goes on": ["sh", "-c", 'sh -c \'kill -STOP $$; "$PY" -c "$CALL"\' & sleep 0.5; kill -CONT $!; wait $!'],
}
ESCAPES = {
    "-I": ["sh", "-c", '"$PY" -c "$CALL"; "$PY" -I -c "$CALL"'],
    "-S -E -s": ["sh", "-c", '"$PY" -c "$CALL"; "$PY" -S -E -s -c "$CALL"'],
    "an empty environment": ["sh", "-c", '"$PY" -c "$CALL"; env -i "$PY" -c "$CALL"'],
    "without PYTHONPATH": ["sh", "-c", '"$PY" -c "$CALL"; env -u PYTHONPATH "$PY" -c "$CALL"'],
    "a child of a hooked Python": [
        PYTHON,
        "-c",
        CALL + "import os, subprocess; subprocess.run([os.environ['PY'], '-c', os.environ['CALL']], env={})",
    ],
    "a hooked Python becomes another": [
        PYTHON,
        "-c",
        CALL + "import os, sys; os.execv(sys.executable, ['python', '-I', '-c', os.environ['CALL']])",
    ],
    "one that hides behind what it becomes": ["sh", "-c", '"$PY" -c "$CALL"; "$PY" -I -c "$CALL$HIDE"'],
    "one that is killed": ["sh", "-c", '"$PY" -c "$CALL"; "$PY" -I -c "$CALL$KILL"; true'],
    "a daemon": ["sh", "-c", '(setsid sh -c \'sleep 0.5; "$PY" -I -c "$CALL"\' &); "$PY" -c "$CALL"'],
}


@pytest.fixture
def _place(attention_graph: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(attention_graph, tmp_path / "in.onnx")
    for name, text in (("workers", WORKERS), ("threads", THREADS), ("copies", COPIES)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PY", PYTHON)
    monkeypatch.setenv("CALL", CALL)
    monkeypatch.setenv("HIDE", "import os; os.execvp('true', ['true'])")
    monkeypatch.setenv("KILL", "import os; os.kill(os.getpid(), 9)")


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("case", REACHED)
def test_a_command_all_of_whose_calls_are_forced_passes(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "run", "--skip", "fuse_qkv,fuse_attention", "--", *REACHED[case]]) == 0, capfd.readouterr().err


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("case", ESCAPES)
def test_a_program_out_of_reach_is_named_and_is_no_pass(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "run", "--skip", "fuse_qkv,fuse_attention", "--", *ESCAPES[case]]) == 2
    printed = capfd.readouterr()
    assert "forced fuse_attention, fuse_qkv" in printed.out, "the call beside it was not forced"
    assert "not every call is known" in printed.err and "did not run the hook" in printed.err


@pytest.mark.nightly
@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(
    ("skip", "code"),
    [
        ("fuse_qkv", "import onnxruntime; onnxruntime.InferenceSession('in.onnx')"),
        ("ConstantFolding", "import onnx, onnxsim; onnxsim.simplify(onnx.load('in.onnx'), check_n=2)"),
    ],
)
def test_a_call_of_an_optimizer_that_lacks_the_pass_protects_nothing(skip: str, code: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "run", "--skip", skip, "--", PYTHON, "-c", code]) == 2
    assert "nothing was protected" in capfd.readouterr().err


@pytest.mark.usefixtures("_place")
def test_an_entry_that_takes_no_list_is_refused_where_it_would_optimize(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import onnxruntime as ort; ort.InferenceSession('in.onnx')\n"
        "compiler = ort.ModelCompiler(ort.SessionOptions(), 'in.onnx'{level}).compile_to_file('out.onnx')"
    )
    run = ["onnx", "run", "--skip", "MatMulScaleFusion", "--", PYTHON, "-c"]
    assert main([*run, code.format(level="")]) == 0
    level = ", graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL"
    assert main([*run, code.format(level=level)]) == 2
    assert "ModelCompiler takes no list of passes, so MatMulScaleFusion cannot be kept from running" in capfd.readouterr().err


def test_where_nothing_can_be_watched_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"

    def refused(request: int, task: int, data: int = 0) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(supervision, "_ptrace", refused)
    with pytest.raises(HarnessError, match="does not let a command be watched"):
        supervision.supervise(["touch", str(ran)], {}, ["onnxsim"], lambda process: False, lambda process: None)
    assert not ran.exists()
