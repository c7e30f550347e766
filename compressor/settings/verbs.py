"""The settings of `oneshot`, `convert`, `plan`, `trace` and `train`.

Parts that several share are classes of their own; nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from compressor.console import count, positive, whole
from compressor.errors import UserInputError
from compressor.settings.kinds import (
    RANKS,
    TEXT,
    Device,
    Dtype,
    Flag,
    Memory,
    ModelClass,
    NamedValues,
    Number,
    Numbers,
    PathLike,
    ProgressLike,
    Ranks,
    RecipeArgs,
    RowFunction,
    SomeTexts,
    Text,
    TextOrTexts,
    Texts,
    Tokenizer,
    Whole,
)
from compressor.settings.options import Option, Settings
from compressor.tracking import TRACKERS, check_trackers

DTYPES = ("auto", "bfloat16", "float16", "float32")
Engine = Annotated[Literal["auto", "graph", "suspend"], TEXT]
Verify = Annotated[Literal["off", "first", "all"], TEXT]
Passes = Annotated[Literal["auto", "one", "two"], TEXT]
OffloadDevice = Annotated[Literal["cpu", "none"], TEXT]
Modality = Annotated[Literal["text", "vision", "audio"], TEXT]
Mode = Annotated[Literal["replay", "eager", "capture"], TEXT]


def _key_value(text: str) -> str:
    key, separator, _ = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


class LoadSettings(Settings):
    """How a model is loaded."""

    model_revision: Annotated[Text | None, Option(metavar="R")] = None
    """Branch, tag or commit of a model that is named by its name on the Hugging Face hub; by default main."""
    model_class: Annotated[ModelClass | None, Option(metavar="C")] = None
    """Transformers class to load with; by default AutoModelForCausalLM."""
    trust_remote_code_model: Annotated[Flag, Option("--trust-remote-code")] = False
    """Run Python code that lies in the model's folder."""

    @property
    def class_name(self) -> str | None:
        """Name of the class to load with, as records have it."""
        given: object = self.model_class
        return given.__name__ if isinstance(given, type) else self.model_class


class RecipeSettings(Settings):
    """What a recipe is made of."""

    recipe_args: Annotated[RecipeArgs | None, Option("--recipe-arg", metavar="NAME=VALUE", read=_key_value, repeats=True)] = None
    """Value for `${NAME}` in the recipe; a text, number or truth value; in Python a mapping, or texts `name=value`."""


class TracingSettings(Settings):
    """How a model is followed layer by layer."""

    sequential_targets: Annotated[SomeTexts | None, Option(metavar="P", many=True)] = None
    """Class names or patterns of the layers that are calibrated one after another; by default inferred."""
    engine: Annotated[Engine, Option()] = "auto"
    """How layers are followed: `graph`, `suspend`, or `auto`, the graph where it can be had."""


class RecordSettings(Settings):
    """How the graph engine records."""

    max_variants: Annotated[Whole, Option(metavar="N", read=positive)] = 8
    """Recorded graphs at most, for batches that take other ways through the model's Python."""
    leaves: Annotated[Texts, Option("--leaf", metavar="MODULE:FUNCTION", repeats=True)] = ()
    """Function that is recorded as one node; `package.module:qualified.name`."""
    verify: Annotated[Verify, Option()] = "first"
    """Batches on which the plan is held against the plain model: none, the first few (all where these are seen to be no proof for the
    others), or all; what they show is right or refused."""


class PassSettings(Settings):
    """How often a layer runs for its calibration."""

    passes: Annotated[Passes, Option()] = "auto"
    """`two`: each layer runs before and after its compression; `one`: what is inside is compressed on the way; `auto`: one where it can be
    had and no sequential targets are named."""


class CostSettings(RecipeSettings, TracingSettings, PassSettings, LoadSettings):
    """The choices on which the cost of a run depends."""

    recipe: Annotated[Any, Option(metavar="R")]
    """YAML or JSON text or file; in Python also a dict, a modifier or a list of modifiers."""
    mode: Annotated[Text | None, Option(choices=("fast", "default", "best"))] = None
    """How much time accuracy is worth, for the modifiers that have modes, in place of what the recipe says."""
    num_calibration_samples: Annotated[Whole, Option(metavar="N", read=positive)] = 512
    """Sequences taken from the dataset; of a DataLoader whole batches, up to that number or beyond."""
    max_seq_length: Annotated[Whole | None, Option(metavar="T", read=positive)] = None
    """Tokens kept of each sequence; by default what the model takes, at most 2048."""
    batch_size: Annotated[Whole | None, Option(metavar="B", read=positive)] = None
    """Sequences in one forward; by default equally long ones together, up to 1024 tokens on a CPU and 8192 on a GPU."""
    pipeline: Annotated[Text | None, Option(choices=("data_free", "basic", "sequential"))] = None
    """`data_free`, `basic` or `sequential`; by default what the modifiers need, or what sequential targets that are named ask for."""
    activation_memory: Annotated[Memory | None, Option(metavar="SIZE")] = None
    """Main memory for what is live between layers, such as `4GB`; by default three quarters of what is free."""
    offload_dir: Annotated[PathLike | None, Option(metavar="DIR")] = None
    """Folder for activations that fit into no memory that they may take; without one that is an error."""
    device: Annotated[Device, Option()] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`; a model in memory stays where it is."""
    dtype: Annotated[Dtype, Option(choices=DTYPES)] = "auto"
    """Dtype to load in; `auto` keeps the checkpoint's own, and a model in memory keeps its own."""


class PlanSettings(CostSettings):
    """The choices of a run that is planned, and on how many processes."""

    ranks: Annotated[Ranks, Option(choices=RANKS, read=int)] = 1
    """Processes that torchrun would start, or workers of `convert`; all numbers are then those of one of them."""
    device_memory: Annotated[Memory | None, Option(metavar="SIZE")] = None
    """Memory of the GPU that the run would have, such as `80GB`: say what of the run fits into it, and where it breaks."""


class DataSettings(Settings):
    """Which part of a dataset is read, and what is done to its rows before they become tokens."""

    split: Annotated[Text | None, Option(metavar="S")] = None
    """Split of a dataset that has several, or a part of one: `train`, `train[:512]`, `train[:5%]`."""
    dataset_config_name: Annotated[Text | None, Option(metavar="NAME")] = None
    """Configuration of a dataset that `datasets.load_dataset` loads by its name or folder."""
    streaming: Annotated[Flag, Option()] = False
    """Read such a dataset, or a .csv or .json file, as it arrives, without a copy on the disk; lines of other files are always read so."""
    raw_kwargs: NamedValues | None = None
    """Further arguments of `datasets.load_dataset`."""
    preprocessing_func: Annotated[RowFunction | None, Option(metavar="FILE:FUNCTION")] = None
    """Function from a row (a dict) to a row, such as one that applies a chat template; or `path/to/file.py:function`."""
    remove_columns: Annotated[Texts, Option("--remove-column", metavar="NAME", repeats=True)] = ()
    """Column that is not looked at, such as one that the model would take as an input."""
    use_loss_mask: Annotated[Flag, Option("--no-loss-mask", negates=True, help="count tokens that a `loss_mask` takes out, too")] = True
    """False counts tokens that a column `loss_mask` takes out of the statistics, too."""
    data_collator: RowFunction | None = None
    """Function from a list of rows to a batch (a dict of tensors), which the model gets as it is: images, audio, masks."""


class TrackSettings(Settings):
    """Where the numbers of a run go beside the terminal."""

    report_to: Annotated[TextOrTexts, Option(choices=(*TRACKERS, "none"), repeats=True)] = ()
    """Experiment tracker that gets the numbers of the run: `tensorboard`, `wandb` or `mlflow`; in Python also a list of them."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers."""
        given = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(name for name in given if name != "none")

    @model_validator(mode="after")
    def _check_trackers(self) -> TrackSettings:
        check_trackers(self.trackers)
        return self


class OneshotSettings(CostSettings, RecordSettings, DataSettings, TrackSettings):
    """The choices of one run of `oneshot`."""

    dataset: Annotated[Any, Option(metavar="D")] = None
    """Calibration data: a .jsonl, .json, .csv, .txt, .parquet or .safetensors file, the folder of a dataset, its name on the Hugging
    Face hub (owner/name), or that of a usual calibration set, such as ultrachat-200k, wikitext or open-platypus; in Python also a
    Dataset, a list of texts, token tensors or a DataLoader. Needed by modifiers that calibrate."""
    output_dir: Annotated[PathLike | None, Option(metavar="O", required=True)] = None
    """Folder of the checkpoint; must not exist or be empty. None (in Python) keeps the result in memory, to be saved later by
    `result.save` or `model.save_pretrained`."""
    run_dir: Annotated[PathLike | None, Option(metavar="R")] = None
    """Folder that keeps finished stages until the run ends, so that it can be resumed; by default `<output_dir>.partial-run`."""
    resume: Annotated[Flag, Option()] = False
    """Go on where an earlier run with the same arguments stopped; the result is bitwise that of a run that never stopped."""
    tokenizer: Tokenizer | None = None
    """For texts, or the path of its folder, or its name on the hub; by default the one in the folder that the model comes from."""
    processor: Tokenizer | None = None
    """What makes inputs of images, video and audio, is saved beside the weights, and has the tokenizer for texts: a processor of
    transformers, or the path of its folder, or its name on the hub; by default the one in the model's folder."""
    config_name: Annotated[PathLike | None, Option(metavar="DIR")] = None
    """Folder with the config.json to load the model by, or its name on the hub, in place of its own."""
    tie_word_embeddings: Annotated[Flag, Option("--untie-word-embeddings", negates=True, help="give the head weights of its own")] = True
    """False gives an output layer that shares the weights of the embeddings weights of its own before anything is compressed."""
    stage: Annotated[Text | None, Option(metavar="NAME")] = None
    """Stage of the recipe to run; by default all."""
    concatenate_data: Annotated[Flag, Option()] = False
    """Join the samples and cut them into sequences of `max_seq_length` tokens."""
    min_tokens_per_module: Annotated[Number | None, Option(metavar="SHARE", read=float)] = None
    """Note modules that fewer than this share of all tokens reached, such as experts."""
    text_column: Annotated[Text, Option(metavar="NAME")] = "text"
    """Column of the dataset that holds the text."""
    shuffle_calibration_samples: Annotated[Flag, Option("--shuffle")] = False
    """Choose the calibration sequences at random, by the seed, not the first ones."""
    calibrate_all_experts: Annotated[Flag, Option()] = False
    """Every expert of a mixture-of-experts layer learns from all tokens; what the layer puts out stays that of the routed tokens."""
    propagate_error: Annotated[Flag, Option("--no-propagate-error", negates=True, help="calibrate on the flow before compression")] = True
    """False calibrates each layer on what the layers before it gave before they were compressed."""
    activation_device_memory: Annotated[Memory | None, Option(metavar="SIZE")] = None
    """GPU memory for activations, filled first; by default two fifths of what is free, or a tenth where layers come there one by one."""
    sequential_offload_device: Annotated[OffloadDevice | None, Option()] = None
    """Where weights wait for their layer's turn on a GPU: `cpu`, main memory, or `none`: all are moved first; by default `cpu` where they
    would take more than half of what is free on it."""
    seed: Annotated[Whole, Option(metavar="S", read=whole)] = 0
    """Seed of everything random."""
    progress: Annotated[ProgressLike, Option("--quiet", negates=True, help="show no progress bars")] = False
    """Show progress bars (True), or an object that shows them."""


class ConvertSettings(LoadSettings):
    """The choices of one `convert`."""

    output_dir: Annotated[PathLike, Option(metavar="O")]
    """Folder of the checkpoint; must not exist or be empty."""
    scheme: Annotated[Any, Option(metavar="S")] = None
    """Scheme that needs no data, such as FP8_DYNAMIC, FP8_BLOCK, W4A16 or NVFP4A16; in Python also a mapping of schemes to targets, or a
    QuantizationScheme."""
    targets: Annotated[TextOrTexts, Option(metavar="P", many=True)] = ("Linear",)
    """Modules that get the scheme: class names, dotted names or `re:` patterns; by default all linear layers."""
    ignore: Annotated[TextOrTexts, Option(metavar="P", many=True)] = ()
    """Modules that stay as they are."""
    recipe: Annotated[Any, Option(metavar="R")] = None
    """Recipe of one QuantizationModifier, in place of scheme, targets and ignore."""
    workers: Annotated[Whole, Option(metavar="N", read=positive)] = 1
    """Processes that share the work; the bytes do not depend on it."""
    max_shard_size: Annotated[Memory, Option(metavar="SIZE")] = "5GB"
    """Size of a weight file at most."""
    resume: Annotated[Flag, Option()] = False
    """Go on where an earlier conversion with the same arguments stopped; the result is bitwise that of one that never stopped."""
    device: Annotated[Device, Option()] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`: where weights are rounded."""
    dtype: Annotated[Dtype, Option(choices=DTYPES)] = "auto"
    """Dtype of the model; `auto` keeps the checkpoint's own."""
    progress: Annotated[ProgressLike, Option("--quiet", negates=True, help="show no progress bars")] = False
    """Show progress bars (True), or an object that shows them."""

    @model_validator(mode="after")
    def _check_together(self) -> ConvertSettings:
        if self.workers < 1:
            raise UserInputError(f"workers: {self.workers} was given, and it must be at least 1; correct it")
        if self.workers > (most := max(16, 4 * (os.cpu_count() or 1))):
            raise UserInputError(f"workers: {self.workers} processes were asked for, more than help on this machine; give at most {most}")
        if (self.scheme is None) == (self.recipe is None):
            given = "neither scheme nor recipe was" if self.scheme is None else "both scheme and recipe were"
            raise UserInputError(f"scheme: {given} given; give one of them")
        for name in ("targets", "ignore"):
            if self.recipe is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise UserInputError(f"{name}: {getattr(self, name)!r} was given beside a recipe, which says it; leave one out")
        return self


class TraceSettings(TracingSettings, RecordSettings, LoadSettings):
    """The choices of one `trace`."""

    model_class: Annotated[ModelClass | None, Option(metavar="C")] = None
    """Transformers class; by default the one that config.json names."""
    ignore: Annotated[Texts, Option(metavar="P", many=True)] = ()
    """Modules that stay as they are: layers inside them are no targets, and the picture shows them as one box."""
    modality: Annotated[Modality | None, Option()] = None
    """What the random batches hold; by default what the model reads first."""
    dataset: Annotated[Any, Option(metavar="D")] = None
    """Real inputs: texts or token ids, or a .safetensors file whose arrays have the names of the forward's arguments."""
    targets_per_subgraph: Annotated[Whole, Option(metavar="N", read=positive)] = 1
    """Layers that share a subgraph; more than one needs the graph engine."""


class MappingsSettings(LoadSettings):
    """The choices of one `mappings`."""

    model_class: Annotated[ModelClass | None, Option(metavar="C")] = None
    """Transformers class; by default the one that config.json names."""
    modality: Annotated[Modality | None, Option()] = None
    """What the random batches hold; by default what the model reads first."""


_MAX_EPOCHS, _MAX_STEPS = 1_000_000, 1_000_000_000  # far beyond any run; a slip of the keyboard is told before the first step
# A setting, what it must be, and that in words.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("steps", lambda value: value is None or 1 <= value <= _MAX_STEPS, f"at least 1, and at most {_MAX_STEPS:,}"),
    ("epochs", lambda value: value is None or 0 < value <= _MAX_EPOCHS, f"above 0, and at most {_MAX_EPOCHS:,}"),
    ("batch_size", lambda value: value >= 1, "at least 1"),
    ("accumulate", lambda value: value >= 1, "at least 1"),
    ("learning_rate", lambda value: 0 < value < math.inf, "above 0"),
    ("warmup_steps", lambda value: value >= 0, "at least 0"),
    ("weight_decay", lambda value: 0 <= value < math.inf, "at least 0"),
    ("clip_norm", lambda value: 0 <= value < math.inf, "at least 0, where 0 clips nothing"),
    ("autocast", lambda value: value in ("off", "bf16"), "off or bf16"),
    ("eval_every", lambda value: value is None or value >= 1, "at least 1"),
    ("save_every", lambda value: value is None or value >= 0, "at least 0, where 0 saves no state"),
)


class StepSettings(Settings):
    """What decides how a training goes, and how it is looked after."""

    steps: Annotated[Whole | None, Option(metavar="N", read=positive, group="length")] = None
    """Length of the run; `start`, `end` and `update` in the recipe then count steps."""
    epochs: Annotated[Number | None, Option(metavar="E", read=float, group="length")] = None
    """Length of the run in passes over the data, in place of steps, rounded to whole steps (a half up, one at least); the recipe then
    counts epochs. By default 1."""
    batch_size: Annotated[Whole, Option(metavar="B", read=positive)] = 8
    """Blocks in a micro-batch."""
    learning_rate: Annotated[Number, Option(metavar="LR", read=float)] = 2e-5
    """Peak of AdamW; a cosine leads from it to 0."""
    warmup_steps: Annotated[Whole, Option(metavar="W", read=count)] = 0
    """Steps that lead up to the peak."""
    weight_decay: Annotated[Number, Option(metavar="WD", read=float)] = 0.0
    """Decoupled decay of matrices; norms and biases have none."""
    accumulate: Annotated[Whole, Option(metavar="A", read=positive)] = 1
    """Micro-batches in a step."""
    clip_norm: Annotated[Number, Option(metavar="C", read=float)] = 1.0
    """Largest norm of all gradients together; 0 clips nothing."""
    autocast: Annotated[Text, Option(choices=("off", "bf16"))] = "off"
    """`bf16` runs the forward under torch.autocast; `off` in the weights' own dtype."""
    ema: Annotated[Numbers, Option(metavar="DECAY", read=float, repeats=True)] = ()
    """Keep a moving average of the weights with this decay."""
    ema_warmup: Annotated[Flag, Option()] = False
    """Begin with smaller decays, (1 + n) / (10 + n) after n steps, so that the first weights are soon forgotten."""
    save_ema: Annotated[Number | None, Option(metavar="DECAY", read=float)] = None
    """Save the averages of this decay in place of the weights."""
    shuffle: Annotated[Flag, Option("--no-shuffle", negates=True, help="take blocks in the order of the data")] = True
    """Draw the order of the blocks anew for each epoch, by the seed."""
    eval_every: Annotated[Whole | None, Option(metavar="N", read=positive)] = None
    """Evaluate after every so many steps, too."""
    dtype: Annotated[Dtype, Option(choices=tuple(one for one in DTYPES if one != "float16"))] = "float32"
    """Of the weights while they are trained; a model in memory keeps its own, so that another than float32 is refused for one."""
    save_dtype: Annotated[Dtype, Option(choices=DTYPES)] = "auto"
    """Of the weights in the checkpoint; `auto`: as in the checkpoint that was loaded."""
    mode: Annotated[Mode, Option()] = "replay"
    """`replay` captures the step once and repeats it, `eager` runs it as it is, `capture` records every step; all give the same bits."""
    check_every: Annotated[Whole, Option(metavar="N", read=positive)] = 1
    """The guards are checked at every so manieth replay."""
    audit_every: Annotated[Whole | None, Option(metavar="N", read=count)] = None
    """A step is run eagerly, too, and compared, at every so manieth step; 0: never; by default 1, 2, 4, ... 64 steps after a proof, then
    in 3 % of the time: what the guards see is refused at once; anything else that Python reads is found by the audit, if it stays
    changed, at most 1,000 steps later."""
    save_every: Annotated[Whole | None, Option(metavar="N", read=count)] = None
    """Keep a state after every so many steps; by default a tenth of the run; 0: none."""

    @model_validator(mode="after")
    def _check(self) -> StepSettings:
        for name, holds, words in _RULES:
            value = getattr(self, name)
            if not holds(value):
                raise UserInputError(f"{name}: {value} was given, and it must be {words}; correct it")
        if self.steps is not None and self.epochs is not None:
            raise UserInputError(f"steps: {self.steps} steps and {self.epochs:g} epochs were given; the length of a run is one of them")
        if self.save_ema is not None and self.save_ema not in self.ema:
            known = ", ".join(f"{decay:g}" for decay in self.ema) or "none"
            raise UserInputError(f"save_ema: no averages of decay {self.save_ema:g} are kept (ema is {known}); name one that is in ema")
        if self.ema_warmup and not self.ema:
            raise UserInputError("ema_warmup: no averages are kept; give ema, or leave this out")
        idle = [name for name in ("check_every", "audit_every") if getattr(self, name) != type(self).model_fields[name].default]
        if idle and self.mode != "replay":
            raise UserInputError(f"{idle[0]}: {getattr(self, idle[0])} is for replays, and mode is {self.mode!r}; leave one of them out")
        return self

    @property
    def unit(self) -> str:
        """What `start`, `end` and `update` of a recipe count: the unit that the length of the run is given in."""
        return "steps" if self.steps is not None else "epochs"

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the length of the run.

        Args:
            steps_per_epoch: steps of one pass over the data.

        Returns:
            Steps; one epoch where neither was given.

        Raises:
            UserInputError: the warm-up is as long as the run.
        """
        number = self.steps if self.steps is not None else max(1, math.floor((self.epochs or 1.0) * steps_per_epoch + 0.5))
        if self.warmup_steps >= number:
            raise UserInputError(
                f"warmup_steps: {self.warmup_steps} steps of warm-up leave nothing of a run of {number} steps; give fewer, or a longer run"
            )
        return number

    def save_interval(self, num_steps: int) -> int:
        """Return after how many steps a state is saved: a tenth of the run unless the user says otherwise; 0: never."""
        return max(1, num_steps // 10) if self.save_every is None else self.save_every


class TrainSettings(StepSettings, RecipeSettings, LoadSettings, TrackSettings):
    """The choices of one run of `train`."""

    dataset: Annotated[Any, Option(metavar="D")]
    """Training data, as for `oneshot` (no DataLoader); its tokens are joined and cut into blocks of one length."""
    recipe: Annotated[Any, Option(metavar="R")] = None
    """Modifiers, as for `oneshot`; without one it is plain training."""
    output_dir: Annotated[PathLike | None, Option(metavar="O", required=True)] = None
    """Folder of the checkpoint; must not exist or be empty. None (in Python) keeps the result in memory."""
    run_dir: Annotated[PathLike | None, Option(metavar="R")] = None
    """Folder that keeps the last two states until the end; by default `<output_dir>.partial-run`."""
    resume: Annotated[Flag, Option()] = False
    """Go on from the newest state of an earlier run of the same settings."""
    tokenizer: Tokenizer | None = None
    """In place of that of the model's folder; or the path of its folder, or its name on the hub."""
    max_seq_length: Annotated[Whole | None, Option(metavar="T", read=positive)] = None
    """Tokens in a block; by default as many as the model takes, at most 2048."""
    text_column: Annotated[Text, Option(metavar="NAME")] = "text"
    """Column of the dataset that holds the text."""
    eval_dataset: Annotated[Any, Option(metavar="D")] = None
    """Held-out data; its loss is measured before and after the run."""
    device: Annotated[Device, Option()] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`; a model in memory stays where it is."""
    seed: Annotated[Whole, Option(metavar="S", read=whole)] = 0
    """Seed of everything random."""
    progress: Annotated[ProgressLike, Option("--quiet", negates=True, help="show no progress bars")] = False
    """Show progress bars (True), or an object that shows them."""

    @model_validator(mode="after")
    def _check_together(self) -> TrainSettings:
        if self.eval_every is not None and self.eval_dataset is None:
            raise UserInputError(f"eval_every: {self.eval_every} was given without eval_dataset; give data to evaluate on, or leave it out")
        if self.recipe is None and self.recipe_args:
            given = [self.recipe_args] if isinstance(self.recipe_args, str) else self.recipe_args
            names = ", ".join(text.partition("=")[0] for text in given)
            raise UserInputError(f"recipe_args: {names} were given without a recipe; give one, or leave them out")
        return self


MODEL_HELP: Mapping[str, str] = {
    "oneshot": "folder of a transformers checkpoint (config.json, *.safetensors), or its name on the Hugging Face hub (owner/name)",
    "convert": "folder of a transformers checkpoint (config.json, *.safetensors), or its name on the Hugging Face hub (owner/name)",
    "plan": "folder of a transformers checkpoint, or its name on the hub; weights are not needed",
    "train": "folder of a transformers checkpoint (config.json, *.safetensors), or its name on the hub",
    "trace": "folder with a config.json, or its name on the hub; weights are not needed",
    "mappings": "folder with a config.json, or its name on the hub; weights are not needed",
}
