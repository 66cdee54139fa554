"""What all kernel families share: scores, weighted sums and whole attention for any pair of codecs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.cuda.module import Array, Driver, Macros, Program
from edgekv.errors import CacheError

I64 = npt.NDArray[np.int64]

THREADS, TILE = 128, 64
MOST_ROWS = 8  # of queries that one block takes
MOST_SHARES = 128  # blocks that share the tokens of a KV head
BLOCKS_PER_PROCESSOR = 8
MOST_CHANNELS = 1024
MOST_CONSTANTS = 4096


@dataclasses.dataclass(frozen=True)
class Codec:
    """One side of attention: the C++ type in ``file`` that reads ``arrays``; ``width`` channels a token."""

    kind: str
    file: str
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    joins: bool = True  # whether it has part in attention of one launch; then at most four arrays


@dataclasses.dataclass(frozen=True)
class Queries:
    """x (G, M, width), what the codec's kernel needs beside it, and a factor (G, M)."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None


@dataclasses.dataclass
class Span:
    """Tokens t0..t1 of one store, at columns s0.. of the scores."""

    keys: Codec
    queries: Queries
    t0: int
    t1: int
    s0: int
    values: Codec | None = None
    out: Array | None = None


class Scores:
    """A score buffer (G, M, columns) that need not exist: what is asked of it is remembered.

    Once every span of tokens has its values, attention over all of them is one launch. A kernel that wants the
    probabilities themselves has them computed after all.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.spans: list[Span] = []
        self.visible: tuple[I64, I64] | None = None
        self.array: Array | None = None


class Backend:
    """The launches behind `edgekv.kernels.spec`; the families derive from it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._scratch: dict[str, Array] = {}
        self._constants: dict[tuple[Any, ...], Array] = {}

    def constant(self, x: Array | npt.NDArray[Any]) -> Array:
        """A small operand that may come from the host, uploaded once for each value that it has."""
        if not isinstance(x, np.ndarray):
            return x
        key = x.shape, x.dtype.str, x.tobytes()
        if key not in self._constants:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.driver.upload(x)
        return self._constants[key]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A buffer for one launch, contents undefined."""
        size = int(np.prod(shape))
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name] = self.driver.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """What launches use beside their operands."""
        return [*self._scratch.values(), *self._constants.values()]

    def score(self, keys: Codec, queries: Queries, t0: int, t1: int, s: Array | Scores, s0: int) -> None:
        if t1 <= t0:
            return
        if isinstance(s, Scores) and s.array is None:
            s.spans.append(Span(keys, queries, t0, t1, s0))
        else:
            self._launch_scores(keys, queries, t0, t1, s.array if isinstance(s, Scores) else s, s0)

    def accumulate(self, p: Array | Scores, s0: int, values: Codec, t0: int, t1: int, out: Array) -> None:
        if t1 <= t0:
            return
        if not isinstance(p, Scores):
            self._launch_values(p, s0, values, t0, t1, out)
        elif p.array is not None:
            self._launch_values(p.array, s0, values, t0, t1, out)
        else:
            span = next(span for span in p.spans if span.s0 == s0)
            span.values, span.out = values, out
            if all(span.values for span in p.spans):
                self._attend(p)

    def softmax(self, s: Array | Scores, lo: I64, hi: I64) -> None:
        if isinstance(s, Scores) and s.array is None:
            s.visible = lo, hi
        else:
            self._launch_softmax(s.array if isinstance(s, Scores) else s, lo, hi)

    def probabilities(self, p: Array | Scores) -> Array:
        """The buffer of p, with all that was asked of it done."""
        if not isinstance(p, Scores):
            return p
        if p.array is None:
            p.array = self.driver.empty(p.shape, np.float32)
            for span in p.spans:
                self._launch_scores(span.keys, span.queries, span.t0, span.t1, p.array, span.s0)
            if p.visible:
                self._launch_softmax(p.array, *p.visible)
            for span in p.spans:
                if span.values:
                    self._launch_values(p.array, span.s0, span.values, span.t0, span.t1, span.out)
        return p.array

    def _launch_scores(self, keys: Codec, queries: Queries, t0: int, t1: int, s: Array, s0: int) -> None:
        groups, rows, _ = s.shape
        at_once = _rows(rows)
        program = Program(
            (keys.file, "scores"),
            (
                ("KEYS", keys.kind),
                ("KEY_DIM", keys.width),
                ("HEAD_DIM", keys.width),
                ("ROWS", at_once),
                *keys.macros,
            ),
        )
        row_blocks = -(-rows // at_once)
        tiles = -(-t1 // TILE) - t0 // TILE
        self.driver.launch(
            *(program, "scores", (self._splits(tiles, groups * row_blocks), groups, row_blocks), THREADS),
            *(*self._queries(queries), rows, *self._store(keys), t0, t1),
            *(s, *_strides(s), s0),
        )

    def _launch_values(self, p: Array, s0: int, values: Codec, t0: int, t1: int, out: Array) -> None:
        groups, rows, _ = p.shape
        at_once = _rows(rows)
        program = Program(
            (values.file, "values"),
            (("VALUES", values.kind), ("HEAD_DIM", values.width), ("ROWS", at_once), *values.macros),
        )
        row_blocks = -(-rows // at_once)
        splits = self._splits(-(-t1 // TILE) - t0 // TILE, groups * row_blocks)
        partial = self.scratch("values", (groups, splits, rows, values.width))
        self.driver.launch(
            *(program, "values", (splits, groups, row_blocks), THREADS),
            *(p, *_strides(p), s0, *self._store(values), t0, t1, rows, partial),
        )
        self.add_partial(partial, out)

    def add_partial(self, partial: Array, out: Array) -> None:
        """out (G, ...) += the sum over the second axis of partial (G, splits, ...)."""
        groups, splits = partial.shape[:2]
        n = out.size
        self.driver.launch(
            Program(("add_partial",)), "add_partial", (-(-n // 256),), 256, partial, splits, n // groups, n, out
        )

    def _launch_softmax(self, s: Array, lo: I64, hi: I64) -> None:
        groups, rows, columns = s.shape
        many = bool((lo != lo[0]).any() or (hi != hi[0]).any())
        ends = self.constant(np.stack([lo, hi]).astype(np.int32)) if many else self.driver.shift
        self.driver.launch(
            *(Program(("softmax",)), "softmax", (rows, groups), 256, s, *_strides(s), columns, rows),
            *(int(many), ends, int(lo[0]), int(hi[0]), self.driver.shift),
        )

    def _attend(self, s: Scores) -> None:
        """One launch if there is at most one store that is not of exact (f16) tokens, and two of those."""
        spans = sorted(s.spans, key=lambda span: _is_exact(span))
        main, exact = spans[0], spans[1:]
        lo, hi = s.visible or (np.zeros(1, np.int64), np.zeros(1, np.int64))
        uniform = (lo == lo[0]).all() and (hi == hi[0]).all()
        fits = len(exact) <= 2 and s.shape[1] <= MOST_ROWS and len({id(span.out) for span in exact}) <= 1
        joined = all(map(_is_exact, exact)) and main.keys.joins and main.values is not None and main.values.joins
        if not (uniform and fits and joined):
            self.probabilities(s)
            return
        groups, rows, _ = s.shape
        assert main.values is not None
        tiles = [-(-span.t1 // TILE) - span.t0 // TILE for span in spans]
        parts = [min(self._splits(tiles[0], groups), MOST_SHARES - sum(tiles[1:])), *tiles[1:]]
        shares = sum(parts)
        ends = self.scratch("attend.ends", (groups, shares, rows, 2))
        sums = self.scratch("attend.sums", (groups, shares, rows, main.values.width))
        nothing = self.driver.shift
        exact_arguments: list[Any] = []
        for i in range(2):
            if i < len(exact):
                span = exact[i]
                assert span.values is not None
                arrays = span.keys.arrays[0], span.values.arrays[0]
                exact_arguments += [*arrays, span.keys.capacity, span.t0, span.t1, span.s0]
            else:
                exact_arguments += [nothing, nothing, 0, 0, 0, 0]
            if i == 0:
                exact_arguments.append(parts[1] if exact else 0)
        self.driver.launch(
            *(_attend_program(main.keys, main.values, rows, bool(exact)), "attend", (shares, groups), THREADS),
            *(*self._queries(main.queries), *self._arrays(main.keys)[:4], *self._arrays(main.values)[:4]),
            *(main.keys.capacity, main.values.capacity, main.t0, main.t1, main.s0, parts[0]),
            *(exact[0].queries.x if exact else nothing, *exact_arguments),
            *(int(lo[0]), int(hi[0]), self.driver.shift, ends, sums, self._done(groups)),
            *(main.out, exact[0].out if exact else main.out),
        )

    def _done(self, groups: int) -> Array:
        """Zeros, left as zeros by every launch."""
        if "attend.done" not in self._scratch or self._scratch["attend.done"].size < groups:
            self._scratch["attend.done"] = self.driver.zeros((groups,), np.uint32)
        return self._scratch["attend.done"]

    def _splits(self, tiles: int, others: int) -> int:
        """Into how many parts to cut a range of tiles that `others` more blocks share out too."""
        wanted = -(-self.driver.multiprocessors * BLOCKS_PER_PROCESSOR // others)
        return max(1, min(tiles, wanted, MOST_SHARES))

    def _queries(self, queries: Queries) -> tuple[Array, Array, Array]:
        nothing = self.driver.shift
        codes = nothing if queries.codes is None else queries.codes
        return queries.x, codes, nothing if queries.scale is None else self.constant(queries.scale)

    def _arrays(self, codec: Codec) -> tuple[Array, ...]:
        return (*codec.arrays, *[self.driver.shift] * (6 - len(codec.arrays)))

    def _store(self, codec: Codec) -> tuple[Any, ...]:
        return (*self._arrays(codec), codec.capacity)


def _attend_program(keys: Codec, values: Codec, rows: int, with_exact: bool) -> Program:
    files = dict.fromkeys((keys.file, values.file, *(["rows"] if with_exact else []), "attend"))
    macros: dict[str, int | str] = dict(
        (
            *(("KEYS", keys.kind), ("VALUES", values.kind), ("KEY_DIM", keys.width), ("HEAD_DIM", values.width)),
            *(("ROWS", rows), ("MOST_SHARES", MOST_SHARES)),
            *([("EXACT", 1)] if with_exact else []),
            *(*keys.macros, *values.macros),
        )
    )
    return Program(tuple(files), tuple(macros.items()))


def _is_exact(span: Span) -> bool:
    values = span.values
    return span.keys.kind == "RowKeys<u16>" and values is not None and values.kind == "RowValues<u16>"


def _rows(rows: int) -> int:
    """Queries that a block takes at once: a power of two, so that few variants are compiled."""
    return min(MOST_ROWS, 1 << (rows - 1).bit_length())


def _strides(x: Array) -> tuple[int, int]:
    """Elements between the groups and between the rows of x (G, M, S)."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def per_head(x: Array) -> tuple[Array, int]:
    """x (G, n, D) with the rows of a head contiguous, and the elements between heads."""
    n, d = x.shape[1:]
    if x.strides[2] != x.itemsize or (n > 1 and x.strides[1] != d * x.itemsize):
        x = x.copy()
    return x, x.strides[0] // x.itemsize if x.shape[0] > 1 else n * d


def check_width(width: int) -> None:
    if width > MOST_CHANNELS:
        raise CacheError(
            f"head_dim {width}: --device cuda takes at most {MOST_CHANNELS} channels; use --device cpu"
        )
