"""THE main path: a model, a recipe and data go in; a compressed model and, if a folder is named, a checkpoint come out.

Read this file first. Everything that can be refused is refused before the first batch runs; nothing is written before every scale has
been checked; a run that stops for any reason leaves no hook on the model and no half-written folder.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from compressor import look_up
from compressor.data import (
    TEXT_COLUMN,
    CalibrationData,
    Media,
    check_batches,
    holds_texts,
    input_columns,
    load_dataset_source,
    max_positions,
    open_source,
)
from compressor.distributed.ranks import Ranks, joined
from compressor.errors import DatasetError, ModelError, RecipeError, UserInputError
from compressor.lifecycle import Report, Session, State
from compressor.model.checkpoints.audit import Content, check_unclaimed, check_values, contents
from compressor.model.checkpoints.online import rotation_notes
from compressor.model.checkpoints.save import save_checkpoint, saved_state
from compressor.model.class_readers import buffer_notes, check_readable, dtype_notes, module_notes, reading_notes
from compressor.model.disk_room import check_room
from compressor.model.evaluation import check_dtypes_around, packing_notes, plain_gradients
from compressor.model.experts.unfuse import UnfusedModel, unfused_experts
from compressor.model.folder import resolve_folder, weight_files
from compressor.model.loading.load import LoadedModel, load_model, resolve_device, untie
from compressor.model.loading.words import find_processor, find_tokenizer, is_tokenizer, origin_of, resolve_processor, resolve_tokenizer
from compressor.model.saving import CompressedModel, attach_save
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.modifiers.transforms.rotating import RotatingModifier
from compressor.monitor import Lap, Monitor
from compressor.nn import QuantizedLayer
from compressor.nn.online_rotation import rotated_modules
from compressor.numerics.precision import widened_products
from compressor.pipelines import SequentialSettings, choose_pipeline, run_pipeline
from compressor.pipelines.journal import RunPlace, SharedJournal, base_hashes, check_places, model_identity, run_fingerprint, run_record
from compressor.pipelines.journal.fingerprint import Fingerprint, changes
from compressor.pipelines.offload.onload import needs_copies, weights_wait
from compressor.pipelines.settings import expert_targets
from compressor.progress import progress_of
from compressor.random_state import random_numbers_kept
from compressor.recipe import Recipe, load_recipe
from compressor.settings.llmcompressor import translated
from compressor.settings.options import from_settings
from compressor.settings.verbs import DataSettings, OneshotSettings
from compressor.tracking import tracked

__getattr__ = look_up  # llm-compressor has Oneshot here


@dataclass(frozen=True)
class OneshotResult(CompressedModel):
    """What a run gives back, beside the model.

    Attributes:
        report: per-module errors and fallbacks.
        seconds: wall time by phase (load, data, compress, save).
        resumed: where the run went on, such as "resumed after stage 3 of 6"; None where it began at the beginning.
        phases: time and memory by phase.
        stages: time, memory and error by stage of the calibration; without those that an earlier run finished.
    """

    report: Report
    seconds: dict[str, float]
    resumed: str | None
    phases: tuple[Lap, ...]
    stages: tuple[Lap, ...]

    if not TYPE_CHECKING:  # which would take any name for an attribute then

        def __getattr__(self, name: str) -> Any:
            """Say where the model is, to whoever takes a result for one, as oneshot of llm-compressor gives it."""
            raise AttributeError(f"OneshotResult: there is no {name!r}; a run gives a result, whose model is `.model` (.model.{name}?)")


@from_settings(OneshotSettings, translated)
@widened_products()
@plain_gradients()
def oneshot(model: str | Path | nn.Module, settings: OneshotSettings) -> OneshotResult:
    """Compress a model in one pass over calibration data.

    Args:
        model: folder of a transformers checkpoint, or its name on the Hugging Face hub (`owner/name`, `owner/name@revision`), which is
            fetched; or a model (any nn.Module) in memory, which is changed in place.
        settings: the choices of the run.

    Returns:
        The compressed model with its report, and the folder if one was written.

    Raises:
        UserInputError: recipe, model, data or output folder cannot be used; nothing was changed.
        CalibrationError: more fallbacks than the recipe allows.
        NumericsError: NaN or infinity, or a Hessian that is not positive definite.
        CheckpointError: checkpoint or run folder could not be written; finished stages are kept.
        AlreadyDoneError: `resume` of a run whose checkpoint is there already.
    """
    with joined() as ranks:
        return _compress(model, settings if ranks.is_first else _unwritten(settings), ranks)


def _unwritten(settings: OneshotSettings) -> OneshotSettings:
    """What a rank does that is not the first, which writes files, shows progress and warns."""
    names = ("output_dir", "run_dir", "resume", "report_to")
    return settings.model_copy(update={name: OneshotSettings.model_fields[name].default for name in names} | {"progress": False})


def _compress(model: str | Path | nn.Module, settings: OneshotSettings, ranks: Ranks) -> OneshotResult:
    bars, monitor = progress_of(settings.progress), Monitor()
    sequential = SequentialSettings.of(settings)
    source = None if isinstance(model, nn.Module) else model
    place = check_places(settings.output_dir, settings.run_dir, resume=settings.resume, source=source)
    parsed = load_recipe(settings.recipe, args=settings.recipe_args, run_type="oneshot", mode=settings.mode, stage=settings.stage)
    words = _words(settings)
    unread = parsed.check_oneshot(ranks.size)
    chosen = _choose(parsed, settings, sequential)
    config_dir = _config_dir(settings)
    loaded = _load(model, settings, config_dir)
    notes = [*loaded.notes, *unread]
    words = _with_origin(words, settings, loaded, notes)
    device, base = _place_and_hash(loaded, settings, _all_layers_at_once(parsed, chosen), ranks)
    # Before anything is done to it; of a folder the first rank alone reads all files.
    identity = model_identity(loaded, base, words.saved) if ranks.is_first or loaded.source_dir is None else {}
    notes += _untie_and_note(loaded, settings, device)
    monitor.end_phase("load")
    report, kept = Report(notes=notes), loaded.from_memory
    state = State(loaded.model, device, settings.seed, report, has_steps=False, keep_originals=kept)
    state.progress, state.monitor, state.ranks, ranks.device = bars, monitor, ranks, state.device
    with ExitStack() as held:
        told = {"model": str(source or type(model).__name__), "recipe": parsed.dump()}
        monitor.trackers = held.enter_context(tracked(settings.trackers, told))
        with (
            random_numbers_kept(devices="all"),
            unfused_experts(loaded.model, hold=loaded.from_memory) as experts,
            Session(state, parsed.modifiers) as session,
        ):
            first = any(modifier.reshapes for modifier in parsed.modifiers)
            if first:  # else what the recipe says is held against the model before any data is read
                state.data = _read(settings, loaded, words, device)
            untouched = _initialize(session, experts, settings.calibrate_all_experts, place)
            sequential = replace(sequential, targets=expert_targets(loaded.model, state.claims, chosen, sequential.targets))
            if chosen != "data_free" and not first:
                state.data = _read(settings, loaded, words, device)
            data = state.data
            if data is None and settings.dataset is not None:
                state.report.notes.append("the dataset was not read, because the data_free pipeline ran")
            monitor.end_phase("data")
            own = {name: getattr(settings, name) for name in ("dtype", "calibrate_all_experts")}
            choices = {"pipeline": chosen, "model_class": settings.class_name, **own, **_rare(settings, config_dir)}
            run = run_fingerprint(
                identity, parsed.dump(), data, state.seed, choices, sequential, device, needs_copies(loaded.model, device)
            )
            _refuse_other_work(ranks, run, loaded)
            journal = held.enter_context(place.open(run, session.modifiers))
            journal = journal if ranks.size == 1 else held.enter_context(SharedJournal(journal, ranks))
            run_pipeline(chosen, session, data, progress=bars, settings=sequential, journal=journal)
            session.finalize()
            _note_data(state, settings.min_tokens_per_module)
            _check_changes(state, parsed, untouched)
        monitor.end_phase("compress")
        record: dict[str, Any] = loaded.source_record | run_record(parsed.dump(), base, data, state.report, choices, state.seed, run)
        folder = None if settings.output_dir is None else _save(loaded, words.saved, settings.output_dir, record, journal.token)
        written = ranks.first(lambda: None if folder is None else str(folder))
        monitor.end_phase("save")
        journal.finish()
    report.notes += monitor.trackers.notes
    folder = None if written is None else Path(written)
    return _result(loaded, words.saved, state.report, record, folder, monitor, journal.summary)


def _untie_and_note(loaded: LoadedModel, settings: OneshotSettings, device: torch.device) -> list[str]:
    """Give the head weights of its own where that was asked for; say what of this and of the device changes nothing. Changes the model."""
    notes = [] if settings.tie_word_embeddings else [untie(loaded)]
    if settings.sequential_offload_device == "cpu" and device.type == "cpu":
        notes.append("sequential_offload_device: 'cpu' was given, and the run takes place there: weights wait where they lie")
    return notes


def _refuse_other_work(ranks: Ranks, run: Fingerprint, loaded: LoadedModel) -> None:
    """Refuse a rank that was asked for something else than the first: the record tells of that one alone."""
    if ranks.size == 1:
        return
    source = loaded.source_dir
    sizes = {} if source is None else {name: (source / name).stat().st_size for name in (*weight_files(source), "config.json")}
    mine = {**run, "model": sizes or run["model"], "machine": None}
    different = changes(ranks.broadcast(mine, 0), mine)
    if different:
        raise UserInputError(
            f"oneshot: rank {ranks.rank} was asked for something else than rank 0 ({'; '.join(different)}); start all with the same model, "
            "recipe, data and settings"
        )


@dataclass(frozen=True)
class _Words:
    """What the user gave for texts: who reads them, and what is saved beside the weights; None where the model's folder has it."""

    reader: Any
    saved: Any


def _words(settings: OneshotSettings) -> _Words:
    """Take tokenizer and processor as objects or by their folders; a processor has a tokenizer, or is one."""
    tokenizer = resolve_tokenizer(settings.tokenizer, settings.trust_remote_code_model)
    processor = resolve_processor(settings.processor, settings.trust_remote_code_model)
    return _Words(tokenizer or getattr(processor, "tokenizer", processor), processor or tokenizer)


def _with_origin(words: _Words, settings: OneshotSettings, loaded: LoadedModel, notes: list[str]) -> _Words:
    """Take the tokenizer of the folder that a model in memory was loaded from, where texts are to be read and none was given."""
    given = settings.preprocessing_func is not None or settings.data_collator is not None
    origin = None if given or words.reader is not None or not loaded.from_memory else origin_of(loaded.model)
    found = find_tokenizer(origin, settings.trust_remote_code_model) if origin is not None and holds_texts(settings.dataset) else None
    if found is None:
        return words
    notes.append(f"texts are read by the tokenizer of {origin}, which the model was loaded from; tokenizer= gives another")
    return _Words(found, found)


def _processor(settings: OneshotSettings, loaded: LoadedModel) -> Any:
    """The processor for images, videos and audio: the one that was given, or that of the tokenizer's or the model's folder."""
    given = resolve_processor(settings.processor, settings.trust_remote_code_model)
    if given is not None:
        return None if is_tokenizer(given) else given
    named = settings.tokenizer if isinstance(settings.tokenizer, str | Path) else loaded.source_dir or origin_of(loaded.model)
    return None if named is None else find_processor(named, settings.trust_remote_code_model)


def _config_dir(settings: OneshotSettings) -> Path | None:
    """The folder whose config.json the model is loaded by; None for its own."""
    name, trust = settings.config_name, settings.trust_remote_code_model
    return None if name is None else resolve_folder(name, weights=False, code=trust, argument="config_name").path


def _all_layers_at_once(recipe: Recipe, pipeline: str) -> str | None:
    """Say why layers cannot take turns on the device."""
    if pipeline != "sequential":
        return f"the {pipeline} pipeline has no layers that take turns"
    needy = next((modifier.label for modifier in recipe.modifiers if modifier.needs_all_layers), None)
    return None if needy is None else f"{needy} trains through all layers at one time"


def _place_and_hash(
    loaded: LoadedModel, settings: OneshotSettings, obstacle: str | None, ranks: Ranks
) -> tuple[torch.device, dict[str, str]]:
    """What goes to a GPU is read from the files that are hashed, and neither waits for the other. Changes the model."""
    with ThreadPoolExecutor(1) as beside:
        hashes = beside.submit(base_hashes, loaded.source_dir if ranks.is_first else None)
        device = _place(loaded, settings, obstacle)
    return device, hashes.result()


def _place(loaded: LoadedModel, settings: OneshotSettings, obstacle: str | None) -> torch.device:
    """Return where the run takes place; move there what came from a folder, unless its weights wait in main memory. Changes the model."""
    device = resolve_device(settings.device)
    asked = settings.sequential_offload_device
    if not loaded.from_memory:
        if not weights_wait(loaded.model, device, obstacle, asked):
            loaded.model.to(device)
        return device
    own = next((parameter.device for parameter in loaded.model.parameters()), torch.device("cpu"))
    if settings.device == "auto" or (device.type == own.type and device.index in (None, own.index)):
        return own
    if own.type == "cpu" and asked == "cpu" and weights_wait(loaded.model, device, obstacle, asked):
        return device
    raise ModelError(
        f"oneshot: device={settings.device!r} was given for a model that is on {own}; move the model first, or leave device out, or have "
        "its layers brought there one by one (sequential_offload_device='cpu')"
    )


def _load(model: str | Path | nn.Module, settings: OneshotSettings, config_dir: Path | None) -> LoadedModel:
    resolve_device(settings.device)  # refused before anything is read
    return load_model(
        model,
        dtype=settings.dtype,
        device="cpu",  # mapped from its files; `_place` says what becomes of it
        trust_remote_code=settings.trust_remote_code_model,
        model_class=settings.model_class,
        config_folder=config_dir,
        revision=settings.model_revision,
    )


def _rare(settings: OneshotSettings, config_dir: Path | None) -> dict[str, Any]:
    """What decides the result and is seldom given."""
    digest = None if config_dir is None else hashlib.sha256((config_dir / "config.json").read_bytes()).hexdigest()
    named = {"config_name": digest, "tie_word_embeddings": settings.tie_word_embeddings}
    return {name: value for name, value in named.items() if value != OneshotSettings.model_fields[name].default}


def _note_data(state: State, share: float | None) -> None:
    """Note what forwards without a cache made of the data, samples that were left out, and modules that too few tokens reached."""
    if state.data is None:
        return
    state.report.notes += packing_notes(state.model, state.data.batches)
    if number := state.data.num_dropped:
        samples = "1 sample" if number == 1 else f"{number} samples"
        state.report.notes.append(f"{samples} without a token that counts (blank, or masked out) left out")
    if share is None:
        return
    least = share * state.data.num_tokens
    few = {name: one.num_tokens for name, one in state.report.modules.items() if one.num_tokens is not None and one.num_tokens < least}
    if few:
        shown = ", ".join(f"{name} ({few[name]})" for name in sorted(few, key=lambda name: (few[name], name))[:5])
        state.report.notes.append(f"{len(few)} modules were reached by fewer than {share:.3g} of all tokens, {least:,.0f}: {shown}")


def _result(
    loaded: LoadedModel,
    tokenizer: Any,
    report: Report,
    record: dict[str, Any],
    folder: Path | None,
    monitor: Monitor,
    resumed: str | None,
) -> OneshotResult:
    """Put the result together. Changes the model, which can be saved from now on."""
    attach_save(loaded.model, record)
    source = loaded.source_dir if tokenizer is None else None
    return OneshotResult(
        loaded.model,
        tokenizer or loaded.tokenizer,
        record,
        folder,
        source,
        report,
        monitor.seconds,
        resumed,
        tuple(monitor.phases),
        tuple(monitor.stages),
    )


def _check_changes(state: State, recipe: Recipe, base: Mapping[str, Content]) -> None:
    """Refuse a model of which something has changed that nobody was to change, or of which nothing has changed at all."""
    check_unclaimed(state.model, base, state.claims.keys() | state.touched)
    quantizes = any(isinstance(modifier, SchemeModifier) for modifier in recipe.modifiers)
    if not quantizes and contents(state.model) == base:
        names = ", ".join(modifier.label for modifier in recipe.modifiers)
        raise RecipeError(f"recipe: {names} left every tensor of the model as it was; give modifiers that change something in oneshot")


def _choose(recipe: Recipe, settings: OneshotSettings, sequential: SequentialSettings) -> str:
    """Choose the pipeline; refuse one without the data that it needs, and settings that it does not use."""
    check_dtypes_around(oneshot)
    dataset = settings.dataset
    if isinstance(dataset, DataLoader) and settings.batch_size is not None:
        raise DatasetError(f"batch_size: {settings.batch_size} was given, but a DataLoader has its own; set it there, or leave it out")
    share = settings.min_tokens_per_module
    if share is not None and not 0 < share <= 1:
        raise DatasetError(f"min_tokens_per_module: {share} is no share of the tokens; give more than 0 and at most 1")
    chosen = choose_pipeline(recipe.modifiers, settings.pipeline, sequential)
    if chosen != "data_free" and dataset is None:
        raise DatasetError(f"oneshot: no dataset was given, and the {chosen} pipeline needs one; pass dataset=")
    if dataset is None:
        _refuse_reading(settings)
    return chosen


def _initialize(session: Session, experts: UnfusedModel, calibrate_all: bool, place: RunPlace) -> dict[str, Content]:
    """Initialize the modifiers; return the contents of the model from before. Changes the model."""
    before = contents(session.state.model)
    torch.manual_seed(session.state.seed)
    session.initialize()
    _settle(experts, session, calibrate_all, place)
    return contents(session.state.model, before)  # with the experts that are fused again


def _settle(experts: UnfusedModel, session: Session, calibrate_all: bool, place: RunPlace) -> None:
    """Put back experts that no modifier changes, and refuse or note what is known now. Changes the model.

    That is NaN in the model, what readers of the checkpoint cannot do, and a disk without room for it.
    """
    state = session.state
    experts.keep(state.claims.keys() | state.touched)
    if not state.keep_originals:
        experts.forget()
    if calibrate_all and not experts.modules:
        state.report.notes.append("calibrate_all_experts: no module with experts is compressed, so there is none to show all tokens")
    elif calibrate_all:
        experts.calibrate_all()
    state.report.notes += [*experts.describe(), *check_values(state.model, state.claims.keys() | state.touched), *buffer_notes(state.model)]
    if rotated_modules(state.model):  # by runs before; what this one turns its modifiers tell
        state.report.notes += rotation_notes(state.model)
    to_disk = place.output_dir is not None
    parts = [part for part in session.modifiers if isinstance(part, SchemeModifier)]
    schemes = {name: scheme for part in parts for name, scheme in part.schemes.items()}
    kv, queries = [part.kv_format for part in parts if part.kv_format is not None], any(part.attention_patterns for part in parts)
    if to_disk:
        check_readable(schemes, state.model, kv[0] if kv else None)
        saved_state(state.model)
    if not place.may_be_done:
        turning = [part for part in session.modifiers if isinstance(part, RotatingModifier)]
        beside = sum(part.online_bytes(state.model) + part.added_bytes(state.model) for part in turning)
        beside += sum(part.kv_bytes(state.model, part.ignore) for part in parts)
        check_room(state.model, schemes, place.output_dir, place.run_dir, beside=beside)
    odd = [*module_notes(state.model), *dtype_notes(state.model)] if state.keep_originals else []
    for note in (*reading_notes(state.model, schemes, kv[0] if kv else None, queries=queries), *odd):
        state.report.notes.append(note)  # of a model that stays in memory, too: it may be saved later
        if to_disk:
            warnings.warn(note, UserWarning, stacklevel=4)


def _save(loaded: LoadedModel, tokenizer: Any, output_dir: str | Path, record: dict[str, Any], token: str | None) -> Path:
    schemes = {name: layer.scheme for name, layer in loaded.model.named_modules() if isinstance(layer, QuantizedLayer)}
    return save_checkpoint(
        loaded.model,
        output_dir,
        tokenizer=tokenizer or loaded.tokenizer,
        source_dir=loaded.source_dir if tokenizer is None else None,
        schemes=schemes,
        record=record,
        token=token,
    )


# What says how a dataset is read.
_READING = (
    *("num_calibration_samples", "max_seq_length", "batch_size", "text_column", "shuffle_calibration_samples", "concatenate_data"),
    *("min_tokens_per_module", *DataSettings.model_fields),
)


def _refuse_reading(settings: OneshotSettings) -> None:
    """Refuse what was given although nothing is read."""
    for name in _READING:
        value = getattr(settings, name)
        if value != OneshotSettings.model_fields[name].default:
            raise DatasetError(f"{name}: {value!r} was given without a dataset to read, and no modifier needs one; leave it out")


def _read(settings: OneshotSettings, loaded: LoadedModel, words: _Words, device: torch.device) -> CalibrationData:
    model, tokenizer = loaded.model, words.reader or loaded.tokenizer
    shuffle = settings.shuffle_calibration_samples
    chosen = DataSettings.of(settings)
    drawn = settings.seed if shuffle else None
    media = Media.of(model, partial(_processor, settings, loaded), settings.text_column)
    source = open_source(
        settings.dataset,
        chosen,
        batch_size=settings.batch_size,
        shuffle_seed=drawn,
        tokenizer=tokenizer,
        media=media,
        text_column=settings.text_column,
    )
    collated = isinstance(source, DataLoader) and source is not settings.dataset
    data = load_dataset_source(
        source,
        tokenizer=tokenizer,
        num_calibration_samples=settings.num_calibration_samples,
        max_seq_length=settings.max_seq_length,
        batch_size=None if collated else settings.batch_size,
        text_column=TEXT_COLUMN if collated else settings.text_column,
        shuffle=shuffle and not collated,
        seed=settings.seed,
        max_positions=max_positions(model),
        inputs=input_columns(model),
        concatenate=settings.concatenate_data,
        device=device,
    )
    check_batches(data, model)
    return data
