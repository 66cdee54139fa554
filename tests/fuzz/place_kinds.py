"""Kinds of input that lie in places which edgekv looks into: its own cache, the Hub, the working folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import threading
from http.server import ThreadingHTTPServer
from random import Random
from unittest import mock

import hub_server

from edgekv import Session, child
from edgekv.checkpoint.hub import HubName, pull
from edgekv.cli import main
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts
from edgekv.errors import EdgeKVError
from edgekv.kvcache import CacheSpec
from edgekv.weights import threads

from .material import Material
from .mutate import ODD, as_json, damaged, mutated


def remembered(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Whatever a file of the cache holds, all that it was remembered for goes on: it is made again."""
    shutil.copytree(m.cache, folder / "cache")
    files = [file for file in sorted((folder / "cache").rglob("*")) if file.is_file()]
    for file in rng.sample(files, rng.choice((1, 1, 2))):
        data = file.read_bytes()
        if file.suffix == ".json":
            value = json.loads(data)
            data = as_json(rng.choice(ODD) if rng.random() < 0.3 else mutated(value, rng), rng)
        file.write_bytes(damaged(data, rng) if file.suffix != ".json" or rng.random() < 0.2 else data)
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
        mock.patch.object(threads, "FEW_CORES", 0),
    ):
        use_remembered(m)


def use_remembered(m: Material) -> None:
    """What makes, or reads, each kind of file in the cache."""
    for path, kv in ((m.talker, "planes"), (m.gguf[0], "onebit")):
        with Session.load(path, kv=kv, weights="int4" if path == m.talker else "auto") as session:
            session.prefill([1, 2, 3])
            spec = CacheSpec.parse("kivi2")
            verdicts = Verdicts(session.model)
            verdicts.warning(spec)
            verdicts.warn_once(spec)
            threads.remembered(session.model.arch, session.model.weight_format("int8"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["info", "--model", str(m.talker)]) == 0


NAMES = (
    *("../x", "../../../x", "a/../../../x", "/x", "a/b", "..", ".", "", "/", "x" * 300),
    *("\x1b[2Jx", "a\nb", "\ud800", "%2e%2e/x", "..\\x", "x\0y", "~", "model.safetensors", "config.json", 5, None),
)


class _LyingHub(hub_server._Handler):
    """headers: what is sent in place of the true ones; facts, from what is true: what it tells of a model."""

    headers_sent: dict[str, str]
    rng: Random

    def send_header(self, keyword: str, value: str) -> None:
        super().send_header(keyword, self.headers_sent.get(keyword, value))

    def _send_json(self, repository: hub_server.Repository, name: str) -> None:
        files = [{"rfilename": file, "size": p.stat().st_size} for file, p in repository.files().items()]
        facts = {"id": name, "modelId": name, "sha": repository.commit, "siblings": files, "tags": []}
        if self.rng.random() < 0.6:
            facts = mutated(facts, self.rng, (*ODD[:16], *NAMES))
        data = json.dumps(facts).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def hub(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Whatever a Hub says: nothing is written outside of the Hub's cache."""
    import huggingface_hub.constants as constants

    model, names = folder / "model", (*NAMES, str(folder / "outside"))
    model.mkdir()
    (model / "config.json").write_bytes((m.llama / "config.json").read_bytes())
    weights = rng.choice(("model.safetensors", "a.safetensors", "x.gguf"))
    (model / weights).write_bytes(b"weights")
    if weights == "a.safetensors":
        homes = {"metadata": {}, "weight_map": {"a": weights, "b": rng.choice(names)}}
        (model / "model.safetensors.index.json").write_bytes(as_json(mutated(homes, rng, names), rng))
    sent = {}
    for header in ("ETag", "X-Repo-Commit", "X-Linked-Etag", "Location"):
        if rng.random() < 0.4:
            name = str(rng.choice(names)).encode("ascii", "ignore").decode().replace("\n", "").replace("\0", "")
            sent[header] = rng.choice((name, f'"{name}"', f'W/"{name}"'))
    told = hub_server.Hub({"org/name": hub_server.Repository(model)})
    handler = type("Handler", (_LyingHub,), {"hub": told, "headers_sent": sent, "rng": rng})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    home = folder / "home" / "a" / "b" / "hub"
    settings = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home),
        "HF_HUB_OFFLINE": False,
    }
    file = "x.gguf" if weights == "x.gguf" else None
    try:
        with mock.patch.multiple(constants, **settings):
            path = pull(HubName("org/name", None, file))
            assert path.resolve().is_relative_to(home.resolve()), path
            with contextlib.suppress(EdgeKVError):
                Model.open(path)
    finally:
        server.shutdown()
        server.server_close()
        written = [each for each in (folder / "home").rglob("*") if not each.is_relative_to(home)]
        assert all(home.is_relative_to(each) for each in written), written
        assert {each.name for each in folder.iterdir()} <= {"model", "home"}, list(folder.iterdir())


PLANTED = (
    *("signal", "json", "struct", "select", "types", "subprocess", "numpy", "numba", "jinja2", "llguidance"),
    *("edgekv", "sitecustomize", "usercustomize", "encodings", "site", "resource", "datetime", "ctypes"),
)
CHILDREN: tuple[tuple[str, ...], ...] = (("edgekv.engine.cpu", "dense"),)


def working_folder(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Modules beside a model are not run by the processes that edgekv starts there."""
    mark = folder / "ran"
    for name in rng.sample(PLANTED, 6):
        file = folder / f"{name}.py" if rng.random() < 0.5 else folder / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({str(mark)!r}, 'w').close()")
    (folder / "edgekv.pth").write_text(f"import os; open({str(mark)!r}, 'w').close()\n")
    module, *arguments = rng.choice(CHILDREN)
    done = subprocess.run(child.command(module, *arguments), cwd=folder, timeout=8, capture_output=True)
    assert done.returncode == 0, done.stderr
    child.BoundedChild(rng.choice(("edgekv.text.sandbox", "edgekv.engine.matcher"))).close()
    assert not mark.exists(), [file.name for file in folder.iterdir()]
