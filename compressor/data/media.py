"""Rows with images, videos or audio: the processor of a model makes of them what the model's forward takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import as_batch
from compressor.data.presets import as_messages, template_arguments
from compressor.data.processors import run_processor
from compressor.data.rows import CONVERSATIONS, TEXT_COLUMN, input_columns
from compressor.data.user_code import errors_named, read_through
from compressor.errors import DatasetError

COLUMNS = {"image": "images", "images": "images", "video": "videos", "videos": "videos", "audio": "audio", "audios": "audio"}
"""Columns of media, and what the processors of transformers call them."""
_MADE = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}  # what processors make of media


@dataclass(frozen=True)
class Media:
    """What rows with media need to become inputs of a model.

    Attributes:
        find: gives the processor, which is loaded then, or None; called for rows with media alone.
        takes: names that the model's forward takes.
        dtype: of the model's floats.
        text_column: column of the text.
    """

    find: Callable[[], Any]
    takes: frozenset[str]
    dtype: torch.dtype
    text_column: str = TEXT_COLUMN

    @staticmethod
    def of(model: nn.Module, find: Callable[[], Any], text_column: str = TEXT_COLUMN) -> Media:
        """Say what the rows of a model need.

        Args:
            model: not changed.
            find: gives its processor, or None.
            text_column: column of the text.

        Returns:
            What turns its rows into batches.
        """
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        return Media(find, input_columns(model) | {"input_ids", "attention_mask"}, next(dtypes, torch.float32), text_column)

    @property
    def is_taken(self) -> bool:
        """Whether the forward takes what a processor makes of media."""
        return bool(self.takes & _MADE)

    def processor_of(self, rows: Any) -> Any:
        """Find the processor that a dataset needs.

        Args:
            rows: a dataset, of which the first row is looked at.

        Returns:
            The processor; None where the rows hold no media, or what a processor made of them, or the model takes none.

        Raises:
            DatasetError: rows hold media that the model takes, and there is no processor.
        """
        columns = _columns(rows)
        found = sorted(columns & COLUMNS.keys())
        if not found or "input_ids" in columns or columns & _MADE or not self.is_taken:
            return None
        processor = self.find()
        if processor is None:
            raise DatasetError(
                f"dataset: the column {found[0]!r} becomes an input of the model through its processor, and there is none; pass processor= "
                "or data_collator=, or remove the column"
            )
        return processor

    def inputs(self, processor: Any, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Let a processor make one batch of rows.

        Args:
            processor: of transformers.
            rows: with media, and with a text or a conversation; several are padded to one length, media as the processor does it.

        Returns:
            What the model takes of that; of an encoder's labels, what its decoder reads.

        Raises:
            DatasetError: the processor gives something else than tensors, or pads without a mask; or a conversation has no template.
        """
        columns = sorted(COLUMNS.keys() & {name for row in rows for name, value in row.items() if value is not None})
        for row in rows:
            if lacking := [name for name in columns if row.get(name) is None]:
                raise DatasetError(
                    f"dataset: a row without {lacking[0]!r} was given beside rows with it in one batch, of which a processor does not tell "
                    "whose they are; leave batch_size out, which makes batches of one row"
                )
        texts = [self._text(row, processor) for row in rows]
        given: dict[str, Any] = {} if texts[0] is None else {"text": texts}
        for column in columns:
            each = [_as_list(row[column], frames=COLUMNS[column] == "videos") for row in rows]
            given[COLUMNS[column]] = each if COLUMNS[column] == "images" else [one for part in each for one in part]
        if "audio" in given:
            waves = [_wave(one, rows[0].get("sampling_rate")) for one in given["audio"]]
            given |= {"audio": [wave for wave, _ in waves], "sampling_rate": waves[0][1]}
        made = as_batch(run_processor(processor, given, pads=len(rows) > 1), "dataset")
        assert isinstance(made, dict)
        if "decoder_input_ids" in self.takes and "labels" in made:
            made["decoder_input_ids"] = made["labels"]
        if len(rows) > 1 and given.keys() & {"text", "audio"}:
            self._check_padding(made, [self.inputs(processor, [row]) for row in rows])
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in made.items() if name in self.takes}

    def _check_padding(self, made: Mapping[str, Tensor], alone: list[dict[str, Tensor]]) -> None:
        """Refuse rows that are longer in a batch than alone where no mask tells: their padding would count as tokens."""
        masks = [mask.shape[:2] for name, mask in made.items() if "mask" in name]
        for name in self.takes & made.keys():
            shape = made[name].shape[:2]
            if len(shape) > 1 and shape not in masks and any(name in one and one[name].shape[1] != shape[1] for one in alone):
                raise DatasetError(
                    f"dataset: rows of other lengths were given to a processor that pads {name!r} without a mask, and padding would count "
                    "as tokens; leave batch_size out, which makes batches of one row, or give rows of one length"
                )

    def _text(self, row: Mapping[str, Any], processor: Any) -> str | None:
        turns = next((row[name] for name in CONVERSATIONS if name in row), None)
        if turns is None or self.text_column in row:
            return row.get(self.text_column)
        if getattr(processor, "chat_template", None) is None:
            raise DatasetError(
                "dataset: a conversation was given, but the processor has no chat template; set processor.chat_template or render the "
                "conversations into a text column"
            )
        return str(processor.apply_chat_template(as_messages(turns), tokenize=False, **template_arguments(row, "dataset")))


def _columns(rows: Any) -> set[str]:
    """Names of columns; none of data that has no rows with names."""
    names = getattr(rows, "column_names", None)
    if isinstance(names, list):
        return set(names)
    is_rows = hasattr(rows, "column_names") or isinstance(rows, list | tuple)
    if not is_rows:
        return set()
    if hasattr(rows, "__len__"):
        with errors_named("dataset row 0", "the dataset"):
            first = rows[0] if len(rows) else None
    else:
        first = next(read_through(rows, "dataset row", "the dataset"), None)
    return set(first) if isinstance(first, Mapping) else set()


def _as_list(value: Any, *, frames: bool) -> list[Any]:
    """One image, wave of numbers, or video, which may be a list of its `frames`, as a list of one."""
    first = value[0] if isinstance(value, list) and value else None
    is_frame = frames and (hasattr(first, "getbands") or getattr(first, "ndim", None) == 3)
    return [value] if not isinstance(value, list) or isinstance(first, int | float) or is_frame else value


def _wave(audio: Any, rate: int | None) -> tuple[Any, int | None]:
    """Samples and their rate, in Hz, of audio as `datasets` decodes it, or of bare samples."""
    if isinstance(audio, Mapping) or hasattr(audio, "get_all_samples"):
        audio, rate = audio["array"], audio["sampling_rate"]
    return torch.as_tensor(audio, dtype=torch.float32).numpy(), rate
