"""Progress on a terminal's standard error, one task at a time; nothing where it is piped."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from tqdm import tqdm

REFRESH_S = 0.4  # so that the seconds go on while nothing else does
BYTES = ("quantizing", "converting", "hashing")
PREFILL = "prefill"


class Bars:
    """A bar that counts what is done and the seconds left, redrawn while it waits."""

    def __init__(self) -> None:
        self._task = ""
        self._bar: tqdm | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def update(self, task: str, done: int, total: int) -> None:
        """The bar of a task at ``done`` of ``total``; another task's bar is closed."""
        if not sys.stderr.isatty():
            return
        if task != self._task:
            self._close()
            self._open(task, total)
        with self._lock:
            if self._bar is not None:
                self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def prefill(self, n_tokens: int, layer: int, n_layers: int) -> None:
        """A prompt of ``n_tokens``, of which ``layer`` of ``n_layers`` are through, in tokens."""
        self.update(PREFILL, n_tokens * layer // n_layers, n_tokens)

    def _open(self, task: str, total: int) -> None:
        unit = "B" if task in BYTES else " tokens" if task == PREFILL else ""
        self._bar = tqdm(total=total, desc=task, unit=unit, unit_scale=unit == "B", leave=False)
        self._task, self._end = task, threading.Event()
        threading.Thread(target=self._refresh, args=(self._bar, self._end), daemon=True).start()

    def _refresh(self, bar: tqdm, end: threading.Event) -> None:
        while not end.wait(REFRESH_S):
            with self._lock:
                if not end.is_set():
                    bar.refresh()

    def _close(self) -> None:
        with self._lock:
            self._end.set()
            if self._bar is not None:
                self._bar.close()
            self._bar, self._task = None, ""
