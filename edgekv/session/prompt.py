"""A prompt among the tokens of a conversation: the stretches that are embeddings, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from edgekv.errors import ContextError
from edgekv.types import F32
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


def shifted(spans: Sequence[EmbeddingSpan], by: int) -> Spans:
    """The spans of a prompt, which begins at position ``by``."""
    return [dataclasses.replace(span, start=span.start + by) for span in spans]


def clipped(spans: Sequence[EmbeddingSpan], start: int, stop: int) -> Spans:
    """What lies in positions start..stop, counted from ``start``."""
    parts = []
    for span in spans:
        a, b = max(start, span.start), min(stop, span.stop)
        if a < b:
            parts.append(EmbeddingSpan(a - start, span.rows[a - span.start : b - span.start], span.modality))
    return parts


def selected(spans: Sequence[EmbeddingSpan], kept: Sequence[int]) -> Spans:
    """The spans of a conversation of which only the positions ``kept``, in order, are left."""
    places = np.asarray(kept)
    parts = []
    for span in spans:
        within = np.flatnonzero((places >= span.start) & (places < span.stop))
        if len(within):
            parts.append(EmbeddingSpan(int(within[0]), span.rows[places[within] - span.start], span.modality))
    return parts


def whole(spans: Sequence[EmbeddingSpan], kept: Sequence[int]) -> list[int]:
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
