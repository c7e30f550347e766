"""From what names a model to its folder, and what can be wrong with that folder, found before its weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from compressor.atomic import real_path
from compressor.errors import ModelError, OutOfMemoryError, reason
from compressor.json_text import from_json
from compressor.model.hub import DEFAULT_REVISION, Origin, fetch, split_name
from compressor.pages import address_space_left

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN_NAMES = 3
# Least and most of each; ten times and more beyond what exists.
_SIZES = {
    "num_hidden_layers": (0, 10_000),
    "vocab_size": (1, 100_000_000),
    "hidden_size": (1, 10_000_000),
    "intermediate_size": (0, 100_000_000),
    "num_attention_heads": (0, 1_000_000),
    "num_key_value_heads": (0, 1_000_000),
    "max_position_embeddings": (1, 10_000_000_000),
}


# What is fetched of a model on the hub, besides its weights and what its own code may read; of subfolders only templates.
_TEXTS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.jinja")
_CODE = "*.py"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".gguf", ".ggml", ".onnx", ".onnx_data"),
    *(".tmp", ".part", ".incomplete"),
)
"""How files end that are weights, pickles, or unfinished downloads: not fetched for a model's own code, nor copied with it."""
_CODE_PACKAGE = "transformers_modules."  # where transformers puts code that trust_remote_code let in


@dataclass(frozen=True)
class ModelFolder:
    """Where a model lies.

    Attributes:
        path: of its folder, which may not be there: `read_config` says so.
        origin: which commit of the hub it is; None for a folder of the user's own.
    """

    path: Path
    origin: Origin | None = None


def resolve_folder(
    model: str | Path, revision: str | None = None, *, weights: bool = True, code: bool = False, argument: str = "model"
) -> ModelFolder:
    """Find the folder of a model, or fetch it into the cache of the hub. A folder that is there goes before a name.

    Args:
        model: path of a folder; or, as a text, a name on the Hugging Face hub: `owner/name` or `owner/name@revision`.
        revision: branch, tag or commit of such a name; None is main.
        weights: fetch the weights as well.
        code: fetch Python files as well, and where there are any what they may read: all but weights and pickles.
        argument: how the user calls it, for errors.

    Returns:
        The folder.

    Raises:
        ModelError: a revision was given for a folder, a link in it leads nowhere, what stands in it is neither file nor folder, or the hub
            does not give the model.
    """
    named = split_name(model) if isinstance(model, str) and not is_there(Path(model)) else None
    if named is None:
        check_no_revision(revision, f"the path {str(model)!r}")
        if is_dir(Path(model)):
            texts = (path for pattern in (*_TEXTS, _CODE) for path in Path(model).glob(pattern))
            _check_links(path for path in texts if path.name != _INDEX_FILE)  # which only those need who need weights
            _check_ends(Path(model))
        return ModelFolder(Path(model))
    name, own = named
    if own is not None and revision not in (None, DEFAULT_REVISION, own):
        raise ModelError(f"model_revision: {revision!r} was given beside {model!r}, which names another; leave one out")
    wanted = own or revision or DEFAULT_REVISION
    files = [*_TEXTS, *([_CODE] if code else []), *([_SINGLE_FILE] if weights else [])]
    below = [f"*/{pattern}" for pattern in files if pattern != "*.jinja"]
    path = fetch(name, wanted, files, without=below, argument=argument)
    if code and any(path.glob(_CODE)):  # which may read whatever lies beside it
        fetch(name, path.name, ["*"], without=["README*", ".*", "*/.*", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)], argument=argument)
    if weights and (path / _INDEX_FILE).is_file():
        shards = [shard for shard in weight_files(path) if shard.endswith(".safetensors")]  # an index may name a pickle
        fetch(name, path.name, shards, argument=argument)
    return ModelFolder(path, Origin(name, wanted, path.name))


def check_no_revision(revision: str | None, what: str) -> None:
    """Refuse a revision of something that has none.

    Args:
        revision: as the user gave it.
        what: it was given for.

    Raises:
        ModelError: it is another than main.
    """
    if revision not in (None, DEFAULT_REVISION):
        raise ModelError(f"model_revision: {revision!r} was given for {what}, which has none; leave it out")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Args:
        folder: folder of a model in the layout of transformers.

    Returns:
        The content of config.json.

    Raises:
        ModelError: no folder, no config.json, or no JSON object in it.
    """
    if not is_dir(folder):
        raise ModelError(
            f"model: {str(folder)!r} is not a folder; give one with config.json and safetensors, or a name on the hub (owner/name)"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json was found; give the folder that holds config.json and the safetensors files")
    config = read_json(path)
    check_sizes(path, config)
    return config


def _check_links(paths: Iterable[Path]) -> None:
    """Refuse links that lead nowhere, as a cache that was cleared leaves them: what they stand for would seem never to have been there."""
    dangling = {path.name: path for path in paths if path.is_symlink() and not is_there(path)}
    if dangling:
        folder, first = next(iter(dangling.values())).parent, dangling[min(dangling)]
        raise ModelError(f"{folder}: {some(dangling)} link to what is not there ({first.name}: {first.readlink()}); fetch the folder again")


def _check_ends(folder: Path) -> None:
    """Refuse pipes, sockets and devices: who reads or copies one waits for ever, or never comes to an end."""
    odd = [path.name for pattern in ("*", "*/*.jinja") for path in folder.glob(pattern) if is_there(path) and not _ends(path)]
    if odd:
        raise ModelError(f"{folder}: {some(odd)}: no file but a pipe, a socket or a device, which has no end; take it out of the folder")


def _ends(path: Path) -> bool:
    return path.is_file() or path.is_dir()


def is_dir(folder: Path) -> bool:
    """Tell whether a folder is there; a name that no file system takes is none.

    Args:
        folder: its path.

    Returns:
        True for a folder, or a link to one.
    """
    try:
        return folder.is_dir()
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """Tell whether anything is there; a name that no file system takes is none.

    Args:
        path: of it.

    Returns:
        True for a file or a folder.
    """
    try:
        return path.exists()
    except OSError:
        return False


def folder_of_code(source_dir: Path | None, model: Any, tokenizer: Any) -> Path | None:
    """Find the folder whose own code runs, which may read whatever lies there.

    Args:
        source_dir: folder the model came from; None where that is not known, or is not to be looked at for a tokenizer.
        model: of transformers.
        tokenizer: or processor; may be None.

    Returns:
        The folder, of a model in memory the one that transformers loaded it from; None where no code came with the model, or none is there.
    """
    config = getattr(model, "config", None)
    if not any(type(part).__module__.startswith(_CODE_PACKAGE) for part in (model, config, tokenizer)):
        return None
    name = source_dir or getattr(config, "name_or_path", None)
    return Path(name) if name and is_dir(Path(name)) else None


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before something is built of them: a thousand million layers would never end.

    Args:
        path: of config.json, for the error.
        config: what it holds.

    Raises:
        ModelError: a size, or one of a part (`text_config`), is beyond all models.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, (least, most) in _SIZES.items():
            value = part.get(name)
            if isinstance(value, int | float) and not least <= value <= most:
                raise ModelError(f"{path}: {name}={value} is not between {least} and {most:,}; restore the file")


def check_not_quantized(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config that says quantized, at its top or in a part of it (`text_config`).

    Args:
        config: content of config.json.
        where: what is checked, for the error.

    Raises:
        ModelError: the config says that the model is quantized.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        found = part.get("quantization_config") or part.get("compression_config")
        if found:
            method = found.get("quant_method", "quantized") if isinstance(found, Mapping) else "quantized"
            raise ModelError(f"{where}: the model is quantized already ({method}); compress the model that it was made from")


def check_no_adapter(folder: Path) -> None:
    """Refuse an adapter beside the weights: transformers computes with it, and a result made of the weights alone would not.

    Args:
        folder: folder of a model in the layout of transformers.

    Raises:
        ModelError: there is one.
    """
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder}: adapter_config.json says that an adapter lies beside the weights, which transformers loads with them; merge it "
            "(merge_and_unload of peft) and save the model, or take the adapter's files out of the folder"
        )


def check_index(folder: Path) -> None:
    """Refuse an index that transformers cannot read.

    Args:
        folder: folder of a model in the layout of transformers, of which `weight_files` has been read.

    Raises:
        ModelError: it has shards, and their index has no metadata.
    """
    index = folder / _INDEX_FILE
    if not (folder / _SINGLE_FILE).exists() and not isinstance(read_json(index).get("metadata"), dict):
        raise ModelError(f'{index}: has no metadata, without which transformers does not read it; add "metadata": {{}}')


def check_weight_files(folder: Path) -> None:
    """Open the header of every weight file: finds what is missing, cut off or no safetensors at all, without reading the weights.

    Args:
        folder: folder of a model in the layout of transformers.

    Raises:
        ModelError: no safetensors (a pickle is never opened), a missing shard, or a damaged file.
    """
    names = weight_files(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(names)} weight files are missing ({some(missing)}); fetch the folder again")
    for name in names:
        _check_header(folder / name)


def check_address_space(folder: Path) -> None:
    """Say before anything is mapped that there is no room for it.

    Args:
        folder: folder of a model in the layout of transformers; files that are missing are somebody else's concern.

    Raises:
        OutOfMemoryError: the limits of this process leave less than all weight files together.
    """
    sizes = [path.stat().st_size for path in (folder / name for name in weight_files(folder)) if path.is_file()]
    needed, left = sum(sizes) + max(sizes, default=0), address_space_left()  # safetensors maps a file twice while it opens it
    if needed > left:
        raise OutOfMemoryError(
            f"{folder}: its weight files are mapped, which takes {needed / 1e6:,.1f} MB of address space, and the limits of this process "
            f"(ulimit -v, ulimit -d) leave {left / 1e6:,.1f} MB; raise them, or limit what is resident instead (a control group), where "
            "mapped files count only while they are read"
        )


def some(names: Iterable[str]) -> str:
    """Name the first few, in order, for a message of one line.

    Args:
        names: any number of names.

    Returns:
        The first three, and dots if there are more.
    """
    ordered: Sequence[str] = sorted(names)
    return ", ".join(ordered[:_SHOWN_NAMES]) + (", ..." if len(ordered) > _SHOWN_NAMES else "")


def one_line(error: BaseException) -> str:
    """Name an error of another library in one line.

    Args:
        error: any error.

    Returns:
        Its kind and its reason.
    """
    return ": ".join(part for part in (type(error).__name__, reason(error)) if part)


def has_weights(folder: Path) -> bool:
    """Say whether a folder holds the weight files that its index names, or the one that it has without an index.

    Args:
        folder: of a model in the layout of transformers.

    Returns:
        False where one of them is missing; what is in them is not looked at.
    """
    is_named = (folder / _SINGLE_FILE).exists() or (folder / _INDEX_FILE).exists()
    return is_named and all((folder / name).is_file() for name in weight_files(folder))


def weight_files(folder: Path) -> list[str]:
    """Name the files that a loader reads; other safetensors files may lie beside them.

    Args:
        folder: folder of a model in the layout of transformers.

    Returns:
        File names: model.safetensors, or the shards of the index.

    Raises:
        ModelError: there are no safetensors weights, or the index names a file that is not in the folder itself.
    """
    _check_links((folder / _SINGLE_FILE, folder / _INDEX_FILE))
    if (folder / _SINGLE_FILE).exists():
        return [_SINGLE_FILE]
    if (folder / _INDEX_FILE).exists():
        weight_map = read_json(folder / _INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{folder / _INDEX_FILE}: has no weight_map from names to files; restore the file")
        outside = sorted({name for name in weight_map.values() if Path(name).name != name})
        if outside:
            raise ModelError(f"{folder / _INDEX_FILE}: {outside[0]!r} is no name of a file in its folder; restore the file")
        return sorted(set(weight_map.values()))
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    found = f"only {pickles[0]} was found, which is a pickle and may run code" if pickles else "no weights were found"
    raise ModelError(f"{folder}: {found}; save the weights as safetensors first (save_pretrained of transformers does)")


def _check_header(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        real_path(path, "model", ModelError)  # whose name may be no UTF-8
        raise ModelError(f"{path}: not a whole safetensors file ({one_line(error)}); fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of JSON.

    Args:
        path: of the file.

    Returns:
        The object in it.

    Raises:
        ModelError: it cannot be read, is no JSON, or holds no object.
    """
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({one_line(error)}); restore the file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); restore the file") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__} where an object is needed; restore the file")
    return content
