"""What has been said and the caches that hold it: tokens in, tokens out, room made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import ContextError, TokenizerError
from edgekv.kvcache.base import KVCache, rewind
from edgekv.models.decoder import Decoder
from edgekv.session.context_shift import Overflow, Stop
from edgekv.session.file import copy_used
from edgekv.session.model import Model
from edgekv.session.plan import Plan
from edgekv.session.prompt import Prompt, Span, Spans, clipped, flatten, selected, shifted, visual_ranges
from edgekv.threads import blas_threads

F32 = npt.NDArray[np.float32]
LayerProgress = Callable[[int, int], None]


class Conversation:
    """The tokens of one conversation and their KV caches."""

    def __init__(self, model: Model, plan: Plan, decoder: Decoder) -> None:
        self.model, self.plan, self._decoder = model, plan, decoder
        self.config = model.config
        self.tokens: list[int] = []  # prompt and output; the last may not be in the caches yet
        self.spans: Spans = []  # positions that hold embeddings; their tokens are placeholders
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
        self.spans = list(other.spans)

    def append(
        self,
        ids: Sequence[int],
        spans: Sequence[Span] = (),
        *,
        n_logits: int = 1,
        progress: LayerProgress | None = None,
    ) -> F32:
        """Logits (n_logits, vocab) after the last ids, all of which are added to the conversation.

        spans: embeddings in place of some of them, counted from the first.
        """
        self.spans += shifted(spans, len(self.tokens))
        try:
            logits = self._logits([*self.tokens[self.n_past :], *ids], n_logits, progress)
            self.tokens.extend(ids)
        finally:
            self.spans = clipped(self.spans, 0, len(self.tokens))
        return logits

    def read(self, ids: Sequence[int]) -> F32:
        """Logits (vocab,) after the ids, which enter the caches; `tokens` is up to the caller."""
        logits: F32 = self._logits(ids, 1)[0]
        return logits

    def _logits(self, ids: Sequence[int], n_last: int, progress: LayerProgress | None = None) -> F32:
        start = self.n_past
        spans = clipped(self.spans, start, start + len(ids))
        if start and len(ids) == 1 and not spans:
            return self._forward_one(ids[0])
        with self._undo_on_error(start), blas_threads(self._decoder.threads):
            x = self._decoder.embed(ids, start)
            for span in spans:
                self._decoder.place(span.rows, x, start, span.start)
            for cache in self.caches:
                cache.mark(visual_ranges(spans))
            hidden = self._decoder.prefill(x, self.caches, progress)
            return self._decoder.head(hidden[len(ids) - n_last :])

    def make_room(self) -> None:
        """If the context is full: forgets tokens as --overflow says, to be computed again with the next one."""
        n, ctx = len(self.tokens), self.plan.ctx
        kept = self._kept(n, ctx - ctx // 2) if n > ctx else None
        if kept is not None:
            self.spans, self.tokens = selected(self.spans, kept), [self.tokens[i] for i in kept]
            rewind(self.caches, 0)

    def _kept(self, n: int, room: int) -> list[int] | None:
        """Positions that stay of a conversation of n tokens; None: --overflow makes no room."""
        kept = self.overflow.kept(n, max(room, 1))
        if kept is not None:
            self.n_dropped += n - len(kept)
        return kept

    def _forward_one(self, token: int) -> F32:
        """Logits (1, vocab)."""
        with self._undo_on_error(self.n_past), blas_threads(1):
            return self._decoder.step(token, self.caches)[None]

    def _fitted(self, ids: list[int], spans: Spans) -> tuple[list[int], Spans]:
        """The prompt, or, if it is too long, what --overflow leaves of it and of all before it."""
        n, ctx = len(self.tokens) + len(ids), self.plan.ctx
        kept = self._kept(n, ctx - ctx // 4) if n > ctx else None
        if kept is None:
            return ids, spans
        whole, every = [*self.tokens, *ids], [*self.spans, *shifted(spans, len(self.tokens))]
        self.rewind(0)
        return [whole[i] for i in kept], selected(every, kept)

    def _checked(self, prompt: Prompt) -> tuple[list[int], Spans]:
        """A prompt that fits, as ids and the spans among them. Raises ContextError, TokenizerError."""
        ids, spans = self._fitted(*self._flat(prompt))
        self._check_prompt(ids)
        return ids, spans

    def _flat(self, prompt: Prompt) -> tuple[list[int], Spans]:
        return flatten(prompt, self.model.placeholder, self.config.hidden_size)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids and self.n_past == len(self.tokens):
            raise ContextError("the prompt is empty: give at least one token")
        room = self.plan.ctx - len(self.tokens)
        if len(ids) > room:
            raise ContextError(
                f"the prompt has {len(ids)} tokens and {max(room, 0)} of --ctx {self.plan.ctx} are free; "
                f"shorten it, raise --ctx (this model: up to {self.config.max_positions}), or set --overflow slide"
            )
        bad = [t for t in ids if not 0 <= t < self.config.vocab_size]
        if bad:
            raise TokenizerError(
                f"token id {bad[0]} is outside the model's vocabulary of {self.config.vocab_size}"
            )

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt.
        """
        if n_tokens < self.n_past:
            rewind(self.caches, n_tokens)
        del self.tokens[n_tokens:]
        self.spans = clipped(self.spans, 0, n_tokens)

    def align(self, tokens: Sequence[int]) -> list[int]:
        """Rewinds to where the conversation and ``tokens`` part; returns what `generate` must add to it.

        That is at least the last of ``tokens``, whose logits are needed. Embeddings are never among them.
        """
        same, end = 0, self.spans[0].start if self.spans else len(self.tokens)
        for held, wanted in zip(self.tokens[:end], tokens[:-1], strict=False):
            if held != wanted:
                break
            same += 1
        self.rewind(same)
        return list(tokens[same:])

    def _undo_on_error(self, n_past: int) -> _Undo:
        return _Undo(self.caches, n_past)


class _Undo:
    """Rewinds every layer's cache to the same length, without marks, when a step is interrupted between layers."""

    def __init__(self, caches: Sequence[KVCache], n_past: int) -> None:
        self.caches, self.n_past = caches, n_past

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            rewind(self.caches, self.n_past)
            for cache in self.caches:
                cache.mark(())
