"""The decoder on this machine's cores: linear blocks and attention by kernels of Numba, or NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.decoder.cpu_attention import BLOCK_ROWS, CpuAttention
from edgekv.decoder.decoder import CHUNK, Decoder
from edgekv.decoder.prompt_attention import Scoring
from edgekv.decoder.rope_tables import RopeRotation
from edgekv.kernels import Kernels, compiling
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.geometry import Workspace
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import RecurrentState, recurrent_states
from edgekv.kvcache.rewinding import rewind
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.weights import Weights
from edgekv.machine import available_memory_bytes
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64

WARM_UP_ROWS = (1, 5, 80)  # tokens at once: decoding, drafts, and more than a packed block


class CpuDecoder(Decoder):
    """`Decoder` in the host's memory."""

    def __init__(
        self, weights: Weights, linear: LinearBlocks, kernels: Kernels, capacity: int, threads: int
    ) -> None:
        attention = CpuAttention(kernels, threads)
        super().__init__(
            weights, linear, kernels, attention, capacity=capacity, threads=threads, workspace=Workspace()
        )

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        self.require_process()
        ids = np.asarray(tokens, np.int64)
        x = self.weights.rows("embed", ids)
        if self.config.embedding_scale != 1.0:
            x = np.multiply(x, np.float32(self.config.embedding_scale), dtype=np.float32)
        if not self._learned_positions:
            return x
        positions = self.weights.rows("positions", np.arange(start, start + len(ids)))
        summed: F32 = np.add(x, positions, dtype=np.float32)
        return summed

    def step(self, token: int, caches: Sequence[LayerState]) -> F32:
        logits: F32 = self.head(self.forward(self.embed((token,), caches[0].n_seen), caches))[0]
        return logits

    def _prompt_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        self._exact_layer(i, cache, x, rotation, pause)

    def warm_up(self, caches: Sequence[KVCache]) -> list[Callable[[], object]]:
        """All that a conversation calls; nothing where it has been compiled before.

        A prompt, one token in an empty cache and in a filled one, a few at once as drafts are, and so many that a
        block is packed and all threads work.
        """
        cache, c = caches[-1], self.config
        linear = f"{type(self.linear).__name__} {getattr(self.weights, 'form', '')}"
        what = f"{type(cache).__name__} {cache.knobs} {cache.geometry} {c.model_type} {self.threads} {linear}"
        if compiling.are_kept(what):
            return []
        n, last = cache.geometry.capacity, c.attending[-1]
        cache.allocate(self.kernels, Workspace())
        rng = np.random.default_rng(0)
        qkv = rng.standard_normal((n, c.q_size + 2 * c.kv_size)).astype(np.float32)
        buffers = Workspace()
        q, k, v = (buffers.array(name, (heads, n, c.head_dim)) for name, heads in self._heads())

        def split() -> None:
            for m, parts in ((1, self._qkv_buffers("step", 1)), (n, (q, k, v))):
                self._split(last, qkv[:m], self._ropes.at(0, m)[last], *parts)

        def attend(n_tokens: int) -> None:
            a = cache.n_seen
            b = min(a + n_tokens, n)
            if a < b:
                cache.attend(*(contiguous(x[:, a:b]) for x in (q, k, v)))

        def prefill() -> None:
            rewind([cache], 0)
            m = max(1, n - sum(WARM_UP_ROWS))
            cache.prefill(q[:, :m], k[:, :m], v[:, :m])
            type(cache).finish_prefill([cache])

        return [
            *self.linear.warm_up(),
            split,
            lambda: self._exact_attention(q, k, v, Scoring()),  # of a prompt, and what every scheme needs: `ahead`
            functools.partial(attend, 1),
            prefill,
            *(functools.partial(attend, rows) for rows in WARM_UP_ROWS),
            *self._warm_up_recurrences(rng),
            lambda: compiling.note_kept(what),
        ]

    def _warm_up_recurrences(self, rng: np.random.Generator) -> list[Callable[[], object]]:
        """A token, and a prompt's chunk, of each kind of layer that does not attend."""
        layers = [i for i in range(self.config.n_layers) if i not in self.config.attending]
        first = {
            type(state.recurrence): (i, state)
            for i, state in zip(layers, recurrent_states(self.config, 2 * CHUNK), strict=False)
        }
        return [functools.partial(self._recur, i, state, rng) for i, state in first.values()]

    def _recur(self, i: int, state: RecurrentState, rng: np.random.Generator) -> None:
        state.allocate(self.kernels, Workspace())
        for n in (1, CHUNK):
            state.run(rng.standard_normal((n, state.recurrence.projected)).astype(np.float32), self._arrays[i])


def scratch_bytes(c: ModelConfig, ctx: int, *, sees_queries: bool) -> int:
    """An upper estimate of scratch, in bytes, while a prompt of ``ctx`` tokens is read into empty caches.

    sees_queries: whether the caches are shown all queries at once (`KVCache.sees_queries`).
    """
    held = ctx if sees_queries else min(ctx, CHUNK)
    prompt = ctx * (c.hidden_size + 2 * c.kv_size) + held * c.q_size + BLOCK_ROWS * ctx
    e = c.experts
    experts = e.per_token * (4 * e.size + 5 * c.hidden_size) if e else 0
    projected = max((each.projected for each in c.recurrences if each is not None), default=0)
    chunk = CHUNK * (3 * c.intermediate_size + 4 * c.hidden_size + 2 * projected + experts) + c.vocab_size
    return 4 * (prompt + chunk)
