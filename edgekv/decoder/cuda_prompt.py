"""A prompt through one layer in half precision: products on tensor cores, attention that keeps no scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.decoder.rope_tables import RopeRotation
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.program import Array, Driver
from edgekv.kernels.cuda.prompt import MOST_WIDTH, padded_width
from edgekv.kernels.cuda.rope import Halves
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.geometry import Workspace
from edgekv.linear.cuda_half import HalfOps
from edgekv.models.architecture import Architecture
from edgekv.models.config import ModelConfig

CHUNK_SHARE = 64  # of the card's memory: what a chunk's activations may take
LEAST_CHUNK, MOST_CHUNK = 256, 8192


def chunk_tokens(config: ModelConfig, driver: Driver) -> int:
    """Tokens whose activations are alive at a time: a power of two that fits the card."""
    c = config
    per_token = 6 * (2 * c.q_size + 2 * c.kv_size + 2 * c.intermediate_size + c.hidden_size)
    most = driver.memory_bytes // CHUNK_SHARE // per_token
    return max(LEAST_CHUNK, min(MOST_CHUNK, 1 << max(most, 1).bit_length() - 1))


class HalfPrompt:
    """The layers of one decoder over a prompt that fills empty caches."""

    def __init__(
        self, arch: Architecture, ops: HalfOps, kernels: CudaKernels, workspace: Workspace, chunk: int
    ) -> None:
        self.arch, self.ops, self.kernels, self.workspace, self.chunk = arch, ops, kernels, workspace, chunk

    @staticmethod
    def fits(config: ModelConfig, driver: Driver) -> bool:
        """Whether the device has what this takes, and attention is of the plain kind."""
        grows = any(rope.query_growth for rope in config.ropes)
        return driver.has_matrix_tiles and config.head_dim <= MOST_WIDTH and config.score_cap is None and not grows

    def layer(self, i: int, cache: KVCache, x: Array, rotation: RopeRotation, norms: tuple[Any, Any]) -> None:
        """Turns x (n, hidden) into layer i's result in place, and fills its cache."""
        n, c, array = len(x), self.arch.config, self.workspace.array
        width, chunk = padded_width(c.head_dim), self.chunk
        queries = array("prefill.q", (c.n_heads, n, c.head_dim)) if cache.sees_queries else None
        k = array("prefill.k", (c.n_kv_heads, n, c.head_dim))
        v = array("prefill.v", (c.n_kv_heads, n, c.head_dim))
        half_k = array("prefill.half_k", (c.n_kv_heads, n, width), np.float16)
        half_v = array("prefill.half_v", (c.n_kv_heads, n, width), np.float16)
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            part = slice(a, b)
            half_q = array("prefill.half_q", (c.n_heads, b - a, width), np.float16)
            out = array("prefill.half_out", (b - a, c.q_size), np.float16)
            self.kernels.split_rope_halves(
                *(self.arch.attention_in(self.ops, i, x[part]), *rotation.rows(a, b)[:2]),
                *(None if queries is None else queries[:, part], k[:, part], v[:, part]),
                *(c.layer_scales[i], *norms, c.norm_eps, Halves(half_q, half_k, half_v, a)),
            )
            self.kernels.attend_prompt(half_q, half_k, half_v, a, c.layer_windows[i], out)
            here = x[part]
            there = self.arch.attention_out(self.ops, i, here, out)
            if there is not here:  # HalfOps adds in place
                x[part] = there
        cache.prefill(k[:, :0] if queries is None else queries, k, v)
