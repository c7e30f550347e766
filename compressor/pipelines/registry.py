"""Which pipeline a recipe needs, and running it: the strongest need of any modifier decides, unless the user overrides it upwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from compressor.data import CalibrationData
from compressor.errors import DatasetError, RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Modifier, Session
from compressor.pipelines import basic, data_free, sequential
from compressor.pipelines.journal import StageJournal
from compressor.pipelines.memory import bound_heap
from compressor.pipelines.settings import SequentialSettings
from compressor.progress import Progress

PIPELINES = ("data_free", "basic", "sequential")
NOT_BY_LAYERS = "no modifier looks at layers one after another"

_NEEDS: Mapping[CalibrationNeed, str] = MappingProxyType(
    {"none": "data_free", "own": "basic", "basic": "basic", "sequential": "sequential"}
)


def choose_pipeline(modifiers: Sequence[Modifier], override: str | None = None, settings: SequentialSettings | None = None) -> str:
    """Choose the pipeline for a recipe, and refuse choices that it has no use for.

    Args:
        modifiers: of the recipe.
        override: the user's choice; None takes the strongest need of all modifiers.
        settings: the user's choices about the sequential pipeline: targets that are named ask for it where data is needed anyway.

    Returns:
        One of PIPELINES. `sequential` gives data too, so it serves every need, and so does `basic`, with statistics from the
        uncompressed model.

    Raises:
        RecipeError: no such pipeline, or one without data for a modifier that calibrates.
        TargetError: settings for a pipeline that has no sequential targets, or passes where layers are not run one after another.
    """
    settings = settings or SequentialSettings()
    chosen = _chosen(modifiers, override, settings.targets)
    settings.refuse_without_use(chosen)
    if modifiers and pipeline_that_runs(chosen, modifiers) != chosen and settings.passes != "auto":
        raise TargetError(f"passes: {settings.passes!r} was given, but {NOT_BY_LAYERS}; leave it out")
    return chosen


def pipeline_that_runs(chosen: str, modifiers: Iterable[Modifier]) -> str:
    """Say which pipeline runs where one was chosen: layers are not run one after another where no modifier looks at them so.

    Args:
        chosen: one of PIPELINES.
        modifiers: of the run.

    Returns:
        One of PIPELINES; `basic` in the place of `sequential` where that is so.
    """
    return "basic" if chosen == "sequential" and not any(_looks_at_stages(modifier) for modifier in modifiers) else chosen


def _chosen(modifiers: Sequence[Modifier], override: str | None, targets: Sequence[str] | None) -> str:
    if unknown := [one for one in modifiers if one.calibration_need not in _NEEDS]:
        needed = unknown[0].calibration_need
        raise RecipeError(f"{unknown[0].label}: calibration is {needed!r}, which does not exist; choose one of {', '.join(_NEEDS)}")
    strongest = max((_NEEDS[modifier.calibration_need] for modifier in modifiers), key=PIPELINES.index, default="data_free")
    if override is None:
        return "sequential" if targets is not None and strongest == "basic" else strongest
    if override not in PIPELINES:
        raise RecipeError(f"pipeline: {override!r} does not exist; choose one of {', '.join(PIPELINES)}")
    if override == "data_free" and strongest != "data_free":
        needy = ", ".join(modifier.label for modifier in modifiers if modifier.calibration_need != "none")
        raise RecipeError(f"pipeline: data_free feeds no data, but {needy} must calibrate; choose {strongest} or leave it out")
    return override


def run_pipeline(
    name: str,
    session: Session,
    data: CalibrationData | None,
    *,
    progress: Progress,
    settings: SequentialSettings | None = None,
    journal: StageJournal | None = None,
) -> None:
    """Run a pipeline by its name: from CALIBRATION_START to CALIBRATION_END.

    Args:
        name: one of PIPELINES.
        session: initialized; its model changes.
        data: what flows through the model; data_free takes None.
        progress: where bars are shown.
        settings: targets, engine and propagation of `sequential`; None takes the defaults, the other pipelines take nothing else.
        journal: keeps finished stages; None keeps nothing. The data_free pipeline, which has no stages, does not use it.

    Raises:
        DatasetError: no data where some is needed.
        TargetError: settings for a pipeline that has no sequential targets.
        RecipeError: no such pipeline.
    """
    settings = settings or SequentialSettings()
    choose_pipeline((), name, settings)
    # Activations and the layers of a large model come and go in blocks: the heap must neither keep nor lose them all.
    bound_heap()
    if name == "data_free":
        data_free.run(session, progress=progress)
    elif data is None:
        raise DatasetError(f"pipeline: {name} was chosen without calibration data; give a dataset")
    elif pipeline_that_runs(name, session.modifiers) == "basic":
        if name != "basic":
            session.state.report.notes.append(f"{NOT_BY_LAYERS}, so they were not run so")
        basic.run(session, data, progress=progress, journal=journal)
    else:
        sequential.run(session, data, progress=progress, settings=settings, journal=journal)


def _looks_at_stages(modifier: Modifier) -> bool:
    acts = type(modifier).on_sequential_epoch_end is not Modifier.on_sequential_epoch_end
    return acts or modifier.calibration_need not in ("none", "own")
