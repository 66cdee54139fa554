"""What a token needs of a machine: the bytes that it reads, and the attention's cycles on Arm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from edgekv.kernels import numba_kernels
from edgekv.kernels.contract.attention import BLOCK
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.geometry import Geometry, Workspace
from edgekv.linear.formats import WEIGHTS, specs_bytes, store_specs
from edgekv.models.architecture import Architecture

HEAD_DIM = 128  # that cycles are counted for
FILL_TOKENS = 512  # synthetic keys and values drawn at a time

Tokens = dict[str, float]  # kernel in the counts -> tokens that one query head does with it


def _dense(cache: Any) -> Tokens:
    width = {"f16": "f16", "f32": "f16", "q8": "8-bit"}[cache.knobs.dtype]
    return dict.fromkeys((f"scores {width}", f"values {width}", "softmax"), cache.n_seen)


def _all(*names: str) -> Callable[[Any], Tokens]:
    return lambda cache: dict.fromkeys((*names, "softmax"), cache.n_seen)


def _planes(cache: Any) -> Tokens:
    exact, knobs = cache.n_seen - cache.n_packed, cache.knobs
    names = f"{knobs.k_bits}-bit scan", "centres", "weights in bytes", f"{knobs.v_bits}-bit values"
    return dict.fromkeys(names, cache.n_packed) | {
        "scores f16": exact,
        "values f16": exact,
        "softmax": cache.n_seen,
    }


def _bitplane(cache: Any) -> Tokens:
    exact, (chosen, full, blocks) = cache.n_seen - cache.n_packed, cache.value_codec.counts
    return {
        "1-bit scan": min(blocks * BLOCK, cache.n_packed),
        "centres": cache.n_packed,
        "bitplane key unpacked": chosen / cache.geometry.n_rep,
        "bitplane key": chosen,
        "bitplane value, 2 planes": chosen - full,
        "bitplane value, 4 planes": full,
        "scores f16": exact,
        "values f16": exact,
        "softmax": cache.n_seen,
    }


def _fier(cache: Any) -> Tokens:
    return {"fier scores": cache.n_seen} | dict.fromkeys(("fier key", "fier value", "softmax"), cache.knobs.k)


# Schemes whose cycles are counted; of others only the bytes are.
SCHEMES: dict[str, Callable[[Any], Tokens]] = {
    "dense": _dense,
    "h1b": _all("h1b scores", "weights in bytes", "h1b values"),
    "int4": _all("scores 4-bit", "values 4-bit"),
    "kivi2": _all("kivi scores", "kivi values"),
    "planes": _planes,
    "onebit": _planes,
    "bitplane": _bitplane,
    "fier": _fier,
}


@dataclasses.dataclass(frozen=True)
class Need:
    """What one token needs, all layers together: bytes, and cycles of the attention (None: not counted)."""

    weights_bytes: int
    cache_bytes: int
    cycles: float | None


def weights_bytes(arch: Architecture, weights: str) -> int:
    """That one token reads: all but the tables, of which it takes a row."""
    tables = arch.tables()
    specs = store_specs(arch, WEIGHTS[weights], dict.fromkeys(tables, "F32"))
    return specs_bytes({name: spec for name, spec in specs.items() if name not in tables})


def filled_cache(spec: CacheSpec, geometry: Geometry) -> KVCache:
    """One layer's cache, full but for one token, after a query: keys and values as `edgekv bench` draws them."""
    cache: KVCache = spec.scheme(geometry, spec.knobs)
    cache.allocate(numba_kernels(), Workspace())
    rng = np.random.default_rng(0)
    g, d = geometry.n_kv_heads, geometry.head_dim
    drift = np.zeros((g, 1, d), np.float32)
    depth = geometry.capacity - 1
    for start in range(0, depth, FILL_TOKENS):
        n = min(FILL_TOKENS, depth - start)
        drift += rng.standard_normal(drift.shape, np.float32)
        k = rng.standard_normal((g, n, d), np.float32) + drift
        v = rng.standard_normal(k.shape, np.float32)
        q = rng.standard_normal((geometry.n_heads, n, d), np.float32) / np.float32(np.sqrt(d))
        if start:
            cache.extend(k, v)
        else:
            cache.prefill(q, k, v)
            type(cache).finish_prefill([cache])
    q, k, v = (rng.standard_normal((heads, 1, d), np.float32) for heads in (geometry.n_heads, g, g))
    cache.attend(q / np.float32(np.sqrt(d)), k + drift, v)
    return cache


def cycles(cache: KVCache, counts: Sequence[dict[str, Any]]) -> float | None:
    """Of one layer and token, all query heads, on one core. None: the scheme is not counted."""
    if cache.name not in SCHEMES:
        return None
    by_kernel, total, n_rep = {row["kernel"]: row for row in counts}, 0.0, cache.geometry.n_rep
    for kernel, tokens in SCHEMES[cache.name](cache).items():
        part = by_kernel[together(kernel, n_rep, by_kernel)]["cycles_per_token"] * tokens * cache.geometry.n_heads
        total += part if kernel == "softmax" else part * cache.geometry.head_dim / HEAD_DIM
    return total


def together(kernel: str, n_rep: int, names: Container[str]) -> str:
    """The loop that does as many of n_rep rows at once as there is one for."""
    for rows in (4, 2):
        if rows <= n_rep and f"{kernel}, {rows} rows" in names:
            return f"{kernel}, {rows} rows"
    return kernel


def need_of(arch: Architecture, weights: str, cache: KVCache, counts: Sequence[dict[str, Any]] | None) -> Need:
    n_layers = len(arch.config.attending)
    work = cycles(cache, counts) if counts else None
    return Need(
        weights_bytes=weights_bytes(arch, weights),
        cache_bytes=n_layers * cache.bytes_read() + state_bytes(arch),
        cycles=work and n_layers * work,
    )


def state_bytes(arch: Architecture) -> int:
    """Read for a token by the layers that do not attend."""
    found = [shape for each in arch.config.recurrences if each is not None for shape in each.state().values()]
    return 4 * sum(math.prod(shape) for shape in found)


def caches(
    arch: Architecture, specs: Sequence[CacheSpec], depths: Sequence[int]
) -> list[tuple[str, int, KVCache]]:
    """(scheme, depth, first layer's cache) of every scheme at every depth."""
    c = arch.config
    result = []
    for depth in depths:
        for spec in specs:
            geometry = Geometry(
                c.n_heads, c.n_kv_heads, c.head_dim, depth + 1, 0, len(c.attending), c.layer_windows[0]
            )
            result.append((str(spec), depth, filled_cache(spec, geometry)))
    return result
