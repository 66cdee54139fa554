"""Prefixes on disk: what conversations have read, in session files, for those that begin alike after a restart."""

from __future__ import annotations

import contextlib
import copy
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
from edgekv.engine.session_file import DAMAGE_ERRORS, VERSION, SavedState, SessionFile, save_state
from edgekv.errors import EdgeKVError, MemoryBudgetError
from edgekv.files import cache_root, remove_abandoned
from edgekv.machine import __version__
from edgekv.types import I32
from edgekv.vision.model import Embeddings, Prompt

MIN_TOKENS = 256  # that a file must spare a prompt to be read, or add to the others to be written
MIN_GROWTH = 4  # so many times longer than its new tokens a prefix may be: one that grows is written seldom
MAX_DISK_SHARE = 10  # one of so many parts of the free disk may be taken
MAX_FILES = 256
SUFFIX = ".kv"


class PrefixStore:
    """Files of prefixes in this user's cache folder, at most ``max_bytes``; the least recently used ones go.

    A file is named by what its arrays depend on beside the tokens, and by the tokens. Several processes may use
    the folder at once: files appear whole and are never changed. An error of the disk counts as no file.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        self._model, self._max_bytes = model, max_bytes
        self._tokens: dict[str, I32] = {}  # of the files, by name, as they were found

    def find(self, tokens: Prompt, plan: SessionPlan, lora: str | None) -> tuple[int, pathlib.Path | None]:
        """Returns how many first tokens of a prompt without pictures a file has at most, and the file, if any."""
        wanted, longest, found = np.array(tokens, np.int32), 0, None
        with contextlib.suppress(OSError, EdgeKVError):
            key, files = self._key(plan, lora), self._files()
            names = {path.name for path in files}
            self._tokens = {name: ids for name, ids in self._tokens.items() if name in names}
            for path in (path for path in files if path.name.startswith(key)):
                try:
                    if (stored := self._tokens.get(path.name)) is None:
                        content = SessionFile(path, is_checked=False).content  # `take` checks
                        stored = self._tokens[path.name] = np.array(content["tokens"], np.int32).reshape(-1)
                except (EdgeKVError, *DAMAGE_ERRORS):
                    self._remove(path)
                    continue
                n = min(len(stored), len(wanted))
                differing = np.flatnonzero(stored[:n] != wanted[:n])
                if (n := int(differing[0]) if len(differing) else n) > longest:
                    longest, found = n, path
        return longest, found

    def take(
        self, prompt: Prompt, n_held: int, plan: SessionPlan, lora: str | None, new_state: Callable[[], State]
    ) -> State | None:
        """Returns the state of a file that has MIN_TOKENS more of a prompt than its ``n_held`` first, or None.

        Removes a file that is damaged or foreign.
        """
        n_ids = next((i for i, piece in enumerate(prompt) if isinstance(piece, Embeddings)), len(prompt))
        n, path = self.find(prompt[:n_ids], plan, lora) if n_ids >= n_held + MIN_TOKENS else (0, None)
        if path is None or n < n_held + MIN_TOKENS:
            return None
        try:
            saved = SavedState(path)
            saved.require_model(self._model)
            if path.name == self._name(saved.tokens, plan, lora):
                saved.open_state(state := new_state(), self._model.config)
                os.utime(path)
                return state
        except MemoryBudgetError:
            return None  # the prompt is read again instead
        except (OSError, EdgeKVError):
            pass
        self._remove(path)
        return None

    def keep(self, state: State, plan: SessionPlan, lora: str | None, between: Callable[[bool], None]) -> None:
        """Writes what an idle conversation has read, unless it holds pictures or the files have most of it.

        between: as of `save_state`. A shorter file of the same conversation goes.
        """
        state.repair()
        state.drop_drafts()
        bare = copy.copy(state)  # without what is its owner's
        bare.tokens, bare.sampler, bare.memo, bare.n_dropped = state.tokens[: state.n_cached], None, {}, 0
        n = len(bare.tokens)
        if n < MIN_TOKENS or bare.spans:
            return
        known, path = self.find(bare.tokens, plan, lora)
        needed = sum(min(cache.nbytes, cache.planned_bytes(n)) for cache in bare.caches)
        with contextlib.suppress(OSError, EdgeKVError):
            if path and known >= MIN_TOKENS:
                os.utime(path)  # used, though from memory
            if n - known >= max(MIN_TOKENS, known // MIN_GROWTH) and self._make_room(needed):
                save_state(_folder() / self._name(bare.tokens, plan, lora), bare, self._model, lora, plan, between)
                if path and path.name == self._name(bare.tokens[:known], plan, lora):
                    self._remove(path)

    def _make_room(self, needed: int) -> bool:
        """Removes the files used longest ago until ``needed`` bytes fit; returns False where they never will."""
        remove_abandoned(_folder(), "*")
        sizes = self._files()
        bound = min(self._max_bytes, (shutil.disk_usage(_folder()).free + sum(sizes.values())) // MAX_DISK_SHARE)
        while sizes and needed <= bound and (sum(sizes.values()) + needed > bound or len(sizes) >= MAX_FILES):
            self._remove(oldest := next(iter(sizes)))
            del sizes[oldest]
        return needed <= bound

    def _files(self) -> dict[pathlib.Path, int]:
        """Returns the bytes of this user's files, the one used longest ago first."""
        found = []
        for path in _folder().glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append((status.st_mtime_ns, path, status.st_size))
        return {path: size for _, path, size in sorted(found)}

    def _remove(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _key(self, plan: SessionPlan, lora: str | None) -> str:
        model, kv = self._model, plan.kv
        facts = [model.adapted_identity, model.lora_text(lora), plan.weights, str(kv), kv.scheme.version, plan.ctx]
        return hashlib.sha256(json.dumps([VERSION, __version__, *facts]).encode()).hexdigest()[:32]

    def _name(self, tokens: Sequence[int], plan: SessionPlan, lora: str | None) -> str:
        digest = hashlib.sha256(np.array(tokens, "<i8").tobytes()).hexdigest()[:32]
        return f"{self._key(plan, lora)}-{digest}{SUFFIX}"


def _folder() -> pathlib.Path:
    """Returns the folder, which only this user can enter. Raises OSError where it is another's, or ConfigError."""
    folder = cache_root() / "prefixes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(0, "it is a link or another user's", folder)
    folder.chmod(0o700)
    return folder
