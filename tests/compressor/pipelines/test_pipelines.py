"""Pipelines feed every hooked module exactly the inputs that naive calibration would, send the right events, and leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from compressor.data import CalibrationData, call_model, load_dataset_source
from compressor.errors import CalibrationError, DatasetError, RecipeError, TargetError, TracingError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, Session, State
from compressor.pipelines import SequentialSettings, choose_pipeline, run_pipeline, sequential
from compressor.progress import SilentProgress
from tests import tiny

PLAIN_CALL = nn.Module.__call__


class Halved(nn.Module):
    """A compressed linear: another function, and a count of its materializations."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.is_materialized = False
        self.calls: list[bool] = []

    @contextmanager
    def materialize(self) -> Iterator[None]:
        self.is_materialized = True
        yield
        self.is_materialized = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.is_materialized)
        return self.linear(x) / 2


class Recorder(Modifier):
    """Hooks linears, keeps what they saw, and halves them when their stage ends."""

    calibration: ClassVar[CalibrationNeed] = "sequential"
    ignore: tuple[str, ...] = ()
    keep_hooks: bool = False
    fail: str | None = None
    _pending: dict[str, Any] = PrivateAttr(default_factory=dict)
    _seen: dict[str, list[tuple[Tensor, Tensor | None]]] = PrivateAttr(default_factory=dict)
    _events: list[tuple[str, tuple[str, ...]]] = PrivateAttr(default_factory=list)

    def on_initialize(self, state: State) -> bool:
        return True

    def on_event(self, state: State, event: Event) -> None:
        self._events.append((event.type.name, event.modules))

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name, module in state.model.named_modules():
            if isinstance(module, nn.Linear) and not any(part in name for part in self.ignore):
                self._pending[name] = self.register_hook(module, self._see(state, name), "forward_pre")

    def _see(self, state: State, name: str) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if self.fail == "hook":
                raise KeyboardInterrupt
            assert not module.training
            self._seen.setdefault(name, []).append((args[0].clone(), state.token_mask))

        return see

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        names = [name for name in event.modules if name in self._pending]
        if names and self.fail == "compress":
            raise KeyboardInterrupt
        for name in names:
            handle = self._pending.pop(name)
            if not self.keep_hooks:
                self.remove_hooks([handle])
            state.replace_module(name, Halved(state.model.get_submodule(name)))


def llama(**settings: Any) -> Any:
    return tiny.llama(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, num_key_value_heads=1, **settings
    ).train()


def tokens(batch_size: int = 2) -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 64, (length,), generator=generator) for length in (5, 8, 8, 3, 6)]
    return load_dataset_source(rows, batch_size=batch_size)


def two_passes(pipeline: str, targets: list[str] | None = None) -> SequentialSettings:
    """Stages that are whole layers; what is different in one pass is held in test_passes."""
    return SequentialSettings(targets, passes="two" if pipeline == "sequential" else "auto")


def run(
    model: nn.Module,
    data: CalibrationData | None,
    name: str,
    recorder: Recorder,
    targets: list[str] | None = None,
    settings: SequentialSettings | None = None,
) -> Recorder:
    with Session(State(model), [recorder]) as session:
        session.initialize()
        run_pipeline(name, session, data, progress=SilentProgress(), settings=settings or two_passes(name, targets))
        assert session.state.token_mask is None
        session.finalize()
    return recorder


@torch.no_grad()
def naive_inputs(model: Any, data: CalibrationData, stages: list[list[str]], compress: bool = True) -> dict[str, list[Tensor]]:
    """Run all plain forwards again for every stage."""
    seen: dict[str, list[Tensor]] = {}
    model.eval()
    state = State(model)
    for names in stages:
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(args[0].clone())
            )
            for name in names
        ]
        for batch in data.batches:
            call_model(model, {**batch, "use_cache": False})  # type: ignore[dict-item]
        for handle in handles:
            handle.remove()
        for name in names if compress else ():
            state.replace_module(name, Halved(model.get_submodule(name)))
    return seen


def layer_stages(model: nn.Module) -> list[list[str]]:
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [[name for name in linears if name.startswith(f"model.layers.{i}.")] for i in range(3)]


def assert_saw(recorder: Recorder, expected: dict[str, list[Tensor]], data: CalibrationData) -> None:
    assert recorder._seen.keys() == expected.keys()
    for name, seen in recorder._seen.items():
        assert len(seen) == len(expected[name])
        for (x, mask), y, real in zip(seen, expected[name], data.token_masks, strict=True):
            assert torch.equal(x, y), name
            assert (mask is None and real is None) or (mask is not None and real is not None and torch.equal(mask, real))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_sequential_feeds_each_layer_through_the_compressed_layers_before_it(batch_size: int) -> None:
    model, data = llama(), tokens(batch_size)
    expected = naive_inputs(copy.deepcopy(model), data, layer_stages(model))
    heads: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: heads.append(output))
    recorder = run(model, data, "sequential", Recorder(ignore=("lm_head",)), settings=SequentialSettings(verify="off", passes="two"))
    assert_saw(recorder, expected, data)
    kinds = len({tuple(batch) for batch in data.batches})
    padding = 3 if any(len(batch) > 1 for batch in data.batches) else 0
    assert len(heads) == kinds + 1 + padding, "one batch of each kind in the plan, thrice one with padding, one in the run"


def test_sequential_tells_each_module_in_exactly_one_event() -> None:
    model = llama()
    modules = {name for name, _ in model.named_modules()}
    events = run(model, tokens(), "sequential", Recorder(ignore=("lm_head",)))._events
    assert [kind for kind, _ in events] == ["CALIBRATION_START", *["SEQUENTIAL_EPOCH_END"] * 4, "CALIBRATION_END"]
    names = [name for _, names in events for name in names]
    assert len(names) == len(set(names)) and set(names) >= modules
    assert [names[0] for _, names in events[1:4]] == [f"model.layers.{i}" for i in range(3)]
    assert {"lm_head", "model.norm", "model.embed_tokens"} < set(events[4][1])


def test_a_watched_head_sees_every_batch_once_after_all_layers_are_compressed() -> None:
    model, data = llama(), tokens()
    expected = naive_inputs(copy.deepcopy(model), data, [*layer_stages(model), ["lm_head"]])
    recorder = run(model, data, "sequential", Recorder())
    assert_saw(recorder, expected, data)
    assert isinstance(model.lm_head, Halved)


def test_hooks_that_a_modifier_leaves_on_do_not_count_the_propagation_too() -> None:
    model, data = llama(), tokens()
    expected = naive_inputs(copy.deepcopy(model), data, layer_stages(model))
    assert_saw(run(model, data, "sequential", Recorder(ignore=("lm_head",), keep_hooks=True)), expected, data)


def test_named_targets_may_be_single_linears() -> None:
    model, data = llama(), tokens()
    order: list[str] = []
    probe = copy.deepcopy(model)
    for name, module in probe.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args, name=name: order.append(name))
    with torch.no_grad():
        call_model(probe, data.batches[0])
    expected = naive_inputs(copy.deepcopy(model), data, [[name] for name in order])
    recorder = run(model, data, "sequential", Recorder(ignore=("lm_head",)), targets=[r"re:model\.layers\..*_proj$"])
    assert_saw(recorder, expected, data)


def test_without_propagated_error_every_layer_sees_the_plain_flow() -> None:
    model, data = llama(), tokens()
    expected = naive_inputs(copy.deepcopy(model), data, layer_stages(model), compress=False)
    recorder = Recorder(ignore=("lm_head",))
    with Session(State(model), [recorder]) as session:
        session.initialize()
        sequential.run(session, data, progress=SilentProgress(), settings=SequentialSettings(propagate_error=False))
        session.finalize()
    assert_saw(recorder, expected, data)
    assert isinstance(model.model.layers[2].mlp.down_proj, Halved)


def test_compressed_modules_are_materialized_while_samples_propagate() -> None:
    model = llama()
    run(model, tokens(), "sequential", Recorder(ignore=("lm_head",)))
    first, last = model.model.layers[0].mlp.down_proj, model.model.layers[2].mlp.down_proj
    assert first.calls == [True] * 3 and not first.is_materialized
    assert last.calls == [False]  # one sample alone goes on from there


def test_basic_runs_whole_forwards_and_ends_with_one_event_for_all_modules() -> None:
    model, data = llama(), tokens()
    modules = tuple(name for name, _ in model.named_modules())
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected = naive_inputs(copy.deepcopy(model), data, [linears], compress=False)
    recorder = run(model, data, "basic", Recorder())
    assert_saw(recorder, expected, data)
    assert recorder._events == [("CALIBRATION_START", ()), ("SEQUENTIAL_EPOCH_END", modules), ("CALIBRATION_END", ())]


def test_data_free_sends_start_and_end_only() -> None:
    recorder = run(llama(), None, "data_free", Recorder(ignore=("",)))
    assert recorder._events == [("CALIBRATION_START", ()), ("CALIBRATION_END", ())] and not recorder._seen


class AsksForNothing(Recorder):
    calibration: ClassVar[CalibrationNeed] = "none"


def test_hooks_without_data_are_refused() -> None:
    with pytest.raises(
        CalibrationError, match=r"^AsksForNothing.*: it has hooks on the model and asks for no data, .*; set calibration = 'basic'"
    ):
        run(llama(), None, "data_free", AsksForNothing())


def test_hooks_see_data_where_the_basic_pipeline_is_chosen() -> None:
    """Whoever asks for none and has hooks all the same."""
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    recorder = run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data, "basic", AsksForNothing())
    assert {name: len(seen) for name, seen in recorder._seen.items()} == {"0": 3, "1": 3}


class PutsInLate(Recorder):
    """Names what it puts in as the calibration ends, so that no forward was asked whether it calls it."""

    def on_calibration_end(self, state: State, event: Event) -> None:
        state.touch(["0"])
        state.replace_module("0", nn.Linear(4, 3))


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_a_model_that_does_not_run_any_more_is_refused_whenever_it_was_named(pipeline: str) -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    with pytest.raises(CalibrationError, match=r"^forward: the compressed model raises RuntimeError.* on a batch that it took before"):
        run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data, pipeline, PutsInLate(ignore=("",)))


class TakesRows(Recorder):
    """Leaves out a row of each layer, which the next one does not take."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        for name in [name for name in event.modules if name in self._pending]:
            self.remove_hooks([self._pending.pop(name)])
            old = state.model.get_submodule(name)
            state.replace_module(name, nn.Linear(old.in_features, old.out_features - 1))


class RaisesBehind(Recorder):
    """Its own hook raises, in a layer behind one that is compressed."""

    def _see(self, state: State, name: str) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if name == "1":
                raise ZeroDivisionError

        return see


@pytest.mark.parametrize(("passes", "where"), [("one", "1"), ("two", "the model")])
def test_what_does_not_run_behind_a_compressed_layer_names_it(passes: Literal["one", "two"], where: str) -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    with pytest.raises(CalibrationError, match=rf"^{where}: it raises RuntimeError.* now that layers are compressed \(0, 1\); ignore"):
        run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data, "sequential", TakesRows(), settings=SequentialSettings(passes=passes))


@pytest.mark.parametrize("settings", [SequentialSettings(passes="one"), SequentialSettings(["Linear"], engine="suspend")])
def test_what_a_hook_raises_behind_a_compressed_layer_stays_what_it_is(settings: SequentialSettings) -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    with pytest.raises(ZeroDivisionError):
        run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data, "sequential", RaisesBehind(), settings=settings)


class SaysWhichBatch(Recorder):
    def on_event(self, state: State, event: Event) -> None:
        self._events.append((event.type.name, (str((state.batch_index, state.batch_shape, state.token_mask)),)))


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_no_batch_runs_while_a_stage_is_compressed(pipeline: str) -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    recorder = run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data, pipeline, SaysWhichBatch())
    assert len(recorder._events) > 2 and {said for _, said in recorder._events} == {("(None, None, None)",)}


def test_a_plain_module_of_linears_is_calibrated_as_one_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    recorder = run(model, data, "sequential", Recorder())
    assert {name: len(seen) for name, seen in recorder._seen.items()} == {"0": 3, "2": 3}
    assert recorder._events[1] == ("SEQUENTIAL_EPOCH_END", ("", "0", "1", "2")) and len(recorder._events) == 3


class Repeating(nn.Module):
    """Calls a linear as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(int(x[0, 0]) - 1):
            y = self.linear(y)
        return y


def test_the_last_stage_misses_no_call_though_no_propagation_could_notice() -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]])))
    recorder = run(nn.Sequential(Repeating()), data, "sequential", Recorder())
    assert len(recorder._seen["0.linear"]) == 1 + 3 + 2


class Branching(nn.Module):
    """Has layers that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.vision = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("name", ["basic", "sequential"])
def test_tokens_that_the_model_does_not_have_are_named(name: str) -> None:
    model = llama()
    data = load_dataset_source([torch.tensor([1, 2, 99])])
    with pytest.raises(
        TracingError, match=r"^forward: the model itself raises IndexError.*token id 99 is given, and the model has 64 tokens"
    ):
        run(model, data, name, Recorder(ignore=("lm_head",)))


class Averaging(nn.Module):
    """Keeps a mean from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean()
        for layer in self.layers:
            x = layer(x)
        return x + self.mean


class AveragingInPlace(Averaging):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean())
        for layer in self.layers:
            x = layer(x)
        return x + self.mean


class MakesItsNorm(nn.Module):
    """Makes a module when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.LayerNorm(x.shape[-1])
        for layer in self.layers:
            x = layer(self.norm(x))
        return x


@pytest.mark.parametrize("name", ["basic", "sequential"])
def test_a_module_that_the_first_forward_makes_is_whole(name: str) -> None:
    rows = torch.randn(3, 2)
    data, recorder = load_dataset_source(torch.utils.data.DataLoader(rows)), Recorder()
    with Session(State(MakesItsNorm()), [recorder]) as session:
        session.initialize()
        run_pipeline(name, session, data, progress=SilentProgress(), settings=two_passes(name))
        session.finalize()
    (seen,) = [torch.cat([given for given, _ in all_given]) for name, all_given in recorder._seen.items() if name == "layers.0.0"]
    torch.testing.assert_close(seen, nn.LayerNorm(2)(rows).detach())


@pytest.mark.parametrize(("name", "model"), [("basic", Averaging), ("basic", AveragingInPlace), ("sequential", Averaging)])
def test_state_that_would_pass_from_batch_to_batch_is_noted(name: str, model: type[nn.Module]) -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(3, 2)))
    with Session(State(model()), [Recorder()]) as session:
        session.initialize()
        run_pipeline(name, session, data, progress=SilentProgress(), settings=two_passes(name))
        session.finalize()
    assert session.state.report.notes == ["mean would pass from batch to batch; every batch starts with the state of the model"]


def test_a_watched_target_that_no_batch_calls_is_an_error_that_names_it() -> None:
    data = load_dataset_source(torch.utils.data.DataLoader(torch.randn(2, 2)))
    recorder = Recorder()
    with pytest.raises(CalibrationError, match=r"^vision.0, vision.1: no batch calls these sequential targets"):
        run(Branching(), data, "sequential", recorder)
    assert [kind for kind, names in recorder._events if names] == [], "nothing had been compressed"
    events = run(Branching(), data, "sequential", Recorder(ignore=("vision",)))._events
    assert [names[0] for kind, names in events if names] == ["layers.0", "layers.1", ""] and "vision.1.0" in events[3][1]
    with pytest.raises(CalibrationError, match=r"^vision.1: no batch calls this sequential target"):
        run(Branching(), data, "sequential", Recorder(ignore=("vision",)), targets=["layers.0", "vision.1"])


@pytest.mark.parametrize("name", ["basic", "sequential"])
@pytest.mark.parametrize("fail", [None, "hook", "compress"])
def test_nothing_is_left_on_the_model_whatever_happens(name: str, fail: str | None) -> None:
    model = llama(use_cache=True)
    model.model.layers[1].eval()
    training = {name: module.training for name, module in model.named_modules()}
    recorder = Recorder(fail=fail)
    if fail is None:
        run(model, tokens(), name, recorder)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(model, tokens(), name, recorder)
    assert {name: module.training for name, module in model.named_modules() if name in training} == training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert model.config.use_cache and nn.Module.__call__ is PLAIN_CALL
    assert all(m.training for m in model.model.layers[0].modules() if isinstance(m, Halved))


@pytest.mark.parametrize("name", ["basic", "sequential"])
def test_no_cache_grows_during_calibration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a cache was made")

    monkeypatch.setattr(transformers.cache_utils.DynamicCache, "__init__", fail)
    run(llama(use_cache=True), tokens(), name, Recorder())


class CountingProgress:
    """Counts the steps of every bar."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.notes: list[str] = []

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Any]:
        self.total = total
        yield self

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        assert amount >= 0
        self.done += amount
        self.notes += [note] if note else []


@pytest.mark.parametrize("name", ["data_free", "basic", "sequential"])
def test_the_bar_ends_exactly_at_its_total(name: str) -> None:
    progress = CountingProgress()
    with Session(State(llama()), [Recorder(ignore=("lm_head",))]) as session:
        session.initialize()
        run_pipeline(name, session, tokens(), progress=progress, settings=two_passes(name))
        session.finalize()
    assert progress.done == progress.total > 0
    stages = [f"model.layers.{i}" for i in range(3)] if name == "sequential" else ["all layers"] if name == "data_free" else []
    assert [note.rpartition(": ")[2] for note in progress.notes] == stages
    assert all(note.startswith(f"stage {number} of {len(stages)}, ") for number, note in enumerate(progress.notes, 1))


class Basic(Recorder):
    calibration: ClassVar[CalibrationNeed] = "basic"


class Free(Recorder):
    calibration: ClassVar[CalibrationNeed] = "none"


@pytest.mark.parametrize(
    ("modifiers", "override", "expected"),
    [
        ([Free()], None, "data_free"),
        ([Free(), Basic()], None, "basic"),
        ([Recorder(), Basic()], None, "sequential"),
        ([Recorder()], "basic", "basic"),
        ([Free()], "sequential", "sequential"),
        ([], None, "data_free"),
    ],
)
def test_the_strongest_need_chooses_the_pipeline(modifiers: list[Modifier], override: str | None, expected: str) -> None:
    assert choose_pipeline(modifiers, override) == expected
    settings = SequentialSettings(["Linear"])
    if "sequential" in (expected, override) or (expected, override) == ("basic", None):
        assert choose_pipeline(modifiers, override, settings) == "sequential"
    else:
        with pytest.raises(TargetError, match=r"were given, but the .* pipeline has none"):
            choose_pipeline(modifiers, override, settings)


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"'sequentail' does not exist; choose one of data_free, basic, sequential"):
        choose_pipeline([Free()], "sequentail")
    with pytest.raises(RecipeError, match=r"data_free feeds no data, but Basic\[1\] must calibrate; choose basic"):
        choose_pipeline([Free(), Basic(index=1)], "data_free")
    with pytest.raises(DatasetError, match="basic was chosen without calibration data"):
        run(llama(), None, "basic", Recorder())
    with pytest.raises(TargetError, match="the basic pipeline has none"):
        run(llama(), tokens(), "basic", Recorder(), targets=["Linear"])
    with pytest.raises(TargetError, match="engine: 'graph' was given, but the basic pipeline traces nothing"):
        run(llama(), tokens(), "basic", Recorder(), settings=SequentialSettings(engine="graph"))
    with pytest.raises(TracingError, match="engine: 'grahp' does not exist; choose one of auto, graph, suspend"):
        SequentialSettings(engine="grahp")  # type: ignore[arg-type]
    with pytest.raises(TracingError, match="max_variants: 0 leaves no room"):
        SequentialSettings(max_variants=0)
    with pytest.raises(TargetError, match="matches no module"):
        run(llama(), tokens(), "sequential", Recorder(), targets=["LlamaDecodrLayer"])
