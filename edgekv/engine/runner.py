"""The state of a conversation, and `Runner`, which runs a decoder over it and makes room in a full context."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edgekv.engine.decoder import Decoder
from edgekv.engine.drafts import MAX_DRAFT_TOKENS, NGRAM, DraftCounts, NGramDrafts
from edgekv.engine.sampling import Sampler
from edgekv.engine.scheduler import BatchScheduler, SerialScheduler, TryLock
from edgekv.errors import ContextError, SessionError, TokenizerError, short_repr
from edgekv.kvcache.cache import LayerState, rewind
from edgekv.machine import memory_errors
from edgekv.types import F32, Array, LayerProgress
from edgekv.vision.model import VISUAL, Embeddings, Prompt

SINK_TOKENS = 4  # first tokens, on which attention rests (StreamingLLM)
BUSY = "this conversation is being computed: let it end, or give each thread a fork of it"
ANSWER_TOKENS = 16  # at the end of a prompt, with which a template begins the answer


@dataclasses.dataclass(frozen=True)
class EmbeddingSpan:
    """Embeddings rows (n, hidden_size) in place of the tokens from position ``start`` on."""

    start: int
    rows: F32
    modality: str

    @property
    def stop(self) -> int:
        """The position after the last embedding."""
        return self.start + len(self.rows)


Spans = list[EmbeddingSpan]


def shift_spans(spans: Sequence[EmbeddingSpan], by: int) -> Spans:
    """Returns the spans moved to later positions by ``by``."""
    return [dataclasses.replace(span, start=span.start + by) for span in spans]


def select_spans(spans: Sequence[EmbeddingSpan], positions: Sequence[int]) -> Spans:
    """Returns the spans of a conversation that only the given positions, ascending, remain of."""
    if not spans:
        return []
    remaining = np.asarray(positions)
    parts = []
    for span in spans:
        within = np.flatnonzero((remaining >= span.start) & (remaining < span.stop))
        if len(within):
            parts.append(EmbeddingSpan(int(within[0]), span.rows[remaining[within] - span.start], span.modality))
    return parts


def require_room(n_tokens: int, ctx: int, max_positions: int, n_held: int = 0) -> None:
    """Raises ContextError where ``n_tokens`` more do not fit a context of ``ctx`` tokens that has ``n_held``."""
    free, needed = max(ctx - n_held, 0), n_held + n_tokens
    if n_tokens <= free:
        return
    advice = "shorten the prompt, or set {overflow:slide}"
    if needed <= max_positions:
        problem, accepted = f"the prompt has {n_tokens} tokens, {free} are free", [f"{needed} to {max_positions}"]
        raise ContextError(problem, field="ctx", value=ctx, accepted=accepted, advice=advice)
    problem = f"the prompt has {n_tokens} tokens, this model {max_positions} positions"
    accepted = [f"up to {max_positions - n_held} tokens"] if n_held < max_positions else []
    raise ContextError(problem, field="prompt", accepted=accepted, advice=advice)


class State:
    """The state of a conversation: tokens, caches, and what else the next tokens depend on beside the model.

    caches: one per layer. tokens: ids of prompts and texts; the last ones may not be in the caches yet. spans:
    positions that hold embeddings, whose tokens are placeholders. rope_invalidates_keys(n, m): whether the keys of
    n tokens change once the conversation has m.
    """

    def __init__(self, caches: list[LayerState], rope_invalidates_keys: Callable[[int, int], bool]) -> None:
        self.caches, self._rope_invalidates_keys = caches, rope_invalidates_keys
        self.tokens: list[int] = []
        self.spans: Spans = []
        self.sampler: Sampler | None = None  # of the last text
        self.n_dropped = 0  # tokens that left the conversation when it outgrew the context
        self.memo: dict[str, Any] = {}  # JSON of the session's owner that is saved with it
        self.n_draft = 0  # tokens in the caches after those of the conversation: drafts that may be its next ones
        self._is_torn = False  # whether a rewind was interrupted

    @property
    def nbytes(self) -> int:
        """The bytes of the caches' arrays."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def n_cached(self) -> int:
        """The number of tokens of the conversation in the caches."""
        return self.caches[0].n_seen - self.n_draft

    @property
    def pending(self) -> list[int]:
        """The latest tokens, which are not in the caches yet."""
        return self.tokens[self.n_cached :]

    def clear(self) -> None:
        """Forgets the whole conversation, with its memo."""
        self.rewind(0)
        self.sampler, self.n_dropped, self.memo = None, 0, {}

    def drop_drafts(self) -> None:
        """Takes drafts out of the caches."""
        if self.n_draft:
            for cache in reversed(self.caches):  # the first, which `n_cached` reads, last
                cache.advance(-self.n_draft)
            self.n_draft = 0

    def repair(self) -> None:
        """Rewinds layers that an interrupt left at different lengths to one; to 0 where it came in a rewind."""
        shortest = 0 if self._is_torn else min(cache.n_seen for cache in self.caches)
        if self._is_torn or any(cache.n_seen != shortest for cache in self.caches):
            self.n_draft = 0
            self._rewind(shortest)

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` tokens; those that a scheme can't keep are pending again."""
        self.drop_drafts()
        self.rewind_caches(min(n_tokens, len(self.tokens)))
        del self.tokens[n_tokens:]
        self.spans = select_spans(self.spans, range(n_tokens))

    def rewind_caches(self, n_tokens: int) -> None:
        """Forgets keys and values after the first ``n_tokens``, or all where RoPE would now change these."""
        before = self.n_cached
        self._rewind(n_tokens)
        if self._rope_invalidates_keys(before, self.n_cached):
            self._rewind(0)

    def _rewind(self, n_tokens: int) -> None:
        self._is_torn = True
        rewind(self.caches, n_tokens)
        self._is_torn = False

    def mark_turn(self, n_more: int) -> None:
        """Marks where a rewind is likely to lead: the beginning or end of a prompt of ``n_more`` tokens.

        Templates often write other text there for an answer once the conversation is sent again.
        """
        for cache in self.caches:
            cache.checkpoint_at(self.n_cached)
            if n_more > ANSWER_TOKENS:
                cache.checkpoint_at(self.n_cached + n_more - ANSWER_TOKENS)

    def drop_invalid_keys(self, n_more: int) -> None:
        """Forgets all keys and values where ``n_more`` tokens change how RoPE rotates them."""
        if self._rope_invalidates_keys(self.n_cached, self.n_cached + n_more):
            self._rewind(0)

    def common_prefix(self, prompt: Prompt) -> tuple[int, int]:
        """Returns how many tokens, and how many pieces of the prompt, both have in common."""
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
        """Rewinds to where the conversation and a prompt differ; returns the rest of the prompt, to be appended.

        The rest is at least its last piece, whose logits are needed.
        """
        same, n = self.common_prefix(prompt[:-1])
        self.rewind(same)
        return list(prompt[n:])

    def replace(self, tokens: list[int], spans: Spans) -> None:
        """Replaces all tokens; the new ones are pending."""
        self.drop_drafts()
        self._rewind(0)
        self.tokens, self.spans = tokens, spans

    def copy_from(self, other: State, caches: list[LayerState]) -> None:
        """Copies another conversation, into ``caches`` that are empty and of its scheme and size."""
        other.drop_drafts()
        for cache, source in zip(caches, other.caches, strict=True):
            state = source.state()
            for name, array in cache.restore(state.counters, copy.deepcopy(state.extra)).items():
                copy_used(state.arrays[name], array)
        self.caches = caches
        self.tokens, self.memo = list(other.tokens), copy.deepcopy(other.memo)
        self.spans, self.n_dropped = list(other.spans), other.n_dropped


def used_slices(array: Array) -> tuple[slice, ...]:
    """Returns the slices of a C-contiguous array (n, ...), each from 0 on, outside of which it is zero."""
    slices = [slice(None)] * array.ndim
    bits = array.view(f"u{array.itemsize}")
    for axis in sorted(range(array.ndim), key=lambda i: -array.shape[i]):
        rows = bits[tuple(slices)]
        if axis < array.ndim - 1 and array.shape[-1] * array.itemsize % 8 == 0 and slices[-1] == slice(None):
            rows = rows.view(np.uint64)
        used = np.flatnonzero(rows.any(axis=tuple(i for i in range(array.ndim) if i != axis)))
        slices[axis] = slice(int(used[-1]) + 1 if len(used) else 0)
    return tuple(slices)


def copy_used(source: Array, target: Array) -> None:
    """Copies an array (n, ...) into one of zeros, whose pages take no memory where both are zero."""
    slices = used_slices(source) if isinstance(source, np.ndarray) else ...  # a device's
    target[slices] = source[slices]


def remaining_positions(n: int, room: int, spans: Spans) -> list[int]:
    """Returns the positions of n tokens, too many, that remain in the context: ``room`` first and latest ones.

    They are computed again from position 0, so that positions fit any scheme. Of an image all remain or none.
    """
    sink = min(SINK_TOKENS, room // 2)
    positions = [*range(sink), *range(n - (room - sink), n)]
    cut = [span for span in spans if not {*positions}.issuperset(range(span.start, span.stop))]
    return [i for i in positions if not any(span.start <= i < span.stop for span in cut)]


class Runner:
    """Runs a decoder over the tokens of a state, at most ``ctx``, when the scheduler gives it a turn.

    placeholder: the token that stands for an embedding. slides: whether the oldest tokens leave when there are
    more than ``ctx``. drafts: the source of guessed tokens, or None.
    """

    def __init__(
        self,
        state: State,
        decoder: Decoder,
        scheduler: SerialScheduler | BatchScheduler,
        ctx: int,
        placeholder: int,
        slides: bool = False,
        drafts: NGramDrafts | None = None,
    ) -> None:
        self.state, self.decoder, self.scheduler, self.ctx = state, decoder, scheduler, ctx
        self.slides, self.drafts, self._placeholder = slides, drafts, placeholder
        self.counts = DraftCounts("none")
        self._ahead: deque[tuple[int, F32]] = deque()  # drafts in the caches, each with the logits behind it
        self._n_drafted = 0  # drafts in the latest pass
        self.n_read = 0  # tokens that the latest prompt, and those pending before it, put into the caches
        self._lock = TryLock()  # of the thread that computes
        self._ready: F32 | None = None  # the logits after the latest token, where that was a draft

    @property
    def n_held(self) -> int:
        """The tokens of the conversation, at most the context: the latest of a full one waits to be read."""
        return min(len(self.state.tokens), self.ctx)

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for the latest token, and none can be made."""
        return len(self.state.tokens) > self.ctx and not self.slides

    def require_free(self) -> None:
        """Raises SessionError while another thread, or a caller, computes this conversation."""
        if self._lock.holders:
            raise SessionError(BUSY)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with self._lock.hold(SessionError(BUSY)):
            self.state.repair()
            yield

    @property
    def is_ready(self) -> bool:
        """Whether the next logits come from a pass that was made already."""
        return self._ready is not None

    def begin_drafts(self) -> DraftCounts:
        """Begins a text after the present tokens; returns the counts of its drafts, which go on changing."""
        self.counts = DraftCounts("none")
        if self.drafts is not None:
            self.counts = DraftCounts(NGRAM)
            self.drafts.begin(self.state.tokens)
        return self.counts

    def end_text(self) -> None:
        """Ends a text: forgets unused drafts, and lets other conversations wait for it no longer."""
        self._forget_drafts()
        self.scheduler.finish()

    def _forget_drafts(self) -> None:
        self.state.drop_drafts()
        self._ahead.clear()
        self._ready = None

    def add(self, token: int) -> None:
        """Appends a chosen token, pending until `next_logits`; forgets the drafts if it is not the next."""
        state = self.state
        state.tokens.append(token)
        self._ready = None
        if self._ahead and self._ahead[0][0] == token and state.n_draft:
            self._ready = self._ahead.popleft()[1]
            self.counts.accepted += 1
        if self.drafts is not None and self._n_drafted and (self._ready is None or not self._ahead):
            self.drafts.learn(self._n_drafted, self._n_drafted - len(self._ahead))
            self._n_drafted = 0
        if self._ready is None:
            self._forget_drafts()

    def next_logits(self) -> F32:
        """Returns logits (vocab,) after the latest token: a right draft's, or those of a pass over pending tokens.

        A pass makes room in a full context, and takes drafts along.
        """
        if self._ready is not None:
            if self.state.n_draft:  # else all drafts were taken back meanwhile
                self.state.n_draft -= 1
            return self._ready
        state, drafts = self.state, list[int]()
        with self._computing():
            self._make_room()
            if self.drafts is not None and len(state.pending) == 1:
                revocable = self.decoder.max_draft_tokens(state.caches) - 1
                room = min(self.ctx - len(state.tokens), revocable, MAX_DRAFT_TOKENS)
                drafts = self.drafts.propose(state.tokens, room) if room > 0 else []
            ids = [*state.pending, *drafts]
            first: F32 = (self._steps(ids, len(drafts)) if drafts else self._logits([], 1))[0]
        self._n_drafted = len(drafts)
        self.counts.passes += 1
        self.counts.proposed += len(drafts)
        return first

    def append(
        self, ids: Sequence[int], spans: Spans, *, n_logits: int = 1, progress: LayerProgress | None = None
    ) -> F32:
        """Appends ids to the conversation; returns logits (n_logits, vocab) after the last of them.

        spans: embeddings in place of some ids. Where there are too many tokens, room is made first. On an error
        the conversation is as it was, though its tokens may be pending again.
        """
        state = self.state
        with self._computing():
            before = state.tokens, state.spans, state.n_dropped
            try:
                ids, spans = self._room_for(ids, spans)
                self.n_read = len(state.pending) + len(ids)
                state.drop_invalid_keys(self.n_read)
                state.spans = [*state.spans, *shift_spans(spans, len(state.tokens))]
                logits = self._logits(ids, n_logits, progress)
            except BaseException:
                state.tokens, state.spans, state.n_dropped = before
                raise
            state.tokens.extend(ids)
            return logits

    def read_prompt(self, prompt: Prompt, *, may_be_empty: bool = False) -> tuple[list[int], Spans]:
        """Returns a prompt as ids, with a placeholder for each row of embeddings, and the spans of these.

        Raises ContextError for other embeddings than the model's and, unless it may be empty, for an empty prompt,
        TokenizerError for an id that is none of the model's.
        """
        config, ids, spans = self.decoder.config, list[int](), Spans()
        for piece in prompt:
            if not isinstance(piece, Embeddings):
                ids.append(int(piece))
                continue
            rows = np.ascontiguousarray(piece.rows, np.float32)
            if rows.shape != (len(rows), config.hidden_size) or not len(rows) or not np.isfinite(rows).all():
                raise ContextError(
                    f"embeddings of shape {rows.shape}: this model takes (n, {config.hidden_size}), n of 1 or "
                    "more, of finite numbers",
                    field="prompt",
                )
            spans.append(EmbeddingSpan(len(ids), rows, piece.modality))
            ids += [self._placeholder] * len(rows)
        if not ids and not may_be_empty:
            raise ContextError("the prompt is empty: give at least one token", field="prompt")
        bad = [token for token in ids if not 0 <= token < config.vocab_size]
        if bad:
            raise TokenizerError(
                f"token id {short_repr(bad[0])} is outside the model's vocabulary of {config.vocab_size}",
                field="prompt",
            )
        return ids, spans

    def fit_prompt(self, prompt: Prompt, slides: bool = False) -> tuple[list[int], Spans]:
        """Returns a prompt as `read_prompt` does. Raises ContextError where it does not fit and nothing slides."""
        ids, spans = self.read_prompt(prompt, may_be_empty=bool(self.state.pending))
        if not slides:
            require_room(len(ids), self.ctx, self.decoder.config.max_positions, len(self.state.tokens))
        return ids, spans

    def _room_for(self, ids: Sequence[int], spans: Spans) -> tuple[Sequence[int], Spans]:
        """Drops tokens of the conversation, and of a prompt that is too long; returns what to append of it.

        Raises ContextError where an image of the prompt would have to leave.
        """
        state, n_held = self.state, len(self.state.tokens)
        new_spans = shift_spans(spans, n_held)
        remaining = self._remaining(n_held + len(ids), self.ctx - self.ctx // 4, [*state.spans, *new_spans])
        if remaining is None:
            return ids, spans
        if len(select_spans(new_spans, remaining)) < len(new_spans):
            require_room(len(ids), self.ctx - self.ctx // 4, self.decoder.config.max_positions)
        old, new = [i for i in remaining if i < n_held], [i - n_held for i in remaining if i >= n_held]
        state.replace([state.tokens[i] for i in old], select_spans(state.spans, old))
        return [ids[i] for i in new], select_spans(spans, new)

    def _make_room(self) -> None:
        state = self.state
        remaining = self._remaining(len(state.tokens), self.ctx - self.ctx // 2, state.spans)
        if remaining is not None:
            self._replace([state.tokens[i] for i in remaining], select_spans(state.spans, remaining))

    def replace(self, prompt: Prompt) -> None:
        """Replaces the conversation between two tokens of a text, which goes on after ``prompt``."""
        self.require_free()
        self._replace(*self.read_prompt(prompt))

    def _replace(self, tokens: list[int], spans: Spans) -> None:
        self.state.replace(tokens, spans)
        if self.drafts is not None:
            self.drafts.begin(self.state.tokens)

    def _remaining(self, n: int, room: int, spans: Spans) -> list[int] | None:
        """Returns the positions of n tokens that remain, and counts the others as dropped; None: all remain."""
        if n <= self.ctx or not self.slides:
            return None
        positions = remaining_positions(n, max(room, 1), spans)
        self.state.n_dropped += n - len(positions)
        return positions

    def _logits(self, more: Sequence[int], n_last: int, progress: LayerProgress | None = None) -> F32:
        """Runs the pending tokens and ``more`` into the caches; returns logits (n_last, vocab) after the last."""
        state, decoder = self.state, self.decoder
        state.drop_invalid_keys(len(state.pending) + len(more))
        ids, start = [*state.pending, *more], state.n_cached
        spans = select_spans(state.spans, range(start, start + len(ids)))
        if start and len(ids) == 1 and not spans:
            return self._steps(ids)
        with self._undone_on_error(start, len(ids)), self.scheduler.exclusive() as pause:
            x = decoder.embed(ids, start)
            for span in spans:
                decoder.insert_embeddings(span.rows, x, start, span.start)
            for cache in state.caches:
                cache.mark_images([(span.start, span.stop) for span in spans if span.modality == VISUAL])
            state.mark_turn(len(ids))
            hidden = decoder.prefill(x, state.caches, progress, pause=pause)
            return decoder.head(hidden[len(ids) - n_last :])

    def _steps(self, ids: Sequence[int], n_drafts: int = 0) -> F32:
        """Returns logits (1 + n_drafts, vocab) after the pending token and after drafts, tentative until `add`."""
        state = self.state
        with self._undone_on_error(state.n_cached, len(ids)):
            logits = self.scheduler.steps(self.decoder, ids, state.caches)
            state.n_draft = n_drafts
            self._ahead.extend(zip(ids[1:], logits[1:], strict=True))
            return logits

    @contextlib.contextmanager
    def _undone_on_error(self, n_cached: int, n_new: int) -> Iterator[None]:
        """Rewinds all caches to the same length, without marks, when a step is interrupted between layers."""
        caches, what = self.state.caches, f"reading {n_new} tokens after {n_cached}"
        try:
            with memory_errors(what, self.decoder.backend.free_bytes):
                yield
        except BaseException:
            self.state.n_draft = 0
            self._ahead.clear()
            self.state.rewind_caches(n_cached)
            for cache in caches:
                cache.mark_images(())
            raise
