"""The path of a conversion: a folder and a scheme go in, a compressed checkpoint comes out, and no weight is in memory as a whole.

What `oneshot` gives for the same recipe decides what every byte must be. So the model is loaded, taken apart, matched and saved by the same
code, but without values; what is left are tensors to be read, rounded and written to places that are known.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compressor.conversion.assign import Origins, place_empty_layers, units_of
from compressor.conversion.partial import PartialRun, remove_leftover
from compressor.conversion.recipes import recipe_of
from compressor.conversion.units import Done, Kind, Unit
from compressor.conversion.workers import run_units
from compressor.errors import AlreadyDoneError, NumericsError, UserInputError
from compressor.lifecycle import ModuleRecord, Report, Session, State
from compressor.model.checkpoints.save import as_pretrained, save_empty, write_record
from compressor.model.class_readers import check_readable, reading_notes
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.folder import read_json, some
from compressor.model.loading.empty import EmptyModel, load_empty
from compressor.model.loading.load import resolve_device
from compressor.model.targets import call_also
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.schemes.targets import lost_notes, scheme_label
from compressor.monitor import Lap, Monitor
from compressor.numerics import QuantizationScheme
from compressor.pipelines import SequentialSettings
from compressor.pipelines.journal import RunPlace, base_hashes, check_places, model_identity, run_fingerprint, run_record
from compressor.pipelines.journal.fingerprint import Fingerprint, versions
from compressor.progress import Progress, progress_of
from compressor.recipe import Recipe
from compressor.settings.options import from_settings
from compressor.settings.verbs import ConvertSettings


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion gives back.

    Attributes:
        output_dir: the checkpoint.
        report: errors by module, and notes.
        record: what `compression.json` holds beside the digests of the tensors.
        seconds: wall time by phase (load, convert, save).
        resumed: where it went on, such as "resumed after 120 of 290 parts"; None where it began at the beginning.
        phases: time and memory by phase, of this process.
    """

    output_dir: Path
    report: Report
    record: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: str | None = None
    phases: tuple[Lap, ...] = ()


@from_settings(ConvertSettings)
def model_free(model: str | Path, settings: ConvertSettings) -> ConvertResult:
    """Quantize the weights of a model in its files, without loading it and without data: the checkpoint that `oneshot` would write.

    Args:
        model: folder of a transformers checkpoint, or its name on the Hugging Face hub (`owner/name`, `owner/name@revision`). One whose
            weights are fp8 in blocks is read as floats.
        settings: the choices of the conversion.

    Returns:
        The folder, with the report.

    Raises:
        UserInputError: model, scheme or output folder cannot be used, or the scheme needs data; nothing was changed.
        NumericsError: NaN or infinity in a weight.
        CheckpointError: the disk is full or fails, or a worker was killed; finished tensors are kept.
        AlreadyDoneError: `resume` of a conversion whose checkpoint is there already.
    """
    if not isinstance(model, str | Path):
        raise UserInputError(f"model: a {type(model).__name__} in memory was given, and only files are converted; use oneshot")
    bars, monitor = progress_of(settings.progress), Monitor()
    recipe, modifier = recipe_of(settings)
    place = check_places(settings.output_dir, None, resume=settings.resume, source=model)
    assert place.output_dir is not None and place.run_dir is not None
    device = resolve_device(settings.device)
    empty = load_empty(
        model,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code_model,
        model_class=settings.model_class,
        revision=settings.model_revision,
    )
    run = _Conversion(empty, recipe, settings, device)
    if place.may_be_done:
        run.refuse_done(place)
    work = _prepare(empty, modifier, device)
    monitor.end_phase("load")
    with PartialRun(place.run_dir, run.identity(), resume=settings.resume) as partial:
        with partial.files() as folder:
            _write_empty(folder, empty, work, settings)
        units = units_of(partial.checkpoint, work.origins, work.schemes, work.weights)
        done = partial.open(units, place.output_dir)
        resumed = f"resumed after {len(done)} of {len(units)} parts" if done else None
        _fill(partial, units, done, work, device, settings.workers, bars)
        monitor.end_phase("convert")
        report = _report(work, units, done)
        record = run.record(report, {one.name: one.sha256 for one in done.values() if one.sha256 is not None})
        described = read_json(partial.checkpoint / "config.json").get("quantization_config")
        digests = {name: digest for one in done.values() for name, digest in one.digests.items()}
        write_record(partial.checkpoint, record, described, digests)
        partial.publish(place.output_dir)
        monitor.end_phase("save")
    return ConvertResult(place.output_dir, report, record, monitor.seconds, resumed, tuple(monitor.phases))


@dataclass(frozen=True)
class _Work:
    """What the recipe comes to on the model, which has empty quantized layers by now."""

    origins: Origins
    schemes: Mapping[str, QuantizationScheme]
    weights: Mapping[str, torch.Tensor]
    notes: Sequence[str]
    reader_notes: Sequence[str]


def _prepare(empty: EmptyModel, modifier: QuantizationModifier, device: torch.device) -> _Work:
    """Match the targets, and refuse or note what `oneshot` would. Changes the model."""
    model = empty.loaded.model
    origins = Origins(empty)
    fp8 = [f"{len(empty.scales)} weights of the base are fp8 in blocks, and were read as floats"] if empty.scales else []
    state = State(model, device, report=Report(notes=[*fp8, *empty.loaded.notes]))
    with unfused_experts(model, hold=False) as experts:
        for name, module in model.named_modules(remove_duplicate=False):
            held = module._parameters.get("weight")
            stored = None if held is None else origins.file_name(held, name)
            if stored is not None and stored.endswith(".weight"):
                call_also(module, stored.removesuffix(".weight"))
        with Session(state, [modifier]) as session:
            session.initialize()
            schemes = modifier.schemes
            session.abort()
        experts.keep(schemes)
        experts.forget()
        check_readable(schemes, model)
        readers = reading_notes(model, schemes)
        for note in readers:
            warnings.warn(note, UserWarning, stacklevel=4)
        notes = [*state.report.notes, *experts.describe()]
        return _Work(origins, schemes, place_empty_layers(model, schemes), notes, readers)


def _write_empty(folder: Path, empty: EmptyModel, work: _Work, settings: ConvertSettings) -> None:
    """Write all files of the result but for the values of its tensors."""
    loaded, model = empty.loaded, as_pretrained(empty.loaded.model)
    assert loaded.source_dir is not None and model is not None
    save_empty(
        folder,
        model,
        tokenizer=loaded.tokenizer,
        source_dir=loaded.source_dir,
        schemes=work.schemes,
        max_shard_bytes=settings.max_shard_size,
    )


def _fill(
    partial: PartialRun,
    units: Sequence[Unit],
    done: dict[tuple[Kind, str], Done],
    work: _Work,
    device: torch.device,
    workers: int,
    bars: Progress,
) -> None:
    """Do what is left to do, and add it to what is done."""
    folder = work.origins.empty.loaded.source_dir
    assert folder is not None
    efforts = {(unit.kind, unit.name): _effort(unit) for unit in units}
    left = [unit for unit in units if (unit.kind, unit.name) not in done]
    ranges = {one.name: one.extremes for one in done.values() if one.extremes is not None}
    with bars.task("convert", total=sum(efforts.values())) as task:
        task.advance(sum(efforts[key] for key in done))
        for one in run_units(left, ranges, folder, partial.checkpoint, device, workers):
            _check_copied(one, work.schemes)
            partial.finish(one)
            done[one.kind, one.name] = one
            task.advance(efforts[one.kind, one.name], one.name)


class _Conversion:
    """What identifies one conversion: at once, for its run folder, and with the hashes of all files, for its record."""

    def __init__(self, empty: EmptyModel, recipe: Recipe, settings: ConvertSettings, device: torch.device) -> None:
        self._empty, self._recipe, self._settings, self._device = empty, recipe, settings, device
        self._choices = {
            "pipeline": "data_free",
            "dtype": settings.dtype,
            "model_class": settings.class_name,
            "calibrate_all_experts": False,
        }

    def identity(self) -> Fingerprint:
        """Sizes and times stand for contents, so that nothing is read."""
        folder = self._empty.loaded.source_dir
        assert folder is not None
        files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.iterdir()) if path.is_file()}
        chosen = {**self._choices, "max_shard_size": self._settings.max_shard_size}
        return {
            "kind": "convert",
            "files": {name: list(map(str, facts)) for name, facts in files.items()},
            "recipe": self._recipe.dump(),
            "settings": {name: str(value) for name, value in chosen.items()},
            "device": self._device.type,
            "versions": versions(),
        }

    def _fingerprint(self, base: Mapping[str, str]) -> Fingerprint:
        identity = model_identity(self._empty.loaded, base, None)
        return run_fingerprint(identity, self._recipe.dump(), None, 0, self._choices, SequentialSettings(), self._device)

    def refuse_done(self, place: RunPlace) -> None:
        try:
            place.refuse_done(self._fingerprint(base_hashes(self._empty.loaded.source_dir)))
        except AlreadyDoneError:
            assert place.run_dir is not None
            remove_leftover(place.run_dir)
            raise

    def record(self, report: Report, hashes: Mapping[str, str]) -> dict[str, Any]:
        run = self._fingerprint(hashes)
        return self._empty.loaded.source_record | run_record(self._recipe.dump(), hashes, None, report, self._choices, 0, run)


def _effort(unit: Unit) -> int:
    return 1 + unit.num_bytes // 1_000_000


def _check_copied(done: Done, schemes: Mapping[str, QuantizationScheme]) -> None:
    owner = done.name.rpartition(".")[0]
    if done.kind == "copy" and not done.is_finite and owner in schemes:
        raise NumericsError(f"{done.name}: holds NaN or infinity, beside a weight that is quantized; repair the model, or ignore {owner}")


def _report(work: _Work, units: Sequence[Unit], done: Mapping[tuple[Kind, str], Done]) -> Report:
    report = Report(notes=list(work.notes))
    for unit in units:
        found = done[unit.kind, unit.name]
        if unit.kind == "round" and found.errors is not None:
            assert unit.scheme is not None and unit.scheme.weights is not None
            error = found.errors[0] / found.errors[1] if found.errors[1] else 0.0
            label = scheme_label(unit.scheme.weights)
            report.modules[unit.name] = ModuleRecord(unit.name, "QuantizationModifier", label, error, None, {})
    spoilt = [one.name for one in done.values() if not one.is_finite]
    if spoilt:
        report.notes.append(f"{len(spoilt)} parameters that stay as they are hold NaN or infinity ({some(spoilt)})")
    report.notes += [*work.reader_notes, *lost_notes(report, report.modules)]
    return report
