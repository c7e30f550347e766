"""What lies in a model's folder beside its weights: who reads it, and so what of it goes with the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from compressor.model.folder import WEIGHT_SUFFIXES, some

# What a tokenizer or processor may read.
TOKENIZER_PATTERNS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*vocab*.json", "vocab.txt", "vocab.bpe", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates", "*processor_config.json"),
    *("audio_tokenizer_config.json", "speaker_embeddings_path.json"),
    *("*.spm", "*.codes", "*.tokenizer", "dict.txt", "normalizer.json", "emoji.json", "byte_maps.json", "word_*.json"),
)
# What sentence-transformers reads beside the model, and what whoever passes the model on has to pass on, too.
OTHER_PATTERNS = ("modules.json", "*sentence*.json", "[0-9]_*", "LICENSE*", "NOTICE*")

# What a result has of its own, or never from its base: a model card tells of the base.
_OWN_PATTERNS = (
    *("config.json", "generation_config.json", "compression.json", "*.index.json", "model*.safetensors", "pytorch_model*.bin"),
    *("README*", ".git*"),
)
_MOST_BYTES = 100_000_000


def side_files(folder: Path) -> tuple[list[str], list[str]]:
    """List what a model's own code may read, beside what is copied of every model.

    Args:
        folder: of the model.

    Returns:
        Paths below it, in order: those that go with the result, and those that stay behind. These are weights, pickles, hidden files, what
        is larger than 100 MB, cannot be read or is no file, and links that lead out of the folder. Hidden folders are not looked into.
    """
    copied: list[str] = []
    left: list[str] = []
    for path in _all_files(folder):
        name = path.relative_to(folder)
        known = any(fnmatchcase(name.parts[0], pattern) for pattern in (*TOKENIZER_PATTERNS, *OTHER_PATTERNS, *_OWN_PATTERNS))
        if path.suffix == ".py" or not known:
            (copied if _may_go(path, folder) else left).append(name.as_posix())
    return sorted(copied), sorted(left)


def side_notes(folder: Path) -> tuple[str, ...]:
    """Tell what the code of a model may read and will not find beside the result.

    Args:
        folder: that `folder_of_code` gave.

    Returns:
        One note, or none.
    """
    left = side_files(folder)[1]
    if not left:
        return ()
    number = "1 file" if len(left) == 1 else f"{len(left)} files"
    return (
        f"{number} beside the model's code will not go with a checkpoint, as weights, pickles, hidden files, links that lead elsewhere and "
        f"what is larger than {_MOST_BYTES // 1_000_000} MB do not ({some(left)}); copy what the code reads",
    )


def copy_side_files(folder: Path, made: Path, *, without: Path | None = None) -> None:
    """Copy what the code of a model may read.

    Args:
        folder: that `folder_of_code` gave.
        made: of the result; what is there stays as it is.
        without: folder that the result will be put into; what is there stays as it is, too.

    Raises:
        OSError: the disk is full or fails.
    """
    for name in side_files(folder)[0]:
        if not any((place / name).exists() for place in (made, without or made)):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, made / name)


def _all_files(folder: Path) -> Iterator[Path]:
    """All but folders; a link to one is a file here."""
    for parent, folders, names in os.walk(folder):
        paths = [Path(parent, name) for name in (*folders, *names)]
        yield from (path for path in paths if path.is_symlink() or not path.is_dir())
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]


def _may_go(path: Path, folder: Path) -> bool:
    is_readable = path.is_file() and os.access(path, os.R_OK)
    if not is_readable or path.name.startswith(".") or path.suffix.lower() in WEIGHT_SUFFIXES or path.stat().st_size > _MOST_BYTES:
        return False
    # Code has been let run, wherever it lies.
    return path.suffix == ".py" or any(path.resolve().is_relative_to(place) for place in _places(folder.resolve()))


def _places(folder: Path) -> Sequence[Path]:
    """Where files of a folder lie: in it, or, in the cache of the hub, among the blobs that snapshots link to."""
    return (folder, folder.parents[1] / "blobs") if folder.parent.name == "snapshots" else (folder,)
