"""Forced skips reach an optimizer on every route that third-party code takes, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest

from compressor.errors import UserInputError
from harness.errors import ContractViolation, HarnessError
from harness.onnx_graph.skips.context import forced_skips
from harness.onnx_graph.skips.passes import effective_passes, installed_backends

pytest.importorskip("onnxsim")

FUSIONS = ("fuse_qkv", "fuse_attention")
IN_PROCESS = (
    *("attribute", "imported_name", "imported_from_inside", "native_name", "native_partial", "native_closure", "native_keyword_default"),
    *("native_positional_default", "native_table", "own_skips", "path_to_path", "main_in_process", "in_a_thread"),
)
CHILDREN = ("command_module", "command_script", "child_script", "spawned_worker", "forked_worker")


def _num_square(model: onnx.ModelProto) -> int:
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    return sum(node.op_type == "MatMul" and shapes.get(node.input[1]) == [32, 32] for node in model.graph.node)


class KeepsSquares:
    """A contract: as many [32, 32] projections after as before."""

    def check(self, before: onnx.ModelProto, after: onnx.ModelProto) -> Any:
        expected, found = _num_square(before), _num_square(after)
        return SimpleNamespace(holds=expected == found, message=f"{expected} projections became {found}")


def _native_functions() -> dict[str, object]:
    native = sys.modules["onnxsim.onnxsim_cpp2py_export"]
    return {name: getattr(native, name) for name in ("simplify", "simplify_path")}


@pytest.mark.parametrize("route", IN_PROCESS)
def test_a_route_that_fuses_keeps_three_projections_under_forced_skips(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path, route: str
) -> None:
    call = getattr(third_party, route)
    assert _num_square(call(attention_graph, tmp_path)) == 1, "the route does not even fuse without forced skips"
    with forced_skips(*FUSIONS) as calls:
        kept = call(attention_graph, tmp_path)
    assert _num_square(kept) == 4
    assert calls and all(set(FUSIONS) <= set(one.used or ()) for one in calls)
    assert "deploy.py:" in calls[0].caller
    assert _num_square(call(attention_graph, tmp_path)) == 1, "the skips outlived their context"


@pytest.mark.parametrize("route", CHILDREN)
def test_child_processes_are_reached_and_their_calls_come_back(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path, route: str
) -> None:
    with forced_skips(*FUSIONS, subprocesses=True, on_call=KeepsSquares()) as calls:
        kept = getattr(third_party, route)(attention_graph, tmp_path)
    assert _num_square(kept) == 4
    assert len(calls) >= 1 and all(call.pid != os.getpid() for call in calls)


@pytest.mark.nightly
def test_an_interpreter_that_ignores_the_environment_escapes_and_that_is_an_error(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    with pytest.raises(HarnessError, match="no call of onnxsim or onnxoptimizer was seen"), forced_skips(*FUSIONS, subprocesses=True):
        third_party.escapes(attention_graph, tmp_path)


@pytest.mark.parametrize("route", ["onnxoptimizer_default", "onnxoptimizer_fixed_point"])
def test_onnxoptimizer_runs_without_the_skipped_passes(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path, route: str
) -> None:
    pytest.importorskip("onnxoptimizer")
    call = getattr(third_party, route)
    assert _num_square(call(attention_graph, tmp_path)) == 1
    with forced_skips("fuse_qkv") as calls:
        assert _num_square(call(attention_graph, tmp_path)) == 4
    assert [("fuse_qkv" in (one.asked or ()), "fuse_qkv" in (one.used or ())) for one in calls] == [(True, False)]


def test_onnxruntime_gets_its_disabled_optimizers_and_its_graphs_are_judged(attention_graph: onnx.ModelProto) -> None:
    ort = pytest.importorskip("onnxruntime")
    seen = []

    class Sees:
        def check(self, before: onnx.ModelProto, after: onnx.ModelProto) -> Any:
            seen.append([sorted({node.op_type for node in model.graph.node}) for model in (before, after)])
            return SimpleNamespace(holds=True, message="")

    def session() -> None:
        ort.InferenceSession(attention_graph.SerializeToString(), providers=["CPUExecutionProvider"])

    for skips in (["ConstantFolding"], ["MatMulScaleFusion"]):
        with forced_skips(*skips, on_call=Sees()) as calls:
            session()
        assert [(call.asked, call.used) for call in calls] == [((), tuple(skips))]
    assert "FusedMatMul" in seen[0][1] and "FusedMatMul" not in seen[1][1], "MatMulScaleFusion ran all the same"
    assert seen[0][0] == seen[1][0]


def test_a_misspelt_pass_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserInputError, match=r"'fuse_qvk' is no pass of onnxsim .*did you mean 'fuse_qkv'"), forced_skips("fuse_qvk"):
        pytest.fail("the context was entered")
    with pytest.raises(UserInputError, match="no pass was named"), forced_skips():
        pytest.fail("the context was entered")
    with pytest.raises(UserInputError, match="'tensorrt' is no optimizer"), forced_skips("fuse_qkv", backends=["tensorrt"]):
        pytest.fail("the context was entered")


@pytest.mark.nightly
def test_no_call_is_an_error_unless_it_is_allowed() -> None:
    with pytest.raises(HarnessError, match="fuse_qkv protected nothing"), forced_skips("fuse_qkv"):
        pass
    with forced_skips("fuse_qkv", require_call=False) as calls:
        pass
    assert not calls


def test_an_exception_inside_comes_out_as_it_is_and_everything_is_restored(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    before, path, environment = _native_functions(), list(sys.meta_path), dict(os.environ)
    with pytest.raises(ZeroDivisionError), forced_skips(*FUSIONS, subprocesses=True):
        third_party.attribute(attention_graph, tmp_path)
        raise ZeroDivisionError
    assert _native_functions() == before and sys.meta_path == path and dict(os.environ) == environment
    assert third_party.native_simplify is before["simplify"] and third_party._PARTIAL.func is before["simplify"]


def test_contexts_nest_and_the_inner_one_adds_to_the_outer_one(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    with forced_skips("fuse_qkv") as outer:
        absorbed = third_party.attribute(attention_graph, tmp_path)
        with forced_skips("fuse_attention") as inner:
            kept = third_party.attribute(attention_graph, tmp_path)
        again = third_party.attribute(attention_graph, tmp_path)
    assert _num_square(kept) == 4
    assert _num_square(absorbed) == _num_square(again) == 1, "fuse_qkv alone does not keep this block"
    assert (len(outer), len(inner)) == (3, 1)


def test_a_broken_contract_raises_in_the_line_that_called(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    with (
        pytest.raises(ContractViolation, match=r"deploy.py:\d+ in attribute: onnxsim.simplify broke the contract: 4 proj") as caught,
        forced_skips("fuse_qkv", on_call=KeepsSquares()) as calls,
    ):
        third_party.attribute(attention_graph, tmp_path)
    assert any(entry.path.name == "deploy.py" for entry in caught.traceback)
    assert calls and all(call.broken for call in calls)


def test_a_broken_contract_that_is_swallowed_raises_when_the_context_ends(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    with pytest.raises(ContractViolation, match="4 projections became 1"), forced_skips("fuse_qkv", on_call=KeepsSquares()):
        assert third_party.swallows_everything(attention_graph, tmp_path) is attention_graph


@pytest.mark.parametrize("route", ["child_script", "forked_worker"])
def test_a_contract_broken_in_a_child_is_found_here(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path, route: str
) -> None:
    with pytest.raises((ContractViolation, AssertionError)), forced_skips("fuse_qkv", subprocesses=True, on_call=KeepsSquares()):
        getattr(third_party, route)(attention_graph, tmp_path)


def test_a_contract_may_run_the_optimizer_itself(third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path) -> None:
    class Simplifies:
        def check(self, before: onnx.ModelProto, after: onnx.ModelProto) -> Any:
            third_party.attribute(before, tmp_path)
            return SimpleNamespace(holds=True, message="")

    with forced_skips(*FUSIONS, on_call=Simplifies()) as calls:
        third_party.attribute(attention_graph, tmp_path)
    assert len(calls) == 1


def test_where_optimizing_is_off_nothing_is_forced(third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path) -> None:
    with forced_skips(*FUSIONS) as calls:
        assert _num_square(third_party.without_optimizing(attention_graph, tmp_path)) == 4
    assert [(call.asked, call.used, call.changed) for call in calls] == [(None, None, False)]


def test_a_call_that_fails_is_recorded_with_its_error(third_party: ModuleType) -> None:
    native = sys.modules["onnxsim.onnxsim_cpp2py_export"]
    with (
        pytest.raises(HarnessError, match=r"every call of onnxsim.* failed, so fuse_qkv"),
        forced_skips(*FUSIONS) as calls,
        pytest.raises(TypeError),
    ):
        native.simplify(None, b"", [])
    assert [call.error.split(":")[0] for call in calls] == ["TypeError"]


@pytest.mark.nightly
def test_a_racing_thread_neither_gets_nor_disturbs_skips_that_are_for_one_thread(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    found: list[int] = []
    stop = threading.Event()

    def race() -> None:
        while not stop.is_set():
            found.append(_num_square(third_party.attribute(attention_graph, tmp_path)))

    racer = threading.Thread(target=race)
    with forced_skips(*FUSIONS, this_thread_only=True) as calls:
        racer.start()
        kept = [_num_square(third_party.attribute(attention_graph, tmp_path)) for _ in range(60)]
        stop.set()
        racer.join()
    assert set(kept) == {4} and len(calls) == 60
    assert found and set(found) == {1}


def test_the_text_names_caller_and_what_was_forced(third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path) -> None:
    with forced_skips(*FUSIONS) as calls:
        third_party.own_skips(attention_graph, tmp_path)
    assert "in own_skips: onnxsim.simplify, asked to skip eliminate_nop_pad, forced fuse_attention, fuse_qkv" in calls.text()


def test_the_effective_passes_are_those_after_first_use() -> None:
    passes = effective_passes("onnxsim")
    assert {"fuse_qkv", "fuse_attention"} <= set(passes.effective), "onnxsim's own passes come only after first use"
    assert len(passes.sha256) == 64 and passes.to_dict()["version"] == passes.version
    assert {"ConstantFolding", "AttentionFusion", "MatMulNBitsFusion"} <= effective_passes("ort").known
    assert set(installed_backends()) >= {"onnxsim", "ort"}


def _with_a_constant_branch(graph: onnx.ModelProto) -> onnx.ModelProto:
    """As TorchScript exports are: a size that is computed from constants, which onnxsim folds by running them in onnxruntime."""
    graph.graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["sizes"], ["zeros"]))
    graph.graph.node.insert(1, onnx.helper.make_node("Add", ["x", "zeros"], ["shifted"]))
    graph.graph.initializer.append(onnx.helper.make_tensor("sizes", onnx.TensorProto.INT64, [1], [32]))
    graph.graph.node[2].input[0] = "shifted"
    return graph


@pytest.mark.nightly
def test_sessions_that_an_optimizer_opens_for_itself_are_neither_judged_nor_counted(
    attention_graph: onnx.ModelProto,
) -> None:
    import onnxsim

    from harness import SeparateQKV

    opened = []
    graph = _with_a_constant_branch(attention_graph)
    for skips in (FUSIONS, (*FUSIONS, "ConstantFolding")):
        with forced_skips(*skips, on_call=SeparateQKV()) as calls:
            kept, equal = onnxsim.simplify(graph, check_n=1)
            opened.append(equal)
        assert [call.backend for call in calls] == ["onnxsim"]
        assert _num_square(kept) == 4
    assert opened == [True, True]


@pytest.mark.parametrize(("skips", "writes", "counted"), [(FUSIONS, False, 0), (FUSIONS, True, 1), (("ConstantFolding",), False, 1)])
def test_a_session_counts_where_it_writes_its_graph_or_has_one_of_the_passes(
    attention_graph: onnx.ModelProto, tmp_path: Path, skips: tuple[str, ...], writes: bool, counted: int
) -> None:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    if writes:
        options.optimized_model_filepath = str(tmp_path / "written.onnx")
    with forced_skips(*skips, on_call=KeepsSquares(), require_call=False) as calls:
        ort.InferenceSession(attention_graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert len(calls) == counted


def test_a_call_of_an_optimizer_without_the_pass_is_no_protection(attention_graph: onnx.ModelProto) -> None:
    ort = pytest.importorskip("onnxruntime")
    with pytest.raises(HarnessError, match="no call of onnxsim or onnxoptimizer was seen, so fuse_qkv protected"), forced_skips("fuse_qkv"):
        ort.InferenceSession(attention_graph.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("hold", [lambda function: (function, 1), lambda function: {function}], ids=["tuple", "set"])
def test_a_holder_that_cannot_be_changed_is_an_error_and_everything_is_restored(hold: Any) -> None:
    before = _native_functions()
    held = hold(before["simplify"])
    with pytest.raises(HarnessError, match=f"held by what cannot be changed .*{type(held).__name__}"), forced_skips("fuse_qkv"):
        pytest.fail("the context was entered")
    assert _native_functions() == before


@pytest.mark.filterwarnings("ignore:nanobind. type .* was already registered:RuntimeWarning")
def test_a_copy_of_the_extension_loaded_before_the_context_is_reached(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    wrapper = third_party.onnxsim.onnx_simplifier
    spec = importlib.util.spec_from_file_location("mine.onnxsim_cpp2py_export", wrapper.C.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    monkeypatch.setattr(wrapper, "C", copy)
    with forced_skips(*FUSIONS):
        assert _num_square(third_party.attribute(attention_graph, tmp_path)) == 4
    assert _num_square(third_party.attribute(attention_graph, tmp_path)) == 1


def test_a_call_that_the_optimizer_refuses_is_refused_in_its_words() -> None:
    pytest.importorskip("onnxsim")
    native = sys.modules["onnxsim.onnxsim_cpp2py_export"]
    with forced_skips("fuse_qkv", require_call=False), pytest.raises(TypeError, match="incompatible function arguments"):
        native.simplify("executor", b"", True)


def test_the_frame_of_a_call_that_has_ended_holds_nothing_back(
    third_party: ModuleType, attention_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    def fails(function: Any) -> None:
        raise LookupError(function.__name__)

    with pytest.raises(LookupError) as kept:  # its traceback keeps the frame, and the frame its argument
        fails(_native_functions()["simplify"])
    with forced_skips(*FUSIONS) as calls:
        third_party.own_skips(attention_graph, tmp_path)
    assert len(calls) == 1 and kept.value.args == ("simplify",)


def test_a_suspended_generator_that_holds_the_function_is_an_error() -> None:
    def waits(function: Any) -> Any:
        yield
        function()

    held = waits(_native_functions()["simplify"])
    next(held)
    with pytest.raises(HarnessError, match=r"held by what cannot be changed .*generator"), forced_skips("fuse_qkv"):
        pass
