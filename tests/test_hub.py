"""Models by their name on the Hub, which a server on the loopback stands in for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import golden_cases
import numpy as np
import pytest
from helpers import Cli
from safetensors.numpy import load_file, save_file

from edgekv.checkpoint.hub import HubName, cached_model_name, find_cached, parse_hub_name, parse_model_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN = ["run", "--prompt", "It was", "--max-new-tokens", "4", "--greedy"]

TOKEN = "hf_secret"


@dataclasses.dataclass
class Repository:
    """A folder's files at one commit.

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
        """Returns the files whose content was asked for."""
        return [r.path.rpartition("/")[2] for r in self.requests if r.method == "GET" and "/resolve/" in r.path]


@contextlib.contextmanager
def serving(**repositories: Repository) -> Iterator[Hub]:
    """Serves repositories, whose names are given as org__name, as the Hub does."""
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

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
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
            files = [{"rfilename": file, "size": p.stat().st_size} for file, p in repository.files().items()]
            files += [{"rfilename": file, "size": 1} for file in repository.listed]
            facts = {"id": name, "modelId": name, "sha": repository.commit, "siblings": files, "tags": []}
            return self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})
        if file not in repository.files():
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
        return self._send_file(repository, file)

    do_HEAD = do_GET

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, **(headers or {})})

    def _send_file(self, repository: Repository, file: str) -> None:
        data = repository.files()[file].read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].partition("-")[0])
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": repository.commit}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = repository.cut.pop(file, None) if self.command == "GET" else None
        self._send(206 if start else 200, data[start:], headers | repository.lies, cut)

    def _send(self, status: int, data: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])
        self.close_connection = cut is not None


@pytest.fixture
def demo(tmp_path: pathlib.Path) -> Repository:
    """The demo model with what other repositories hold beside."""
    folder = tmp_path / "demo"
    shutil.copytree(ROOT / "models" / "demo", folder)
    return holding(folder, "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx")


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "hf"


Run = Callable[..., Any]


@pytest.fixture
def here(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Run:
    """Runs the command line as `cli` does, with the environment that `process` gives another process."""
    import huggingface_hub.constants as constants

    def edgekv(hub: Hub, *arguments: str, offline: bool = False, **expected: int) -> Any:
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": offline,
        }.items():
            monkeypatch.setattr(constants, name, value)
        return cli(*arguments, **expected)

    return edgekv


def process(hub: Hub, home: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_names(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in ((), ("v1.0",), ("refs/pr/1", "x/y.gguf"), (None, "Q4_K_M"), ("v--1", "a--b/c d.gguf")):
        assert parse_hub_name(str(HubName("a/B-0.6", *parts))) == HubName("a/B-0.6", *parts)
    wrong = ["demo", "./a/b", "/a/b", "a/b/c", "a/../b", "a/b:c.bin", "a/b@", "a/b--c", "a/b.git", "a-/b"]
    for text in (*wrong, "a\n/b", "a/b:x /../y.gguf"):
        assert parse_hub_name(text) is None
    monkeypatch.chdir(tmp_path)
    assert parse_model_name("models/typo") == HubName("models/typo")
    (tmp_path / "models").mkdir()
    assert parse_model_name("models/typo") is None  # what lies in a folder that is here is a path
    assert cached_model_name(tmp_path) is None


def test_pull_fetches_what_is_needed_once_and_run_nothing(demo: Repository, home: pathlib.Path, here: Run) -> None:
    with serving(some__demo=demo) as hub:
        done = process(hub, home, "-m", "edgekv", "pull", "some/demo")
        assert done.returncode == 0, done.stderr
        assert "downloading 22.5 MiB from 127.0.0.1" in done.stderr
        wanted = ["config.json", "generation_config.json", "model.safetensors"]
        assert sorted(hub.fetched()) == [*wanted, "tokenizer.model", "tokenizer_config.json"]
        assert not any("telemetry" in request.path for request in hub.requests)
        n = len(hub.requests)
        run = here(hub, *RUN, "--model", "some/demo")
        assert ("some/demo" in run.err, len(hub.requests)) == (True, n)  # the copy is whole: nobody is asked
        here(hub, "pull", "some/demo")
        assert len(hub.fetched()) == 5
    assert run.out == here(hub, *RUN).out
    assert pathlib.Path(done.stdout.strip()).is_relative_to(home)


def test_a_download_goes_on_where_it_was_cut(demo: Repository, home: pathlib.Path, here: Run) -> None:
    """The process dies each time; the first 10 MiB, which the library writes at once, are not sent again."""
    with serving(some__demo=demo) as hub:
        demo.cut["model.safetensors"] = 15_000_000
        script = (
            "import os, huggingface_hub.file_download as d\n"
            "d.time.sleep = lambda s: os._exit(9)\n"  # what waits to try again is killed
            "from edgekv.cli import main; main(['pull', 'some/demo'])"
        )
        died = process(hub, home, "-c", script)
        assert died.returncode == 9, died.stderr
        here(hub, *RUN, "--model", "some/demo", offline=True, status=2)  # half a copy
        done = here(hub, "pull", "some/demo")
        ranges = [r.headers.get("Range") for r in hub.requests if "/model.safe" in r.path and r.method == "GET"]
        assert ranges == [None, "bytes=10485760-"]
        got = pathlib.Path(done.out.strip()) / "model.safetensors"
        assert got.read_bytes() == (demo.folder / "model.safetensors").read_bytes()
        assert not list(home.rglob("*partial*"))
        got.resolve().rename(got.resolve().with_name(f"{got.resolve().name}.edgekv-partial"))  # with other bytes
        got.parent.joinpath("model.safetensors").unlink()
        (next(home.rglob("*.edgekv-partial"))).write_bytes(b"x" * 1000)
        assert "what came is not what was sent" in here(hub, "pull", "some/demo", status=2, notes=1).err
        here(hub, "pull", "some/demo")


def test_what_the_network_calls_a_file_is_no_path(demo: Repository, home: pathlib.Path, here: Run) -> None:
    with serving(some__demo=demo) as hub:
        headers = "ETag", "X-Linked-ETag", "X-Repo-Commit"
        for header, value in itertools.product(headers, ("../../../../out", "..")):
            demo.lies = {header: value}
            for command in (["pull", "some/demo"], ["budget", "--model", "some/demo", "--ctx", "100"]):
                assert "for an ETag or a commit" in here(hub, *command, status=2).err
        assert not [p for p in home.parent.rglob("*") if p.is_file() and demo.folder not in p.parents]
        demo.lies, out = {}, "../../../../out.safetensors"
        (demo.folder / "model.safetensors").unlink()
        (demo.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": out}}))
        demo.listed = (out,)
        assert f"has no file {out}" in here(hub, "pull", "some/demo", status=2).err


def test_shards_a_revision_and_one_command(tmp_path: pathlib.Path, here: Run) -> None:
    """`info --model org/name@v1` of a sharded repository: downloaded by the way, and said."""
    folder = golden_cases.write_checkpoint("qwen3", tmp_path / "qwen")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(homes.values()):
        save_file({name: tensors[name] for name in tensors if homes[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    save_file({"a": np.zeros(3, np.float32)}, folder / "adapter_model.safetensors")
    with serving(Qwen__Qwen3=Repository(folder, revisions=("v1",))) as hub:
        done = here(hub, "info", "--model", "Qwen/Qwen3@v1", "--json")
        assert "Qwen/Qwen3@v1: downloading" in done.err
        assert json.loads(done.out)["model_type"] == "qwen3"
        assert "adapter_model.safetensors" not in hub.fetched()
        offline = here(hub, "info", "--model", "Qwen/Qwen3@v1", "--json", offline=True)
        assert offline.out == done.out
        assert "no revision main" in here(hub, "pull", "Qwen/Qwen3@main", status=2).err


def test_a_budget_downloads_the_config_alone(demo: Repository, here: Run) -> None:
    with serving(some__demo=demo) as hub:
        here(hub, "budget", "--model", "some/demo", "--ctx", "2048", "--json")
        assert set(hub.fetched()) == {"config.json"}


def holding(folder: pathlib.Path, *files: str) -> Repository:
    """Returns a repository of such files, which only hold their names."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    return Repository(folder)


def test_a_gguf_file(tmp_path: pathlib.Path, here: Run) -> None:
    with serving(some__GGUF=holding(tmp_path / "files", "a-Q4_0.gguf", "a-Q8_0.gguf")) as hub:
        done = here(hub, "pull", "some/GGUF:a-Q8_0.gguf")
        assert pathlib.Path(done.out.strip()).read_bytes() == b"a-Q8_0.gguf"
        assert hub.fetched() == ["a-Q8_0.gguf"]
        for name in ("some/GGUF", "some/GGUF:b.gguf"):
            refused = here(hub, "pull", name, status=2)
            assert "some/GGUF:a-Q4_0.gguf, some/GGUF:a-Q8_0.gguf" in refused.err


def test_a_quantization_names_its_file(tmp_path: pathlib.Path, here: Run) -> None:
    """In any case, offline once it is here; where none or several have it, those that are there are named."""
    parts = ("a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf")
    single = ("a-Q4_K_M.gguf", "a-IQ4_K_M.gguf", "mmproj-a-q4_k_m.gguf", "sub/a.f16.gguf")
    with serving(some__GGUF=holding(tmp_path / "files", *single, *parts)) as hub:
        for name, file in (("q4_k_m", "a-Q4_K_M.gguf"), ("F16", "sub/a.f16.gguf")):
            done = here(hub, "pull", f"some/GGUF:{name}")
            found = find_cached(HubName("some/GGUF", None, name))
            assert str(found) == done.out.strip()
            assert found.read_bytes() == file.encode()
        assert hub.fetched() == ["a-Q4_K_M.gguf", "a.f16.gguf"]
        none, several = (here(hub, "info", f"some/GGUF:{name}", status=2) for name in ("Q5_0", "Q8_0"))
    assert "has no single GGUF file of Q5_0; accepted: some/GGUF:a-IQ4_K_M.gguf, some/GGUF:a-Q4" in none.err
    assert f"accepted: some/GGUF:{parts[0]}, some/GGUF:{parts[1]}\n" in several.err


def test_list_and_rm(demo: Repository, home: pathlib.Path, here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, parts of downloads and stores are listed and go by their names; nothing else is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent / "cache"))
    files, other = (home.parent / name for name in ("files", "other"))
    gguf = holding(files, "a-Q4_0.gguf", "a-Q8_0.gguf")
    shutil.copy(files / "a-Q8_0.gguf", files / "b-Q8_1.gguf")
    other.mkdir()
    shutil.copy(demo.folder / "config.json", other)
    with serving(some__demo=demo, some__GGUF=gguf, some__other=Repository(other)) as hub:
        for name in ("some/demo", "some/GGUF:Q4_0", "some/GGUF:Q8_0", "some/GGUF:Q8_1"):
            here(hub, "pull", name)
        here(hub, "budget", "some/other")
    here(hub, *RUN, "--model", "some/demo")
    cache = home / "hub"
    hidden = cache / "models--org--bert" / "snapshots" / "0" / "config.json"
    hidden.parent.mkdir(parents=True)
    hidden.write_text('{"model_type": "bert"}')
    (cache / "models--broken--one").write_text("no folder")
    (cache / "models--org--link").symlink_to(files)
    loop, stores = cache / "models--org--loop" / "snapshots", home.parent / "cache" / "edgekv" / "stores"
    for folder in (loop, stores / "damaged-int8-v1", stores / "random-0-q4-v1"):
        folder.mkdir(parents=True)
    (loop / "x").symlink_to("x")
    shape = {"name": "random-0", "weights": "q4", "config": {"_name_or_path": "org/7b"}}
    (stores / "random-0-q4-v1" / "store.json").write_text(json.dumps(shape))

    def listed() -> dict[tuple[str, str], int]:
        return {(row["name"], row["what"]): row["bytes"] for row in json.loads(here(hub, "list", "--json").out)}

    found = listed()
    model = sum((demo.folder / file).stat().st_size for file in ("model.safetensors", "tokenizer.model"))
    assert model < found["some/demo", "llama"] < model + 5000
    assert found["some/GGUF:a-Q4_0.gguf", "GGUF"] == 11
    assert found["some/other", "not whole; `edgekv pull` goes on"] == (other / "config.json").stat().st_size + 40
    assert found["some/demo", "weights as f32"] > model
    rest = {name for name, _ in found if not name.startswith("some/")}
    assert rest <= {"kernels", "gguf", "gates", "bits", "random-0"}
    assert ("random-0", "random weights as q4, shape org/7b") in found
    said = here(hub, "list").out
    assert all(name in said for name, _ in found)
    for names in ("some/demo some/GUF:Q4_0", "org/bert", "org/link", "../hub", "stores", "scenes"):
        here(hub, "rm", *names.split(), status=2)
    assert listed() == found
    gone = found["some/demo", "llama"] + found["some/demo", "weights as f32"]
    done = here(hub, "rm", "some/demo", "some/GGUF:q4_0")
    assert f"({gone} bytes)\n" in done.out
    assert "some/GGUF:q4_0: freed 11 B" in done.out
    assert (cache / "models--some--GGUF").is_dir()
    here(hub, "rm", "some/GGUF", "some/other")
    assert {name for name, _ in listed()} == rest
    assert hidden.exists()
    assert sorted(path.name for path in files.iterdir()) == ["a-Q4_0.gguf", "a-Q8_0.gguf", "b-Q8_1.gguf"]
    assert not list(cache.glob("models--some--*"))
    shutil.rmtree(home)
    assert json.loads(here(hub, "list", "--json").out) is not None


def test_without_a_network(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not found, nothing answers, or a look-up hangs: one line, which says how to go on."""
    monkeypatch.setattr("edgekv.checkpoint.hub.CONNECT_S", 0.2)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    over, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *rest: object, **more: object) -> list[object]:
        if host == "hang.invalid":
            over.wait(60)
            return []
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for endpoint, said in {
        "http://127.0.0.1:9": "refused",
        "http://hang.invalid": "hang.invalid: no answer within 0.2 seconds",
        "https://behind.invalid": "127.0.0.1: Connection refused",
    }.items():
        for command in (["run", "some/demo", "x"], ["budget", "some/demo:Q4_0"], ["budget", "some/demo"]):
            error = here(Hub({}, endpoint), *command, status=2).err
            assert f"can't be downloaded: {endpoint} can't be reached" in error
            assert said in error
            assert "give a path, demo, or a name of `edgekv list`" in error
    over.set()


def test_refusals_are_one_line(
    demo: Repository, here: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = holding(tmp_path / "hqq", "model.safetensors")
    config = json.loads((demo.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (quantized.folder / "config.json").write_text(json.dumps(config))
    demo.gated = True
    with serving(some__demo=demo, some__hqq=quantized) as hub:
        for arguments, said in (
            (["pull", "some/none"], "is not at http://127.0.0.1"),
            (["pull", "some/demo"], "error: some/demo: is gated: accept its terms at"),
            (["pull", "demo"], "ships with edgekv"),
            (["pull", "some/hqq"], "quant_method is 'hqq'; accepted: gptq, awq"),
            (["info", "--model", "some/demo"], "is gated"),
        ):
            assert said in here(hub, *arguments, status=2).err
        assert "model.safetensors" not in hub.fetched()
        offline = here(Hub({}, "http://127.0.0.1:9"), "info", "some/demo", offline=True, status=2)  # not tried
        assert "HF_HUB_OFFLINE is set" in offline.err
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        here(hub, "pull", "some/demo")
