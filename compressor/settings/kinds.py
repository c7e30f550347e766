"""Of what kind an argument of a Python function must be: types of fields, each with a check and the words for it; and sizes in bytes.

What a value means (whether a folder exists, whether an engine has that name) is checked where it is used. Nothing heavy is imported: what
is an object of torch can only be given where torch is loaded already.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from compressor.errors import UserInputError


@dataclass(frozen=True)
class Kind:
    """A check of one value, in place of pydantic's own.

    Attributes:
        holds: whether the value is of this kind.
        words: what belongs there, for errors.
        becomes: what the settings hold of a value, such as its name.
    """

    holds: Callable[[Any], bool]
    words: str
    becomes: Callable[[Any], Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Check by `holds`, and whether it is one of the values that the type names, if it names any."""
        del handler
        choices = get_args(source) if get_origin(source) is Literal else None

        def check(value: Any) -> Any:
            checked = self.checked(value)
            if choices is not None and checked not in choices:
                raise PydanticCustomError("choice", "choose one of {choices}", {"choices": ", ".join(choices)})
            return checked

        return core_schema.no_info_plain_validator_function(check)

    def checked(self, value: Any) -> Any:
        """Return the value, a number as one of Python.

        Args:
            value: as given.

        Returns:
            The same; what numpy and the like call a number is an int or a float.

        Raises:
            PydanticCustomError: it is of another kind.
        """
        if not self.holds(value):
            raise PydanticCustomError("kind", "{words}", {"words": self.words})
        if self.becomes is not None:
            return self.becomes(value)
        return [plain_number(one) for one in value] if isinstance(value, list) else plain_number(value)


def plain_number(value: Any) -> Any:
    """Return a number of numpy, and the like, as one of Python, which JSON can hold.

    Args:
        value: anything.

    Returns:
        An int for a whole number, a float for another real one; what is no number, or one of Python already, as it is.
    """
    if isinstance(value, bool | int | float) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _path(value: Any) -> bool:
    return isinstance(value, Path) or _text(value)


def _of_torch(value: Any, name: str) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def _is_model(value: Any) -> bool:
    return _path(value) or ("torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module))


def _recipe_args(value: Any) -> bool:
    pairs = [value] if isinstance(value, str) else value
    if isinstance(pairs, Mapping):
        return all(_text(name) for name in pairs)
    return isinstance(pairs, list | tuple) and all(_text(pair) and pair.partition("=")[1:2] == ("=",) and pair[0] != "=" for pair in pairs)


def _all(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


def object_of(*classes: type, words: str) -> Kind:
    """Return the kind of objects of some classes.

    Args:
        *classes: one of which it must be.
        words: what belongs there, for errors.

    Returns:
        The kind.
    """
    return Kind(lambda value: isinstance(value, classes), words)


RANKS = (1, 2, 4, 8)  # among which the parts of the samples can be divided
PATH = Kind(_path, "a path")
MODEL = Kind(_is_model, "the path of a folder, a name on the hub (owner/name), or a model (torch.nn.Module)")
DEVICE = Kind(lambda value: _text(value) or _of_torch(value, "device"), "the name of a device")
MODEL_CLASS = Kind(lambda value: _text(value) or isinstance(value, type), "a class of transformers, or its name")
WHOLE = Kind(_whole, "a whole number")
NUMBER = Kind(_number, "a number")
NUMBERS = Kind(_all(_number), "a list of numbers")
MAPPING = object_of(Mapping, words="a mapping")
NAME = object_of(str, words="a text")
"""Empty where there is no name."""
TEXT = Kind(_text, "a text")
"""For texts with a Literal type of their own."""
MODULE = Kind(lambda value: "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module), "a model (torch.nn.Module)")
TENSOR = Kind(lambda value: _of_torch(value, "Tensor"), "a tensor")
FUNCTION = Kind(callable, "a function")
FLAG = Kind(lambda value: isinstance(value, bool), "True or False")
TEXTS = Kind(_all(_text), "a list of texts")
NAMES = Kind(lambda value: isinstance(value, Collection) and not isinstance(value, str) and all(map(_text, value)), "a list of names")
LIST = Kind(lambda value: isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0, "a list with something in it")
RECIPE_ARGS = Kind(_recipe_args, "a mapping of names to values, or a list of texts 'name=value'")
PROGRESS = Kind(lambda value: hasattr(value, "task"), "an object with a method task()")

Whole = Annotated[int, WHOLE]
Ranks = Annotated[int, Kind(lambda value: _whole(value) and value in RANKS, " or ".join(map(str, RANKS)))]
Number = Annotated[float, NUMBER]
Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
PathLike = Annotated[str | Path, PATH]
FilePath = Annotated[Path, PATH]
Texts = Annotated[Sequence[str], TEXTS]
TextOrTexts = Annotated[str | Sequence[str], Kind(lambda value: _text(value) or _all(_text)(value), "a text, or a list of texts")]
SomeTexts = Annotated[list[str], Kind(lambda value: _all(_text)(value) and bool(value), "a list of at least one text")]
Numbers = Annotated[Sequence[float], NUMBERS]
Memory = Annotated[int | str, Kind(lambda value: isinstance(value, str) or _number(value), "a number of bytes, or a text such as '4GB'")]
Dtype = Annotated[
    str,
    Kind(lambda value: _text(value) or _of_torch(value, "dtype"), "the name of a dtype", lambda value: str(value).removeprefix("torch.")),
]
Device = Annotated[str, DEVICE]
ModelClass = Annotated[str, MODEL_CLASS]
Tokenizer = Annotated[
    Any,
    Kind(
        lambda value: _path(value) or (callable(value) and hasattr(value, "save_pretrained")),
        "a tokenizer or processor of transformers, or the path of its folder",
    ),
]
RecipeArgs = Annotated[Mapping[str, Any] | Sequence[str], RECIPE_ARGS]
ProgressLike = Annotated[
    Any, Kind(lambda value: isinstance(value, bool) or hasattr(value, "task"), "True, False, or an object with a method task()")
]
RowFunction = Annotated[Any, Kind(lambda value: callable(value) or _text(value), "a function, or the text path/to/file.py:function")]
NamedValues = Annotated[
    Mapping[str, Any], Kind(lambda value: isinstance(value, Mapping) and all(map(_text, value)), "a mapping of names to values")
]


# Sizes in bytes as users write them.

_MAX_BYTES = 2**63
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: int | str, name: str) -> int:
    """Read a size in bytes.

    Args:
        size: a number of bytes, or text such as `4GB`, `512 MiB`, `1.5e9`.
        name: of the setting, for errors only.

    Returns:
        Bytes.

    Raises:
        UserInputError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:E[0-9]+)?)\s*([KMGT]I?)?B?\s*", str(size).upper())
    if match is None:
        raise UserInputError(f"{name}: {size!r} is no size in bytes; write a number, or one with a unit, such as 4GB or 512MiB")
    found = float(match[1]) * _UNITS[match[2] or ""]
    if found >= _MAX_BYTES:
        raise UserInputError(f"{name}: {size!r} is more than any machine has; write a size such as 4GB or 512MiB")
    return int(found)
