"""A pipe, a socket or a device in the folder of a model is refused by name before it is read, for that would never end; folders stay."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.cli.main import main as compressor
from compressor.errors import ModelError
from compressor.model.folder import resolve_folder
from compressor.model.loading.load import load_model
from harness.cli import main as harness


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may have 100 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/null"),
    "link to a pipe": lambda path: (os.mkfifo(path.with_suffix(".away")), path.symlink_to(path.with_suffix(".away")))[1],
}
RECIPE = '{"QuantizationModifier": {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}}'
VERBS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "plan": (compressor, ["plan", "MODEL", "--recipe", "RECIPE"]),
    "oneshot": (compressor, ["oneshot", "MODEL", "--recipe", "RECIPE", "--output-dir", "OUT"]),
    "convert": (compressor, ["convert", "MODEL", "--scheme", "FP8_DYNAMIC", "--ignore", "lm_head", "--output-dir", "OUT"]),
    "train": (compressor, ["train", "MODEL", "--dataset", "DATA", "--steps", "1", "--output-dir", "OUT"]),
    "trace": (compressor, ["trace", "MODEL"]),
    "mappings": (compressor, ["mappings", "MODEL"]),
    "inspect": (compressor, ["inspect", "MODEL"]),
    "validate": (harness, ["validate", "SOUND", "MODEL", "--dataset", "DATA"]),
    "bisect": (harness, ["bisect", "MODEL", "SOUND", "--dataset", "DATA"]),
    "release": (harness, ["release", "check", "SOUND", "MODEL", "--dataset", "DATA"]),
}


@pytest.fixture
def damaged(llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama_dir, tmp_path / "model")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_what_has_no_end(
    verb: str, damaged: Path, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A socket, for a verb that read a pipe would never say that it did."""
    _socket(damaged / "more.json")
    (tmp_path / "recipe.json").write_text(RECIPE)
    main, words = VERBS[verb]
    given = {"MODEL": damaged, "SOUND": llama_dir, "OUT": tmp_path / "out", "RECIPE": tmp_path / "recipe.json", "DATA": tokens_file}
    assert main([str(given.get(word, word)) for word in words]) != 0
    said = capsys.readouterr().err
    assert f"{damaged}: more.json: no file but a pipe, a socket or a device, which has no end; take it out of the folder" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pipe.json", "config.json", "model.safetensors", "notes", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named_whatever_it_is_and_wherever_it_stands(kind: str, name: str, damaged: Path) -> None:
    path = damaged / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    with pytest.raises(ModelError, match=f"{path.name}.*: no file but a pipe, a socket or a device"):
        resolve_folder(damaged)


def test_folders_and_links_to_files_stay(damaged: Path, tmp_path: Path) -> None:
    """As a cache of the hub holds them."""
    (damaged / "onnx").mkdir()
    (damaged / "config.json").rename(tmp_path / "blob")
    (damaged / "config.json").symlink_to("../blob")
    assert json.loads((damaged / "config.json").read_text()) and load_model(damaged).model


@pytest.mark.parametrize("verb", ["oneshot", "convert"])
def test_folders_with_names_of_files_are_left_alone(verb: str, damaged: Path, llama_dir: Path, tmp_path: Path) -> None:
    """As an editor or an export leaves them behind."""
    for name in ("notes.json", "log.txt", "bpe.model", "old/a.jinja"):
        (damaged / name).mkdir(parents=True)
    (tmp_path / "recipe.json").write_text(RECIPE)
    main, words = VERBS[verb]
    files = []
    for model, out in ((llama_dir, tmp_path / "sound"), (damaged, tmp_path / "out")):
        given = {"MODEL": model, "OUT": out, "RECIPE": tmp_path / "recipe.json"}
        assert main([str(given.get(word, word)) for word in words]) == 0
        files.append({path.name: path.read_bytes() for path in out.glob("*.safetensors")})
    assert files[0] == files[1] and files[0]
