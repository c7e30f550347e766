"""What a user of `compressor train` chooses, checked as a whole before anything is loaded, and what the result depends on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from compressor.arguments import plain_number
from compressor.data import TokenBlocks
from compressor.errors import UserInputError
from compressor.lifecycle import Modifier
from compressor.pipelines.journal.fingerprint import Fingerprint, machine, versions
from compressor.training.trainer import Mode

Autocast = Literal["off", "bf16"]
_AUTOCAST: Mapping[str, torch.dtype | None] = {"off": None, "bf16": torch.bfloat16}

# A resumed run may choose these otherwise: every mode gives the same bits, and checks and states change none.
_CHANGE_NOTHING = ("mode", "check_every", "audit_every", "save_every")
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
    ("autocast", lambda value: value in _AUTOCAST, "off or bf16"),
    ("eval_every", lambda value: value is None or value >= 1, "at least 1"),
    ("save_every", lambda value: value is None or value >= 0, "at least 0, where 0 saves no state"),
)


@dataclass(frozen=True)
class TrainSettings:
    """The choices of one run; see `train` for each.

    Raises:
        UserInputError: one is out of range, or two contradict each other.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 8
    learning_rate: float = 2e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    accumulate: int = 1
    clip_norm: float = 1.0
    autocast: str = "off"
    ema: tuple[float, ...] = ()
    ema_warmup: bool = False
    save_ema: float | None = None
    shuffle: bool = True
    eval_every: int | None = None
    dtype: str = "float32"
    save_dtype: str = "auto"
    mode: Mode = "replay"
    check_every: int = 1
    audit_every: int | None = None
    save_every: int | None = None

    def __post_init__(self) -> None:
        """Check every rule, after numbers of numpy have become numbers."""
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        object.__setattr__(self, "ema", tuple(map(plain_number, self.ema)))
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

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What `TrainStep` takes."""
        return _AUTOCAST[self.autocast]

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
        number = self.steps if self.steps is not None else max(1, round((self.epochs or 1.0) * steps_per_epoch))
        if self.warmup_steps >= number:
            raise UserInputError(
                f"warmup_steps: {self.warmup_steps} steps of warm-up leave nothing of a run of {number} steps; give fewer, or a longer run"
            )
        return number

    def save_interval(self, num_steps: int) -> int:
        """Return after how many steps a state is saved: a tenth of the run unless the user says otherwise; 0: never."""
        return max(1, num_steps // 10) if self.save_every is None else self.save_every


def check_recipe(modifiers: tuple[Modifier, ...], length: float, unit: str) -> list[str]:
    """Refuse modifiers that would do nothing in a training of this length.

    Args:
        modifiers: of the recipe.
        length: of the run, in the unit that they count.
        unit: `steps` or `epochs`.

    Returns:
        What a user must know, a sentence each: ends that the run does not reach.

    Raises:
        UserInputError: a modifier that training would never start.
    """
    notes = []
    for modifier in modifiers:
        takes_part = _overrides(modifier, "on_start", "on_update", "on_end", "on_event")
        if not takes_part or (modifier.start is None and (_overrides(modifier, "on_start") or not _overrides(modifier, "on_event"))):
            why = (
                "it has no start, so training would never begin it; give start (0: from the first step)"
                if takes_part
                else ("it takes no part in training; leave it out")
            )
            raise UserInputError(f"{modifier.label}: {why}, or compress with `compressor oneshot` after the training")
        if modifier.end is not None and modifier.end <= 0:
            raise UserInputError(f"{modifier.label}: end={modifier.end:g} lies before the first step; give a larger end")
        if modifier.start is not None and modifier.start >= length:
            raise UserInputError(
                f"{modifier.label}: start={modifier.start:g} is not reached in a run of {length:g} {unit}; "
                "give a smaller start, or a longer run"
            )
        if modifier.end is not None and modifier.end > length:
            notes.append(f"{modifier.label}: end={modifier.end:g} lies behind the run of {length:g} {unit}, so it is cut short")
    return notes


def _overrides(modifier: Modifier, *callbacks: str) -> bool:
    return any(getattr(type(modifier), name) is not getattr(Modifier, name) for name in callbacks)


def training_fingerprint(
    model: Mapping[str, Any],
    recipe: str | None,
    data: TokenBlocks,
    eval_data: TokenBlocks | None,
    seed: int,
    settings: TrainSettings,
    num_steps: int,
    device: torch.device,
) -> Fingerprint:
    """Put together what the result of a training depends on.

    Args:
        model: what `model_identity` gave.
        recipe: as text; None where there is none.
        data: the blocks to train on.
        eval_data: those to evaluate on, whose losses stand in the record.
        seed: of everything random.
        settings: of the run.
        num_steps: length of the run.
        device: where it takes place.

    Returns:
        JSON types.
    """
    chosen = {name: value for name, value in asdict(settings).items() if name not in (*_CHANGE_NOTHING, "steps", "epochs")}
    content = {
        "model": model,
        "recipe": recipe,
        "data": data_record(data),
        "eval_data": None if eval_data is None else data_record(eval_data),
        "seed": seed,
        "steps": num_steps,
        "settings": {**chosen, "recipe_counts": settings.unit},
        "versions": versions(),
        "machine": machine(device),
    }
    return dict(json.loads(json.dumps(content)))  # as it will be read back


def data_record(data: TokenBlocks) -> dict[str, Any]:
    """Say what data was, by hash and counts.

    Args:
        data: blocks.

    Returns:
        JSON types.
    """
    num_blocks, length = data.input_ids.shape
    return {
        "sha256": data.sha256,
        "num_samples": data.num_samples,
        "num_blocks": num_blocks,
        "block_length": length,
        "num_tokens": num_blocks * length,
        "num_left_over": data.num_left_over,
    }
