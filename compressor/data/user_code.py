"""Code of the user in the way of the data: functions on rows, collators, datasets and loaders, which raise what they like.

Whatever they raise is bad input: one error that says whose code it was and on what, with the exception itself as its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from compressor.errors import CompressorError, DatasetError
from compressor.model.folder import one_line

T = TypeVar("T")


@contextmanager
def errors_named(where: str, what: str) -> Iterator[None]:
    """Say where code of the user failed.

    Args:
        where: which row or batch it was working on.
        what: whose code it is, such as the name of the function.

    Yields:
        None: while the code runs.

    Raises:
        DatasetError: it raised something; errors of ours pass as they are.
    """
    try:
        yield
    except CompressorError:
        raise
    except Exception as error:  # the user's own code raises what it likes
        raise DatasetError(f"{where}: {what} raised {one_line(error)}; correct it, or the data that it was given") from error


def read_through(items: Iterable[T], where: str, what: str) -> Iterator[T]:
    """Iterate over what the user gave.

    Args:
        items: a dataset or a loader.
        where: what its items are called, before their number.
        what: whose code it is.

    Yields:
        T: the items.

    Raises:
        DatasetError: reading one raised something.
    """
    with errors_named(f"{where} 0", what):
        iterator = iter(items)
    for index in count():
        with errors_named(f"{where} {index}", what):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def function_label(name: str, given: Any) -> str:
    """Name a function of the user.

    Args:
        name: of the setting.
        given: the function, or the text that names it.

    Returns:
        Both in words.
    """
    return f"{name} {given if isinstance(given, str) else getattr(given, '__qualname__', type(given).__name__)}"
