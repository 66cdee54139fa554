"""What all kernels share: the device, small operands on it, scratch, and how work is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels.cuda.program import Array, Driver, Launch, Program
from edgekv.types import I64

MOST_SHARES = 128  # blocks that share the tokens of a KV head
MOST_CONSTANTS = 4096


class Backend:
    """The families of kernels derive from it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._scratch: dict[str, Array] = {}
        self._constants: dict[tuple[Any, ...], Array] = {}

    def constant(self, x: Array | npt.NDArray[Any]) -> Array:
        """A small operand that may come from the host, uploaded once for each value that it has."""
        if not isinstance(x, np.ndarray):
            return x
        key = x.shape, x.dtype.str, x.tobytes()
        if key not in self._constants:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.driver.upload(x)
        return self._constants[key]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A buffer for one launch, contents undefined."""
        size = int(np.prod(shape))
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name] = self.driver.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """What launches use beside their operands."""
        return [*self._scratch.values(), *self._constants.values()]

    def add_partial(self, partial: Array, out: Array) -> None:
        """out (G, ...) += the sum over the second axis of partial (G, splits, ...)."""
        n_kv_heads, splits = partial.shape[:2]
        n = out.size
        launch = Launch(Program(("add_partial",)), "add_partial", (-(-n // 256),), 256)
        self.driver.launch(launch, partial, splits, n // n_kv_heads, n, out)

    def splits(self, rounds: int, others: int, blocks: int = 8, beside: int = 0) -> int:
        """Into how many parts to cut a range of rounds, of which there are `others`, each beside some blocks.

        All of them run at once where a multiprocessor holds `blocks`: a few more would take as long again.
        """
        at_once = self.driver.multiprocessors * blocks // others - beside
        return max(1, min(rounds, at_once, MOST_SHARES))

    def per_token(self, *numbers: I64) -> tuple[Any, ...]:
        """For a kernel: whether query tokens differ, their numbers (len(numbers), n), and the first token's."""
        many = any((x != x[0]).any() for x in numbers)
        array = self.constant(np.stack(numbers).astype(np.int32)) if many else self.driver.shift
        return int(many), array, *(int(x[0]) for x in numbers)
