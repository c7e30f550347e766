"""THE main path of training: a model, data and, if wanted, a recipe go in; a trained, compressed checkpoint comes out.

Everything that can be refused is refused before the first step. A run that stops for any reason leaves no hook on the model and no
half-written folder, and goes on from its last state to the very bytes of a run that never stopped.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from compressor.model.evaluation import check_dtypes_around, plain_gradients
from compressor.model.loading.words import resolve_tokenizer
from compressor.numerics.precision import widened_products
from compressor.recipe import load_recipe
from compressor.settings.options import from_settings
from compressor.settings.verbs import TrainSettings
from compressor.tracking import tracked
from compressor.training_run.phases import TrainingRun, TrainResult
from compressor.training_run.place import check_place


@from_settings(TrainSettings)
@widened_products()
@plain_gradients()
def train(model: str | Path | nn.Module, settings: TrainSettings) -> TrainResult:
    """Train a causal language model on the next token, with modifiers that prune or quantize it meanwhile.

    Args:
        model: folder of a transformers checkpoint, or its name on the hub; or such a model in memory, which is changed in place.
        settings: the choices of the run.

    Returns:
        The trained model with its report, and the folder if one was written.

    Raises:
        UserInputError: something given cannot be used; nothing was changed.
        NumericsError: a loss or a weight is NaN or infinite.
        ReplayError: the step cannot be captured or replayed.
        OutOfMemoryError: memory ran out.
        CheckpointError: checkpoint or state could not be written; the last states are kept.
        AlreadyDoneError: `resume` of a run whose checkpoint is there already.
        KeyboardInterrupt: ctrl-C; the state after the last whole step is kept, and a note says how to go on.
    """
    check_dtypes_around(train)
    source = None if isinstance(model, nn.Module) else model
    place = check_place(settings.output_dir, settings.run_dir, resume=settings.resume, source=source)
    parsed = None if settings.recipe is None else load_recipe(settings.recipe, args=settings.recipe_args, run_type="train")
    text, modifiers = (None, ()) if parsed is None else (parsed.dump(), tuple(parsed.modifiers))
    tokenizer = resolve_tokenizer(settings.tokenizer, settings.trust_remote_code_model)
    run = TrainingRun(settings, place, text, modifiers, settings.seed, settings.progress)
    run.load(model, tokenizer, settings.device, settings.model_class, settings.trust_remote_code_model, settings.model_revision)
    run.read(settings.dataset, settings.eval_dataset, settings.max_seq_length, settings.text_column)
    with tracked(settings.trackers, {"model": str(source or type(model).__name__), "recipe": text or "none"}) as run.monitor.trackers:
        result = run.train()
    result.report.notes += run.monitor.trackers.notes
    return result
