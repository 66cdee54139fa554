"""Where a token's time goes: decoder parts and kernels, timed by standing between them and their callers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

# What a kernel does, by the start of its name.
PARTS = {
    "scores": "score",
    "hadamard_back": "value",
    "hadamard": "score",
    "pack_sign_rows": "score",
    "pack_queries": "score",
    "softmax": "select",
    "select": "select",
    "values": "value",
    "attend": "value",
    "add_attention": "select",
    "evict": "append",
    "encode": "append",
    "pack": "append",
    "store": "append",
    "split_rope": "rope",
}
ATTENTION = ("append", "score", "select", "value")


class Stopwatch:
    """Seconds by part; counts only while ``on``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.on = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
            return result

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
