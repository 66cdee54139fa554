"""Where a token's time goes: decoder parts and kernels, timed by standing between them and their callers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

# What a kernel does, by the start of its name.
PARTS = {
    "attend": "attend",
    "append": "append",
    "scores": "choose",
    "softmax": "choose",
    "select": "choose",
    "add_attention": "choose",
    "evict": "append",
    "encode": "append",
    "pack": "append",
    "store": "append",
    "hadamard": "append",
    "project": "append",
    "split_rope": "rope",
    "short_conv": "recurrence",
    "gated_delta": "recurrence",
}
ATTENTION = ("append", "choose", "attend")


class Stopwatch:
    """Seconds by part; counts only while ``on``. What a timed function calls counts as its own time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.on = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            self.on, begin = False, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
                self.on = True

        return call

    def kernels(self, kernels: Any) -> Any:
        """A backend whose functions are timed by what they do; those not in PARTS count as "other"."""
        return TimedKernels(self, kernels)


class TimedKernels:
    """See `Stopwatch.kernels`."""

    def __init__(self, watch: Stopwatch, kernels: Any) -> None:
        self._watch, self._kernels = watch, kernels

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        if callable(attribute):
            part = next((part for start, part in PARTS.items() if name.startswith(start)), "other")
            attribute = self._watch.timed(part, attribute)
        setattr(self, name, attribute)
        return attribute
