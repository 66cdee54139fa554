"""The state of a session: what has been said, and the caches that hold it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv.engine.sampling import Sampler
from edgekv.errors import ContextError
from edgekv.kvcache.cache import LayerState, rewind
from edgekv.kvcache.recurrent import attending
from edgekv.types import F32, Array
from edgekv.vision.prompt import VISUAL, Embeddings, Prompt


@dataclasses.dataclass(frozen=True)
class EmbeddingSpan:
    """Embeddings from position ``start`` on."""

    start: int
    rows: F32
    modality: str

    @property
    def stop(self) -> int:
        """The position behind the last embedding."""
        return self.start + len(self.rows)


Spans = list[EmbeddingSpan]


def flatten(prompt: Prompt, placeholder: int, hidden_size: int) -> tuple[list[int], Spans]:
    """Ids, with ``placeholder`` for each row of embeddings, and spans, counted from the prompt's start."""
    ids: list[int] = []
    spans: Spans = []
    for piece in prompt:
        if isinstance(piece, Embeddings):
            rows = np.ascontiguousarray(piece.rows, np.float32)
            if rows.ndim != 2 or rows.shape[1] != hidden_size or not len(rows) or not np.isfinite(rows).all():
                raise ContextError(
                    f"embeddings of shape {rows.shape}: this model takes (n, {hidden_size}), n of 1 or more, of "
                    "finite numbers",
                    field="prompt",
                )
            spans.append(EmbeddingSpan(len(ids), rows, piece.modality))
            ids += [placeholder] * len(rows)
        else:
            ids.append(int(piece))
    return ids, spans


def shift_spans(spans: Sequence[EmbeddingSpan], by: int) -> Spans:
    """The spans of a prompt, which begins at position ``by``."""
    return [dataclasses.replace(span, start=span.start + by) for span in spans]


def slice_spans(spans: Sequence[EmbeddingSpan], start: int, stop: int) -> Spans:
    """What lies in positions start..stop, counted from ``start``."""
    parts = []
    for span in spans:
        a, b = max(start, span.start), min(stop, span.stop)
        if a < b:
            parts.append(EmbeddingSpan(a - start, span.rows[a - span.start : b - span.start], span.modality))
    return parts


def keep_spans(spans: Sequence[EmbeddingSpan], kept: Sequence[int]) -> Spans:
    """The spans of a conversation of which only the positions ``kept``, in order, are left."""
    places = np.asarray(kept)
    parts = []
    for span in spans:
        within = np.flatnonzero((places >= span.start) & (places < span.stop))
        if len(within):
            parts.append(EmbeddingSpan(int(within[0]), span.rows[places[within] - span.start], span.modality))
    return parts


def whole_spans(spans: Sequence[EmbeddingSpan], kept: Sequence[int]) -> list[int]:
    """Those of the positions ``kept`` that are not in a span of which others are missing."""
    left = set(kept)
    cut = [span for span in spans if not left.issuperset(range(span.start, span.stop))]
    return [i for i in kept if not any(span.start <= i < span.stop for span in cut)]


def visual_ranges(spans: Sequence[EmbeddingSpan]) -> list[tuple[int, int]]:
    """(first, last + 1) of the images among them."""
    return [(span.start, span.stop) for span in spans if span.modality == VISUAL]


def require_room(n_tokens: int, ctx: int, max_positions: int, n_held: int = 0) -> None:
    """Raises ContextError for a prompt of ``n_tokens`` behind ``n_held`` others, where ``ctx`` are too few."""
    free, needed = max(ctx - n_held, 0), n_held + n_tokens
    if n_tokens <= free:
        return
    held = f"the prompt has {n_tokens} tokens and {free} of ctx={ctx} are free"
    if needed > max_positions:
        raise ContextError(
            f"{held}; it needs {needed} positions, and this model has {max_positions}: shorten it, or set "
            "overflow='slide'",
            field="prompt",
            value=n_tokens,
            accepted=[f"up to {max_positions - n_held} tokens"] if n_held < max_positions else [],
        )
    raise ContextError(
        f"{held}; shorten it, raise `ctx` (this model: up to {max_positions}), or set overflow='slide'",
        field="ctx",
        value=ctx,
        accepted=[f"{needed} to {max_positions}"],
    )


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
    rope_invalidates_keys(n, m): whether the keys of n tokens are others once the conversation has m.
    n_draft: tokens in the caches behind those of the conversation: drafts that may be its next ones.
    """

    def __init__(self, caches: list[LayerState], rope_invalidates_keys: Callable[[int, int], bool]) -> None:
        self.caches, self._keys_change = caches, rope_invalidates_keys
        self.tokens: list[int] = []
        self.spans: Spans = []
        self.sampler: Sampler | None = None
        self.n_dropped = self.n_first = 0
        self.memo: dict[str, Any] = {}
        self.n_draft = 0
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
    def n_cached(self) -> int:
        """Tokens of the conversation in the caches."""
        return self.caches[0].n_seen - self.n_draft

    @property
    def pending(self) -> list[int]:
        """The latest tokens, which are not in the caches yet."""
        return self.tokens[self.n_cached :]

    def clear(self) -> None:
        """Forgets all of the conversation, with its memo."""
        self.rewind(0)
        self.sampler, self.n_dropped, self.n_first, self.memo = None, 0, 0, {}

    def drop_drafts(self) -> None:
        """Takes what is tentative out of the caches."""
        if self.n_draft:
            for cache in reversed(self.caches):  # the first, which `n_cached` reads, last
                cache.advance(-self.n_draft)
            self.n_draft = 0

    def mend(self) -> None:
        """After an interrupt: layers of several lengths get one length, those that were being rewound nothing."""
        shortest = 0 if self._is_torn else min(cache.n_seen for cache in self.caches)
        if self._is_torn or any(cache.n_seen != shortest for cache in self.caches):
            self.n_draft = 0
            self._rewind(shortest)

    def add_coming_spans(self, spans: Spans) -> None:
        """Embeddings that are about to be appended with their placeholders, counted from the end of the tokens."""
        self.spans = [*self.spans, *shift_spans(spans, len(self.tokens))]

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` tokens.

        What a scheme can't keep of them is pending again.
        """
        self.drop_drafts()
        self.rewind_caches(min(n_tokens, len(self.tokens)))
        del self.tokens[n_tokens:]
        self.spans = slice_spans(self.spans, 0, n_tokens)

    def rewind_caches(self, n_tokens: int) -> None:
        """Forgets keys and values behind the first ``n_tokens``, or all where these would now be others."""
        before = self.n_cached
        self._rewind(n_tokens)
        if self._keys_change(before, self.n_cached):
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
            cache.mark(self.n_cached)
            if n_more > ANSWER_TOKENS:
                cache.mark(self.n_cached + n_more - ANSWER_TOKENS)

    def require_keys(self, n_more: int) -> None:
        """Forgets all keys and values where ``n_more`` tokens make them others: all tokens are pending again."""
        if self._keys_change(self.n_cached, self.n_cached + n_more):
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
        self.drop_drafts()
        self._rewind(0)
        self.tokens, self.spans = tokens, spans

    def copy_from(self, other: State, caches: list[LayerState]) -> None:
        """Takes over another conversation into ``caches``, which are empty and of its scheme and size."""
        other.drop_drafts()
        for cache, source in zip(caches, other.caches, strict=True):
            state = source.state()
            for name, array in cache.prepare(state.counters, copy.deepcopy(state.fitted)).items():
                copy_used(state.arrays[name], array)
        self.caches = caches
        self.tokens, self.memo = list(other.tokens), copy.deepcopy(other.memo)
        self.spans, self.n_dropped, self.n_first = list(other.spans), other.n_dropped, other.n_first


def used_part(array: Array) -> tuple[slice, ...]:
    """The box from the first element on outside of which a C-contiguous array is zero."""
    part = [slice(None)] * array.ndim
    bits = array.view(f"u{array.itemsize}")
    for axis in sorted(range(array.ndim), key=lambda i: -array.shape[i]):
        rows = bits[tuple(part)]
        if axis < array.ndim - 1 and array.shape[-1] * array.itemsize % 8 == 0 and part[-1] == slice(None):
            rows = rows.view(np.uint64)
        used = np.flatnonzero(rows.any(axis=tuple(i for i in range(array.ndim) if i != axis)))
        part[axis] = slice(int(used[-1]) + 1 if len(used) else 0)
    return tuple(part)


def copy_used(source: Array, target: Array) -> None:
    """Copies an array (n, ...) into one of zeros without touching what is zero in both, which takes no memory."""
    part = used_part(source) if isinstance(source, np.ndarray) else ...  # a device's
    target[part] = source[part]
