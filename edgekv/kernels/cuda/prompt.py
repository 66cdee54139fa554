"""A prompt's exact attention in half precision, and the queries, keys and values for it."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.tiles import THREADS

BLOCK_ROWS = 64  # queries of a block of prompt_attention.cu
MOST_WIDTH = 256


def padded_width(head_dim: int) -> int:
    """Channels of a head with which prompt_attention.cu computes: a multiple of 16."""
    return -(-head_dim // 16) * 16


class PromptKernels(Backend):
    """Launches of prompt_attention.cu."""

    def attend_prompt(self, q: Array, k: Array, v: Array, earlier: int, window: int | None, out: Array) -> None:
        """out (n, n_heads * head_dim) = causal attention of queries q (n_heads, n, width), already scaled.

        All are float16. The queries are those of the last n of ``earlier`` + n tokens, the first of k and v
        (n_kv_heads, capacity, width). Token t sees max(0, t + 1 - window)..t. Channels from head_dim on are 0.
        """
        n_heads, n, width = q.shape
        n_kv_heads, capacity, _ = k.shape
        macros = ("WIDTH", width), ("HEAD_DIM", out.shape[1] // n_heads)
        program = Program(("prompt_attention",), macros)
        launch = Launch(program, "prompt_attention", (-(-n // BLOCK_ROWS), n_heads), THREADS)
        sizes = n, earlier, capacity, n_heads // n_kv_heads, window or 0
        self.driver.launch(launch, q, k, v, *sizes, out)
