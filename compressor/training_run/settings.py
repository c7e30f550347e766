"""What a recipe must be for a training, and what the result of one depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from compressor.data import TokenBlocks
from compressor.data.collate import text_marks
from compressor.errors import UserInputError
from compressor.lifecycle import Modifier
from compressor.lifecycle.interface import TRAINING_CALLBACKS
from compressor.lifecycle.modifier import overrides
from compressor.modifiers.quantization import QuantizationModifier
from compressor.pipelines.journal.fingerprint import Fingerprint, machine, versions
from compressor.settings.verbs import StepSettings

AUTOCAST: Mapping[str, torch.dtype | None] = {"off": None, "bf16": torch.bfloat16}
"""Choice of a user to what `TrainStep` takes."""

# A resumed run may choose these otherwise: every mode gives the same bits, and checks and states change none.
_CHANGE_NOTHING = ("mode", "check_every", "audit_every", "save_every")


def check_recipe(modifiers: tuple[Modifier, ...], length: float, unit: str) -> list[str]:
    """Refuse modifiers that would do nothing in a training of this length.

    Args:
        modifiers: of the recipe.
        length: of the run, in the unit that they count.
        unit: `steps` or `epochs`.

    Returns:
        What a user must know, a sentence each: ends that the run does not reach, and when observers would stop.

    Raises:
        UserInputError: a modifier that training would never start.
    """
    notes = []
    for modifier in modifiers:
        takes_part = overrides(modifier, *TRAINING_CALLBACKS)
        if not takes_part or (modifier.start is None and (overrides(modifier, "on_start") or not overrides(modifier, "on_event"))):
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
        freeze = modifier.disable_quantization_observer_epoch if isinstance(modifier, QuantizationModifier) else None
        if freeze is not None and freeze >= length:
            text = f"disable_quantization_observer_epoch={freeze:g} lies behind the run of {length:g} {unit}"
            notes.append(f"{modifier.label}: {text}, so scales are fixed at its end alone")
    return notes


def training_fingerprint(
    model: Mapping[str, Any],
    recipe: str | None,
    data: TokenBlocks,
    eval_data: TokenBlocks | None,
    seed: int,
    settings: StepSettings,
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
    depends = StepSettings.model_fields.keys() - {*_CHANGE_NOTHING, "steps", "epochs"}
    chosen = {name: value for name, value in settings if name in depends}
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
        "marks": text_marks(part.flatten() for part in data.input_ids.split(1024)).record,
    }
