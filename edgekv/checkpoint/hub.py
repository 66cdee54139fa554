"""Models of the Hugging Face Hub, in its usual cache: nothing is contacted while a whole copy is there.

`huggingface_hub`, which does the transfer, is imported when the first name of a model is met, its telemetry off.
"""

from __future__ import annotations

import contextlib
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

from edgekv.checkpoint.hub_errors import CONFIG, no_weights, required_file, transfer_error
from edgekv.checkpoint.hub_name import HubName
from edgekv.checkpoint.packed.methods import packing
from edgekv.checkpoint.source import INDEX, SINGLE, TOKENIZER_FILES, read_config
from edgekv.errors import CheckpointError, EdgeKVError
from edgekv.files import atomic_write
from edgekv.machine import format_bytes
from edgekv.models import architecture
from edgekv.version import __version__

Say = Callable[[str], None]

HASH_BYTES = 1 << 20
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
        raise transfer_error(hub, name, error) from error


def config(name: HubName) -> dict[str, Any]:
    """The model's config.json, and nothing else, from the cache or the Hub. Raises CheckpointError as `pull`."""
    hub = _hub()
    try:
        return read_config(_Download(hub, name, None).config())
    except EdgeKVError:
        raise
    except Exception as error:
        raise transfer_error(hub, name, error) from error


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
            files = [required_file(self.name, self.name.file, sizes)]
        else:
            with _no_bars(self.hub):
                said = read_config(self._fetch(required_file(self.name, CONFIG, sizes), commit))
                architecture(said)
                packing(said)
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
                raise no_weights(self.name, sizes)
        return [required_file(self.name, file, sizes) for file in shards]

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
