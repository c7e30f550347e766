"""verify_module finds each planted bug and nothing else, passes torch's layers and all of ours, and leaves the module as it was."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import UserInputError
from compressor.nn import QuantizedLayer, QuantizedLinear, quantized, set_matmul
from compressor.numerics import PRESETS, QuantizationArgs, QuantizationScheme, make_observer, preset_scheme, weight_qparams
from harness import verify_module
from harness.lifecycle.driving.snapshot import Snapshot
from harness.modules.contract import CHECKS
from harness.modules.tensors import same_bits
from harness.reporting.verdict import Outcome

FEATURES = 4


def inputs_of() -> Tensor:
    return torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0))


class Layer(nn.Linear):
    """What the planted bugs start from: parameters, both kinds of buffers, a child, a version, something to show."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.register_buffer("saved", torch.ones(FEATURES))
        self.register_buffer("cached", torch.arange(FEATURES), persistent=False)
        self.inner = nn.Sequential(nn.Identity(), nn.Linear(FEATURES, FEATURES))

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(super().forward(input) + self.saved)


class AppendsEveryHook(Layer):
    """prepend=True is ignored."""

    def register_forward_hook(self, hook: Callable[..., Any], *, prepend: bool = False, **options: Any) -> RemovableHandle:
        return super().register_forward_hook(hook, **options)


class OwnPreHooksAmongGlobal(Layer):
    """Its own pre-hooks stand among the global ones, in the order of registration."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False) -> RemovableHandle:
        if prepend or with_kwargs:
            return super().register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)
        return torch_module.register_module_forward_pre_hook(lambda module, args: hook(module, args) if module is self else None)


class BackwardHooksReversed(Layer):
    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return super().register_full_backward_hook(hook, prepend=not prepend)


class BackwardHooksForgotten(Layer):
    """The output is detached from what the backward hooks watch."""

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return RemovableHandle(OrderedDict())


class InputGradientKept(Layer):
    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return super().register_full_backward_hook(without_return(hook), prepend)


class OutputGradientKept(Layer):
    def register_full_backward_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return super().register_full_backward_pre_hook(without_return(hook), prepend)


class InputsKept(Layer):
    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any) -> RemovableHandle:
        return super().register_forward_pre_hook(hook if with_kwargs else without_return(hook), with_kwargs=with_kwargs, **options)


class SingleInputKept(Layer):
    """A pre-hook may return a tuple, but one value that stands for itself is dropped."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any) -> RemovableHandle:
        def tuples_only(*seen: Any) -> Any:
            answer = hook(*seen)
            return answer if isinstance(answer, tuple) else None

        return super().register_forward_pre_hook(tuples_only, with_kwargs=with_kwargs, **options)


class OutputKept(Layer):
    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        return super().register_forward_hook(without_return(hook), **options)


class KwargsHidden(Layer):
    """A hook with_kwargs is given an empty mapping."""

    def register_forward_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any) -> RemovableHandle:
        hidden = (lambda module, args, kwargs, output: hook(module, args, {}, output)) if with_kwargs else hook
        return super().register_forward_hook(hidden, with_kwargs=with_kwargs, **options)


class KwargsKept(Layer):
    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **options: Any) -> RemovableHandle:
        return super().register_forward_pre_hook(without_return(hook) if with_kwargs else hook, with_kwargs=with_kwargs, **options)


class AlwaysCallForgotten(Layer):
    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False, **options: Any) -> RemovableHandle:
        return super().register_forward_hook(hook, **options)


class AlwaysCallsAll(Layer):
    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False, **options: Any) -> RemovableHandle:
        return super().register_forward_hook(hook, always_call=True, **options)


class SwallowsErrors(Layer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the bug that is planted
            return None


class ForwardRunsHooks(Layer):
    """A forward that was not called by the module calls the module."""

    inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inside = True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.inside = False

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inside else self(input)


class HookStays(Layer):
    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        super().register_forward_hook(hook, **options)
        return RemovableHandle(OrderedDict())


class ParentFirst(Layer):
    def apply(self, fn: Callable[[nn.Module], Any]) -> ParentFirst:
        fn(self)
        for child in self.children():
            child.apply(fn)
        return self


class ApplyForgetsChildren(Layer):
    def apply(self, fn: Callable[[nn.Module], Any]) -> ApplyForgetsChildren:
        fn(self)
        return self


class TrainForgetsChildren(Layer):
    def train(self, mode: bool = True) -> TrainForgetsChildren:
        if not isinstance(mode, bool):
            raise ValueError("no bool")
        self.training = mode
        return self


class TrainTakesAnything(Layer):
    def train(self, mode: bool = True) -> TrainTakesAnything:
        super().train(bool(mode))
        return self


class TrainReturnsNothing(Layer):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


class ShowsNothing(Layer):
    def __repr__(self) -> str:
        return "ShowsNothing((inner): )"


class FillsInMissingKeys(Layer):
    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({prefix + "bias": self.bias, **state}, prefix, *rest)


class TakesUnexpectedKeys(Layer):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        known = copy.copy(state)
        for name in set(state) - set(self.state_dict()):
            del known[name]
        return super().load_state_dict(known, strict, assign)


class ForgetsThePrefix(Layer):
    """Of two below another module one is saved over the other."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, "", keep_vars)


class ForgetsTheDestination(Layer):
    """Below another module its tensors are in a dict that nobody gets."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return super().state_dict(prefix=prefix, keep_vars=keep_vars)


class LoadsWithoutThePrefix(Layer):
    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, "", *rest)


class SavesNoBias(Layer):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "bias"]

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({prefix + "bias": torch.ones(FEATURES), **state}, prefix, *rest)

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.bias)


class ForgetsOnLoading(Layer):
    """A load of it by itself refuses wrong keys, and then leaves the bias as it is."""

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        own = self.bias.detach().clone()
        state = {key: own if key == "bias" and value.shape == own.shape else value for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, *rest)


class SavesNoVersion(Layer):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(super().state_dict(*args, **kwargs))


class LoadsNoVersion(Layer):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(dict(state), strict, assign)


class SavesEveryBuffer(Layer):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: buffer for name, buffer in self._buffers.items()})

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        left_out = {prefix + name for name in self._non_persistent_buffers_set}
        for name in left_out & set(state):
            del state[name]
        super()._load_from_state_dict(state, prefix, *rest)


class CopySharesBias(Layer):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopySharesBias:
        memo[id(self.bias)] = self.bias
        twin = CopySharesBias.__new__(CopySharesBias)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class CopyIsTraining(Layer):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopyIsTraining:
        twin = CopyIsTraining.__new__(CopyIsTraining)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.train(not self.training)
        return twin


class StaysInFloat32(Layer):
    def to(self, *args: Any, **kwargs: Any) -> StaysInFloat32:
        return self if isinstance(args[0], torch.dtype) else super().to(*args, **kwargs)


class ConvertsIntegers(Layer):
    def to(self, *args: Any, **kwargs: Any) -> ConvertsIntegers:
        super().to(*args, **kwargs)
        if isinstance(args[0], torch.dtype):
            self.cached = self.cached.to(args[0])
        return self


class DoesNotRunInBfloat16(Layer):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + torch.zeros(1, dtype=torch.float32))


class TensorInAttribute(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(FEATURES)


class CopiedByPickle(Layer):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedByPickle:
        return pickle.loads(pickle.dumps(self))


class SavesAnObject(Layer):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class ComputesInAClosure(Layer):
    """A copy takes the function as it is, and with it the weights of the module that it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = lambda input: super(ComputesInAClosure, self).forward(input)

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input)


class KeepsItsFirstWeight(Layer):
    """What is loaded after the first call has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        first = self.kept.setdefault("weight", self.weight.detach().clone()).to(self.weight)
        return nn.functional.linear(input, first) + self.weight.sum() * 0


class KeepsItsWeightUntilOneIsLoaded(KeepsItsFirstWeight):
    """As it should."""

    def _load_from_state_dict(self, *given: Any) -> None:
        self.kept.clear()
        super()._load_from_state_dict(*given)


class MakesABufferInItsFirstCall(Layer):
    """As torch has it: a buffer that is None is in no state dict, and one with a value is state."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, input: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.weight.detach().abs().amax()
        return super().forward(input) / self.scale


class ForgetsOnLoadingTheBufferOfItsFirstCall(MakesABufferInItsFirstCall):
    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state = {key: self.scale.clone() if key == prefix + "scale" and self.scale is not None else value for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, *rest)


class ComputesInABoundMethod(Layer):
    """A copy of a bound method belongs to the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.own

    def own(self, input: Tensor) -> Tensor:
        return super().forward(input)

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input)


class SwitchesGradientsOff(Layer):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        torch.set_grad_enabled(False)
        return output


class SwitchesGradientsOn(Layer):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        torch.set_grad_enabled(True)
        return output


class SetsTheDefaultDtype(Layer):
    def forward(self, input: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return super().forward(input)


class FreezesItsWeight(Layer):
    def forward(self, input: Tensor) -> Tensor:
        self.inner[1].weight.requires_grad_(False)
        return super().forward(input)


class ReplacesItsWeight(Layer):
    def forward(self, input: Tensor) -> Tensor:
        self.inner[1].weight = nn.Parameter(self.inner[1].weight.detach().clone())
        return super().forward(input)


class SeedsTorch(Layer):
    def forward(self, input: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(input)


class ComputesWithoutGradientsForATime(Layer):
    """As it may."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            scale = input.abs().amax()
        return super().forward(input) * scale


class ThawsBehindAConversion(Layer):
    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        if self.weight.dtype is torch.float64:
            self.weight.requires_grad_(False)


class TakesNothing(Layer):
    def forward(self) -> None:  # type: ignore[override]
        return None


def without_return(hook: Callable[..., Any]) -> Callable[..., None]:
    def silent(*seen: Any) -> None:
        hook(*seen)

    return silent


def leave_output(module: nn.Module, args: object, output: object) -> None:
    pass


PLANTED: dict[type[nn.Module], str] = {
    AppendsEveryHook: "forward_hook_order",
    OwnPreHooksAmongGlobal: "forward_hook_order",
    BackwardHooksReversed: "backward_hooks",
    BackwardHooksForgotten: "backward_hooks",
    InputGradientKept: "backward_hooks",
    OutputGradientKept: "backward_hooks",
    InputsKept: "input_replacement",
    SingleInputKept: "input_replacement",
    OutputKept: "output_replacement",
    KwargsHidden: "hooks_with_kwargs",
    KwargsKept: "hooks_with_kwargs",
    AlwaysCallForgotten: "always_called_hooks",
    AlwaysCallsAll: "always_called_hooks",
    SwallowsErrors: "always_called_hooks",
    ForwardRunsHooks: "bare_forward",
    HookStays: "hook_removal",
    ParentFirst: "apply_order",
    ApplyForgetsChildren: "apply_order",
    TrainForgetsChildren: "train_and_eval",
    TrainTakesAnything: "train_and_eval",
    TrainReturnsNothing: "train_and_eval",
    ShowsNothing: "extra_repr",
    FillsInMissingKeys: "state_dict_keys",
    TakesUnexpectedKeys: "state_dict_keys",
    SavesNoBias: "state_dict_keys",
    ForgetsThePrefix: "state_dict_keys",
    ForgetsTheDestination: "state_dict_keys",
    LoadsWithoutThePrefix: "state_dict_keys",
    ForgetsOnLoading: "state_dict_round_trip",
    SavesNoVersion: "state_dict_version",
    LoadsNoVersion: "state_dict_version",
    SavesEveryBuffer: "non_persistent_buffers",
    CopySharesBias: "deepcopy",
    CopyIsTraining: "deepcopy",
    StaysInFloat32: "to_dtype",
    ConvertsIntegers: "to_dtype",
    DoesNotRunInBfloat16: "to_dtype",
    TensorInAttribute: "to_device",
    CopiedByPickle: "no_pickling",
    SavesAnObject: "no_pickling",
    ThawsBehindAConversion: "two_steps",
    ComputesInAClosure: "deepcopy",
    KeepsItsFirstWeight: "state_dict_round_trip",
    ForgetsOnLoadingTheBufferOfItsFirstCall: "state_dict_round_trip",
    SwitchesGradientsOn: "surroundings",
    SetsTheDefaultDtype: "surroundings",
    FreezesItsWeight: "surroundings",
    ReplacesItsWeight: "surroundings",
    SeedsTorch: "surroundings",
    TakesNothing: "call",
}
RAISES = {DoesNotRunInBfloat16, TakesNothing}
"""Found because the module raises, rather than by what the check compares."""


@pytest.mark.parametrize("layer_class", PLANTED, ids=lambda layer_class: layer_class.__name__)
def test_a_planted_bug_fails_its_check_and_no_other_and_the_module_is_left_as_it_was(layer_class: type[nn.Module]) -> None:
    layer = layer_class()
    layer.training = False  # not the same everywhere
    layer._forward_hooks[-1] = leave_output
    before = Snapshot(layer)
    report = verify_module(layer, inputs_of())
    assert not before.differences(Snapshot(layer))  # torch's settings among it
    assert report.failed == (f"module.{PLANTED[layer_class]}",), report.to_text()
    assert not report.passed and report.exit_code == 1
    found = next(record.summary for record in report.records if record.outcome is Outcome.FAIL)
    assert ("deviation" in found) == (layer_class not in RAISES), found


def test_a_forward_that_leaves_gradients_off_is_told_and_the_caller_has_them_on() -> None:
    report = verify_module(SwitchesGradientsOff(), inputs_of())
    assert torch.is_grad_enabled()
    assert "module.surroundings" in report.failed  # its backward hooks do not run either
    assert "grad mode" in next(record.summary for record in report.records if record.name == "module.surroundings")


class GivesMore(nn.Linear):
    """A sound layer whose output is more than a tensor."""

    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__(FEATURES, 2)
        self.give = give

    def forward(self, input: Tensor) -> Any:
        return self.give(super().forward(input))


def test_every_check_has_a_planted_bug() -> None:
    assert {f"module.{name}" for name in PLANTED.values()} == {"module.call", *(check.claim.name for check in CHECKS)}


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Layer(), inputs_of()),
        (Layer(), {"input": inputs_of()}),
        (nn.Linear(FEATURES, 2, bias=False), (inputs_of(),)),
        (nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(), nn.ReLU()), inputs_of()),
        (nn.LSTM(FEATURES, 2), inputs_of()),
        (nn.MultiheadAttention(FEATURES, 2), (inputs_of(),) * 3),
        (nn.Bilinear(FEATURES, FEATURES, 2), (inputs_of(), inputs_of())),
        (KeepsItsWeightUntilOneIsLoaded(), inputs_of()),
        (MakesABufferInItsFirstCall(), inputs_of()),
        (ComputesInABoundMethod(), inputs_of()),
        (ComputesWithoutGradientsForATime(), inputs_of()),
        (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(FEATURES, 2))), inputs_of()),
        (GivesMore(lambda y: (y, {"more": y * 2})), inputs_of()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torch_keeps_its_own_contract(module: nn.Module, inputs: object) -> None:
    report = verify_module(module, inputs)
    assert all(record.outcome is Outcome.PASS for record in report.records), report.to_text()


def quantized_layer(scheme: QuantizationScheme, dtype: torch.dtype, g_idx_C: Tensor | None = None) -> QuantizedLayer:
    linear, args = nn.Linear(256, 16, dtype=dtype), scheme.weights
    assert args is not None
    inputs, input_qparams = scheme.input_activations, None
    if inputs is not None and inputs.dynamic is not True:
        observer = make_observer(inputs)
        observer.update(torch.linspace(-1, 1, 256, dtype=dtype))
        input_qparams = observer.qparams()
    if g_idx_C is None:
        return quantized(linear, scheme, input_qparams=input_qparams)
    qparams = weight_qparams(linear.weight.detach(), args)
    codes = round_to_nearest(linear.weight.detach(), qparams, args).codes_RC
    return QuantizedLinear.from_linear(linear, scheme, codes, qparams, g_idx_C=g_idx_C, input_qparams=input_qparams)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("matmul", ["reference", "native"])
def test_every_runtime_layer_keeps_the_contract(preset: str, dtype: torch.dtype, matmul: str) -> None:
    layer = quantized_layer(preset_scheme(preset), dtype)
    set_matmul(layer, matmul)
    x = torch.rand(3, 256, dtype=dtype)
    report = verify_module(layer, x)
    assert not [record.name for record in report.records if record.outcome is Outcome.SKIP]
    assert report.passed, report.to_text()


def test_a_layer_with_activation_ordered_groups_keeps_the_contract() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128, actorder="group", symmetric=False)
    layer = quantized_layer(QuantizationScheme(targets=["Linear"], weights=args), torch.float32, torch.arange(256, dtype=torch.int32) % 2)
    report = verify_module(layer, torch.rand(3, 256))
    assert all(record.outcome is Outcome.PASS for record in report.records), report.to_text()


def test_inputs_are_not_modified() -> None:
    x = inputs_of()
    verify_module(nn.Linear(FEATURES, FEATURES), x)
    assert torch.equal(x, inputs_of()) and not x.requires_grad and x.grad is None


def test_what_does_not_apply_is_skipped_with_its_reason() -> None:
    records = {record.name: record for record in verify_module(nn.Embedding(FEATURES, 2), torch.tensor([1, 2])).records}
    assert records["module.backward_hooks"].outcome is Outcome.SKIP
    assert records["module.backward_hooks"].summary == "no input can carry a gradient"
    for give, kind in ((lambda y: {"y": y}, "dict"), (lambda y: [y], "list")):
        records = {record.name: record for record in verify_module(GivesMore(give), inputs_of()).records}
        assert [record.name for record in records.values() if record.outcome is not Outcome.PASS] == ["module.backward_hooks"]
        assert records["module.backward_hooks"].summary.endswith(f"the output is a {kind}")


def test_a_module_that_does_not_take_the_inputs_is_reported_and_the_run_ends() -> None:
    report = verify_module(nn.Linear(FEATURES, 2), torch.rand(2, FEATURES + 1))
    records = {record.name: record for record in report.records}
    assert "RuntimeError" in records["module.call"].summary
    assert records["module.deepcopy"].outcome is Outcome.SKIP and records["module.train_and_eval"].outcome is Outcome.PASS


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(FEATURES, 2))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear, "the class Linear is no nn.Module object"),
        (3, "int object"),
        (nn.LazyLinear(3), "parameters without a shape"),
        (nn.Sequential(scripted()), "Sequential is, or holds, what torch.jit or torch.compile has made"),
        (torch.compile(nn.Linear(FEATURES, 2), backend="eager"), "OptimizedModule is, or holds, what torch.jit or torch.compile has made"),
    ],
    ids=["class", "number", "lazy", "script", "compiled"],
)
def test_what_is_no_module_is_refused(module: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        verify_module(module, inputs_of())


def test_the_report_is_text_and_json() -> None:
    report = verify_module(ParentFirst(), inputs_of())
    assert "module.apply_order" in report.to_text() and "ParentFirst: regression" in report.to_text()
    data = json.loads(report.to_json())
    assert data["verdict"] == "regression" and [check["name"] for check in data["checks"] if check["outcome"] == "fail"] == [
        "module.apply_order"
    ]


class WithBuffer(nn.Linear):
    """A sound layer beside a buffer that it does not save."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__(FEATURES, 2)
        self.register_buffer("beside", buffer, persistent=False)


def test_gradients_and_the_graph_of_a_call_before_are_left_as_they_were() -> None:
    layer = Layer()
    layer(inputs_of()).sum().backward()
    weight_grad, values = layer.weight.grad, copy.deepcopy(layer.weight.grad)
    loss = layer(inputs_of()).square().sum()
    assert verify_module(layer, inputs_of()).passed
    assert layer.weight.grad is weight_grad and torch.equal(weight_grad, values)
    loss.backward()  # torch refuses it where a weight was written to, be it with what it held
    assert not torch.equal(layer.weight.grad, values)


def test_a_sparse_gradient_is_left_as_it_was() -> None:
    layer = nn.Embedding(FEATURES, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    gradient = layer.weight.grad
    assert verify_module(layer, torch.tensor([1])).passed and layer.weight.grad is gradient


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
    "windows": lambda: torch.arange(6.0).unfold(0, 3, 1),
    "complex": lambda: torch.polar(torch.ones(4), torch.arange(4.0)),
    "conjugate": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj(),
    "negative": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj().imag,
    "fp4": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_of_another_make_is_no_deviation_and_keeps_its_bits(kind: str) -> None:
    layer = WithBuffer(BUFFERS[kind]())
    report = verify_module(layer, inputs_of())
    # torch itself does not convert fp4
    assert report.failed == (("module.to_dtype",) if kind == "fp4" else ()), report.to_text()
    assert same_bits(layer.beside, BUFFERS[kind]()) and layer.beside.stride() == BUFFERS[kind]().stride()


def test_of_an_fp4_buffer_that_is_saved_only_what_torch_cannot_do_is_told() -> None:
    layer = nn.Linear(FEATURES, 2)
    layer.register_buffer("codes", torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert verify_module(layer, inputs_of()).failed == ("module.state_dict_round_trip", "module.to_dtype")  # neither loaded nor converted


class CountsInContainers(nn.Linear):
    """A sound layer that writes to tensors which torch does not know of."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.counts: tuple[Any, ...] = (torch.zeros(1),)
        self.kept = {"seen": torch.zeros(1)}

    def forward(self, input: Tensor) -> Tensor:
        self.counts[0].add_(1)
        self.kept["seen"].add_(1)
        return super().forward(input)


def test_tensors_in_plain_containers_are_left_as_they_were() -> None:
    layer = CountsInContainers()
    verify_module(layer, inputs_of())
    assert (float(layer.counts[0]), float(layer.kept["seen"])) == (0.0, 0.0)


def halve_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg / 2 for arg in args)


def halve_gradient(module: nn.Module, grads: tuple[Tensor, ...], *_: object) -> tuple[Tensor, ...]:
    return tuple(grad / 2 for grad in grads)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_hooks_of_the_callers_that_replace_what_they_see_are_no_deviation(needs_grad: bool) -> None:
    layer = nn.Linear(FEATURES, 2)
    layer.register_forward_pre_hook(halve_input)
    layer.register_forward_hook(lambda module, args, output: output / 2)
    layer.register_full_backward_pre_hook(halve_gradient)
    layer.register_full_backward_hook(halve_gradient)
    report = verify_module(layer, inputs_of().requires_grad_(needs_grad))
    assert report.passed, report.to_text()


def test_a_module_of_complex_numbers_alone_is_not_asked_for_another_real_dtype() -> None:
    report = verify_module(nn.Linear(FEATURES, 2, dtype=torch.complex64), inputs_of().to(torch.complex64))
    assert report.passed, report.to_text()
    assert {record.name: record for record in report.records}["module.to_dtype"].summary == "it computes with complex numbers alone"


class AddsInPlace(nn.Module):
    """It writes to its input, as torch's own layers with inplace=True do."""

    def forward(self, input: Tensor) -> Tensor:
        return input.add_(1)


@pytest.mark.parametrize("make", [inputs_of, lambda: inputs_of().requires_grad_() * 2], ids=["leaf", "with history"])
def test_inputs_that_a_forward_writes_to_are_given_anew_to_each_call(make: Callable[[], Tensor]) -> None:
    x = make()
    report = verify_module(AddsInPlace(), x)
    assert torch.equal(x, make())
    assert not report.failed, report.to_text()
    skipped = next(record for record in report.records if record.name == "module.backward_hooks")
    assert skipped.summary == "a forward changes its input in place, where torch runs no full backward hooks"


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (WithBuffer(torch.eye(2).to_sparse()), inputs_of(), "WithBuffer holds a sparse_coo tensor"),
        (nn.Sequential(WithBuffer(torch.ones(2, device="meta"))), inputs_of(), "Sequential holds a meta tensor"),
        (nn.Linear(FEATURES, 2), (part for part in [inputs_of()]), "the inputs cannot be copied"),
    ],
    ids=["sparse", "meta", "generator"],
)
def test_what_cannot_be_put_back_is_refused(module: nn.Module, inputs: object, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        verify_module(module, inputs)


def test_a_module_that_was_made_in_inference_mode_is_told_what_it_cannot_do() -> None:
    with torch.inference_mode():
        layer = nn.Linear(FEATURES, 2)
    before = layer.weight.clone()
    assert "module.state_dict_round_trip" in verify_module(layer, inputs_of()).failed  # torch lets nobody write to its weights
    assert torch.equal(layer.weight, before) and layer.weight.requires_grad


def test_a_part_that_stands_twice_may_have_a_buffer_that_is_not_saved() -> None:
    part = nn.Linear(FEATURES, FEATURES)
    part.register_buffer("table", torch.ones(FEATURES), persistent=False)
    report = verify_module(nn.Sequential(part, part), torch.rand(2, FEATURES))
    assert "module.state_dict_keys" not in report.failed, report.to_text()
