"""Prefixes on disk: what conversations have read, in session files, for those that begin alike after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.engine.loading import SessionPlan
from edgekv.engine.model import Model
from edgekv.engine.runner import State
from edgekv.engine.session_file import VERSION, SavedState, SessionFile, save_state
from edgekv.errors import EdgeKVError, SessionError
from edgekv.files import cache_root, remove_abandoned
from edgekv.machine import __version__
from edgekv.types import I32
from edgekv.vision.model import Prompt

MIN_TOKENS = 256  # that a file must spare a prompt to be read, or add to the others to be written
MIN_GROWTH = 4  # so many times longer than its new tokens a prefix may be: one that grows is written seldom
DISK_SHARE = 10  # one of so many parts of the free disk may be taken
MOST_FILES = 256
END = ".kv"


class PrefixStore:
    """Files of prefixes in this user's cache folder, at most ``max_bytes``; the least recently used ones go.

    A file is named by what its arrays depend on beside the tokens, and by the tokens. Several processes may use
    the folder at once: files appear whole and are never changed. An error of the disk is as good as no file.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        self._model, self._max_bytes = model, max_bytes
        self._tokens: dict[str, I32] = {}  # of the files, by name, as they were found

    def find(self, tokens: Prompt, plan: SessionPlan, lora: str | None) -> tuple[int, pathlib.Path | None]:
        """Returns how many first tokens of a prompt without pictures a file has at most, and the file, if any."""
        wanted, longest, found = np.array(tokens, np.int32), 0, None
        with contextlib.suppress(OSError, EdgeKVError):
            key, files = self._key(plan, lora), self._files()
            for path in (path for path in files if path.name.startswith(key)):
                stored = self._stored_tokens(path)
                n = min(len(stored), len(wanted))
                differing = np.flatnonzero(stored[:n] != wanted[:n])
                if (n := int(differing[0]) if len(differing) else n) > longest:
                    longest, found = n, path
            present = {path.name for path in files}
            self._tokens = {name: ids for name, ids in self._tokens.items() if name in present}
        return longest, found

    def open(self, path: pathlib.Path, plan: SessionPlan, lora: str | None) -> SavedState | None:
        """Opens a found file, as one just used. Removes one that is damaged or foreign, and returns None."""
        try:
            saved = SavedState(path)
            if path.name != self._name(saved.tokens, plan, lora):
                raise SessionError(f"{path}: its name is another's")
            saved.require_model(self._model)
            os.utime(path)
        except (EdgeKVError, OSError):
            self.remove(path)
            return None
        return saved

    def keep(self, state: State, plan: SessionPlan, lora: str | None, between: Callable[[bool], None]) -> None:
        """Writes what an idle conversation has read, unless it holds pictures or the files have most of it.

        between: as of `save_state`. A shorter file of the same conversation goes.
        """
        state.mend()
        bare = state.prefix()
        if len(bare.tokens) < MIN_TOKENS or bare.spans:
            return
        known, path = self.find(bare.tokens, plan, lora)
        needed = sum(min(each.nbytes, each.planned_bytes(len(bare.tokens))) for each in bare.caches)
        if len(bare.tokens) - known < max(MIN_TOKENS, known // MIN_GROWTH) or not self._make_room(needed):
            return
        with contextlib.suppress(OSError, EdgeKVError):
            new = _folder() / self._name(bare.tokens, plan, lora)
            save_state(new, bare, self._model, lora, plan, between)
            if path and known == len(self._stored_tokens(path)):
                self.remove(path)

    def remove(self, path: pathlib.Path) -> None:
        """Removes a file if it is there."""
        with contextlib.suppress(OSError):
            path.unlink()

    def _make_room(self, needed: int) -> bool:
        """Removes the files used longest ago until ``needed`` bytes fit; returns False where they never will."""
        try:
            folder = _folder()
            remove_abandoned(folder, "*")
            sizes = {path: path.stat().st_size for path in self._files()}
            bound = min(self._max_bytes, (shutil.disk_usage(folder).free + sum(sizes.values())) // DISK_SHARE)
            while sizes and needed <= bound and (sum(sizes.values()) + needed > bound or len(sizes) >= MOST_FILES):
                oldest = next(iter(sizes))
                del sizes[oldest]
                self.remove(oldest)
        except (OSError, EdgeKVError):
            return False
        return needed <= bound

    def _files(self) -> list[pathlib.Path]:
        """Returns this user's files, the one used longest ago first. Raises OSError or ConfigError."""
        found = []
        for entry in os.scandir(_folder()):
            if entry.name.endswith(END):
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found.append((status.st_mtime_ns, pathlib.Path(entry.path)))
        return [path for _, path in sorted(found)]

    def _stored_tokens(self, path: pathlib.Path) -> I32:
        """Returns the tokens (n,) of a file, without checking the checksum; none of a damaged one, which goes."""
        if path.name not in self._tokens:
            try:
                content = SessionFile(path, is_checked=False).content
                self._tokens[path.name] = np.array(content["tokens"], np.int32).reshape(-1)
            except (EdgeKVError, KeyError, TypeError, ValueError, OverflowError):
                self.remove(path)
                return np.zeros(0, np.int32)
        return self._tokens[path.name]

    def _key(self, plan: SessionPlan, lora: str | None) -> str:
        model, kv = self._model, plan.kv
        facts = [model.adapted_identity, model.lora_text(lora), plan.weights, str(kv), kv.scheme.version, plan.ctx]
        return _digest(json.dumps([VERSION, __version__, *facts]).encode())

    def _name(self, tokens: Sequence[int], plan: SessionPlan, lora: str | None) -> str:
        return f"{self._key(plan, lora)}-{_digest(np.array(tokens, '<i8').tobytes())}{END}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _folder() -> pathlib.Path:
    """Returns the folder, which only this user can enter. Raises OSError where it is another's, or ConfigError."""
    folder = cache_root() / "prefixes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(0, "it is a link or another user's", folder)
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder
