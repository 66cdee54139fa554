"""Tokens into a session's state, logits out of it; room is made when the context is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from edgekv.errors import ContextError, TokenizerError
from edgekv.machine import blas_threads, memory_errors
from edgekv.models.decoder import Decoder
from edgekv.session.context_shift import ContextShift, Stop
from edgekv.session.prompt import Spans, clipped, flatten, selected, shifted, visual_ranges
from edgekv.session.state import State
from edgekv.types import F32
from edgekv.vision.prompt import Prompt

LayerProgress = Callable[[int, int], None]  # layers done, of all layers


class Reader:
    """Reads tokens with a decoder into a state of at most ``ctx`` tokens.

    placeholder: the token that counts for a position that holds an embedding.
    """

    def __init__(self, state: State, decoder: Decoder, ctx: int, placeholder: int) -> None:
        self.state, self.decoder, self.ctx, self._placeholder = state, decoder, ctx, placeholder
        self.context_shift: ContextShift = Stop()

    @property
    def tokens(self) -> Sequence[int]:
        """The whole conversation."""
        return self.state.tokens

    @property
    def n_pending(self) -> int:
        """Tokens of the conversation that are not in the caches yet."""
        return len(self.state.tokens) - self.state.n_past

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for the latest token, and none can be made."""
        return len(self.state.tokens) > self.ctx and not self.context_shift.makes_room

    def free_bytes(self) -> int:
        """Memory that is left where the decoder computes."""
        return self.decoder.free_bytes()

    def add(self, token: int) -> None:
        """A chosen token, which is pending until `next_logits`."""
        self.state.tokens.append(token)

    def next_logits(self) -> F32:
        """Logits (vocab,) after the pending tokens, for which room is made if there is none."""
        self._make_room()
        logits: F32 = self._logits([], 1)[0]
        return logits

    def append(
        self, ids: Sequence[int], spans: Spans, *, n_logits: int = 1, progress: LayerProgress | None = None
    ) -> F32:
        """Logits (n_logits, vocab) after the last of the ids, which are added to the conversation.

        spans: embeddings in place of some of them, counted from the first.
        """
        state = self.state
        state.announce(spans)
        try:
            logits = self._logits(ids, n_logits, progress)
            state.tokens.extend(ids)
        finally:
            state.forget_announced()
        return logits

    def flat(self, prompt: Prompt) -> tuple[list[int], Spans]:
        """A prompt as ids and the spans among them. Raises ContextError, TokenizerError where it can't be read."""
        ids, spans = self._known(prompt)
        self._require_room(ids)
        return ids, spans

    def fitted(self, prompt: Prompt) -> tuple[list[int], Spans]:
        """As `flat`; if the prompt is too long, what the context shift leaves of it and of all before it."""
        ids, spans = self._known(prompt)
        state, n = self.state, len(self.state.tokens) + len(ids)
        kept = self._kept(n, self.ctx - self.ctx // 4) if n > self.ctx else None
        if kept is not None:
            whole, every = [*state.tokens, *ids], [*state.spans, *shifted(spans, len(state.tokens))]
            state.rewind(0)
            ids, spans = [whole[i] for i in kept], selected(every, kept)
        self._require_room(ids)
        return ids, spans

    def _known(self, prompt: Prompt) -> tuple[list[int], Spans]:
        """A prompt of the model's tokens, as ids and spans."""
        config = self.decoder.config
        ids, spans = flatten(prompt, self._placeholder, config.hidden_size)
        if not ids and not self.n_pending:
            raise ContextError("the prompt is empty: give at least one token", field="prompt")
        bad = [token for token in ids if not 0 <= token < config.vocab_size]
        if bad:
            raise TokenizerError(
                f"token id {bad[0]} is outside the model's vocabulary of {config.vocab_size}",
                field="prompt",
                value=bad[0],
            )
        return ids, spans

    def _require_room(self, ids: Sequence[int]) -> None:
        n_held, most = len(self.state.tokens), self.decoder.config.max_positions
        room = self.ctx - n_held
        if len(ids) > room:
            raise ContextError(
                f"the prompt has {len(ids)} tokens and {max(room, 0)} of ctx={self.ctx} are free; shorten it, "
                f"raise `ctx` (this model: up to {most}), or set overflow='slide'",
                field="ctx",
                value=self.ctx,
                accepted=[f"{n_held + len(ids)} to {most}"],
            )

    def _make_room(self) -> None:
        state = self.state
        n = len(state.tokens)
        kept = self._kept(n, self.ctx - self.ctx // 2) if n > self.ctx else None
        if kept is not None:
            state.replace([state.tokens[i] for i in kept], selected(state.spans, kept))

    def _kept(self, n: int, room: int) -> list[int] | None:
        """Positions that stay of a conversation of n tokens; None: no room is made."""
        kept = self.context_shift.kept(n, max(room, 1))
        if kept is not None:
            self.state.n_dropped += n - len(kept)
        return kept

    def _logits(self, more: Sequence[int], n_last: int, progress: LayerProgress | None = None) -> F32:
        """(n_last, vocab) after the last of the pending tokens and these, which all enter the caches."""
        state, decoder = self.state, self.decoder
        state.require_keys(self.n_pending + len(more))
        ids, start = [*state.pending, *more], state.n_past
        spans = clipped(state.spans, start, start + len(ids))
        if start and len(ids) == 1 and not spans:
            with self._undone_on_error(start, 1), blas_threads(1):
                return decoder.step(ids[0], state.caches)[None]
        with self._undone_on_error(start, len(ids)), blas_threads(decoder.threads):
            x = decoder.embed(ids, start)
            for span in spans:
                decoder.place(span.rows, x, start, span.start)
            for cache in state.caches:
                cache.mark_images(visual_ranges(spans))
            hidden = decoder.prefill(x, state.caches, progress)
            return decoder.head(hidden[len(ids) - n_last :])

    @contextlib.contextmanager
    def _undone_on_error(self, n_past: int, n_new: int) -> Iterator[None]:
        """Rewinds all caches to the same length, without marks, when a step is interrupted between layers.

        MemoryBudgetError in place of a MemoryError.
        """
        caches, what = self.state.caches, f"reading {n_new} tokens after {n_past}"
        try:
            with memory_errors(what, self.decoder.free_bytes):
                yield
        except BaseException:
            self.state.rewind_caches(n_past)
            for cache in caches:
                cache.mark_images(())
            raise
