"""A deployment script as people write them: it can be read, but not edited, and it reaches the optimizer in every way there is."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import onnxsim
from onnxsim import simplify
from onnxsim.onnx_simplifier import simplify as simplify_from_its_module
from onnxsim.onnxsim_cpp2py_export import simplify as native_simplify

_PARTIAL = functools.partial(native_simplify)
_TABLE = {"simplify": [native_simplify]}


class Swapped:
    """Calls the native function through whoever holds it, by way of the module that the wrappers look it up in."""

    def __init__(self, held: Callable[..., bytes]) -> None:
        self.held = held

    def __call__(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Simplify with onnxsim's own arguments, but through the function held here."""
        native = onnxsim.onnx_simplifier.C
        found = native.simplify
        native.simplify = self.held
        try:
            return onnxsim.simplify(model)[0]
        finally:
            native.simplify = found


def _closure() -> Callable[..., bytes]:
    held = native_simplify

    def call(*args: object, **kwargs: object) -> bytes:
        return held(*args, **kwargs)

    return call


def _by_default(*args: object, function: Callable[..., bytes] = native_simplify, **kwargs: object) -> bytes:
    return function(*args, **kwargs)


def _by_positional_default(model: onnx.ModelProto, function: Callable[..., object] = native_simplify) -> onnx.ModelProto:
    return Swapped(function)(model)


_CLOSURE = _closure()


def attribute(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxsim.simplify(model)[0]


def imported_name(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return simplify(model)[0]


def imported_from_inside(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return simplify_from_its_module(model)[0]


def native_name(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return Swapped(native_simplify)(model)


def native_partial(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return Swapped(_PARTIAL)(model)


def native_closure(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return Swapped(_CLOSURE)(model)


def native_keyword_default(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return Swapped(_by_default)(model)


def native_positional_default(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return _by_positional_default(model)


def native_table(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return Swapped(_TABLE["simplify"][0])(model)


def own_skips(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxsim.simplify(model, skipped_optimizers=["eliminate_nop_pad"])[0]


def path_to_path(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "in.onnx")
    onnxsim.simplify(str(folder / "in.onnx"), output_path=str(folder / "out.onnx"))
    return onnx.load(folder / "out.onnx")


def main_in_process(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "in.onnx")
    before = sys.argv
    sys.argv = ["onnxsim", str(folder / "in.onnx"), str(folder / "out.onnx")]
    try:
        onnxsim.main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
    return onnx.load(folder / "out.onnx")


def in_a_thread(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(attribute, model, folder).result()


def command_module(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return _command([sys.executable, "-m", "onnxsim"], model, folder)


def command_script(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return _command([sys.executable, str(Path(sys.executable).parent / "onnxsim")], model, folder)


def child_script(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    code = "import sys, onnx, onnxsim; onnx.save(onnxsim.simplify(onnx.load(sys.argv[1]))[0], sys.argv[2])"
    return _command([sys.executable, "-c", code], model, folder)


def spawned_worker(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return _worker("spawn", model, folder)


def forked_worker(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return _worker("fork", model, folder)


def onnxoptimizer_default(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    import onnxoptimizer

    return onnxoptimizer.optimize(model)


def onnxoptimizer_fixed_point(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    from onnxoptimizer import optimize

    return optimize(model, ["fuse_qkv", "eliminate_deadend"], fixed_point=True)


def without_optimizing(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxsim.simplify(model, perform_optimization=False)[0]


def escapes(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """`-I` ignores the environment: no hook reaches this interpreter."""
    return _command([sys.executable, "-I", "-m", "onnxsim"], model, folder)


def swallows_everything(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    try:
        return onnxsim.simplify(model)[0]
    except BaseException:  # noqa: BLE001 - as people write it
        return model


def _simplify_file(source: str, target: str) -> None:
    onnx.save(onnxsim.simplify(onnx.load(source))[0], target)


def _worker(method: str, model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "in.onnx")
    process = multiprocessing.get_context(method).Process(target=_simplify_file, args=(str(folder / "in.onnx"), str(folder / "out.onnx")))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return onnx.load(folder / "out.onnx")


def _command(command: list[str], model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "in.onnx")
    subprocess.run([*command, str(folder / "in.onnx"), str(folder / "out.onnx")], check=True, capture_output=True, timeout=120)
    return onnx.load(folder / "out.onnx")
