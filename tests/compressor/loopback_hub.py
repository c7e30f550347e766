"""A hub on the loopback address: the routes that the clients of the Hugging Face hub ask, served from dictionaries of files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_of_a_test"


@dataclass
class Repo:
    """Files by revision; a revision is a branch or a tag."""

    revisions: dict[str, dict[str, bytes]]
    private: bool = False
    gated: bool = False

    def commit(self, revision: str) -> str:
        """The hash of a revision, which follows from its files."""
        files = self.revisions[revision]
        return hashlib.sha1(b"".join(path.encode() + hashlib.sha1(files[path]).digest() for path in sorted(files))).hexdigest()

    def find(self, revision: str) -> str | None:
        """The revision of a name or of a hash."""
        return next((name for name in self.revisions if revision in (name, self.commit(name))), None)


@dataclass
class Hub:
    """What it holds and what it was asked."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, files: Path | dict[str, bytes], kind: str = "models", revision: str = "main", **flags: bool) -> Repo:
        """Serve a folder, or files by their names."""
        if isinstance(files, Path):
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        repo = self.repos.setdefault((kind, name), Repo({}, **flags))
        repo.revisions[revision] = files
        return repo


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    routes = (
        ("GET", r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
        ("POST", r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/paths-info/(?P<revision>[^/]+)", "paths"),
        ("GET", r"(?:/(?P<kind>datasets))?/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/(?P<kind>models)/(?P<name>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/upload/(?P<path>[0-9a-f]+)", "upload"),
        ("POST", r"/api/(?P<kind>models)/(?P<name>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
    )

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self) -> None:
        path, _, _ = self.path.partition("?")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {path}")
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, name in self.routes:
            found = re.fullmatch(pattern, path)
            if wanted == method and found is not None:
                given = {key: None if value is None else unquote(value) for key, value in found.groupdict().items()}
                getattr(self, f"on_{name}")(**given)
                return
        self.fail(404, "", f"no such route {path}")

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(self, content: bytes | Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, code: int, kind: str, words: str) -> None:
        self.send({"error": words}, code, X_Error_Code=kind, X_Error_Message=words)

    def repo(self, kind: str | None, name: str, revision: str | None) -> tuple[Repo, str] | None:
        """Repository and revision; what is not there, or not to be seen, is answered as the hub does it."""
        repo = self.hub.repos.get((kind or "models", name))
        may_see = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not may_see):
            self.fail(404 if may_see else 401, "RepoNotFound", "Repository not found")
            return None
        found = repo.find(revision or "main")
        if found is None:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo, found

    def on_info(self, kind: str, name: str, revision: str | None) -> None:
        if (found := self.repo(kind, name, revision)) is not None:
            repo, own = found
            siblings = [{"rfilename": path} for path in repo.revisions[own]]
            self.send({"id": name, "sha": repo.commit(own), "private": repo.private, "siblings": siblings, "tags": [], "downloads": 0})

    def on_tree(self, kind: str, name: str, revision: str, path: str | None) -> None:
        if (found := self.repo(kind, name, revision)) is not None:
            files = found[0].revisions[found[1]]
            inside = {one: files[one] for one in files if path is None or one.startswith(f"{path}/")}
            if path is not None and not inside:
                self.fail(404, "EntryNotFound", f"{path} does not exist")
            elif "recursive=true" in self.path.lower() or path is not None:
                self.send([_entry(one, content) for one, content in inside.items()])
            else:
                folders = {one.partition("/")[0] for one in files if "/" in one}
                here = [_entry(one, content) for one, content in files.items() if "/" not in one]
                self.send([*here, *({"type": "directory", "path": one, "size": 0, "oid": "0" * 40} for one in sorted(folders))])

    def on_paths(self, kind: str, name: str, revision: str) -> None:
        if (found := self.repo(kind, name, revision)) is not None:
            files = found[0].revisions[found[1]]
            text = self.body.decode()
            asked = (
                json.loads(text)["paths"]
                if text.startswith("{")
                else [part[6:] for part in unquote(text).split("&") if part[:6] == "paths="]
            )
            self.send([_entry(path, files[path]) for path in asked if path in files])

    def on_resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        if (found := self.repo(kind, name, revision)) is None:
            return
        repo, own = found
        if repo.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.fail(401, "GatedRepo", "Access to this repository is restricted")
        elif path not in repo.revisions[own]:
            self.send(b"", 404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=repo.commit(own))
        else:
            content = repo.revisions[own][path]
            first, last = _range(self.headers.get("Range"), len(content))
            headers = {"ETag": f'"{_oid(content)}"', "X_Repo_Commit": repo.commit(own), "Accept_Ranges": "bytes"}
            if self.headers.get("Range"):
                headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            self.send(content[first : last + 1], 206 if self.headers.get("Range") else 200, **headers)

    def on_create(self) -> None:
        given = json.loads(self.body)
        name = given["name"] if given.get("organization") is None else f"{given['organization']}/{given['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.fail(401, "", "Invalid username or password.")
            return
        self.hub.repos.setdefault(("models", name), Repo({"main": {}}, private=bool(given.get("private"))))
        self.send({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def on_validate(self) -> None:
        self.send({"errors": [], "warnings": []})

    def on_preupload(self, kind: str, name: str, revision: str) -> None:
        files = [one["path"] for one in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
        self.send({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]})

    def on_batch(self, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        made = [{**one, "actions": {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}", "header": {}}}} for one in objects]
        self.send({"transfer": "basic", "objects": made})

    def on_upload(self, path: str) -> None:
        self.hub.stored[path] = self.body
        self.send(b"", ETag=f'"{path}"')

    def on_commit(self, kind: str, name: str, revision: str) -> None:
        files = self.hub.repos[kind, name].revisions.setdefault(revision, {})
        for line in self.body.decode().splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            elif part["key"] == "lfsFile":
                files[part["value"]["path"]] = self.hub.stored[part["value"]["oid"]]
        commit = self.hub.repos[kind, name].commit(revision)
        self.send({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}


def _range(header: str | None, size: int) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    return (0, size - 1) if found is None else (int(found[1]), min(int(found[2] or size - 1), size - 1))


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve an empty hub until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
