"""Suspended forwards compute what plain forwards compute, bit for bit, stop when they may, complain when they must, and leave nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data import Batch, call_model
from compressor.errors import CalibrationError, TracingError
from compressor.tracing import SuspendedRun, infer_targets
from compressor.tracing.suspend.paused_forward import Sample
from tests import tiny

PLAIN = {name: nn.Module.__dict__[name] for name in ("__call__", "__setattr__", "register_buffer")}


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test the class is as torch made it and no forward is paused."""
    made: list[Sample] = []

    def remember(*args: Any) -> Sample:
        made.append(Sample(*args))
        return made[-1]

    monkeypatch.setattr("compressor.tracing.suspend.engine.Sample", remember)
    yield
    assert {name: nn.Module.__dict__[name] for name in PLAIN} == PLAIN
    assert not any(sample and sample.gr_frame for sample in made), "a forward is still paused"


def padded_batches(*names: str) -> list[Batch]:
    """Batches of different shape, one of them with padding."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for rows, length in ((1, 7), (2, 5), (1, 9)):
        batch = {name: torch.randint(1, 64, (rows, length), generator=generator) for name in names}
        if rows == 2:
            mask = torch.ones(rows, length, dtype=torch.int64)
            mask[1, 3:] = 0
            batch["attention_mask"] = mask
        batches.append(batch)
    return batches


def llama() -> tuple[nn.Module, list[Batch]]:
    return tiny.llama(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, num_key_value_heads=1, use_cache=False
    ), padded_batches("input_ids")


def gpt2() -> tuple[nn.Module, list[Batch]]:

    return tiny.gpt2(n_embd=16, n_head=2, n_layer=3, n_positions=16, use_cache=False), padded_batches("input_ids")


def bert() -> tuple[nn.Module, list[Batch]]:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(
        tiny.config("bert", hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, max_position_embeddings=16)
    ), padded_batches("input_ids")


def t5() -> tuple[nn.Module, list[Batch]]:

    return tiny.t5(d_ff=24, use_cache=False), padded_batches("input_ids", "decoder_input_ids")


class Residual(nn.Module):
    """Takes two tensors, writes to one of them in place and calls its linears in a scope of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor, *, memory: dict[str, Tensor]) -> Tensor:
        memory["sum"] += x
        return x + self.down(torch.tanh(self.up(memory["sum"])))


class TwoInputs(nn.Module):
    """Layers that share a dictionary, and glue that depends on the shape."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Residual() for _ in range(num_layers))
        self.head = nn.Linear(6, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        memory = {"sum": right.clone()}
        x = self.embed(left)
        for layer in self.layers:
            x = layer(x, memory=memory)
            x = x * 2 if x.shape[0] > 1 else x
        return self.head(x) + memory["sum"].sum()


def toy() -> tuple[nn.Module, list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return TwoInputs(), [(torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator)) for n in (1, 3, 2)]


def made(maker: Callable[[], tuple[nn.Module, list[Batch]]]) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model, batches = maker()
    return model.eval(), batches


def linear_like(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class Halved(nn.Module):
    """Stands where a linear stood: a different function of the same input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight, self.bias = inner.weight, inner.bias  # some models look at them

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / 2


def compress(model: nn.Module, target: str) -> None:
    """Replace every linear at or below a target."""
    for name, module in list(model.named_modules()):
        if linear_like(module) and (name == target or name.startswith(f"{target}.")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Halved(module))


def hooks_on(model: nn.Module, target: str, seen: dict[str, list[Tensor]]) -> contextlib.ExitStack:
    """Record the inputs of all linears at or below a target."""
    hooks = contextlib.ExitStack()
    for name, module in model.named_modules():
        if linear_like(module) and (name == target or name.startswith(f"{target}.")):

            def record(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name, []).append(args[0].clone())

            hooks.callback(module.register_forward_pre_hook(record).remove)
    return hooks


@torch.no_grad()
def naive(model: nn.Module, batches: list[Batch], targets: list[str]) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """The reference: run all plain forwards again for every target."""
    seen: dict[str, list[Tensor]] = {}
    for target in targets:
        with hooks_on(model, target, seen):
            for batch in batches:
                call_model(model, batch)
        compress(model, target)
    return seen, [call_model(model, batch) for batch in batches]


def suspended(model: nn.Module, batches: list[Batch], targets: list[str]) -> tuple[dict[str, list[Tensor]], list[Any]]:
    seen: dict[str, list[Tensor]] = {}
    watched: dict[str, bool] = {}
    with SuspendedRun(model, targets, batches, watched=lambda: watched, keep_outputs=True) as run:
        for stage in run.stages():
            watched = {name: False for name in stage.module_names if linear_like(model.get_submodule(name))}
            with hooks_on(model, stage.name, seen):
                stage.calibrate()
            watched = {}
            compress(model, stage.name)
            stage.propagate()
        assert run.uncalled == ()
    return seen, run.outputs


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("maker", [llama, gpt2, bert, t5, toy])
@pytest.mark.parametrize("level", ["layers", "linears"])
def test_inputs_and_outputs_are_those_of_plain_forwards_bit_for_bit(maker: Any, level: str) -> None:
    model, batches = made(maker)
    if level == "layers":
        targets = list(infer_targets(model).targets)
    else:
        called: list[str] = []
        for name, module in model.named_modules():
            if linear_like(module):
                module.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
        with torch.no_grad():
            call_model(model, batches[0])
        for module in model.modules():
            module._forward_pre_hooks.clear()
        targets = [name for name, _ in model.named_modules() if name in called]
    expected = naive(copy.deepcopy(model), batches, called if level == "linears" else targets)
    got = suspended(model, batches, targets)
    assert_same({name: expected[0][name] for name in sorted(expected[0])}, {name: got[0][name] for name in sorted(got[0])})
    assert_same(expected[1], got[1])
    assert len(got[0]) >= len(targets) and all(len(inputs) == len(batches) for inputs in got[0].values())


def test_outputs_that_a_model_collects_on_the_way_hold_no_trial_call() -> None:
    model, batches = made(llama)
    batches = [{**batch, "output_hidden_states": True} for batch in batches]  # type: ignore[dict-item]
    expected = naive(copy.deepcopy(model), batches, ["model.layers.0", "model.layers.1"])
    got = suspended(model, batches, ["model.layers.0", "model.layers.1"])
    assert_same(expected, got)
    assert len(got[1][0].hidden_states) == 4
    with torch.no_grad():
        call_model(model, batches[0])
    counts = {len(layer._forward_hooks) for layer in model.model.layers}
    assert counts == {1}, "hooks that a model installs once are installed once"


def test_targets_run_under_the_grad_and_autocast_state_of_their_forward() -> None:
    class Autocasting(TwoInputs):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                return super().forward(left, right)

    torch.manual_seed(0)
    model, batches = Autocasting().eval().requires_grad_(False), toy()[1]
    expected = naive(copy.deepcopy(model), batches, ["layers.0", "layers.1", "layers.2"])
    with torch.enable_grad():
        got = suspended(model, batches, ["layers.0", "layers.1", "layers.2"])
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert_same(expected, got)
    assert got[0]["layers.1.down"][0].dtype == torch.bfloat16


def test_weights_changed_in_place_are_not_served_from_the_autocast_cache() -> None:
    class Autocasting(TwoInputs):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                return super().forward(left, right)

    torch.manual_seed(0)
    model, batches = Autocasting().eval(), toy()[1]
    with SuspendedRun(model, ["layers.0"], batches, watched=lambda: {"layers.0.up": False}, keep_outputs=True) as run:
        for stage in run.stages():
            stage.calibrate()
            with torch.no_grad():
                model.layers[0].up.weight.mul_(3)
            stage.propagate()
    with torch.no_grad():
        assert_same(run.outputs, [call_model(model, batch) for batch in batches])


def count_calls(model: nn.Module, name: str) -> list[Tensor]:
    outputs: list[Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


def test_a_calibration_call_runs_to_its_end_and_leaves_no_hook() -> None:
    model, batches = made(toy)
    outputs = count_calls(model, "layers.0.down")
    with SuspendedRun(model, ["layers.0"], batches, watched=lambda: ["layers.0.up"]) as run:
        for stage in run.stages():
            hooks_before = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
            stage.calibrate()
            assert len(outputs) == 3
            assert hooks_before == [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
            stage.propagate()
    assert len(outputs) == 6


class Choosy(nn.Module):
    """Calls its experts as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        for _ in range(int(x[0, 0]) - 1):
            y = self.first(y)
        return y


def choosy(*times: int) -> tuple[nn.Module, list[Batch]]:
    model = nn.Sequential(nn.Identity(), Choosy())
    return model.eval(), [(torch.tensor([[float(n), 1.0]]),) for n in times]


def run_stages(model: nn.Module, batches: list[Batch], targets: list[str], watched: dict[str, bool]) -> SuspendedRun:
    with SuspendedRun(model, targets, batches, watched=lambda: watched) as run:
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    return run


def test_every_call_is_seen_however_often_a_sample_calls() -> None:
    model, batches = choosy(1, 2, 3)
    seen: list[Tensor] = []
    model[1].first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with SuspendedRun(model, ["1"], batches, watched=lambda: ["1.first", "1.second"]) as run:
        for stage in run.stages():
            stage.calibrate()
            assert len(seen) == 1 + 2 + 3
            stage.propagate()


class Shared(nn.Module):
    """Calls one layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2))
        self.other = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.other(self.layer(x)))


def test_a_target_that_is_called_again_is_an_error_where_it_has_statistics_and_runs_where_it_has_none() -> None:
    model, batches = Shared().eval(), [(torch.ones(1, 2),)] * 2
    with pytest.raises(TracingError, match=r'^layer: batch 0 calls this sequential target again .*; .*use pipeline="basic"'):
        run_stages(model, batches, ["layer", "other"], {"layer.0": False, "other.0": False})
    run = run_stages(model, batches, ["layer", "other"], {"other.0": False})
    assert run.uncalled == ()


def test_a_watched_module_that_is_called_outside_its_stage_later_on_is_an_error() -> None:
    class Leaking(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer[0](self.layer(x))

    with pytest.raises(CalibrationError, match=r"^layer.0: batch 0 calls it outside layer, "):
        run_stages(Leaking().eval(), [(torch.ones(1, 2),)], ["layer"], {"layer.0": False})


def test_only_the_first_sample_runs_on_when_nothing_later_is_watched() -> None:
    model, batches = made(toy)
    heads = count_calls(model, "head")
    with SuspendedRun(model, ["layers.0", "layers.1"], batches, watched=lambda: {"layers.0.up": False}, keep_outputs=True) as run:
        stages = []
        for stage in run.stages():
            stages.append((stage.name, stage.num_samples))
            stage.calibrate()
            stage.propagate(only_first=True)
    assert stages == [("layers.0", 3), ("layers.1", 1)] and len(heads) == 1
    assert run.outputs[0] is not None and run.outputs[1:] == [None, None]


def test_targets_that_no_sample_calls_are_known() -> None:
    model, batches = made(toy)
    model.layers.append(Residual())
    del model.layers[3]
    model.unused = Residual()
    with SuspendedRun(model, ["layers.2", "unused"], batches) as run:
        for stage in run.stages():
            stage.propagate()
        assert run.uncalled == ("unused",)


def test_samples_that_skip_a_target_wait_for_those_that_do_not() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x if number == int(skip) else layer(x)
            return x

    model = Skipping().eval()
    batches: list[Batch] = [{"x": torch.ones(1, 2), "skip": torch.tensor(skip)} for skip in (1, 0, 7)]
    with SuspendedRun(model, [f"layers.{i}" for i in range(3)], batches, keep_outputs=True) as run:
        groups = []
        for stage in run.stages():
            groups.append((stage.name, stage.num_samples))
            stage.propagate()
    assert groups == [("layers.0", 2), ("layers.1", 2), ("layers.2", 3)]
    with torch.no_grad():
        assert_same(run.outputs, [call_model(model, batch) for batch in batches])


class Stash(nn.Module):
    """Passes values from the embedding to the layers through attributes and a buffer of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.sum()
        self.register_buffer("scale", x.mean().reshape(1), persistent=True)
        for layer in self.layers:
            x = layer(x) + self.kept
        return x * self.scale


def test_what_a_forward_stores_on_modules_stays_its_own_and_is_taken_away() -> None:
    torch.manual_seed(0)
    model = Stash().eval()
    before = copy.deepcopy(model.state_dict())
    batches: list[Batch] = [(torch.randn(1, 2),) for _ in range(3)]
    with torch.no_grad():
        expected = [call_model(copy.deepcopy(model), batch) for batch in batches]
    with SuspendedRun(model, ["layers.0", "layers.1"], batches, watched=lambda: {"layers.0.0": False}, keep_outputs=True) as run:
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    assert_same(run.outputs, expected)
    assert not hasattr(model, "kept")
    assert_same(model.state_dict(), before)


def test_a_trial_call_leaves_no_value_on_modules() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.times = 1

        def forward(self, x: Tensor) -> Tensor:
            self.times = self.times + 1
            return self.linear(x) * self.times

    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting()).eval()
    batches: list[Batch] = [(torch.ones(1, 2),)] * 2
    with torch.no_grad():
        expected = [call_model(copy.deepcopy(model), batch) for batch in batches]
    with SuspendedRun(model, ["0", "1"], batches, watched=lambda: {"0.linear": False, "1.linear": False}, keep_outputs=True) as run:
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    assert_same(run.outputs, expected)
    assert model[0].times == model[1].times == 1


def test_rotary_tables_that_grow_and_shrink_with_the_sequence_are_those_of_plain_forwards() -> None:

    torch.manual_seed(0)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny.llama(
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=3,
        intermediate_size=24,
        num_key_value_heads=1,
        use_cache=False,
        max_position_embeddings=8,
        rope_parameters=scaling,
    ).eval()
    batches: list[Batch] = [{"input_ids": torch.arange(length)[None] + 1} for length in (5, 20, 12, 30, 4)]
    with torch.no_grad():  # a table is kept from batch to batch, and every sample starts from the state of the model
        expected = [call_model(copy.deepcopy(model), batch) for batch in batches]
    before = model.model.rotary_emb.inv_freq.clone()
    assert_same(suspended(copy.deepcopy(model), batches, [])[1], expected)
    with SuspendedRun(model, list(infer_targets(model).targets), batches, keep_outputs=True) as run:
        for stage in run.stages():
            stage.propagate()
    assert_same(run.outputs, expected)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


class CacheLike:
    """A helper object that layers write to."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


def test_a_trial_call_changes_no_argument_whatever_holds_it() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, cache: CacheLike, also: tuple[Tensor, ...]) -> Tensor:
            assert also[0] is x
            cache.seen.append(x.clone())
            return self.linear(x.add_(1))

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Writing() for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            cache, x = CacheLike(), x * 1
            for layer in self.layers:
                x = layer(x, cache, (x,))
            return x, cache.seen

    torch.manual_seed(0)
    model, batches = Writer().eval(), [(torch.ones(1, 2),), (torch.zeros(1, 2),)]
    expected = naive(copy.deepcopy(model), batches, ["layers.0", "layers.1"])
    assert_same(expected, suspended(model, batches, ["layers.0", "layers.1"]))


class Boom(BaseException):
    """Like KeyboardInterrupt: no `except Exception` sees it."""


@pytest.mark.parametrize("where", ["prologue", "calibrate", "compress", "propagate", "glue"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Boom])
def test_an_exception_anywhere_surfaces_and_leaves_nothing_behind(where: str, error: type[BaseException]) -> None:
    model, batches = made(toy)
    closed: list[int] = []
    armed = {"prologue": "embed", "calibrate": "layers.1.up", "propagate": "layers.1.up", "glue": "head"}

    class Guarded(TwoInputs):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                try:
                    return super().forward(left, right)
                finally:
                    closed.append(1)

    model.__class__ = Guarded
    hooks_before = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    handles = []

    def arm(phase: str) -> None:
        if phase == where:
            if where == "compress":
                raise error

            def fail(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                raise error

            handles.append(model.get_submodule(armed[where]).register_forward_pre_hook(fail))

    watched = {f"layers.{i}.{name}": False for i in range(3) for name in ("up", "down")}
    with pytest.raises(error), SuspendedRun(model, ["layers.0", "layers.1"], batches, watched=lambda: watched) as run:
        arm("prologue")
        for stage in run.stages():
            if stage.index == 1:
                arm("calibrate")
            stage.calibrate()
            if stage.index == 1:
                arm("compress"), arm("propagate"), arm("glue")
            stage.propagate()
    for handle in handles:
        handle.remove()
    assert len(closed) == (1 if where == "prologue" else 3), "every forward that started has been unwound"
    assert hooks_before == {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_that_swallows_its_end_is_ended_all_the_same() -> None:
    class Stubborn(TwoInputs):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            for _ in range(3):
                with contextlib.suppress(BaseException):
                    return super().forward(left, right)
            return left

    model = Stubborn().eval()
    with pytest.raises(Boom), SuspendedRun(model, ["layers.0"], toy()[1]) as run:
        for _ in run.stages():
            raise Boom


def test_two_runs_cannot_be_open_at_once() -> None:
    model, batches = made(toy)
    with SuspendedRun(model, ["layers.0"], batches), pytest.raises(TracingError, match="another suspended run is open"):
        SuspendedRun(model, ["layers.0"], batches).__enter__()


def test_a_stage_that_is_left_without_propagation_is_an_error() -> None:
    model, batches = made(toy)
    with pytest.raises(TracingError, match=r"layers.0: its stage was left without"), SuspendedRun(model, ["layers.0"], batches) as run:
        for stage in run.stages():
            stage.calibrate()


def test_each_sample_is_announced_before_it_runs_on() -> None:
    model, batches = made(toy)
    order: list[int] = []
    with SuspendedRun(model, ["layers.0"], batches, watched=lambda: {"layers.0.up": False}, on_sample=order.append) as run:
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    assert order == [0, 1, 2] * 3


def test_hooks_sleep_in_the_target_and_wake_between_targets() -> None:
    model, batches = made(toy)
    asleep: list[bool] = []
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        asleep.append(True)
        yield
        asleep.pop()

    for name in ("embed", "layers.0.up", "head"):
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: seen.append((name, bool(asleep))))
    with SuspendedRun(model, ["layers.0"], batches[:2], watched=lambda: {"layers.0.up": False, "head": False}, quiet=quiet) as run:
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    one = [("layers.0.up", True), ("head", False)]
    assert seen == [("embed", False)] * 2 + [("layers.0.up", False)] * 2 + one * 2


def test_values_that_hooks_keep_on_hooked_modules_are_kept_over_samples() -> None:
    model, batches = made(toy)
    model.head.total = 0.0

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        module.total = module.total + 1.0

    model.head.register_forward_pre_hook(add)
    with SuspendedRun(model, ["layers.0"], batches, watched=lambda: {"head": False}) as run:
        for stage in run.stages():
            stage.propagate()
    assert model.head.total == 3.0


def test_what_a_finished_forward_held_is_let_go() -> None:
    model, batches = made(toy)
    with SuspendedRun(model, ["layers.0", "layers.2"], batches) as run:
        for stage in run.stages():
            stage.propagate()
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.dim() == 2 and t.shape[1] == 6 and t.shape[0] < 4]
    assert len(tensors) == 6, "only the batches are left"
