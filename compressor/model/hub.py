"""Models on the Hugging Face hub, fetched by the hub's own client with its cache, token and offline mode; or one line says why not.

Nothing here talks HTTP. What the client reads of the environment (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) is its own affair.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from compressor.errors import ModelError

DEFAULT_REVISION = "main"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?\Z")
# What the client raises where the network or the disk fails; the first is the error of the HTTP library that it was built with.
CLIENT_ERRORS: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, HFValidationError, RuntimeError)


@dataclass(frozen=True)
class Origin:
    """Which model of the hub it is.

    Attributes:
        name: `owner/name`.
        revision: branch, tag or commit, as it was asked for.
        commit: hash of the commit that this was.
    """

    name: str
    revision: str
    commit: str


class _Bar(tqdm):
    """The bar of the hub, on terminals alone."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **{**given, "disable": given.get("disable") or not sys.stderr.isatty()})


def split_name(text: str) -> tuple[str, str | None] | None:
    """Read a name on the hub.

    Args:
        text: `owner/name` or `owner/name@revision`.

    Returns:
        Name and revision, None where none was named; None for what is no such name.
    """
    found = _NAME.match(text)
    return None if found is None else (found[1], found[2])


def fetch(name: str, revision: str, files: Sequence[str], *, without: Sequence[str] = (), argument: str = "model") -> Path:
    """Fetch files of a model, as far as the cache does not have them.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit.
        files: patterns of the files.
        without: patterns of files to leave out.
        argument: how the user calls the model, for errors.

    Returns:
        The folder in the cache; its name is the hash of the commit.

    Raises:
        ModelError: there is no such model or revision, it is private or gated, or neither hub nor cache gives it.
    """
    try:
        path = snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=list(without), tqdm_class=_Bar)
    except CLIENT_ERRORS as error:
        raise ModelError(f"{argument}: {name!r} is no folder here, and {why_not(error, revision)}") from error
    return Path(path)


def why_not(error: BaseException, revision: str = DEFAULT_REVISION) -> str:
    """Say why the hub did not give something, and what to do.

    Args:
        error: one of CLIENT_ERRORS, from the client.
        revision: that was asked for.

    Returns:
        The end of a message.
    """
    if isinstance(error, GatedRepoError):  # one that is found, whatever its base class says
        return "on the hub it is gated; accept its conditions on its page, and set HF_TOKEN to a token of that account"
    if isinstance(error, RevisionNotFoundError):
        return f"on the hub it has no revision {revision!r}; correct it"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has none of that name, or it is private; correct the name, or set HF_TOKEN to a token that may read it"
    if isinstance(error, HFValidationError):
        return "it is no name on the hub; correct it"
    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError):
        return (
            f"the cache of the hub ({constants.HF_HUB_CACHE}) lacks revision {revision!r} of it, or a part; "
            "unset HF_HUB_OFFLINE, with which nothing is fetched"
        )
    cause = error.__cause__ or error
    reason = " ".join(str(cause).split())[:200].rstrip(".")
    return f"{constants.ENDPOINT} does not give it ({type(cause).__name__}: {reason}); check the network, or give a folder"
