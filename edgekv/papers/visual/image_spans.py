"""A policy that packs each image in codecs of its own, when its last token has come, and keeps text in f16."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from edgekv.codecs.codec import Codec
from edgekv.codecs.f16 import F16
from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import zeros
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.kvcache.policies import CodecCache
from edgekv.machine import format_bytes
from edgekv.types import F32


@dataclasses.dataclass
class ImageSpan:
    """Image tokens at positions start..stop: in ``exact`` codecs (f16) until the last has come, then packed."""

    start: int
    stop: int
    packed: tuple[Codec, Codec]
    exact: tuple[F16, F16] | None = None


class Run(NamedTuple):
    """Positions start..stop, stored as tokens ``first``.. of a span's codecs, or of the text's (span None)."""

    start: int
    stop: int
    first: int
    span: ImageSpan | None


def runs(spans: Sequence[ImageSpan], start: int, stop: int) -> Iterator[Run]:
    """Yields the runs of positions start..stop, in order."""
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


SIDES = ("key", "value")


class ImageSpans(CodecCache):
    """Base class of caches that pack each span that `mark_images` names; without a span this is `dense`.

    A scheme defines `span_codecs`, and `pack` where it encodes in another way. block: only whole blocks of so many
    tokens of a span are packed; its other tokens are stored as text.
    """

    block: ClassVar[int] = 1

    @classmethod
    def codecs_used(cls, config: Any) -> set[type[Any]] | None:
        """Returns None: the spans' memory is the host's."""
        return None

    @classmethod
    def is_lossless_on_text(cls, config: Any) -> bool:
        return True

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        self.spans: list[ImageSpan] = []
        self._text = self._f16_stores(geometry.capacity)

    @abc.abstractmethod
    def span_codecs(self, n_kv_heads: int, n_tokens: int, head_dim: int) -> tuple[Codec, Codec]:
        """Returns the codecs for a span's keys and values."""

    def pack(self, packed: tuple[Codec, Codec], keys: F32, values: F32) -> None:
        """Stores a whole span's keys and values (n_kv_heads, n_tokens, head_dim)."""
        for codec, x in zip(packed, (keys, values), strict=True):
            self.kernels.encode(codec, x, 0)

    def _f16_stores(self, capacity: int) -> tuple[F16, F16]:
        return F16(*self._shape(capacity)), F16(*self._shape(capacity))

    def _shape(self, capacity: int) -> tuple[int, int, int]:
        return self.geometry.n_kv_heads, capacity, self.geometry.head_dim

    def stored(self) -> dict[str, Codec]:
        pairs: dict[str, tuple[Codec, Codec]] = {"text": self._text}
        for i, span in enumerate(self.spans):
            pairs[f"span{i}"] = span.packed
            if span.exact:
                pairs[f"span{i}.exact"] = span.exact
        return {f"{name}.{side}": pair[i] for name, pair in pairs.items() for i, side in enumerate(SIDES)}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        """Takes the text's memory; a span's is taken when it is marked."""
        self.kernels, self.workspace = kernels, workspace
        for codec in self._text:
            self._take_memory(codec)
        self._list_arrays()

    def _take_memory(self, codec: Codec) -> None:
        codec.bind({name: zeros(shape, dtype) for name, (shape, dtype) in codec.layout().items()}, self.kernels)

    def _list_arrays(self) -> None:
        codecs = self.stored().items()
        self.arrays = {f"{owner}.{name}": array for owner, codec in codecs for name, array in codec.arrays.items()}

    def cut(self, n_tokens: int) -> ImageSpans:
        """Returns a cache cut to n tokens, with the spans that are marked here."""
        small = type(self)(self.geometry.cut(n_tokens), self.config)
        spans = [span for span in self.spans if span.start < n_tokens]
        small.spans = [dataclasses.replace(span, stop=min(span.stop, n_tokens)) for span in spans]
        small._text = small._f16_stores(small._n_text)
        return small

    @property
    def _n_text(self) -> int:
        """Returns how many tokens belong to no span."""
        return self.geometry.capacity - sum(span.stop - span.start for span in self.spans)

    @property
    def image_bytes(self) -> int:
        """Returns the bytes of the marked spans."""
        return self.nbytes - self.text_bytes

    @property
    def text_bytes(self) -> int:
        """Returns the bytes of the text tokens."""
        return sum(array.nbytes for codec in self._text for array in codec.arrays.values())

    def mark_images(self, spans: Sequence[tuple[int, int]]) -> None:
        """Takes memory for the spans of a coming prompt, by so much less for text. Raises CacheError: bad spans.

        Marks of tokens that have not come are forgotten: they were another prompt's.
        """
        self.spans = [span for span in self.spans if span.start < self.n_seen]
        earliest = self.spans[-1].stop if self.spans else 0
        for first, last in spans:
            start, stop = self.n_seen + first, self.n_seen + last
            if first < 0 or last <= first or start < earliest or stop > self.geometry.capacity:
                raise CacheError(
                    f"{self.name}: span {first}..{last} does not fit: give non-empty ranges of the coming "
                    f"prompt, in order and apart, within the {self.geometry.capacity - self.n_seen} free tokens",
                    field="images",
                )
            earliest = stop
            n_packed = (stop - start) // self.block * self.block
            if n_packed:
                self._add_span(start, start + n_packed)
        self._fit_text()

    def _add_span(self, start: int, stop: int) -> None:
        self.spans.append(ImageSpan(start, stop, self.span_codecs(*self._shape(stop - start))))
        for codec in self.spans[-1].packed:
            self._take_memory(codec)

    def _fit_text(self) -> None:
        """Resizes the text's memory to the tokens that belong to no span."""
        capacity = self._n_text
        if capacity != self._text[0].capacity:
            n_text = sum(run.stop - run.start for run in self._runs(0, self.n_seen) if run.span is None)
            old, self._text = self._text, self._f16_stores(capacity)
            for source, target in zip(old, self._text, strict=True):
                self._take_memory(target)
                for name, array in target.arrays.items():
                    array[:, :n_text] = source.arrays[name][:, :n_text]
        self._list_arrays()

    def _runs(self, start: int, stop: int) -> Iterator[Run]:
        return runs(self.spans, start, stop)

    def _stores(self, run: Run) -> tuple[Codec, Codec]:
        """Returns the codecs of keys and of values in which a run is stored."""
        if run.span is None:
            return self._text
        return run.span.exact or run.span.packed

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim)."""
        self.require_room(keys.shape[1])
        while keys.shape[1]:
            n = min(keys.shape[1], self.max_append_tokens())
            self.append(keys[:, :n], values[:, :n])
            self.flush()
            keys, values = keys[:, n:], values[:, n:]

    def rollback_tokens(self) -> int:
        """Returns 0 while an image is to come, else the free tokens."""
        is_text = all(span.stop <= self.n_seen for span in self.spans)
        return self.geometry.capacity - self.n_seen if is_text else 0

    def max_append_tokens(self) -> int:
        """Returns how many tokens may come before a span is packed."""
        return next(
            (span.stop - self.n_seen for span in self.spans if span.stop > self.n_seen), self.geometry.capacity
        )

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        before = self.n_seen
        for run in self._runs(before, before + keys.shape[1]):
            new = slice(run.start - before, run.stop - before)
            self._append(run, keys[:, new], values[:, new])

    def segments(self) -> list[Segment]:
        return [
            Segment(*self._stores(run), run.first, run.first + run.stop - run.start, run.start)
            for run in self._runs(0, self.n_seen)
        ]

    def flush(self) -> None:
        for run in self._runs(max(0, self.n_seen - 1), self.n_seen):
            self._pack_if_complete(run)

    def _append(self, run: Run, keys: F32, values: F32) -> None:
        if run.span and run.span.exact is None:
            self._open_exact(run.span, run.span.stop - run.span.start)
            self._list_arrays()
        for store, x in zip(self._stores(run), (keys, values), strict=True):
            self.kernels.encode(store, x, run.first)
        self.n_seen = run.stop

    def _open_exact(self, span: ImageSpan, capacity: int) -> None:
        span.exact = self._f16_stores(capacity)
        for codec in span.exact:
            self._take_memory(codec)

    def _pack_if_complete(self, run: Run) -> None:
        span = run.span
        if span and span.exact and run.stop == span.stop:
            keys, values = (store.decode(0, span.stop - span.start) for store in span.exact)
            self.pack(span.packed, keys, values)
            span.exact = None
            self._list_arrays()

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        visible = self._runs(self.n_seen - reach, self.n_seen)
        return sum(store.bytes_of(run.stop - run.start) for run in visible for store in self._stores(run))

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to n tokens; an incomplete span is dropped as a whole, and later marks are forgotten."""
        for span in self.spans:
            if span.exact and span.start < n < self.n_seen:
                n = span.start
        self.spans = [span for span in self.spans if span.start < n]
        if self.spans:
            self.spans[-1].stop = min(self.spans[-1].stop, n)
        self.n_seen = n
        self._fit_text()
        return n

    def extra_state(self) -> dict[str, Any]:
        """Returns each span's ends and the capacities of its codecs, which a rewind does not change."""
        spans = [
            (span.start, span.stop, span.packed[0].capacity, span.exact[0].capacity if span.exact else 0)
            for span in self.spans
        ]
        return {"spans": spans}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        earliest = 0
        for start, stop, packed, exact in extra["spans"]:
            inside = earliest <= start < stop <= start + packed <= self.geometry.capacity
            if not inside or packed % self.block or not (exact == 0 or stop - start <= exact <= packed):
                raise ValueError(f"span {(start, stop, packed, exact)}")
            earliest = stop
            self._add_span(start, start + packed)
            if exact:
                self._open_exact(self.spans[-1], exact)
            self.spans[-1].stop = stop
        self._fit_text()

    def notes(self) -> list[str]:
        n_image = sum(span.stop - span.start for span in self.spans)
        if not n_image:
            return [f"{self.name}: no span is marked visual, all tokens are in f16"]
        exact = 4 * n_image * self.geometry.n_kv_heads * self.geometry.head_dim
        return [
            f"{self.name}: a layer's {n_image} image tokens take {format_bytes(self.image_bytes)} "
            f"({format_bytes(exact)} in f16), its text tokens' store {format_bytes(self.text_bytes)}"
        ]
