"""Models by their names on the hub: what is fetched, what goes before it, and one line for everything that the hub does not give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from compressor.errors import ModelError
from compressor.model.folder import resolve_folder

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "merges.txt": b"",
    "chat_templates/tool.jinja": b"{{ messages }}",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"weights once more",
    "onnx/config.json": b"{}",
    "README.md": b"",
}
TEXTS = {"config.json", "tokenizer.json", "merges.txt", "chat_templates/tool.jinja"}


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("how", "more"),
    [({}, {"model.safetensors"}), ({"weights": False}, set()), ({"weights": False, "code": True}, {"modeling.py", "onnx/config.json"})],
)
def test_only_what_a_loader_reads_is_fetched(hub: Any, how: dict[str, bool], more: set[str]) -> None:
    repo = hub.add("owner/name", FILES)
    found = resolve_folder("owner/name", **how)
    assert files_of(found.path) == TEXTS | more
    assert found.origin is not None and found.origin.commit == repo.commit("main") == found.path.name
    assert not any("pytorch_model.bin" in line or "consolidated" in line for line in hub.asked)


def test_what_code_may_read_is_fetched_where_there_is_code(hub: Any) -> None:
    files = {name: data for name, data in FILES.items() if name != "modeling.py"} | {"assets/a.npy": b"", "assets/b.pt": b"", ".env": b""}
    hub.add("owner/plain", files)
    hub.add("owner/own", {**files, "modeling.py": b""})
    assert files_of(resolve_folder("owner/plain", code=True).path) == TEXTS | {"model.safetensors"}
    assert files_of(resolve_folder("owner/own", code=True).path) == TEXTS | {
        *("model.safetensors", "modeling.py", "assets/a.npy", "onnx/config.json")
    }
    assert not any(name in line for name in ("b.pt", "pytorch_model.bin", "consolidated", ".env") for line in hub.asked)


def test_the_shards_of_an_index_are_fetched_and_no_others(hub: Any) -> None:
    index = b'{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}'
    shards = {f"part-{number}.safetensors": b"x" for number in (1, 2, 3)}
    hub.add("owner/name", {"config.json": b"{}", "model.safetensors.index.json": index, **shards})
    assert files_of(resolve_folder("owner/name").path) == {
        *("config.json", "model.safetensors.index.json", "part-1.safetensors", "part-2.safetensors")
    }


def test_a_pickle_is_not_fetched_though_the_index_names_it(hub: Any) -> None:
    index = b'{"weight_map": {"a": "part-1.safetensors", "b": "pytorch_model.bin"}}'
    hub.add(
        "owner/name", {"config.json": b"{}", "model.safetensors.index.json": index, "part-1.safetensors": b"x", "pytorch_model.bin": b""}
    )
    assert "pytorch_model.bin" not in files_of(resolve_folder("owner/name").path)
    assert not any("pytorch_model.bin" in line for line in hub.asked)


@pytest.mark.parametrize(
    ("name", "revision"), [("owner/name", "v2"), ("owner/name@v2", None), ("owner/name@v2", "v2"), ("owner/name@v2", "main")]
)
def test_a_revision_may_be_told_in_two_ways(hub: Any, name: str, revision: str | None) -> None:
    hub.add("owner/name", FILES)
    commit = hub.add("owner/name", {"config.json": b"{ }"}, revision="v2").commit("v2")
    origin = resolve_folder(name, revision, weights=False).origin
    assert origin is not None and (origin.name, origin.revision, origin.commit) == ("owner/name", "v2", commit)
    assert resolve_folder(f"owner/name@{commit}", weights=False).path.name == commit


def test_a_local_folder_goes_before_a_name(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", FILES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    found = resolve_folder("owner/name", "main")
    assert found.path == Path("owner/name") and found.origin is None and hub.asked == []
    with pytest.raises(ModelError, match=r"^model_revision: 'v2' was given for the path 'owner/name', which has none; leave it out$"):
        resolve_folder("owner/name", "v2")


@pytest.mark.parametrize("path", ["name", "./owner/name", "/owner/name", "../owner/name", "a/b/c", "owner/", Path("owner/name")])
def test_what_is_no_name_is_a_path_and_the_hub_is_not_asked(hub: Any, path: str | Path) -> None:
    assert resolve_folder(path).path == Path(path) and hub.asked == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/nothing", "the hub has none of that name, or it is private; correct the name, or set HF_TOKEN"),
        ("owner/private", "the hub has none of that name, or it is private; correct the name, or set HF_TOKEN"),
        ("owner/gated", "on the hub it is gated; accept its conditions on its page, and set HF_TOKEN"),
        ("owner/name@v3", "on the hub it has no revision 'v3'; correct it"),
        ("owner/na..me", "it is no name on the hub; correct it"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_one_line(hub: Any, name: str, words: str) -> None:
    hub.add("owner/name", FILES)
    hub.add("owner/private", FILES, private=True)
    hub.add("owner/gated", FILES, gated=True)
    with pytest.raises(ModelError) as caught:
        resolve_folder(name)
    assert str(caught.value).startswith(f"model: {name.partition('@')[0]!r} is no folder here, and {words}") and "\n" not in str(
        caught.value
    )


def test_a_token_opens_what_is_private_or_gated(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/private", FILES, private=True)
    hub.add("owner/gated", FILES, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    for name in ("owner/private", "owner/gated"):
        assert "model.safetensors" in files_of(resolve_folder(name).path)


def test_without_a_network_the_cache_serves_what_it_has(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", FILES)
    folder = resolve_folder("owner/name", weights=False).path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert resolve_folder("owner/name", weights=False).path == folder
    for name, revision in (("owner/other", "main"), ("owner/name", "main")):  # of the second the weights are missing
        with pytest.raises(ModelError, match=rf"lacks revision '{revision}' of it, or a part; unset HF_HUB_OFFLINE, with which nothing is"):
            resolve_folder(name)
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert resolve_folder("owner/name", weights=False).path == folder
    with pytest.raises(ModelError, match=r"and http://127\.0\.0\.1:9 does not give it \(ConnectError: .*\); check the network, or give a"):
        resolve_folder("owner/other")
