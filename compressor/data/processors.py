"""How the processors of transformers are called: those of several parts, or of one for images, video or audio, and how each pads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_NAMES = {"text", "images", "videos", "audio"}  # what processors call what they are given
_SOUND_PARTS = ("audio_processor", "feature_extractor")  # what processors call the part that reads audio


def run_processor(processor: Any, given: Mapping[str, Any], *, pads: bool) -> dict[str, Any]:
    """Let a processor make inputs of texts and media.

    Args:
        processor: of several parts, which takes `text`, `images`, `videos` and `audio`; or a part by itself, which takes one of them,
            under whatever name, and no text.
        given: texts and media by those names, and the `sampling_rate` of audio.
        pads: rows are brought to one length, each part in its own way where it has one.

    Returns:
        What it made, by the names of a forward's arguments.
    """
    parameters = inspect.signature(processor).parameters
    first = next(iter(parameters.values()), None)
    padding: dict[str, Any] = {}
    if "text" not in parameters and first is not None and first.kind is first.POSITIONAL_OR_KEYWORD:  # one part by itself
        given = _named_as(first.name, {name: value for name, value in given.items() if name != "text"}, parameters)
    elif pads and "padding" not in parameters:
        padding = {"padding": _processor_settings(processor, "text_kwargs").get("padding") or True}
        processor = _with_own_padding_of_sound(processor) if "audio" in given else processor
    if pads and "padding" in parameters and parameters["padding"].default is False:
        padding = {"padding": True}
    return dict(processor(**given, **padding, return_tensors="pt"))


def _named_as(name: str, given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Hand the only medium over as what the call names its first argument: `raw_speech`, `raw_audio`."""
    is_other = name not in _NAMES and len(given.keys() & _NAMES) == 1
    return {name if is_other and key in _NAMES and key not in parameters else key: value for key, value in given.items()}


def _processor_settings(processor: Any, kind: str) -> dict[str, Any]:
    """What a processor sets by itself for one of its parts, such as `text_kwargs`."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    return {**getattr(processor, kind, {}), **defaults.get(kind, {})}


def _with_own_padding_of_sound(processor: Any) -> Any:
    """A processor whose part for audio does not hear of the padding of texts, unless it would not pad: Whisper's have one length."""
    name = next((name for name in _SOUND_PARTS if callable(getattr(processor, name, None))), None)
    if name is None:
        return processor
    part = getattr(processor, name)
    parameter = inspect.signature(part).parameters.get("padding")
    own = _processor_settings(processor, "audio_kwargs").get("padding", False if parameter is None else parameter.default)
    if own is False:
        return processor
    copied = copy.copy(processor)
    setattr(copied, name, _Padding(part, own))
    return copied


class _Padding:
    """A part of a processor with a padding that stays."""

    def __init__(self, part: Callable[..., Any], padding: Any) -> None:
        self._part, self._padding = part, padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part(*args, **{**kwargs, "padding": self._padding})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
