"""THE main path of training: a model, data and, if wanted, a recipe go in; a trained, compressed checkpoint comes out.

Everything that can be refused is refused before the first step. A run that stops for any reason leaves no hook on the model and no
half-written folder, and goes on from its last state to the very bytes of a run that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from compressor.arguments import check_arguments, check_dtypes_around, plain_number
from compressor.errors import UserInputError
from compressor.model.loading.load import resolve_tokenizer
from compressor.progress import Progress
from compressor.recipe import load_recipe
from compressor.training.trainer import Mode
from compressor.training_run.phases import TrainingRun, TrainResult
from compressor.training_run.place import check_place
from compressor.training_run.settings import TrainSettings


def train(
    model: str | Path | nn.Module,
    *,
    dataset: Any,
    recipe: Any = None,
    output_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    recipe_args: Mapping[str, Any] | Sequence[str] | None = None,
    tokenizer: Any = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int = 8,
    max_seq_length: int | None = None,
    text_column: str = "text",
    shuffle: bool = True,
    learning_rate: float = 2e-5,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    accumulate: int = 1,
    clip_norm: float = 1.0,
    autocast: str = "off",
    ema: Sequence[float] = (),
    ema_warmup: bool = False,
    save_ema: float | None = None,
    eval_dataset: Any = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    mode: Mode = "replay",
    check_every: int = 1,
    audit_every: int | None = None,
    device: str = "auto",
    dtype: str = "float32",
    save_dtype: str = "auto",
    model_class: str | None = None,
    trust_remote_code_model: bool = False,
    seed: int = 0,
    progress: Progress | bool = False,
) -> TrainResult:
    """Train a causal language model on the next token, with modifiers that prune or quantize it meanwhile.

    Args:
        model: folder of a transformers checkpoint; or such a model in memory, which is changed in place.
        dataset: training data, as for `oneshot` (no DataLoader); its tokens are joined and cut into blocks of one length.
        recipe: modifiers, as for `oneshot`; None trains without any.
        output_dir: folder of the checkpoint; None keeps the result in memory.
        run_dir: folder that keeps the last two states; by default beside the output folder.
        resume: go on from the newest state of an earlier run of the same settings.
        recipe_args: values for `${name}` in the recipe: a mapping, or texts `name=value`.
        tokenizer: in place of that of the model's folder; or the path of its folder.
        steps: length of the run; `start`, `end` and `update` in the recipe then count steps.
        epochs: length of the run in passes over the data, in place of `steps`; the recipe then counts epochs. By default 1.
        batch_size: blocks in a micro-batch.
        max_seq_length: tokens in a block; by default as many as the model takes, at most 2048.
        text_column: column of the dataset that holds the text.
        shuffle: draw the order of the blocks anew for each epoch, by `seed`.
        learning_rate: the peak; a cosine leads from it to 0.
        warmup_steps: steps that lead up to it.
        weight_decay: decoupled decay of matrices; norms and biases have none.
        accumulate: micro-batches in a step.
        clip_norm: largest norm of all gradients together; 0 clips nothing.
        autocast: `bf16` runs the forward under torch.autocast; `off` in the weights' own dtype.
        ema: decays of moving averages of the weights.
        ema_warmup: begin with smaller decays, so that the first weights are soon forgotten.
        save_ema: the decay whose averages are saved in place of the weights.
        eval_dataset: data to evaluate on, before and after the run.
        eval_every: evaluate after so many steps, too.
        save_every: keep a state after so many steps; by default a tenth of the run; 0: none.
        mode: `replay` captures the step once and repeats it, `eager` runs it as it is, `capture` records every step; all give the same
            bits.
        check_every: the guards are checked at every so manieth replay.
        audit_every: a step is run eagerly, too, and compared, at every so manieth step; 0: never; None: 1, 2, 4, ... 64 steps after a
            proof, then in 3 % of the time. What the guards see is refused at once; anything else that Python reads is found by the
            audit, if it stays changed, at most 1,000 steps later.
        device: `auto`, `cpu`, `cuda`, `cuda:1`; a model in memory stays where it is.
        dtype: of the weights while they are trained; a model in memory keeps its own, so that another than float32 is refused for one.
        save_dtype: of the weights in the checkpoint; `auto`: as in the checkpoint that was loaded.
        model_class: transformers class to load with; by default AutoModelForCausalLM.
        trust_remote_code_model: run Python code that lies in the model's folder.
        seed: of everything random.
        progress: show progress bars (True), or an object that shows them.

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
    check_arguments(train, locals())
    check_dtypes_around(train)
    settings = TrainSettings(
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        accumulate=accumulate,
        clip_norm=clip_norm,
        autocast=autocast,
        ema=tuple(ema),
        ema_warmup=ema_warmup,
        save_ema=save_ema,
        shuffle=shuffle,
        eval_every=eval_every,
        dtype=dtype,
        save_dtype=save_dtype,
        mode=mode,
        check_every=check_every,
        audit_every=audit_every,
        save_every=save_every,
    )
    if eval_every is not None and eval_dataset is None:
        raise UserInputError(f"eval_every: {eval_every} was given without eval_dataset; give data to evaluate on, or leave it out")
    if recipe is None and recipe_args:
        names = ", ".join(text.partition("=")[0] for text in recipe_args)
        raise UserInputError(f"recipe_args: {names} were given without a recipe; give one, or leave them out")
    place = check_place(output_dir, run_dir, resume=resume, source=None if isinstance(model, nn.Module) else model)
    parsed = None if recipe is None else load_recipe(recipe, args=recipe_args, run_type="train")
    text, modifiers = (None, ()) if parsed is None else (parsed.dump(), tuple(parsed.modifiers))
    run = TrainingRun(settings, place, text, modifiers, plain_number(seed), progress)
    run.load(model, resolve_tokenizer(tokenizer, trust_remote_code_model), device, model_class, trust_remote_code_model)
    run.read(dataset, eval_dataset, plain_number(max_seq_length), text_column)
    return run.train()
