"""A saved cache with any numbers is refused or harmless: nothing is written outside of its arrays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cache_cases import attend_last, attend_singly, draw, make, read
from helpers import SCHEMES

from edgekv.kernels import numba_kernels
from edgekv.kernels.arrays import zeros
from edgekv.kvcache.cache import CacheState, KVCache

HEADS, TOKENS, GUARD = (4, 2, 64), 420, 4096
SMALL = {  # of which something has left, or was chosen, when 300 tokens are in
    **{name: f"{name}:budget=100" for name in ("streaming", "h2o", "tova", "mikv")},
    "snapkv": "snapkv:budget=130,interval=32",
    "fier": "fier:k=64",
    "quest": "quest:k=64",
    "visual_planes": "visual_planes:k_bits=2",
}
FILLS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda x: np.full(x.shape, np.nan if x.dtype == np.float32 else -1).astype(x.dtype),
    "infinity": lambda x: (
        np.full(x.shape, np.inf).astype(np.float16).view(np.uint16)
        if x.dtype == np.uint16
        else (np.full(x.shape, np.inf, np.float32) if x.dtype == np.float32 else np.zeros_like(x))
    ),
    "noise": lambda x: np.frombuffer(np.random.default_rng(1).bytes(x.nbytes), x.dtype).reshape(x.shape),
}


class Guarded:
    """Memory with GUARD bytes on either side of each array, which stay as they are."""

    def __init__(self) -> None:
        self.taken: list[npt.NDArray[np.uint8]] = []

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        n = math.prod(shape) * np.dtype(dtype).itemsize
        raw = zeros((n + 2 * GUARD,), np.uint8)
        raw[:GUARD] = raw[GUARD + n :] = 0xA5
        self.taken.append(raw)
        return raw[GUARD : GUARD + n].view(dtype).reshape(shape)

    empty = zeros

    def check(self) -> None:
        for raw in self.taken:
            assert (raw[:GUARD] == 0xA5).all()
            assert (raw[-GUARD:] == 0xA5).all()


def opened(name: str, memory: Guarded, window: int | None = None) -> KVCache:
    """A layer for TOKENS."""
    kernels, layer = numba_kernels(1), {"layer": 2, "n_layers": 4, "sliding_window": window}
    return make(SMALL.get(name, name), HEADS, TOKENS, kernels, memory, **layer)


def filled(name: str, window: int | None = None) -> KVCache:
    """A conversation of 300 tokens."""
    cache = opened(name, Guarded(), window)
    cache.mark_images([(10, 150), (290, 320)])
    attend_last(cache, draw(HEADS, 300), 20)
    return cache


def goes_on(cache: KVCache) -> None:
    """Reads tokens one by one, together, and after a rewind."""
    tokens = draw(HEADS, TOKENS, seed=3)
    with np.errstate(all="ignore"):
        attend_singly(cache, tokens, 300, 340)
        read(cache, tokens, 340, 410)
        read(cache, tokens, cache.truncate(200), 250)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("name", SCHEMES)
def test_arrays_of_any_numbers_are_refused_or_harmless(name: str, window: int | None) -> None:
    """All of them, and each by itself: scales and elements that are no numbers go through the kernels."""
    state, refused = filled(name, window).state(), set()
    for fill in FILLS:
        for changed in (None, *state.arrays):
            memory = Guarded()
            cache = opened(name, memory, window)
            for key, array in cache.restore(state.counters, copy.deepcopy(state.extra)).items():
                with np.errstate(all="ignore"):
                    array[...] = FILLS[fill](array) if changed in (None, key) else state.arrays[key]
            if cache.arrays_valid():
                goes_on(cache)
                memory.check()
            else:
                refused.add(changed)
    must = {key for key in state.arrays if key in ("position", "low.position", "mass", "balance")}
    assert must <= refused


def changed(state: CacheState, counters: dict[str, int], **fitted: Any) -> tuple[dict[str, int], dict[str, Any]]:
    return state.counters | counters, copy.deepcopy(state.extra) | fitted


SPAN = (10, 150, 128, 0)
LIES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    *(("h1b", {}, {"tau": [[tau, 0.1], [0.1, 0.1]]}) for tau in (math.nan, math.inf, 0.0, -1.0, 1e-30, 1e30)),
    *(("planes", {}, {"key_scale": [scale, 1.0], "adapted_by": "x"}) for scale in (math.nan, math.inf, -1, 1e30)),
    ("planes", {}, {"key_scale": [1.0] * 3, "adapted_by": "x"}),
    ("kvcomp", {}, {"keys": {"pool_words": 1 << 40, "n_encoded": 192}}),
    ("kvcomp", {}, {"keys": {"pool_words": math.inf, "n_encoded": 192}}),
    ("visual_planes", {}, {"spans": [(10, 138, 128, 1)]}),  # what comes would lie behind its store's end
    ("visual_planes", {}, {"spans": [(10, 138, 128, -1)]}),
    ("visual_planes", {}, {"spans": [(10, 138, 1 << 40, 0)]}),
    ("visual_planes", {}, {"spans": [(10, 138, 130, 0)]}),
    ("visual_planes", {}, {"spans": [(10, math.nan, 128, 0)]}),
    ("visual1", {}, {"spans": [(10, 150, 140, 30)]}),
    *((name, {"n_used": 97}, {}) for name in ("streaming", "h2o", "tova", "mikv", "snapkv")),
    ("streaming", {"n_used": 101}, {}),
    ("mikv", {"n_low": 10}, {}),
    ("snapkv", {"n_observed": 33}, {}),
]


@pytest.mark.parametrize(("name", "counters", "fitted"), LIES, ids=str)
def test_what_no_conversation_has_is_refused(name: str, counters: dict[str, int], fitted: dict[str, Any]) -> None:
    state = filled(name).state()
    opened(name, Guarded()).restore(state.counters, copy.deepcopy(state.extra))
    with pytest.raises((ValueError, TypeError, OverflowError)):
        opened(name, Guarded()).restore(*changed(state, counters, **fitted))
