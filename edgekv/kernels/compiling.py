"""What Numba compiles, and how long that takes: kernels that its cache on disk has are loaded, not compiled."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import platform
import time
from types import TracebackType
from typing import Any

import numba
from numba.core import event

from edgekv import numba_cache


class CompileClock(event.Listener):  # type: ignore[misc]
    """Within the block: ``seconds`` of the time in which something was compiled, and ``n`` functions."""

    def __init__(self) -> None:
        self.seconds, self.n = 0.0, 0
        self._depth, self._began = 0, 0.0  # a function is compiled within its caller's compilation

    def on_start(self, event: Any) -> None:
        """Numba's: a compilation begins."""
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """Numba's: it ends."""
        self._depth -= 1
        self.n += 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._began

    def __enter__(self) -> CompileClock:
        event.register("numba:compile", self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        event.unregister("numba:compile", self)


def are_kept(what: str) -> bool:
    """Whether `note_kept` was told that all kernels for it are compiled: they are loaded when they are needed."""
    place = _place(what)
    return place is not None and place.exists()


def note_kept(what: str) -> None:
    """Remembers that all kernels for it were compiled; where that fails, they are looked for one by one again."""
    place = _place(what)
    if place is not None:
        with contextlib.suppress(OSError):
            place.touch()


def _place(what: str) -> pathlib.Path | None:
    """A file beside the kernels; None: none are kept."""
    from edgekv.kernels.cpu import compile as kept
    from edgekv.kernels.cpu.compile import CPU_FEATURES

    folder = numba_cache.folder(kept.__file__)
    if folder is None:
        return None
    processor = numba.config.CPU_NAME, CPU_FEATURES
    made_by = numba.__version__, platform.python_version(), processor, kept.sources(), what
    return folder / f"{numba_cache.WARM}{hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]}"
