"""What Numba compiles, and how long that takes: kernels that its cache on disk has are loaded, not compiled."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target


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


def prepare() -> None:
    """Fills Numba's tables of types, which its first kernel needs, in a thread: while a model is opened, say."""
    threading.Thread(target=_fill_tables, name="edgekv-numba", daemon=True).start()


def _fill_tables() -> None:
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
