"""Tokens into a session's state, logits out of it; room is made when the context is full."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from edgekv.checks import short_repr
from edgekv.engine.decoder import Decoder
from edgekv.engine.drafts import MOST, DraftCounts, NGramDrafts
from edgekv.engine.scheduler import SerialScheduler
from edgekv.engine.state import (
    Spans,
    State,
    flatten,
    keep_spans,
    require_room,
    shift_spans,
    slice_spans,
    visual_ranges,
    whole_spans,
)
from edgekv.errors import ContextError, SessionError, TokenizerError
from edgekv.machine import memory_errors
from edgekv.types import F32, LayerProgress
from edgekv.vision.prompt import Prompt

SINK = 4  # first tokens, on which attention rests (StreamingLLM)


def kept_positions(n: int, room: int, n_first: int = 0) -> list[int]:
    """Of n tokens, which are too many, the positions of the ``room`` first and latest ones that stay.

    Those are computed again from position 0, so that positions fit any scheme. n_first: so many at the beginning
    stay, where they leave a quarter of the room.
    """
    sink = max(min(SINK, room // 2), n_first if n_first <= room * 3 // 4 else 0)
    return [*range(sink), *range(n - (room - sink), n)]


class Runner:
    """Runs a decoder, when it is its turn, over the tokens of a state, of which there can be ``ctx``.

    placeholder: the token that counts for a position that holds an embedding. slides: whether the oldest tokens
    leave when there are more than ``ctx``; else the text ends, and a longer prompt is refused. drafts: what
    guesses the next tokens, so that one pass checks several; None: nothing.
    """

    def __init__(
        self,
        state: State,
        decoder: Decoder,
        scheduler: SerialScheduler,
        ctx: int,
        placeholder: int,
        slides: bool = False,
        drafts: NGramDrafts | None = None,
    ) -> None:
        self.state, self.decoder, self.scheduler, self.ctx = state, decoder, scheduler, ctx
        self.slides, self.drafts, self._placeholder = slides, drafts, placeholder
        self.counts = DraftCounts("none")
        self._ahead: deque[tuple[int, F32]] = deque()  # drafts in the caches, each with the logits behind it
        self._n_drafted = 0  # in the latest pass
        self.n_read = 0  # tokens that the latest prompt and what was pending before it had, with room made
        self._lock = threading.Lock()  # of the thread that computes
        self._ready: F32 | None = None  # the logits behind the latest token, which was a draft

    @property
    def n_pending(self) -> int:
        """Tokens of the conversation that are not in the caches yet."""
        return len(self.state.tokens) - self.state.n_cached

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for the latest token, and none can be made."""
        return len(self.state.tokens) > self.ctx and not self.slides

    def require_free(self) -> None:
        """Raises SessionError while another thread, or a caller, computes this conversation."""
        if self._lock.locked():
            raise SessionError(
                "this conversation is being computed: let it end first, or give each thread a `fork`"
            )

    @property
    def is_ready(self) -> bool:
        """Whether the next logits come from a pass that was made already."""
        return self._ready is not None

    def begin_drafts(self) -> DraftCounts:
        """A text begins behind the present tokens; returns the counts of what will be drafted for it."""
        self.counts = DraftCounts("none")
        if self.drafts is not None:
            self.counts = DraftCounts(self.drafts.name)
            self.drafts.begin(self.state.tokens)
        return self.counts

    def end_text(self) -> None:
        """Forgets drafts that were not asked for; nobody waits for the next token of this text."""
        self._forget_drafts()
        self.scheduler.finish()

    def _forget_drafts(self) -> None:
        self.state.drop_drafts()
        self._ahead.clear()
        self._ready = None

    def add(self, token: int) -> None:
        """A chosen token, which is pending until `next_logits`; the next draft, or the drafts are forgotten."""
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
        """Logits (vocab,) after the latest token: of a draft that was right, or of a pass over what is pending.

        A pass makes room if there is none, and takes drafts along.
        """
        if self._ready is not None:
            if self.state.n_draft:  # else all drafts were taken back meanwhile
                self.state.n_draft -= 1
            return self._ready
        self.require_free()
        with self._lock:
            self.state.mend()
            self._make_room()
            drafts = self._drafted()
            first: F32 = (self._steps(drafts) if drafts else self._logits([], 1))[0]
        self._n_drafted = len(drafts)
        self.counts.passes += 1
        self.counts.proposed += len(drafts)
        return first

    def _drafted(self) -> list[int]:
        """Guesses at the tokens behind the one that is pending, as many as can be taken back."""
        state = self.state
        if self.drafts is None or len(state.pending) != 1:
            return []
        room = min(self.ctx - len(state.tokens), self.decoder.max_draft_tokens(state.caches) - 1, MOST)
        return self.drafts.propose(state.tokens, room) if room > 0 else []

    def append(
        self, ids: Sequence[int], spans: Spans, *, n_logits: int = 1, progress: LayerProgress | None = None
    ) -> F32:
        """Logits (n_logits, vocab) after the last of the ids, which are added to the conversation.

        spans: embeddings in place of some of them, counted from the first. Where there are too many, room is
        made first. On an error the conversation is what it was, though it may be pending.
        """
        state = self.state
        self.require_free()
        with self._lock:
            state.mend()
            before = state.tokens, state.spans, state.n_dropped
            try:
                ids, spans = self._room_for(ids, spans)
                state.require_keys(self.n_pending + len(ids))
                self.n_read = self.n_pending + len(ids)
                state.add_coming_spans(spans)
                logits = self._logits(ids, n_logits, progress)
            except BaseException:
                state.tokens, state.spans, state.n_dropped = before
                raise
            state.tokens.extend(ids)
            return logits

    def flatten_prompt(self, prompt: Prompt, slides: bool = False) -> tuple[list[int], Spans]:
        """A prompt as ids and the spans among them; of any length where it ``slides``: `append` makes room.

        Raises ContextError, TokenizerError where it can't be read.
        """
        ids, spans = self.known_prompt(prompt, self.n_pending)
        if not slides:
            require_room(len(ids), self.ctx, self.decoder.config.max_positions, len(self.state.tokens))
        return ids, spans

    def known_prompt(self, prompt: Prompt, n_pending: int = 0) -> tuple[list[int], Spans]:
        """A prompt of the model's tokens, as ids and spans; with pending ones it may be empty.

        Raises ContextError for an empty prompt, TokenizerError for an id that is none of the model's.
        """
        config = self.decoder.config
        ids, spans = flatten(prompt, self._placeholder, config.hidden_size)
        if not ids and not n_pending:
            raise ContextError("the prompt is empty: give at least one token", field="prompt")
        bad = [token for token in ids if not 0 <= token < config.vocab_size]
        if bad:
            raise TokenizerError(
                f"token id {short_repr(bad[0])} is outside the model's vocabulary of {config.vocab_size}",
                field="prompt",
                value=bad[0],
            )
        return ids, spans

    def _room_for(self, ids: Sequence[int], spans: Spans) -> tuple[Sequence[int], Spans]:
        """What is to be appended of a prompt; of the conversation stays what leaves room for it.

        Raises ContextError where an image of the prompt would have to leave.
        """
        state, n_held = self.state, len(self.state.tokens)
        own = shift_spans(spans, n_held)
        kept = self._kept(n_held + len(ids), self.ctx - self.ctx // 4, [*state.spans, *own])
        if kept is None:
            return ids, spans
        if len(keep_spans(own, kept)) < len(own):
            require_room(len(ids), self.ctx - self.ctx // 4, self.decoder.config.max_positions)
        held, new = [i for i in kept if i < n_held], [i - n_held for i in kept if i >= n_held]
        state.replace([state.tokens[i] for i in held], keep_spans(state.spans, held))
        return [ids[i] for i in new], keep_spans(spans, new)

    def _make_room(self) -> None:
        state = self.state
        kept = self._kept(len(state.tokens), self.ctx - self.ctx // 2, state.spans)
        if kept is not None:
            state.replace([state.tokens[i] for i in kept], keep_spans(state.spans, kept))
            if self.drafts is not None:
                self.drafts.begin(state.tokens)

    def _kept(self, n: int, room: int, spans: Spans) -> list[int] | None:
        """Positions that stay of a conversation of n tokens; None: all fit, or no room is made.

        Of an image all stay or none.
        """
        if n <= self.ctx or not self.slides:
            return None
        kept = whole_spans(spans, kept_positions(n, max(room, 1), self.state.n_first))
        self.state.n_dropped += n - len(kept)
        return kept

    def _logits(self, more: Sequence[int], n_last: int, progress: LayerProgress | None = None) -> F32:
        """(n_last, vocab) after the last of the pending tokens and these, which all enter the caches."""
        state, decoder = self.state, self.decoder
        state.require_keys(self.n_pending + len(more))
        ids, start = [*state.pending, *more], state.n_cached
        spans = slice_spans(state.spans, start, start + len(ids))
        if start and len(ids) == 1 and not spans:
            with self._undone_on_error(start, 1):
                return self.scheduler.step(decoder, ids[0], state.caches)[None]
        with self._undone_on_error(start, len(ids)), self.scheduler.exclusive() as pause:
            x = decoder.embed(ids, start)
            for span in spans:
                decoder.place(span.rows, x, start, span.start)
            for cache in state.caches:
                cache.mark_images(visual_ranges(spans))
            state.mark_turn(len(ids))
            hidden = decoder.prefill(x, state.caches, progress, pause=pause)
            return decoder.head(hidden[len(ids) - n_last :])

    def _steps(self, drafts: Sequence[int]) -> F32:
        """(1 + n, vocab): logits behind the pending token, and behind drafts, which are tentative until `add`."""
        state = self.state
        ids = [*state.pending, *drafts]
        with self._undone_on_error(state.n_cached, len(ids)):
            logits = self.scheduler.steps(self.decoder, ids, state.caches)
            state.n_draft = len(drafts)
            self._ahead.extend(zip(drafts, logits[1:], strict=True))
            return logits

    @contextlib.contextmanager
    def _undone_on_error(self, n_cached: int, n_new: int) -> Iterator[None]:
        """Rewinds all caches to the same length, without marks, when a step is interrupted between layers.

        MemoryBudgetError in place of a MemoryError.
        """
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
