"""What computes the exact attention of a prompt, whatever it runs on."""

from __future__ import annotations

from typing import Protocol

from edgekv.types import F32


class PromptAttention(Protocol):
    """Exact causal attention over a prompt."""

    def __call__(
        self,
        queries: F32,
        keys: F32,
        values: F32,
        window: int | None,
        cap: float | None = None,
        sinks: F32 | None = None,
    ) -> None:
        """Replaces queries (n_heads, n, head_dim), already scaled, by their attention over keys and values.

        keys, values (n_kv_heads, m, head_dim) with m >= n; the queries are those of the last n tokens. That of
        token t sees keys max(0, t + 1 - window)..t; None: all up to t. cap: the soft bound of scores.
        sinks (n_heads,): a score of each head that belongs to no token.
        """
