"""The state of a session: what has been said, and the caches that hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import attending
from edgekv.kvcache.rewinding import rewind
from edgekv.session.file import copy_used
from edgekv.session.prompt import Spans, clipped, shifted
from edgekv.session.sampling import Sampler
from edgekv.vision.prompt import Embeddings, Prompt

ANSWER_TOKENS = 16  # at the end of a prompt, which begin the answer


class State:
    """All that the next tokens depend on, beside the model. It computes nothing.

    caches: one per layer; those of layers that attend are of one scheme.
    tokens: ids of prompt and output; the last ones may not be in the caches yet.
    spans: positions that hold embeddings, whose tokens are placeholders.
    sampler: of the last text.
    n_dropped: tokens that left the conversation when it outgrew the context.
    n_first: so many tokens at its beginning, a system message, stay then.
    memo: whatever the session's owner wants to be saved with it, as JSON.
    keys_change(n, m): whether the keys of n tokens are others once the conversation has m.
    n_tentative: tokens in the caches behind those of the conversation: drafts that may be its next ones.
    """

    def __init__(self, caches: list[LayerState], keys_change: Callable[[int, int], bool]) -> None:
        self.caches, self._keys_change = caches, keys_change
        self.tokens: list[int] = []
        self.spans: Spans = []
        self.sampler: Sampler | None = None
        self.n_dropped = self.n_first = 0
        self.memo: dict[str, Any] = {}
        self.n_tentative = 0
        self._is_torn = False  # whether a rewind was interrupted

    @property
    def nbytes(self) -> int:
        """Bytes of the caches' arrays."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def kv_bytes(self) -> int:
        """The part of `nbytes` that KV caches take."""
        return sum(cache.nbytes for cache in attending(self.caches))

    @property
    def n_past(self) -> int:
        """Tokens of the conversation in the caches."""
        return self.caches[0].n_seen - self.n_tentative

    @property
    def pending(self) -> list[int]:
        """The latest tokens, which are not in the caches yet."""
        return self.tokens[self.n_past :]

    def clear(self) -> None:
        """Forgets all of the conversation, with its memo."""
        self.rewind(0)
        self.sampler, self.n_dropped, self.n_first, self.memo = None, 0, 0, {}

    def drop_tentative(self) -> None:
        """Takes what is tentative out of the caches."""
        if self.n_tentative:
            for cache in reversed(self.caches):  # the first, which `n_past` reads, last
                cache.advance(-self.n_tentative)
            self.n_tentative = 0

    def mend(self) -> None:
        """After an interrupt: layers of several lengths get one length, those that were being rewound nothing."""
        shortest = 0 if self._is_torn else min(cache.n_seen for cache in self.caches)
        if self._is_torn or any(cache.n_seen != shortest for cache in self.caches):
            self.n_tentative = 0
            self._rewind(shortest)

    def add_coming_spans(self, spans: Spans) -> None:
        """Embeddings that are about to be appended with their placeholders, counted from the end of the tokens."""
        self.spans = [*self.spans, *shifted(spans, len(self.tokens))]

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` tokens.

        What a scheme can't keep of them is pending again.
        """
        self.drop_tentative()
        self.rewind_caches(min(n_tokens, len(self.tokens)))
        del self.tokens[n_tokens:]
        self.spans = clipped(self.spans, 0, n_tokens)

    def rewind_caches(self, n_tokens: int) -> None:
        """Forgets keys and values behind the first ``n_tokens``, or all where these would now be others."""
        before = self.n_past
        self._rewind(n_tokens)
        if self._keys_change(before, self.n_past):
            self._rewind(0)

    def _rewind(self, n_tokens: int) -> None:
        self._is_torn = True
        rewind(self.caches, n_tokens)
        self._is_torn = False

    def mark_turn(self, n_more: int) -> None:
        """Before a prompt of ``n_more`` tokens: where a rewind is likely to lead to.

        To where the prompt begins, and to shortly before its end: what a template writes there for the answer is
        often written otherwise when the conversation is sent again.
        """
        for cache in self.caches:
            cache.mark(self.n_past)
            if n_more > ANSWER_TOKENS:
                cache.mark(self.n_past + n_more - ANSWER_TOKENS)

    def require_keys(self, n_more: int) -> None:
        """Forgets all keys and values where ``n_more`` tokens make them others: all tokens are pending again."""
        if self._keys_change(self.n_past, self.n_past + n_more):
            self._rewind(0)

    def shared(self, prompt: Prompt) -> tuple[int, int]:
        """Where the conversation and a prompt part: after so many tokens, and so many pieces of the prompt."""
        at, spans = 0, {span.start: span for span in self.spans}
        for n, piece in enumerate(prompt):
            span = spans.get(at)
            if isinstance(piece, Embeddings):
                if span is None or not np.array_equal(span.rows, piece.rows):
                    return at, n
                at = span.stop
            elif span is None and at < len(self.tokens) and self.tokens[at] == piece:
                at += 1
            else:
                return at, n
        return at, len(prompt)

    def align(self, prompt: Prompt) -> list[int | Embeddings]:
        """Rewinds to where the conversation and a prompt part; returns what must be appended of the prompt.

        That is at least its last piece, whose logits are needed.
        """
        same, n = self.shared(prompt[:-1])
        self.rewind(same)
        return list(prompt[n:])

    def replace(self, tokens: list[int], spans: Spans) -> None:
        """Other tokens, all of them pending, in place of the present ones."""
        self.drop_tentative()
        self._rewind(0)
        self.tokens, self.spans = tokens, spans

    def copy_from(self, other: State, caches: list[LayerState]) -> None:
        """Takes over another conversation into ``caches``, which are empty and of its scheme and size."""
        other.drop_tentative()
        for cache, source in zip(caches, other.caches, strict=True):
            state = source.state()
            for name, array in cache.prepare(state.counters, copy.deepcopy(state.fitted)).items():
                copy_used(state.arrays[name], array)
        self.caches = caches
        self.tokens, self.memo = list(other.tokens), copy.deepcopy(other.memo)
        self.spans, self.n_dropped, self.n_first = list(other.spans), other.n_dropped, other.n_first
