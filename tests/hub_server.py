"""A stand-in for the Hugging Face Hub on the loopback: folders as repositories; ranges, revisions, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"


@dataclasses.dataclass
class Repository:
    """A folder's files at one commit, which ``main`` and other names point to.

    gated: only with TOKEN. cut: a file's answer ends after so many bytes, once each time it is set. lies: a file's
    headers that are not true. listed: names in the list of files that it does not have.
    """

    folder: pathlib.Path
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    cut: dict[str, int] = dataclasses.field(default_factory=dict)
    lies: dict[str, str] = dataclasses.field(default_factory=dict)
    listed: tuple[str, ...] = ()

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.folder).encode()).hexdigest()

    def files(self) -> dict[str, pathlib.Path]:
        return {str(p.relative_to(self.folder)): p for p in sorted(self.folder.rglob("*")) if p.is_file()}


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclasses.dataclass
class Hub:
    """The repositories by name, the address, and every request that came."""

    repositories: dict[str, Repository]
    endpoint: str = ""
    requests: list[Request] = dataclasses.field(default_factory=list)

    def fetched(self) -> list[str]:
        """The files whose content was asked for."""
        return [r.path.rpartition("/")[2] for r in self.requests if r.method == "GET" and "/resolve/" in r.path]


@contextlib.contextmanager
def serving(**repositories: Repository) -> Iterator[Hub]:
    """The Hub with repositories, whose names are given as org__name."""
    hub = Hub({name.replace("__", "/"): repository for name, repository in repositories.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, dict(self.headers)))
        is_api = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        repository = self.hub.repositories.get(name)
        rest = path.removeprefix("/api/models").removeprefix(f"/{name}").strip("/")
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo")
        revision, _, file = rest.partition("/")[2].partition("/")
        revision = unquote(revision) or "main"
        if revision not in (*repository.revisions, repository.commit):
            return self._refuse(404, "RevisionNotFound")
        if is_api:
            return self._send_json(repository, name)
        if file not in repository.files():
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
        return self._send_file(repository, file, body)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in {"X-Error-Code": code, "Content-Length": "0", **(headers or {})}.items():
            self.send_header(header, value)
        self.end_headers()

    def _send_json(self, repository: Repository, name: str) -> None:
        files = [{"rfilename": file, "size": p.stat().st_size} for file, p in repository.files().items()]
        files += [{"rfilename": file, "size": 1} for file in repository.listed]
        facts = {"id": name, "modelId": name, "sha": repository.commit, "siblings": files, "tags": []}
        data = json.dumps(facts).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, repository: Repository, file: str, body: bool) -> None:
        data = repository.files()[file].read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].partition("-")[0])
        self.send_response(206 if start else 200)
        truth = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": repository.commit}
        for header, value in (truth | repository.lies).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        cut = repository.cut.pop(file, None)
        self.wfile.write(data[start:] if cut is None else data[start : start + cut])
        self.close_connection = cut is not None
