"""Models of the Hugging Face Hub (org/name, org/name@revision, org/name:file.gguf), in its usual cache.

Nothing is contacted while a whole copy is there. `huggingface_hub`, which does the transfer, is imported when
the first name of a model is met, its telemetry off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from edgekv.checkpoint.checkpoint import GGUF, INDEX, SINGLE, TOKENIZER_FILES, read_config
from edgekv.checkpoint.quantized_formats import quantization_method
from edgekv.errors import CheckpointError, EdgeKVError
from edgekv.files import atomic_write, user_path
from edgekv.machine import __version__, format_bytes
from edgekv.models import architecture

Say = Callable[[str], None]

HASH_BYTES = 1 << 20
CONFIG = "config.json"
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?(?::([^:]+\.gguf))?", re.ASCII)
_FOLDER = re.compile(r"models--(.+?)--(.+)")
WANTED = (
    CONFIG,
    *TOKENIZER_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "vision.onnx",
)
"""What is used of a repository beside its weights."""


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model of the Hub: its repository, a branch, tag or commit (None: main), and which GGUF file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def parse_name(text: str) -> HubName | None:
    """The model that ``org/name[@revision][:file.gguf]`` means; None for what is not of this form."""
    found = _NAME.fullmatch(text)
    return HubName(*found.groups()) if found and ".." not in text and len(found[1]) <= 96 else None


def hub_name(path: str | os.PathLike[str]) -> HubName | None:
    """What a user may type for ``path``; None where it is a path: something is there, or its folder is."""
    place = user_path(path)
    is_path = os.path.exists(place) or os.path.exists(place.parent)
    return None if is_path else parse_name(os.fspath(path))


def name_of(place: pathlib.Path) -> str | None:
    """The name of what lies in the Hub's cache; None for any other path."""
    folder, file = (place.parent, place.name) if place.suffix == GGUF else (place, None)
    found = _FOLDER.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    if found is None:
        return None
    try:
        is_main = (folder.parents[1] / "refs" / "main").read_text().strip() == folder.name
    except OSError:
        is_main = False
    return str(HubName(f"{found[1]}/{found[2]}", None if is_main else folder.name, file))


def cached(name: HubName) -> pathlib.Path | None:
    """The model's folder or file in the cache, if it is whole; no connection is made."""
    from_cache = functools.partial(_hub().try_to_load_from_cache, name.repository, revision=name.revision)
    if name.file:
        found = from_cache(name.file)
        return pathlib.Path(found) if isinstance(found, str) else None
    config = from_cache(CONFIG)
    folder = pathlib.Path(config).parent if isinstance(config, str) else None
    return folder if folder and _has_weights(folder) else None


def pull(name: HubName, say: Say | None = None) -> pathlib.Path:
    """Downloads what is missing of a model, as it is on the Hub now; returns its folder or file.

    What was interrupted goes on where it stopped. ``say`` is told what is downloaded, before it is. Raises
    CheckpointError (field model) where the Hub can't be reached or has no such model, and before the weights are
    downloaded whatever opening the model would raise for its config.
    """
    hub = _hub()
    try:
        return _Download(hub, name, say).run()
    except EdgeKVError:
        raise
    except Exception as error:  # huggingface_hub's own, those of the HTTP library that it uses, the disk's
        raise _transfer_error(hub, name, error) from error


def config(name: HubName) -> dict[str, Any]:
    """The model's config.json, and nothing else, from the cache or the Hub. Raises CheckpointError as `pull`."""
    hub = _hub()
    try:
        return read_config(_Download(hub, name, None).config())
    except EdgeKVError:
        raise
    except Exception as error:
        raise _transfer_error(hub, name, error) from error


def locate(name: HubName, say: Say | None = None) -> pathlib.Path:
    """The model's copy in the cache; where there is none, or half of one, it is downloaded."""
    return cached(name) or pull(name, say)


def _hub() -> Any:
    """`huggingface_hub`; what it reads of the environment, it reads when it is imported."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # only plain HTTP goes on where it was interrupted
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


class _Download:
    """One download."""

    def __init__(self, hub: Any, name: HubName, say: Say | None) -> None:
        self.hub, self.name, self.say = hub, name, say or (lambda text: None)
        self.cache = pathlib.Path(hub.constants.HF_HUB_CACHE)
        self.folder: pathlib.Path = self.cache / hub.file_download.repo_folder_name(
            repo_id=name.repository, repo_type="model"
        )

    def run(self) -> pathlib.Path:
        about = self.hub.HfApi(library_name="edgekv", library_version=__version__).model_info(
            self.name.repository, revision=self.name.revision, files_metadata=True
        )
        commit = _checked(about.sha)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings if _is_below(file.rfilename)}
        if self.name.file:
            files = [_required_file(self.name, self.name.file, sizes)]
        else:
            with _no_bars(self.hub):
                said = read_config(self._fetch(_required_file(self.name, CONFIG, sizes), commit))
                architecture(said)
                quantization_method(said)
                for file in (*WANTED, INDEX):
                    if file in sizes:
                        self._fetch(file, commit)
            files = self._weights(sizes, commit)
        self._announce({file: sizes[file] for file in files}, commit)
        for file in files:
            self._fetch(file, commit)
        last = self._fetch(self.name.file or CONFIG, commit)
        self._name_revision(commit)  # once all is there
        return last if self.name.file else last.parent

    def config(self) -> pathlib.Path:
        found = self._path(CONFIG, self.name.revision)
        if found is None:
            with _no_bars(self.hub):
                found = self._fetch(CONFIG, self.name.revision or "main")
            self._name_revision(found.parent.name)
        return found

    def _weights(self, sizes: dict[str, int], commit: str) -> list[str]:
        if SINGLE in sizes:
            return [SINGLE]
        shards = sorted(_shards(self._fetch(INDEX, commit))) if INDEX in sizes else []
        if not shards:
            shards = [file for file in sizes if file.endswith(".safetensors") and "/" not in file]
            if len(shards) != 1:
                raise _no_weights(self.name, sizes)
        return [_required_file(self.name, file, sizes) for file in shards]

    def _announce(self, sizes: dict[str, int], commit: str) -> None:
        missing = {file: size for file, size in sizes.items() if self._path(file, commit) is None}
        if not missing:
            return
        needed, part = sum(missing.values()), next(p for p in (self.cache, *self.cache.parents) if p.exists())
        free = shutil.disk_usage(part).free
        if needed > free:
            raise CheckpointError(
                f"model={str(self.name)!r}: {format_bytes(needed)} to download, and {self.cache} has "
                f"{format_bytes(free)} left; make room, or set HF_HOME to a folder on another disk",
                field="model",
                value=str(self.name),
            )
        host = self.hub.constants.ENDPOINT.partition("://")[2]
        self.say(f"{self.name}: downloading {format_bytes(needed)} from {host} to {self.cache}")

    def _fetch(self, file: str, revision: str) -> pathlib.Path:
        """A file in the cache, through a partial one beside where that will have it: another try goes on with it.

        `hf_hub_download` forgets what it had when it is interrupted, and makes any ETag a path.
        """
        hub, download = self.hub, self.hub.file_download
        if (found := self._path(file, revision)) is not None:
            return found
        url = hub.hf_hub_url(self.name.repository, file, revision=revision)
        about = hub.get_hf_file_metadata(url, library_name="edgekv", library_version=__version__)
        etag, commit = _checked(about.etag), _checked(about.commit_hash)
        blob = self.folder / "blobs" / etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(f"{etag}.edgekv-partial")
        with partial.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # another process may be at it
            if not blob.exists():
                elsewhere = urlsplit(about.location).netloc != urlsplit(url).netloc
                download.http_get(
                    about.location,
                    out,
                    resume_size=out.tell(),
                    headers=hub.utils.build_hf_headers(token=False if elsewhere else None),
                    expected_size=about.size,
                    displayed_filename=file,
                )
                out.flush()
                _require_content(partial, etag)
                partial.rename(blob)
        partial.unlink(missing_ok=True)
        place: pathlib.Path = self.folder / "snapshots" / commit / file
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            download._create_symlink(str(blob), str(place), new_blob=False)
        return place

    def _name_revision(self, commit: str) -> None:
        """The revision's name points to the commit, as the Hub's cache has it."""
        if self.name.revision != commit:
            reference = self.folder / "refs" / (self.name.revision or "main")
            reference.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(reference, commit.encode())

    def _path(self, file: str, commit: str | None) -> pathlib.Path | None:
        found = self.hub.try_to_load_from_cache(self.name.repository, file, revision=commit)
        return pathlib.Path(found) if isinstance(found, str) else None


def _is_below(file: str) -> bool:
    """Whether a repository's file lies in its folder."""
    path = pathlib.PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _checked(name: str | None) -> str:
    """An ETag or a commit that the network gave, before it is part of a path. Raises ValueError."""
    if not re.fullmatch(r"(?!\.+$)[\w.:+=-]{1,200}", name or "", re.ASCII):
        raise ValueError(f"its answer has {name!r:.100} for an ETag or a commit")
    return str(name)


@contextlib.contextmanager
def _no_bars(hub: Any) -> Iterator[None]:
    """Inside the block the Hub shows no progress bars: small files need none."""
    shown = not hub.utils.are_progress_bars_disabled()
    if shown:
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            hub.utils.enable_progress_bars()


def _require_content(partial: pathlib.Path, etag: str) -> None:
    """For files in large storage the etag is their SHA-256: what differs is removed, and OSError raised."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    if digest.hexdigest() != etag:
        partial.unlink()
        raise OSError("what came is not what was sent")


def _shards(index: str | pathlib.Path) -> set[str]:
    """The files that an index names; what else is wrong with it, opening the model says."""
    homes = read_config(index).get("weight_map")
    return {str(shard) for shard in homes.values()} if isinstance(homes, dict) else set()


def _has_weights(folder: pathlib.Path) -> bool:
    if (folder / SINGLE).exists():
        return True
    if (folder / INDEX).exists():
        try:
            return all((folder / shard).exists() for shard in _shards(folder / INDEX))
        except EdgeKVError:
            return False
    return any(folder.glob("*.safetensors"))


def _required_file(name: HubName, file: str, sizes: dict[str, int]) -> str:
    """The file, which must be one of the repository's; sizes: its files, in bytes. Raises CheckpointError."""
    if file in sizes:
        return file
    if file == CONFIG:
        raise _no_weights(name, sizes)
    raise CheckpointError(
        f"model={str(name)!r}: the repository has no file {file}; {_offered(name, sizes)}",
        field="model",
        value=str(name),
        accepted=_gguf(name, sizes),
    )


def _no_weights(name: HubName, sizes: dict[str, int]) -> CheckpointError:
    """The error for a repository that has no model that can be read as a folder."""
    return CheckpointError(
        f"model={str(name)!r}: the repository has no {CONFIG} with safetensors weights; {_offered(name, sizes)}",
        field="model",
        value=str(name),
        accepted=_gguf(name, sizes),
    )


def _gguf(name: HubName, sizes: dict[str, int]) -> list[str]:
    return [str(dataclasses.replace(name, file=file)) for file in sorted(sizes) if file.endswith(GGUF)]


def _offered(name: HubName, sizes: dict[str, int]) -> str:
    names = _gguf(name, sizes)
    if not names:
        return "only safetensors and GGUF files can be read: look for a repository that has them"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"give one of its GGUF files: {', '.join(names[:8])}{more}"


def _transfer_error(hub: Any, name: HubName, error: Exception) -> CheckpointError:
    """A failure of the transfer in one line, with what to do."""
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        said = f"is gated: accept its terms at {endpoint}/{name.repository}, then set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = f"is not at {endpoint}, or it is private: check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        said = f"has no revision {name.revision}: give a branch, a tag or a whole commit id"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        said = f"is not whole in {hub.constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it to download"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        said = "can't be written (no space left): make room, or set HF_HOME; what is there is kept"
    else:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        said = f"can't be downloaded from {endpoint} ({reason}); try again: it goes on where it stopped"
    return CheckpointError(f"model={str(name)!r}: {said}", field="model", value=str(name))
