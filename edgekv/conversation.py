"""What has been said and the caches that hold it: tokens in, tokens out, room made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kvcache.base import KVCache, rewind
from edgekv.model import Model
from edgekv.models.decoder import Decoder
from edgekv.overflow import Overflow, Stop
from edgekv.plan import Plan
from edgekv.session_file import copy_used
from edgekv.threads import blas_threads

F32 = npt.NDArray[np.float32]
LayerProgress = Callable[[int, int], None]


class Conversation:
    """The tokens of one conversation and their KV caches."""

    def __init__(self, model: Model, plan: Plan, decoder: Decoder) -> None:
        self.model, self.plan, self._decoder = model, plan, decoder
        self.config = model.config
        self.tokens: list[int] = []  # prompt and output; the last may not be in the caches yet
        self.memo: dict[str, Any] = {}  # whatever its owner wants to be saved with it, as JSON
        self.overflow: Overflow = Stop()
        self.n_dropped = 0  # tokens that left the conversation when it outgrew the context
        self._new_caches()

    def _new_caches(self) -> None:
        self.caches: list[KVCache] = self.plan.kv.layers(self.config, self.plan.ctx)
        if self.model.adapter:
            self.model.adapter.adapt(self.caches)
        for cache in self.caches:
            cache.allocate(self._decoder.kernels, self._decoder.workspace)

    @property
    def n_past(self) -> int:
        """Tokens in the caches."""
        return self.caches[0].n_seen

    def copy(self, other: Conversation) -> None:
        """Takes over the conversation of another session of the same model, scheme and context; both go on."""
        self._new_caches()
        for cache, source in zip(self.caches, other.caches, strict=True):
            state = source.state()
            for name, array in cache.prepare(state.counters, copy.deepcopy(state.fitted)).items():
                copy_used(state.arrays[name], array)
        self.tokens, self.memo = list(other.tokens), copy.deepcopy(other.memo)

    def read(self, ids: Sequence[int], progress: LayerProgress | None = None) -> F32:
        """Logits (vocab,) after the ids, which enter the caches; `tokens` is up to the caller."""
        start = self.n_past
        if start and len(ids) == 1:
            return self._forward_one(ids[0])
        with self._undo_on_error(start), blas_threads(self._decoder.threads):
            hidden = self._decoder.prefill(self._decoder.embed(ids, start), self.caches, progress)
            logits: F32 = self._decoder.head(hidden[-1:])[0]
            return logits

    def make_room(self) -> None:
        """If the context is full: forgets tokens as --overflow says, to be computed again with the next one."""
        if len(self.tokens) > self.plan.ctx:
            self.tokens = self._trimmed(self.tokens, self.plan.ctx - self.plan.ctx // 2)
            rewind(self.caches, 0)

    def _trimmed(self, tokens: list[int], room: int) -> list[int]:
        kept = self.overflow.kept(tokens, max(room, 1))
        if kept is None:
            return tokens
        self.n_dropped += len(tokens) - len(kept)
        return kept

    def _forward_one(self, token: int) -> F32:
        with self._undo_on_error(self.n_past), blas_threads(1):
            logits: F32 = self._decoder.step(token, self.caches)
            return logits

    def _fitted(self, ids: list[int]) -> list[int]:
        """The prompt, or, if it is too long, what --overflow leaves of it and of all before it."""
        ctx, whole = self.plan.ctx, [*self.tokens, *ids]
        if len(whole) <= ctx:
            return ids
        kept = self._trimmed(whole, ctx - ctx // 4)
        if len(kept) == len(whole):
            return ids
        self.rewind(0)
        return kept

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt.
        """
        if n_tokens < self.n_past:
            rewind(self.caches, n_tokens)
        del self.tokens[n_tokens:]

    def align(self, tokens: Sequence[int]) -> list[int]:
        """Rewinds to where the conversation and ``tokens`` part; returns what `generate` must add to it.

        That is at least the last of ``tokens``, whose logits are needed.
        """
        same = 0
        for held, wanted in zip(self.tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            same += 1
        self.rewind(same)
        return list(tokens[same:])

    def _undo_on_error(self, n_past: int) -> _Undo:
        return _Undo(self.caches, n_past)


class _Undo:
    """Rewinds every layer's cache to the same length when a step is interrupted between layers."""

    def __init__(self, caches: Sequence[KVCache], n_past: int) -> None:
        self.caches, self.n_past = caches, n_past

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            rewind(self.caches, self.n_past)
