"""Where the tokens of pictures and of text lie, when each picture has a store of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgekv.kvcache.codecs import F16, Codec


@dataclasses.dataclass
class Span:
    """Image tokens at positions start..stop: in ``exact`` stores (f16) until the last has come, then packed."""

    start: int
    stop: int
    packed: tuple[Codec, Codec]
    exact: tuple[F16, F16] | None = None


class Run(NamedTuple):
    """Positions start..stop, held by one store (the span's, or the text's) as its tokens from ``at`` on."""

    start: int
    stop: int
    at: int
    span: Span | None


def runs(spans: Sequence[Span], start: int, stop: int) -> Iterator[Run]:
    """Where positions start..stop are or will be, in order."""
    n_image = 0  # image tokens before `start`
    for span in spans:
        if start < min(span.start, stop):
            yield Run(start, min(span.start, stop), start - n_image, None)
            start = min(span.start, stop)
        if max(start, span.start) < min(stop, span.stop):
            start = max(start, span.start)
            yield Run(start, min(stop, span.stop), start - span.start, span)
            start = min(stop, span.stop)
        n_image += span.stop - span.start
    if start < stop:
        yield Run(start, stop, start - n_image, None)
