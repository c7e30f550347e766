"""The sequential pipeline: all samples through one layer, that layer compressed, all samples through the compressed layer, and on.

Memory stays at one layer's statistics, and each layer sees the error of those before it. Per stage: a calibration pass, in which the
hooks inside the target see its inputs; SEQUENTIAL_EPOCH_END with the names inside it, upon which the modifiers compress; a propagation
pass with hooks asleep inside the target. Between targets (embeddings, norms, the head) hooks are awake whenever that code runs, which is
once per sample; those modules come in one last SEQUENTIAL_EPOCH_END. When no later module is watched, all samples but one are ended
where they stand: nobody needs their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from compressor.data import CalibrationData
from compressor.errors import CalibrationError, CompressorError, TracingError
from compressor.lifecycle import EventType, Session, State
from compressor.lifecycle.hooks import raised_in_hook
from compressor.lifecycle.padding import check_padding, note_unread_masks
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.folder import some
from compressor.pipelines.forward_checks import (
    calibration_mode,
    calls_of,
    check_alike,
    check_still_called,
    compressed_names,
    note_kept,
    note_proof,
    note_unproved,
    picked_rows,
    refuse_exchanged,
    set_token_mask,
    shared_parameters,
    unchanged_elsewhere,
    watched_elsewhere,
    watched_modules,
    weights_held_to,
)
from compressor.pipelines.journal import NullJournal, StageJournal
from compressor.pipelines.memory import memory_explained, return_freed_pages
from compressor.pipelines.offload.activation_store import open_store
from compressor.pipelines.offload.onload import OnloadedWeights, WeightsByStretch, weights_by_stretch
from compressor.pipelines.settings import SequentialSettings, around_watched, check_base_stream, cut_at_inputs, whole_notes
from compressor.progress import Progress, StageBar
from compressor.tracing import Engine, Partition, Plan, Run, RunningStage, ValueStore, Watched, module_names, partition, trace
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.targets.out_of_memory import is_out_of_memory


@runtime_checkable
class Materializable(Protocol):
    """A compressed module that can keep its float weight for many forwards in a row."""

    def materialize(self) -> AbstractContextManager[None]:
        """Keep the float weight for the duration of the context."""


def run(
    session: Session,
    data: CalibrationData,
    *,
    progress: Progress,
    settings: SequentialSettings | None = None,
    journal: StageJournal | None = None,
) -> None:
    """Calibrate and compress target by target.

    Args:
        session: initialized; its model changes.
        data: at least one batch.
        progress: where a bar is shown.
        settings: targets, engine and propagation; None takes the defaults.
        journal: keeps finished stages, and knows those of an earlier run; None keeps nothing.

    Raises:
        TargetError: a pattern matches nothing, or a target lies inside another.
        CalibrationError: a target with watched modules, or one that was named, is never called; or calls were missed.
        TracingError: a target is called again after its stage.
    """
    state = session.state
    settings, journal = settings or SequentialSettings(), journal or NullJournal()
    layers = partition(state.model, settings.targets)  # a wrong pattern is refused before anything happens
    with weights_by_stretch(state.model, layers.targets, state.device) as weights:
        state.bring = weights.hold
        _run(session, data, progress, settings, journal, weights)


def _run(
    session: Session,
    data: CalibrationData,
    progress: Progress,
    settings: SequentialSettings,
    journal: StageJournal,
    weights: WeightsByStretch,
) -> None:
    state = session.state
    session.send(EventType.CALIBRATION_START)
    num_notes = len(state.report.notes)
    # An earlier run has finished the stages of all watched modules: what it left is enough, and no forward runs.
    if journal.needs_no_data(watched_modules(session)):
        cut, uncalled, called = partition(state.model, settings.targets), journal.restore_all(session), set[str]()
        rewritten: tuple[str, ...] = ()
    else:
        cut, uncalled, called, rewritten = _run_stages(session, data, progress, settings, journal, weights)
        journal.end_stages(session, uncalled, state.report.notes[num_notes:])
        state.place_again()
    _send_rest(session, cut, uncalled)
    session.send(EventType.CALIBRATION_END)
    with calibration_mode(state):
        check_still_called(session, data, called, rewritten)


def _run_stages(
    session: Session,
    data: CalibrationData,
    progress: Progress,
    settings: SequentialSettings,
    journal: StageJournal,
    weights: WeightsByStretch,
) -> tuple[Partition, tuple[str, ...], set[str], tuple[str, ...]]:
    """Take all samples through all stages; return targets, those that no sample has called, called modules, and rewritten parameters."""
    state = session.state
    with calibration_mode(state):
        plan, runs_once, called = _planned(session, data, settings, weights)
        beside = _beside(session, plan, settings, runs_once)
        state.has_base_stream = beside is not None
        state.picked = frozenset() if beside is None else picked_rows(session, data)
        # A sample enters once and passes each stage twice, to calibrate and to propagate; a twin of it enters once and passes each once.
        total = len(data.batches) * (1 + 2 * len(plan.stages) + (0 if beside is None else 1 + len(plan.stages)))
        with progress.task("calibrate", total=total) as task:
            bar = StageBar(task, total, journal.summary, data.num_tokens)
            uncalled = _pass_stages(session, data, settings, journal, weights, plan, beside, bar)
            bar.finish()
    return plan.partition, uncalled, called, plan.rewritten


def _planned(
    session: Session, data: CalibrationData, settings: SequentialSettings, weights: WeightsByStretch
) -> tuple[Plan, bool, set[str]]:
    """Trace; return the plan, whether layers run once, and the modules that were called. Refuses what no stage could do."""
    state = session.state
    watched = watched_modules(session)
    with session.hooks_disabled(), memory_explained(state.model, "the model", "traced", module_names(state.model, "")):
        names = compressed_names(state)
        with calls_of(state.model, names) as called, weights_held_to(state.model, names) as exchanged:
            plan, runs_once = _trace(session, data, settings, watched, weights)
        refuse_exchanged(exchanged, plan.rewritten)
        note_unread_masks(state, data)
        check_padding(state, data, watched)
    weights.refuse_rewritten(plan.rewritten)
    note_kept(state, plan.kept)
    note_proof(state, plan.widened)
    return plan, runs_once, called


def _pass_stages(
    session: Session,
    data: CalibrationData,
    settings: SequentialSettings,
    journal: StageJournal,
    weights: WeightsByStretch,
    plan: Plan,
    beside: Callable[[], AbstractContextManager[None]] | None,
    bar: StageBar,
) -> tuple[str, ...]:
    """Calibrate and propagate, stage by stage; return the targets that no sample has called."""
    state, num_batches = session.state, len(data.batches)

    def on_sample(index: int) -> None:
        state.ranks.check()
        # Twins of samples, on the uncompressed model, are numbered behind all samples and share their masks.
        set_token_mask(state, data, index % num_batches)
        state.base_stream = index >= num_batches
        bar.advance()

    with (
        _open_store(state, plan, settings, isinstance(weights, OnloadedWeights)) as store,
        plan.run(
            data.batches,
            store,
            device=state.device,
            watched=lambda: watched_modules(session),
            keeping=watched_modules(session, keeping=True),
            on_sample=on_sample,
            quiet=session.hooks_disabled,
            beside=beside,
            own=state.own_batches(data),
            everywhere=state.ranks.union,
            may_wait=settings.propagate_error,
        ) as running,
    ):
        # What planning knows is refused before the first stage; what only the run shows, below.
        _check_called(session, plan.uncalled, settings.targets)
        _check_rewritten(state, plan, settings.propagate_error)
        _check_called_late(session, plan, settings.propagate_error)
        early: tuple[str, ...] = ()
        with _outside_calls(state, plan.partition) as outside:
            for stage in running:
                # What was called before the last stage: layers behind it have seen it uncompressed.
                early = tuple(state.ranks.union(tuple(_changed_by_modifiers(state, list(outside)))))
                with memory_explained(state.model, stage.name, "brought to the device", stage.module_names):
                    weights.hold(stage.module_names)
                # Graphs know what a stage runs anew. Of a module that still runs, such as the model, its own tensors alone were used.
                own = [f"{name}.{key}".lstrip(".") for name in outside for key in state.model.get_submodule(name)._parameters]
                called = own if plan.engine == "suspend" else []
                _run_stage(
                    session, running, stage, bar, settings.propagate_error, journal, len(plan.stages), called, plan.partition.targets
                )
        weights.hold(())
    _check_called(session, running.uncalled, settings.targets)
    _note_late(state, early if settings.propagate_error else ())
    note_unproved(state, plan.unproved)
    return running.uncalled


def _trace(
    session: Session, data: CalibrationData, settings: SequentialSettings, watched: Watched, weights: WeightsByStretch
) -> tuple[Plan, bool]:
    """Find out how batches flow: from module to module where layers run once, which is told, too, else from layer to layer."""
    state = session.state
    layers = around_watched(state.model, watched, partition(state.model, settings.targets))

    def plan(targets: Partition, engine: Engine, per_stage: int | Literal["input"]) -> Plan:
        return trace(
            state.model,
            data.batches,
            targets,
            leaves=settings.leaves,
            engine=engine,
            max_variants=settings.max_variants,
            verify="all" if differ and settings.verify == "first" else settings.verify,
            device=state.device,
            targets_per_stage=per_stage,
            put_away=weights.put_away,
        )

    differ = False
    if not watched:
        state.report.notes.append("layers were not run for all batches, for nothing in the recipe learns from what flows through them")
    if settings.num_passes == 2 or not watched:
        return plan(layers, settings.engine, 1), False
    try:
        found = plan(cut_at_inputs(state.model, watched, layers), "graph", "input")
        blind = _blind(state, watched, found.uncalled, settings.targets)
        if not blind or settings.passes == "one":
            state.report.notes += whole_notes(state.model, _watched_by(session, watched))
            return found, True
        # Whether a layer may do without statistics of a module inside is for the modifiers to say, who have a budget for that.
        raise TracingError(f"no batch calls {some(blind)}")
    except TracingError as error:
        if settings.passes == "one":
            raise TracingError(f"passes: 'one' is not possible here: {error}; or leave passes out") from error
        state.report.notes.append(f"each layer ran twice, for its modules could not be cut apart: {error}")
        differ = isinstance(error, Unrepeatable)  # of some batches, it may be, which a few others would not show of layers
        return plan(layers, settings.engine, 1), False


def _beside(
    session: Session, plan: Plan, settings: SequentialSettings, runs_once: bool
) -> Callable[[], AbstractContextManager[None]] | None:
    """The context for hooks that see the stream of the uncompressed model, where that runs beside the other."""
    asking = {modifier.base_stream: modifier.label for modifier in session.modifiers}
    if not settings.propagate_error:
        if "required" in asking:
            session.state.report.notes.append(
                f"{asking['required']}: without propagate_error every module has the inputs of the uncompressed model, so that nothing is "
                "left to move to target 'base'"
            )
        return None
    check_base_stream(session.modifiers, plan.engine, plan.why)
    if "required" not in asking and not ("wanted" in asking and runs_once):
        return None
    if late := plan.run_late(watched_modules(session)):
        why = f"{some(late)}: the forward uses it again after later layers, compressed by then"
        if "required" in asking:
            raise TracingError(
                f"{asking['required']}: target 'base' runs the uncompressed model beside the other, which cannot be had here ({why}); "
                + ("give passes='two', or leave it out" if runs_once else "leave it out")
            )
        session.state.report.notes.append(f"the uncompressed model did not run beside the other ({why})")
        return None
    return session.only_base_hooks


def _open_store(state: State, plan: Plan, settings: SequentialSettings, weights_wait: bool) -> AbstractContextManager[ValueStore | None]:
    """The store of what is live between stages, for the engine that can hand it over."""
    chosen = settings.activation_choices
    if plan.engine == "graph":
        return open_store(state.model, state.device, weights_wait=weights_wait, sharers=state.ranks.on_host, **chosen)  # type: ignore[arg-type]
    settings.refuse_budgets(plan.why)
    return nullcontext()


def _run_stage(
    session: Session,
    run: Run,
    stage: RunningStage,
    bar: StageBar,
    propagate_error: bool,
    journal: StageJournal,
    num_stages: int,
    outside: Collection[str],
    targets: Collection[str],
) -> None:
    names, model = stage.module_names, session.state.model
    session.state.monitor.begin_stage()
    # When nobody watches a later module, one sample goes on: it alone shows calls that would come too late.
    is_last = not watched_elsewhere(session, names)
    is_finished = journal.open_stage(session, stage.index, stage.name, names, num_stages)
    if is_finished:
        # The hooks in here stay blind: what they would learn lies in the journal, compressed already.
        stage.skip_calibration()
        bar.skip(stage.num_samples, f"forwards through {stage.name}")
    else:
        explained = memory_explained(model, stage.name, "calibrated", names)
        with explained, _compressed_explained(session.state, stage), _materialized(model, stage.put_off):
            stage.calibrate()
    if not propagate_error:
        with memory_explained(model, stage.name, "propagated", names):
            stage.propagate(only_first=is_last)
        # Compressed is what was loaded, not what the model's own forward has made of it on the way.
        run.give_back(_changed_by_modifiers(session.state, names))
    session.state.leave_batch()
    session.state.base_stream = False  # the last sample to run may have been a twin
    return_freed_pages()
    with memory_explained(model, stage.name, "compressed", names):
        if is_finished:
            journal.restore_stage(session)
        else:
            # Without propagation what comes later is calibrated on the model as it was, too.
            fixed = stage.passed.union(outside) if propagate_error else {name for name, _ in model.named_parameters(remove_duplicate=False)}
            if session.state.has_base_stream:  # which runs later layers as they are then
                fixed |= watched_elsewhere(session, names) | shared_parameters(model)
            with unchanged_elsewhere(session.state, fixed, names, targets):
                session.send(EventType.SEQUENTIAL_EPOCH_END, modules=names)
            check_alike(session.state, names)
            journal.finish_stage(session)
    return_freed_pages()
    if propagate_error:
        # Asked again, because a modifier may have hooked other modules while it compressed these.
        only_first = is_last and not watched_elsewhere(session, names)
        with (
            memory_explained(model, stage.name, "propagated", names),
            _compressed_explained(session.state, stage),
            _materialized(model, () if only_first else (*stage.put_off, *stage.module_names)),  # beside the head they would be in the way
        ):
            stage.propagate(only_first=only_first)
    return_freed_pages()
    if not is_finished:
        monitor, errors = session.state.monitor, session.state.report.errors(names)
        bar.note(monitor.end_stage(stage.index + 1, num_stages, stage.name, errors, bar.num_tokens))


@contextmanager
def _materialized(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make compressed layers float once for all samples: one of packed codes would dequantize its weight in each forward."""
    with ExitStack() as weights:
        for name in names:
            module = model.get_submodule(name)
            if isinstance(module, Materializable):
                weights.enter_context(module.materialize())
        yield


@contextmanager
def _compressed_explained(state: State, stage: RunningStage) -> Iterator[None]:
    """Say of what a stage raises in a forward what is compressed in it and before it: its code may ask for more than to call that."""
    try:
        yield
    except Exception as error:  # the model's own code raises what it likes
        changed = _changed_by_modifiers(state, (*sorted(stage.passed.difference(stage.module_names)), *stage.module_names))
        if isinstance(error, CompressorError) or is_out_of_memory(error) or raised_in_hook(error) or not changed:
            raise
        raise CalibrationError(
            f"{stage.module_names[0] or 'the model'}: it raises {one_line(error)} now that layers are compressed ({some(changed)}); ignore "
            "those of which its code asks for more than to be called, and change in one stage, or in on_calibration_end, what fits only "
            "together"
        ) from error


def _changed_by_modifiers(state: State, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in state.claims or name in state.touched]


@contextmanager
def _outside_calls(state: State, cut: Partition) -> Iterator[dict[str, None]]:
    """Note which modules outside of the targets are called that the recipe compresses, or that share a weight, as they are called."""
    staged = {below for target in cut.targets for below in module_names(state.model, target)}
    outside = [name for name, _ in state.model.named_modules() if name not in staged]
    called: dict[str, None] = {}
    with ExitStack() as hooks:
        changed = _changed_by_modifiers(state, [name for name in outside if name in state.claims or name not in state.settled])
        sharing = {name.rpartition(".")[0] for name in shared_parameters(state.model)}
        for name in dict.fromkeys((*changed, *(name for name in outside if name in sharing))):
            handle = state.model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.setdefault(name))
            hooks.callback(handle.remove)
        yield called


def _watched_by(session: Session, watched: Watched) -> dict[str, list[str]]:
    """Which of these modules each modifier watches, by its label."""
    names = {session.state.model.get_submodule(name): name for name in watched}
    return {one.label: [names[module] for module, _ in one.hooked_modules() if module in names] for one in session.modifiers}


def _note_late(state: State, names: Sequence[str]) -> None:
    """Say which modules were compressed after layers that come behind them."""
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        state.report.notes.append(
            f"{shown} lie outside the sequential targets and were compressed last, so the layers behind them were calibrated without their "
            "error; name them among the sequential_targets if that matters"
        )


def _check_rewritten(state: State, plan: Plan, propagate_error: bool) -> None:
    """Refuse weights that the model's own forward rewrites after loading, if they are to be compressed while forwards go on."""
    staged = {name for target in plan.partition.targets for name in module_names(state.model, target)}
    owners = {name: name.rpartition(".")[0] for name in plan.rewritten}
    changed = set(_changed_by_modifiers(state, list(owners.values()))) & staged
    wrong = [name for name, owner in owners.items() if owner in changed]
    if wrong and propagate_error:
        more = f"{wrong[0]} (and {len(wrong) - 1} more)" if wrong[1:] else wrong[0]
        raise CalibrationError(
            f"{more}: the model's own forward rewrites it, and the recipe compresses it as it was loaded, so that layers behind it cannot "
            f"be calibrated on what it then computes; {_as_loaded(state)}ignore it"
        )


def _as_loaded(state: State) -> str:
    """How to have it compressed all the same; who reads a checkpoint of transformers may unpack it before it is rewritten."""
    return "" if as_pretrained(state.model) is None else 'give propagate_error=False or pipeline="basic", or '


def _check_called_late(session: Session, plan: Plan, propagate_error: bool) -> None:
    """Refuse layers that run again after others have, and are compressed by then, where they should be what they were."""
    if propagate_error:
        return
    state = session.state
    wrong = [name for name in plan.run_late(watched_modules(session)) if _changed_by_modifiers(state, module_names(state.model, name))]
    if wrong:
        again = "the forward uses it again after later layers"
        if plan.engine == "suspend":
            again = "paused forwards run it, or use its weight, again after its stage"
        raise TracingError(
            f"{some(wrong)}: {again}, and what learns behind that would learn from it compressed; "
            'use propagate_error=True, pipeline="basic" or other sequential targets'
        )


def _check_called(session: Session, uncalled: Sequence[str], named: Sequence[str] | None) -> None:
    """Refuse targets without statistics: those that somebody watches, and those that the user named one by one."""
    blind = _blind(session.state, watched_modules(session), uncalled, named)
    if blind:
        raise CalibrationError(
            f"{', '.join(blind)}: no batch calls {'these sequential targets' if len(blind) > 1 else 'this sequential target'}, so there "
            "are no statistics; give data that reaches them, or ignore the modules inside (calls of a .forward() are not seen); inside "
            "of a layer that is called, passes='two' leaves them to the recipe's fallback_budget"
        )


def _blind(state: State, watched: Watched, uncalled: Sequence[str], named: Sequence[str] | None) -> list[str]:
    return [name for name in uncalled if name in (named or ()) or not set(watched).isdisjoint(module_names(state.model, name))]


def _send_rest(session: Session, cut: Partition, uncalled: Sequence[str]) -> None:
    """Close with the modules that lie in no stage: they have seen their data between the targets."""
    model = session.state.model
    staged = {below for name in cut.targets if name not in uncalled for below in module_names(model, name)}
    rest = tuple(name for name, _ in model.named_modules() if name not in staged)
    if rest:
        session.send(EventType.SEQUENTIAL_EPOCH_END, modules=rest)
