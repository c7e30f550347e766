"""The usual calibration sets by name: where they lie on the hub, which part of them is usual, and how their rows become texts.

Repositories and templates are those under which llm-compressor 0.14 knows the sets (llmcompressor/transformers/data); the instructions are
worded as Stanford Alpaca words them, and conversations without a template of the tokenizer are marked up as those of Zephyr.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compressor.errors import DatasetError
from compressor.json_text import from_json
from compressor.spelling import did_you_mean

_INSTRUCTION = "### Instruction:\n{instruction}\n\n"
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request.\n\n"


@dataclass(frozen=True)
class Preset:
    """A calibration set.

    Attributes:
        name: by which it is called.
        repo: its name on the hub.
        split: the usual one.
        config: the usual configuration; None where it has one alone.
        template: of a text, with the columns of a row in braces; None where one column holds texts, conversations or media.
        short_template: the same for rows whose column `input` is empty.
        conversations: the column that holds them; None where none does.
        files: what is read of a set that is too large to be fetched whole, by split.
        aliases: further names.
        media: makes a row of media and conversation, or of media and a text where there is no chat template, of a row.
    """

    name: str
    repo: str
    split: str = "train"
    config: str | None = None
    template: str | None = None
    short_template: str | None = None
    conversations: str | None = None
    files: Mapping[str, str] | None = None
    aliases: tuple[str, ...] = ()
    media: Callable[[Mapping[str, Any], bool], dict[str, Any]] | None = None

    def row_function(self, tokenizer: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """Return what makes a text of a row, or a text and media; None where a row is read as it is.

        Args:
            tokenizer: that will read it, or a processor; one without a chat template is given conversations as texts.

        Returns:
            A function from a row to a row.
        """
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if (media := self.media) is not None:
            return lambda row: media(row, has_template)
        template, short, column = self.template, self.short_template, self.conversations
        if template is not None:
            return lambda row: {"text": (template if short is None or row.get("input") else short).format(**row)}
        if column is None or tokenizer is None or has_template:
            return None
        end = getattr(tokenizer, "eos_token", None) or ""
        return lambda row: {"text": "".join(f"<|{one['role']}|>\n{one['content']}{end}\n" for one in as_messages(row[column]))}


def _asked(media: Mapping[str, Any], question: str) -> dict[str, Any]:
    return {"role": "user", "content": [media, {"type": "text", "text": question}]}


def _picture(row: Mapping[str, Any], has_template: bool) -> dict[str, Any]:
    del has_template  # without one it is refused: how a model marks the place of an image is not known
    answer = {"role": "assistant", "content": [{"type": "text", "text": " ".join(row["caption"])}]}
    return {"messages": [_asked({"type": "image"}, "What does this image show?"), answer], "images": row["image"]}


def _speech(row: Mapping[str, Any], has_template: bool) -> dict[str, Any]:
    if not has_template:  # as of Whisper, whose text is what the decoder reads
        return {"text": " " + row["text"].capitalize(), "audio": row["audio"]}
    return {"messages": [_asked({"type": "audio", "audio": None}, "What did the person say?")], "audio": row["audio"]}


PRESETS: tuple[Preset, ...] = (
    Preset("ultrachat-200k", "HuggingFaceH4/ultrachat_200k", "train_sft", conversations="messages", aliases=("ultrachat",)),
    Preset("wikitext", "Salesforce/wikitext", config="wikitext-2-raw-v1", aliases=("wikitext2", "wikitext-2-raw-v1")),
    Preset(
        "open-platypus",
        "garage-bAInd/Open-Platypus",
        template=f"{_TASK}, paired with an input that provides further context. {_REQUEST}{_INSTRUCTION}"
        "### Input:\n{input}\n\n### Response:\n{output}",
        short_template=f"{_TASK}. {_REQUEST}{_INSTRUCTION}### Response:\n{{output}}",
        aliases=("platypus",),
    ),
    Preset(
        "c4",
        "allenai/c4",
        config="en",
        files={"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"},
    ),
    Preset("pile-10k", "NeelNanda/pile-10k"),
    Preset("pile-val", "mit-han-lab/pile-val-backup", "validation", aliases=("pileval",)),
    Preset(
        "cnn-dailymail",
        "abisee/cnn_dailymail",
        config="3.0.0",
        template="Article:\n{article}\n\n### Summarization:\n{highlights}\n",
    ),
    Preset("gsm8k", "openai/gsm8k", config="main", template="Question: {question}\nAnswer: {answer}"),
    Preset(
        "evol-codealpaca",
        "theblackcat102/evol-codealpaca-v1",
        template=f"Below is an instruction that describes a programming task. {_REQUEST}{_INSTRUCTION}### Response:\n{{output}}",
    ),
    Preset("perfectblend", "mlabonne/open-perfectblend", conversations="conversations", aliases=("open-perfectblend",)),
    Preset("flickr30k", "lmms-lab/flickr30k", "test", aliases=("flickr",), media=_picture),
    Preset("peoples-speech", "MLCommons/peoples_speech", "test", config="test", media=_speech),
)


def find_preset(name: str) -> Preset | None:
    """Find a calibration set by its name, a further one, or that of its repository; case, `-` and `_` do not matter.

    Args:
        name: as the user wrote it.

    Returns:
        The set; None where there is none of that name.
    """
    return next((preset for preset in PRESETS if any(_bare(name) == _bare(one) for one in _names(preset))), None)


def unknown_preset(name: str) -> DatasetError:
    """Return the error for a word that is neither a file nor a calibration set.

    Args:
        name: as the user wrote it.

    Returns:
        The error.
    """
    known = [preset.name for preset in PRESETS]
    return DatasetError(
        f"dataset: {name!r} is no file, no folder and no calibration set; {did_you_mean(name, known)}"
        f"give one of {', '.join(known)}, a path, or owner/name of a set on the hub"
    )


def _names(preset: Preset) -> tuple[str, ...]:
    return (preset.name, preset.repo, preset.repo.partition("/")[2], *preset.aliases)


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_ROLES = {"human": "user", "gpt": "assistant"}


def as_messages(turns: Any) -> Any:
    """Write the turns of a conversation as messages: `from` and `value`, as ShareGPT has them, become `role` and `content`.

    Args:
        turns: a list of mappings.

    Returns:
        The same with `role` and `content`; what is no such list as it is.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) and {"from", "value"} <= turn.keys() for turn in turns):
        return turns
    return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


TEMPLATE_COLUMNS: Mapping[str, tuple[type, str]] = {
    "tools": (list, "list of tools"),
    "chat_template_kwargs": (Mapping, "mapping of arguments of a template"),
}


def template_arguments(columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a row gives its chat template beside the messages: `tools`, and arguments in `chat_template_kwargs`, as TRL calls them.

    Args:
        columns: of the row; a value may be JSON text.
        where: what errors call the row.

    Returns:
        Keyword arguments of `apply_chat_template`.

    Raises:
        DatasetError: a value is none that a template could be given.
    """
    given: dict[str, Any] = {}
    for name, (kind, words) in TEMPLATE_COLUMNS.items():
        value = columns.get(name)
        if isinstance(value, str):
            try:
                value = from_json(value, once=True)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{where}: {name} is no JSON ({error.msg}); repair this row, or remove the column") from error
        if value is None:
            continue
        arguments = {name: value} if kind is list else value
        if not isinstance(value, kind) or not arguments.keys().isdisjoint(("tokenize", "conversation")):
            raise DatasetError(f"{where}: {name} is no {words}; repair this row, or remove the column")
        given |= arguments
    return given
