"""Queries, keys and values out of the fused projection, rotated by their position."""

from __future__ import annotations

from typing import Any, NamedTuple

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.tiles import THREADS


class Halves(NamedTuple):
    """Where `split_rope_halves` also puts queries, keys and values in float16, zeros behind a head's channels.

    q (n_heads, n, width); k, v (n_kv_heads, capacity, width), from token ``first`` on.
    """

    q: Array
    k: Array
    v: Array
    first: int


class RopeKernels(Backend):
    """Launches of rope.cu."""

    def split_rope(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        q_norm: Array,
        k_norm: Array,
        eps: float,
    ) -> None:
        self.split_rope_halves(qkv, cos, sin, q, k, v, scale, q_norm, k_norm, eps, None)

    def split_rope_halves(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        q: Array | None,
        k: Array,
        v: Array,
        scale: float,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        halves: Halves | None,
    ) -> None:
        """`split_rope`, and the same in halves. q None: the queries are wanted as halves only."""
        n_kv_heads, n, head_dim = k.shape
        n_heads, shift = qkv.shape[1] // head_dim - 2 * n_kv_heads, self.driver.shift
        tables = (cos, sin) if cos.size else (shift, shift)
        norms = (q_norm, k_norm, 1) if q_norm.size else (shift, shift, 0)
        outs: list[Any] = [shift, 0] if q is None else _rows(q)
        arguments = qkv, *tables, cos.shape[1], shift, *outs, *_rows(k), *_rows(v), n_heads, n_kv_heads, head_dim
        more: tuple[Any, ...] = ()
        if halves is not None:
            _, capacity, width = halves.k.shape
            more = int(q is not None), halves.q, halves.k, halves.v, width, capacity, halves.first
        kernel = "split_rope_half" if more else "split_rope"
        grid = n, n_heads + 2 * n_kv_heads
        launch = Launch(Program(("rope",)), kernel, grid, THREADS, early=kernel == "split_rope")
        self.driver.launch(launch, *arguments, float(scale), *norms, float(eps), *more)


def _rows(x: Array) -> list[Any]:
    """x (heads, n, head_dim) and the elements between its heads."""
    return [x, x.strides[0] // x.itemsize]
