"""Finds models: at a path, among those that ship with edgekv (`models/`), or on the Hugging Face Hub.

Names on the Hub are org/name, org/name@revision, org/name:file.gguf, and org/name:Q4_K_M for the one GGUF file of
that quantization. No connection is made if the Hub's cache has a whole copy. `huggingface_hub` is imported for the
first such name, without its telemetry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import hashlib
import math
import os
import pathlib
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from edgekv.checkpoint.checkpoint import GGUF, INDEX, SINGLE, TEXT_FILES, read_config
from edgekv.checkpoint.quantized import quantization_method
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, nearest
from edgekv.files import atomic_write, user_path
from edgekv.machine import __version__, format_bytes
from edgekv.models import architecture

Say = Callable[[str], None]

HASH_BYTES = 1 << 20
CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "models"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "models"
MIN_ROTARY_POSITIONS = 8192
CONFIG = "config.json"
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?(?::([^:]+\.gguf|[\w-]+))?", re.ASCII)
CONNECT_S = 3.0  # for a connection to be made, so that a machine without one is told soon
_FOLDER = re.compile(r"models--(.+?)--(.+)")
WANTED = (CONFIG, *TEXT_FILES, "preprocessor_config.json", "processor_config.json", "vision.onnx")
"""The files of a repository that are used beside its weights."""
SHIPPED_NOTES = {  # what a shipped model is for, and two prompts that suit it
    "demo": (
        "the demo model writes in the manner of old novels and can't answer; one that can: Qwen/Qwen3-0.6B",
        ["It was a dark night when the old man", "The ship had been forty days at sea when"],
    ),
    "scenes": (
        "this model describes pictures of drawn shapes and printed numbers, and nothing else: show it one",
        ["Describe the picture.", "How many objects are in the picture?"],
    ),
}


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model of the Hub: its repository, a branch, tag or commit (None: main), and perhaps a GGUF file of it.

    file: the file's path, or its quantization, such as Q4_K_M in any case.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")

    def of_quantization(self, files: Iterable[str]) -> list[str]:
        """Returns those of a repository's files that are GGUF files of the quantization ``file``."""
        ending = re.compile(rf"(?:^|[-._/]){re.escape(self.file or '')}(?:-\d+-of-\d+)?\.gguf\Z", re.IGNORECASE)
        named = (file for file in files if not file.rpartition("/")[2].startswith("mmproj"))
        return [file for file in named if ending.search(file)]


def parse_hub_name(text: str) -> HubName | None:
    """Parses ``org/name[@revision][:file.gguf or :Q4_K_M]``; returns None for a text of another form."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or match[1].endswith(".git") or len(match[1]) > 96:
        return None  # huggingface_hub refuses such names, too
    return HubName(*match.groups())


def parse_model_name(path: str | os.PathLike[str]) -> HubName | None:
    """Parses a name that is no path, or that of a shape; returns None if the path, or its folder, exists."""
    local_path, of_shape = user_path(path), hub_name_of_shape(os.fspath(path))
    if os.path.exists(local_path) or (os.path.exists(local_path.parent) and not of_shape):
        return None
    return parse_hub_name(of_shape or os.fspath(path))


def cached_model_name(path: pathlib.Path) -> str | None:
    """Returns the name of a model that ships with edgekv or is in the Hub's cache; None for any other path."""
    folder, file = (path.parent, path.name) if path.suffix == GGUF else (path, None)
    match = _FOLDER.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    if match is None:
        return next((name for name in SHIPPED_NOTES if shipped_model(name) == path), None)
    try:
        is_main = (folder.parents[1] / "refs" / "main").read_text().strip() == folder.name
    except OSError:
        is_main = False
    return str(HubName(f"{match[1]}/{match[2]}", None if is_main else folder.name, file))


def find_cached(name: HubName) -> pathlib.Path | None:
    """Returns the folder or file of a model that is whole in the cache, else None; makes no connection."""
    if name.file and not name.file.endswith(GGUF):
        folder, revision = _folder(_hub(), name), name.revision or "main"
        with contextlib.suppress(OSError):
            revision = (folder / "refs" / revision).read_text().strip()
        snapshot = folder / "snapshots" / revision
        found = name.of_quantization(str(path.relative_to(snapshot)) for path in snapshot.rglob(f"*{GGUF}"))
        return snapshot / found[0] if len(found) == 1 else None
    path = _in_cache(name, name.file or CONFIG, name.revision)
    if path is None or name.file:
        return path
    return path.parent if _has_weights(path.parent) else None


def pull(name: HubName, say: Say | None = None) -> pathlib.Path:
    """Downloads the missing files of a model's current version; returns its folder or file.

    An interrupted download is resumed. say: called with a message before the download. Raises CheckpointError
    (field model) if the Hub can't be reached or has no such model; an unsupported config raises as opening the
    model does, before the weights are downloaded, and a GGUF file without the packages that read it.
    """
    if name.file:
        from edgekv.checkpoint.gguf import library

        library(str(name))
    with _transfer(name) as hub:
        api = hub.HfApi(library_name="edgekv", library_version=__version__)
        _require_connection(name, hub.constants)
        timeout = hub.constants.HF_HUB_ETAG_TIMEOUT
        info = api.model_info(name.repository, revision=name.revision, files_metadata=True, timeout=timeout)
        commit = _safe_name(info.sha)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        sizes = {file: size for file, size in sizes.items() if not {"/", ".."} & {*PurePosixPath(file).parts}}
        fetch = functools.partial(_fetch, hub, name, revision=commit)
        if name.file and not name.file.endswith(GGUF):
            files = name.of_quantization(sorted(sizes))
            _require_file(len(files) == 1, name, f"single GGUF file of {name.file}", files or sizes)
            name = dataclasses.replace(name, file=files[0])
        if name.file:
            files = [name.file]
        else:
            _require_file(CONFIG in sizes, name, f"{CONFIG} with safetensors weights", sizes)
            values = read_config(fetch(CONFIG))
            architecture(values)
            quantization_method(values)
            for file in (*WANTED, INDEX):
                if file in sizes:
                    fetch(file)
            shards = sorted(_shards(fetch(INDEX))) if INDEX in sizes else []
            loose = [file for file in sizes if file.endswith(".safetensors") and "/" not in file]
            files = [SINGLE] if SINGLE in sizes else shards or loose
            _require_file(bool(shards) or len(files) == 1, name, f"{CONFIG} with safetensors weights", sizes)
        for file in files:
            _require_file(file in sizes, name, f"file {file}", sizes)
        missing = sum(sizes[file] for file in files if _in_cache(name, file, commit) is None)
        cache, host = pathlib.Path(hub.constants.HF_HUB_CACHE), hub.constants.ENDPOINT.partition("://")[2]
        free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
        if missing > free:
            problem = f"{format_bytes(missing)} to download, and {cache} has {format_bytes(free)} left"
            raise _error(name, f"{problem}; make room, or set HF_HOME to a folder on another disk")
        if missing and say:
            say(f"{name}: downloading {format_bytes(missing)} from {host} to {cache}")
        for file in files:
            fetch(file, shows_bar=True)
        path: pathlib.Path = fetch(name.file or CONFIG)
        _name_revision(hub, name, commit)  # once all is there
        return path if name.file else path.parent


def fetch_config(name: HubName) -> dict[str, Any]:
    """Returns a model's config.json, from the cache or the Hub. Raises CheckpointError as `pull`."""
    with _transfer(name) as hub:
        path = _in_cache(name, CONFIG, name.revision)
        if path is None:
            _require_connection(name, hub.constants)
            path = _fetch(hub, name, CONFIG, name.revision or "main")
            _name_revision(hub, name, path.parent.name)
        return read_config(path)


@dataclasses.dataclass(frozen=True)
class CachedEntry:
    """A file or folder on the disk that can be made again: whose it is, what, and when it was last used."""

    name: str
    what: str
    path: pathlib.Path
    bytes: int
    last_used: datetime.datetime

    @classmethod
    def of(cls, name: str, what: str, path: pathlib.Path) -> CachedEntry:
        """Measures a file, or the files in a folder that are no links. Raises OSError."""
        files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
        states = [file.stat() for file in (files if path.is_dir() else [path])]
        used = max((max(state.st_atime, state.st_mtime) for state in states), default=0.0)
        moment = datetime.datetime.fromtimestamp(int(used)).astimezone()
        return cls(name, what, path, sum(state.st_size for state in states), moment)

    def remove(self) -> None:
        """Removes a folder, or a file of the Hub's cache with its blob, and a repository that is empty then."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
            return
        repository = next(folder for folder in self.path.parents if _FOLDER.fullmatch(folder.name))
        for file in dict.fromkeys((self.path, self.path.resolve())):
            if file.parent.resolve().is_relative_to(repository.resolve()):
                file.unlink(missing_ok=True)  # another file of the same content may have gone with it
        if not any(repository.glob("blobs/*")):
            shutil.rmtree(repository, ignore_errors=True)


def cached_models() -> list[CachedEntry]:
    """Returns the models in the Hub's cache that edgekv reads, each GGUF file by itself, and parts of them."""
    found = list[CachedEntry]()
    for folder in pathlib.Path(_hub().constants.HF_HUB_CACHE).glob("models--*"):
        match, snapshots = _FOLDER.fullmatch(folder.name), [*folder.glob("snapshots/*")]
        if match is None or folder.is_symlink():
            continue
        name, part = f"{match[1]}/{match[2]}", "not whole; `edgekv pull` goes on"
        with contextlib.suppress(OSError, EdgeKVError):  # damaged, or no model that edgekv knows
            files = {f"{name}:{file.relative_to(p)}": file for p in snapshots for file in p.rglob(f"*{GGUF}")}
            partial = [*folder.glob("blobs/*partial")]
            configs = [read_config(snapshot / CONFIG) for snapshot in snapshots if (snapshot / CONFIG).is_file()]
            if files:
                found += [CachedEntry.of(name, "GGUF", file) for name, file in files.items()]
                found += [CachedEntry.of(name, part, file) for file in partial]
            elif configs or partial:
                families = [architecture(config).config.model_type for config in configs]
                is_whole = any(_has_weights(snapshot) for snapshot in snapshots)
                found.append(CachedEntry.of(name, families[0] if is_whole and families else part, folder))
    return found


def find_or_pull(name: HubName, say: Say | None = None) -> pathlib.Path:
    """Returns the folder or file of a model in the cache, after downloading what is missing."""
    return find_cached(name) or pull(name, say)


def _hub() -> Any:
    """Imports `huggingface_hub`, which reads its environment variables then."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # only plain HTTP goes on where it was interrupted
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def _require_connection(name: HubName, constants: Any) -> None:
    """Raises CheckpointError unless the Hub, or the proxy on the way, can be connected to within CONNECT_S.

    A thread tries, as the look-up of a name can hang beyond any timeout. Does nothing where HF_HUB_OFFLINE forbids
    connections, which huggingface_hub then says.
    """
    from urllib.request import getproxies, proxy_bypass

    if constants.HF_HUB_OFFLINE:
        return
    url = urlsplit(constants.ENDPOINT)
    if not proxy_bypass(url.hostname or "") and (proxy := getproxies().get(url.scheme)):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port, problem = url.port or {"https": 443}.get(url.scheme, 80), f"no answer within {CONNECT_S:g} seconds"

    def connect() -> None:
        nonlocal problem
        try:
            socket.create_connection((url.hostname or "", port), CONNECT_S).close()
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    if problem:
        way = "without a network: give a path, demo, or a name of `edgekv list`"
        raise _error(
            name, f"can't be downloaded: {constants.ENDPOINT} can't be reached ({url.hostname}: {problem}); {way}"
        )


def _in_cache(name: HubName, file: str, revision: str | None) -> pathlib.Path | None:
    path = _hub().try_to_load_from_cache(name.repository, file, revision=revision)
    return pathlib.Path(path) if isinstance(path, str) else None


def _folder(hub: Any, name: HubName) -> pathlib.Path:
    """Returns the repository's folder in the cache."""
    folder: str = hub.file_download.repo_folder_name(repo_id=name.repository, repo_type="model")
    return pathlib.Path(hub.constants.HF_HUB_CACHE) / folder


def _fetch(hub: Any, name: HubName, file: str, revision: str, shows_bar: bool = False) -> pathlib.Path:
    """Returns a file in the cache, after downloading it; a partial file beside it allows to resume.

    `hf_hub_download` restarts interrupted downloads, and accepts any ETag as a path.
    """
    if (cached_path := _in_cache(name, file, revision)) is not None:
        return cached_path
    folder, url = _folder(hub, name), hub.hf_hub_url(name.repository, file, revision=revision)
    info = hub.get_hf_file_metadata(url, library_name="edgekv", library_version=__version__)
    etag, commit = _safe_name(info.etag), _safe_name(info.commit_hash)
    blob, link = folder / "blobs" / etag, folder / "snapshots" / commit / file
    partial = blob.with_name(f"{etag}.edgekv-partial")
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # another process may be at it
        if not blob.exists():
            elsewhere = urlsplit(info.location).netloc != urlsplit(url).netloc
            hub.file_download.http_get(
                info.location,
                out,
                resume_size=out.tell(),
                headers=hub.utils.build_hf_headers(token=False if elsewhere else None),
                expected_size=info.size,
                displayed_filename=file,
                _tqdm_bar=None if shows_bar else hub.utils.tqdm(disable=True),
            )
            out.flush()
            _require_content(partial, etag)
            partial.rename(blob)
    partial.unlink(missing_ok=True)
    if not link.exists():
        hub.file_download._create_symlink(str(blob), str(link), new_blob=False)
    return link


def _name_revision(hub: Any, name: HubName, commit: str) -> None:
    """Makes the revision's name point to the commit, in the layout of the Hub's cache."""
    if name.revision != commit:
        reference = _folder(hub, name) / "refs" / (name.revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(reference, commit.encode())


def _safe_name(name: str | None) -> str:
    """Returns an ETag or commit of the network that is safe in a path. Raises ValueError for another."""
    if not re.fullmatch(r"(?!\.+$)[\w.:+=-]{1,200}", name or "", re.ASCII):
        raise ValueError(f"its answer has {name!r:.100} for an ETag or a commit")
    return str(name)


def _require_content(partial: pathlib.Path, etag: str) -> None:
    """Removes a file and raises OSError, if its ETag is the SHA-256 of another content."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        for block in iter(lambda: file.read(HASH_BYTES), b""):
            digest.update(block)
    if digest.hexdigest() != etag:
        partial.unlink()
        raise OSError("what came is not what was sent")


def _shards(index: str | pathlib.Path) -> set[str]:
    """Returns the files that an index lists."""
    homes = read_config(index).get("weight_map")
    return {str(shard) for shard in homes.values()} if isinstance(homes, dict) else set()


def _has_weights(folder: pathlib.Path) -> bool:
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return any(folder.glob("*.safetensors"))
    try:
        return all((folder / shard).exists() for shard in _shards(folder / INDEX))
    except EdgeKVError:
        return False


def _require_file(is_there: bool, name: HubName, missing: str, there: Iterable[str]) -> None:
    """Raises CheckpointError, which lists the GGUF files of those ``there``, unless ``is_there``."""
    if is_there:
        return
    files = [str(dataclasses.replace(name, file=file)) for file in sorted(there) if file.endswith(GGUF)]
    accepted = files or ["safetensors and GGUF files: look for a repository that has them"]
    raise _error(name, f"the repository has no {missing}", accepted)


def _error(name: HubName, problem: str, accepted: Sequence[str] = ()) -> CheckpointError:
    return CheckpointError(problem, field="model", value=str(name), accepted=accepted)


@contextlib.contextmanager
def _transfer(name: HubName) -> Iterator[Any]:
    """Provides `huggingface_hub`, and turns failures of the transfer into CheckpointError with advice."""
    hub = _hub()
    errors, endpoint, cache = hub.errors, hub.constants.ENDPOINT, hub.constants.HF_HUB_CACHE
    problems = {
        errors.GatedRepoError: f"is gated: accept its terms at {endpoint}/{name.repository}, then set HF_TOKEN",
        errors.RepositoryNotFoundError: f"is not at {endpoint}, or it is private: check the name, or set HF_TOKEN",
        errors.RevisionNotFoundError: f"has no revision {name.revision}: give a branch, tag or whole commit id",
        errors.OfflineModeIsEnabled: f"is not whole in {cache}, and HF_HUB_OFFLINE is set: unset it to download",
    }
    try:
        yield hub
    except EdgeKVError:
        raise
    except Exception as error:  # huggingface_hub's own, those of the HTTP library that it uses, the disk's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"can't be downloaded from {endpoint} ({reason}); try again: it goes on where it stopped"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = "can't be written (no space left): make room, or set HF_HOME; what is there is kept"
        problem = next((problems[kind] for kind in problems if isinstance(error, kind)), problem)
        raise _error(name, problem) from error


# Models and shapes that ship with edgekv


def shipped_file(name: str) -> pathlib.Path | None:
    """Returns the path of a file of `models/`, in the checkout or the installation; None if it is missing."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if os.path.isfile(folder / name)), None)


def shipped_model(name: str) -> pathlib.Path | None:
    """Returns the folder of a model that ships with edgekv (demo, scenes); None for another name."""
    config_path = shipped_file(f"{name}/config.json")
    return config_path and config_path.parent


def shipped_note(path: pathlib.Path) -> tuple[str, list[str]]:
    """Returns what a shipped model is for, and prompts that suit it; "" and none for a model of another path."""
    paths = {name: shipped_model(name) for name in SHIPPED_NOTES}
    found = (SHIPPED_NOTES[name] for name, local in paths.items() if local and os.path.samefile(path, local))
    return next(found, ("", []))


def find_model(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a model: ``path`` if it exists, else the shipped model or the Hub's of that name.

    A model of the Hub that is not in the cache is downloaded. Raises CheckpointError (field model) if there is no
    such model, or the download fails.
    """
    if isinstance(path, (str, os.PathLike)) and os.fspath(path):
        local, name = user_path(path), parse_model_name(path)
        found = local if os.path.exists(local) else find_or_pull(name) if name else shipped_model(os.fspath(path))
        if found is not None:
            return found
    raise no_such_model(path)


def no_such_model(path: object, advice: str = "") -> CheckpointError:
    """Returns the error for what is no model, which says what is one."""
    paths = ["a Hugging Face folder", "a .safetensors or .gguf file", "a store", "a name on the Hub (org/name)"]
    accepted = [*paths, *SHIPPED_NOTES]
    advice = advice or hub_suggestion(path)
    return CheckpointError("there is none", field="model", value=path, accepted=accepted, advice=advice)


def hub_suggestion(name: object) -> str:
    """Returns advice: the model on the Hub of the shape that a name is close to, and its size; "" without one."""
    shape = nearest(name, shape_names()).partition(" or ")[0]
    config = read_shape(shape) if shape else {}
    if (hub_name := config.get("_name_or_path")) is None:
        return ""
    n_parameters = sum(math.prod(sizes) for sizes in architecture(config).tensors().values())
    return f"did you mean {hub_name} ({n_parameters / 1e6:,.0f} M parameters)?"


def hub_name_of_shape(shape: str) -> str:
    """Returns the name on the Hub of the model of a shape that ships with edgekv, in any case; "" without one."""
    name = shape.lower()
    return str(read_shape(name).get("_name_or_path", "")) if name in shape_names() else ""


def published_shape(name: str) -> str | None:
    """Returns the shape that ships with edgekv of a model on the Hub, in any case, or None."""
    names = {str(read_shape(shape).get("_name_or_path")).lower(): shape for shape in shape_names()}
    return names.get(name.lower())


def load_shape(shape: str, n_layers: int | None = None, n_positions: int | None = None) -> dict[str, Any]:
    """Returns the config of a named shape or a JSON file, with other numbers of layers and positions if given.

    As random weights have no trained length, plain rotary embeddings get at least MIN_ROTARY_POSITIONS. Raises
    ConfigError for an unknown shape.
    """
    config = read_shape(shape)
    arch = architecture(config)
    ropes, trained = arch.config.ropes, config.get(arch.positions_key) or arch.config.max_positions
    if ropes and all(rope.kind == "default" for rope in ropes):
        trained = max(trained, MIN_ROTARY_POSITIONS)
    config[arch.layers_key] = n_layers or arch.config.n_layers
    config[arch.positions_key] = n_positions or trained
    return config


def read_shape(shape: str) -> dict[str, Any]:
    """Returns the config of a named shape or a JSON file. Raises ConfigError for an unknown shape."""
    path = user_path(shape) if shape.endswith(".json") else shipped_file(f"{shape}.json")
    if path is None or not os.path.isfile(path):
        accepted = [*shape_names(), "a path that ends in .json"]
        raise ConfigError("no such shape", field="shape", value=shape, accepted=accepted)
    return read_config(path)


def shape_names() -> list[str]:
    """Returns the names of the shapes that ship with edgekv."""
    return sorted({file.stem for folder in (CHECKOUT, INSTALLED) for file in folder.glob("*.json")})
