"""Keys and values of new tokens into their stores: in one call where both are stored token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgekv.kernels.contract.attention import F32
from edgekv.kernels.cpu.dense import append_f16

APPENDS: dict[tuple[str, str], Callable[[Any, Any, F32, F32, int], None]] = {("f16", "f16"): append_f16}
"""By the kinds of keys and values; other pairs take a call for each."""


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    together = APPENDS.get((keys.kind, values.kind))
    if together is not None:
        together(keys, values, k, v, t0)
    else:
        keys.encode(k, t0)
        values.encode(v, t0)
