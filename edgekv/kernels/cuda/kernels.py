"""The CUDA backend: attention over segments and within prompts, new tokens into their stores, rotations.

A launch of attend.cu keeps no scores: blocks share the tokens, each with a running softmax. It takes one pair of
any codecs and two of exact tokens. Several launches, of mixed pairs, are merged by the sums of their weights.
Prompts, probabilities that are asked for, and tokens that stand anywhere take a buffer of scores: ranges.cu.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from edgekv.errors import CacheError
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.cuda.driver import (
    RECORDED_TOKENS,
    Array,
    CannotRecord,
    Counter,
    Driver,
    Launch,
    Macros,
    Program,
    Struct,
    counter,
)
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, Matrix, matvec
from edgekv.kernels.interface import Segment, Visible, find_codec_kernels
from edgekv.types import I64

THREADS, TILE = 128, 64
MOST_ROWS = 8  # of queries that one block takes
MOST_CHANNELS = 1024
MOST_SHARES = 128  # blocks that share the tokens of a KV head
MOST_CONSTANTS = 4096
ENCODE = Program(("exact",), exact=True)
ATTEND_BLOCKS = {1: 4}  # of attend.cu that a multiprocessor holds, by queries; else 2
MOST_EXACT = 2  # pairs of exact tokens that a launch takes beside the first one
MOST_EXACT_TOKENS = 2048  # of each; more make a first pair
EXACT_TILES = 3  # at most, of a block that takes exact tokens beside a fused kernel
SEES_ALL = np.zeros(1, np.int64), np.full(1, 1 << 30)
PROMPT_ROWS, MOST_WIDTH = 64, 256  # queries of a block of prompt_attention.cu, and channels
LAYERS = Program(("layers",))


def padded_width(head_dim: int) -> int:
    """Channels of a head with which prompt_attention.cu computes: a multiple of 16."""
    return -(-head_dim // 16) * 16


class Halves(NamedTuple):
    """Where `split_rope` also puts queries, keys and values in float16, zeros behind a head's channels.

    q (n_heads, n, width); k, v (n_kv_heads, capacity, width), from token ``first`` on.
    """

    q: Array
    k: Array
    v: Array
    first: int


@dataclasses.dataclass(frozen=True)
class Reader:
    """The C++ type ``name`` in ``file`` reads ``arrays`` of ``capacity`` tokens, ``width`` channels a token."""

    name: str
    file: Any  # as in `Program.files`
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    joins: bool = True  # whether attention of one launch takes it: at most five arrays of keys, four of values
    tiles: int = 1  # of 64 tokens that a block reads at once, to have enough bytes on their way
    rotation: Any = None  # of the values: sums are rotated back


@dataclasses.dataclass(frozen=True)
class Queries:
    """x (G, M, width), what the reader's kernel needs beside it, and a factor (G, M)."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None


def as_they_are(tools: CudaKernels, codec: Any, q: Array) -> Queries:
    """Queries (G, M, D) for keys whose scores are plain products."""
    return Queries(q)


class Fused(NamedTuple):
    """A kernel for a pair of codecs in place of attend.cu's own, with ``macros`` beside those of all pairs.

    A launch takes ``most_rows`` query rows, and a multiprocessor holds ``blocks``. Queries come as they are, with
    codes and scale as in `Queries`.
    """

    file: pathlib.Path
    macros: Macros
    most_rows: int
    blocks: int
    codes: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class CodecKernels:
    """What a file for a kind of codec says; ``tools`` are the kernels.

    keys, values: (codec) -> what reads it as keys, or as values. queries: (tools, codec, q (G, M, D)) -> the
    queries as its scores want them. encode: (tools, codec, x (G, n, D), t0) stores x as tokens t0.., else
    `Codec.encode` does. placed: whether that takes a token to a place that moves (a `Counter`). fused: of keys,
    (driver, query rows, keys, values) -> the pair's own kernel, if there is one.
    """

    keys: Callable[[Any], Reader] | None = None
    values: Callable[[Any], Reader] | None = None
    queries: Callable[[CudaKernels, Any, Array], Queries] = as_they_are
    encode: Callable[[CudaKernels, Any, Array, int], None] | None = None
    placed: bool = False
    fused: Callable[[Driver, int, Any, Any], Fused | None] = lambda *pair: None


def kernels_of(codec: Any) -> CodecKernels:
    """Returns how a codec, or a codec of that class, is read. Raises CacheError (field kv) where the GPU can't."""
    loops = find_codec_kernels("cuda", codec)
    if loops is None:
        raise CacheError(
            f"codec of kind {codec.kind!r}: no kernels for a GPU", field="kv", advice="use {device:cpu}"
        )
    return cast(CodecKernels, loops)


def read_keys(codec: Any) -> Reader:
    """What reads a codec that holds keys."""
    make = kernels_of(codec).keys
    assert make is not None, codec.kind
    return make(codec)


def read_values(codec: Any) -> Reader:
    """What reads a codec that holds values."""
    make = kernels_of(codec).values
    assert make is not None, codec.kind
    return make(codec)


def rows_at_once(rows: int) -> int:
    """Queries that a block takes at once: a power of two, so that few variants are compiled."""
    return min(MOST_ROWS, 1 << (rows - 1).bit_length())


def tiles_at_once(rows: int, *readers: Reader) -> int:
    """Tiles that a block takes at once; of many queries the sums fill the registers."""
    return min(reader.tiles for reader in readers) if rows <= 2 else 1


def n_rounds(t0: int, t1: int, tiles: int) -> int:
    """Rounds of `tiles` tiles over the tokens t0..t1."""
    return -(-(-(-t1 // TILE) - t0 // TILE) // tiles)


def query_argument(queries: Queries) -> Struct:
    """Returns queries as the `Queries` of common.cu."""
    rows = queries.x.shape[1]
    return Struct("Queries", x=queries.x, codes=queries.codes, scale=queries.scale, rows=rows)


def store_argument(reader: Reader) -> Struct:
    """Returns the arrays of a reader as the `Store` of common.cu."""
    return Struct("Store", **dict(zip("abcdef", reader.arrays, strict=False)), capacity=reader.capacity)


def scores_argument(s: Array) -> Struct:
    """Returns s (G, M, columns) as the `Scores` of common.cu."""
    group_stride, row_stride = s.strides[0] // s.itemsize, s.strides[1] // s.itemsize
    return Struct("Scores", x=s, group_stride=group_stride, row_stride=row_stride)


def per_head(x: Array) -> tuple[Array, int]:
    """x (G, n, D) with the rows of a head contiguous, and the elements between heads."""
    n, d = x.shape[1:]
    if x.strides[2] != x.itemsize or (n > 1 and x.strides[1] != d * x.itemsize):
        x = x.copy()
    return x, x.strides[0] // x.itemsize if x.shape[0] > 1 else n * d


def check_width(width: int) -> None:
    """CacheError where a head has more channels than a block can hold."""
    if width > MOST_CHANNELS:
        raise CacheError(
            f"head_dim {width}: a GPU takes at most {MOST_CHANNELS} channels", advice="use {device:cpu}"
        )


class Part(NamedTuple):
    """A segment as the kernels take it, for queries ``q``."""

    segment: Segment
    keys: Reader
    q: Array
    values: Reader

    @property
    def joins(self) -> bool:
        """Whether attend.cu can take it."""
        s = self.segment
        return s.positions is None and self.keys.joins and self.values.joins

    @property
    def is_short(self) -> bool:
        """Exact tokens, so few that another pair's launch can take them along."""
        kinds = {self.segment.keys.kind, self.segment.values.kind}
        return kinds == {"f16"} and self.columns <= MOST_EXACT_TOKENS

    @property
    def most(self) -> int:
        """Where the tokens end at the latest, while a recording is replayed."""
        stop = self.segment.stop
        spare = RECORDED_TOKENS if isinstance(stop, Counter) else 0
        return min(int(stop) + spare, max(self.keys.capacity, int(stop)))

    @property
    def columns(self) -> int:
        """Of the scores."""
        return self.most - self.segment.first


class CudaKernels:
    """Every function of `edgekv.kernels.interface` that the schemes it supports use.

    Arrays are those of the driver; ranges (lo, hi, counts) stay NumPy's, on the host.
    """

    backend = "cuda"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._scratch: dict[str, Array] = {}
        self._constants: dict[tuple[Any, ...], Array] = {}

    def constant(self, x: Array | npt.NDArray[Any]) -> Array:
        """A small operand such as (G, R) that may come from the host, uploaded once for each of its values."""
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
        """Arrays (size,) that launches use beside their operands."""
        return [*self._scratch.values(), *self._constants.values()]

    def splits(self, rounds: int, others: int, blocks: int = 8, beside: int = 0) -> int:
        """Into how many parts to cut a range of rounds, of which there are `others`, each beside some blocks.

        All of them run at once where a multiprocessor holds `blocks`: a few more would take as long again.
        """
        at_once = self.driver.multiprocessors * blocks // others - beside
        return max(1, min(rounds, at_once, MOST_SHARES))

    def limits(self, lo: I64, hi: I64) -> Array | None:
        """Returns lo and hi (n,) as (2, n) int32 of the device; None where all are equal."""
        differ = (lo != lo[0]).any() or (hi != hi[0]).any()
        return self.constant(np.stack([lo, hi]).astype(np.int32)) if differ else None

    def encode(self, codec: Any, x: Array, t0: int) -> None:
        """Stores x (G, n, D) as tokens t0..; CannotRecord where t0 moves and the encoder can't follow."""
        loops: CodecKernels | None = find_codec_kernels("cuda", codec)
        if isinstance(t0, Counter) and loops and not loops.placed:
            raise CannotRecord(f"{codec.kind}: its encoder takes no place that moves")
        if loops and loops.encode:
            loops.encode(self, codec, x, t0)
        else:
            codec.encode(x, t0)

    def append(self, keys: Any, values: Any, k: Array, v: Array, t0: int) -> None:
        """Stores k and v (G, n, D) as tokens t0.. of two codecs."""
        if not (keys.kind == values.kind == "f16" and k.shape[1] == 1):
            self.encode(keys, k, t0)
            self.encode(values, v, t0)
            return
        (k, k_stride), (v, v_stride) = per_head(k), per_head(v)
        key_store, value_store = keys.arrays["half"], values.arrays["half"]
        n_kv_heads, capacity, d = key_store.shape
        launch = Launch(ENCODE, "append_f16", (2, n_kv_heads), THREADS, early=True)
        stores = key_store, capacity, value_store, value_store.shape[1]
        self.driver.launch(launch, k, k_stride, v, v_stride, d, *stores, counter(self.driver, t0))

    def attend(
        self,
        queries: Array,
        segments: Sequence[Segment],
        visible: Visible,
        out: Array,
        weights: Array | None = None,
        sinks: Array | None = None,
        cap: float | None = None,
    ) -> None:
        """out (H, n, D) = attention of queries (H, n, D) over segments; weights (G, M, columns): probabilities."""
        if sinks is not None:
            raise ValueError("sinks are not known to the kernels of CUDA: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        n_kv_heads = segments[0].keys.n_kv_heads
        shape = n_kv_heads, n_heads // n_kv_heads * n, head_dim
        q, result = queries.reshape(shape), out.reshape(shape)
        parts = [self._part(segment, q, cap) for segment in segments if segment.stop > segment.first]
        if not parts:
            out.fill(0)
        elif n > 1 or shape[1] > MOST_ROWS or weights is not None or not all(part.joins for part in parts):
            self._attend_through_scores(parts, visible, result, weights)
        elif shape[1] <= (most := self._most_rows(parts)):
            self._attend_at_once(parts, visible, result)
        else:
            for a in range(0, shape[1], most):  # the rest of the rows in a launch of its own
                some = q[:, a : a + most].copy()
                self._attend_at_once([part._replace(q=some) for part in parts], visible, some)
                result[:, a : a + most] = some

    def _most_rows(self, parts: list[Part]) -> int:
        return min([MOST_ROWS, *(fused.most_rows for part in parts if (fused := self._fused(part, 1)))])

    def _fused(self, part: Part, rows: int) -> Fused | None:
        keys, values = part.segment.keys, part.segment.values
        return kernels_of(keys).fused(self.driver, rows, keys, values)

    def scores(self, codec: Any, queries: Array, t0: int, t1: int, s: Array) -> None:
        """s (G, M, t1 - t0) = scores of queries (G, M, D) with a codec's tokens t0..t1."""
        segment, prepared = Segment(codec, codec, t0, t1), self._prepared(codec, queries)
        self.launch_scores(read_keys(codec), prepared, s, segment, SEES_ALL)

    def _part(self, segment: Segment, q: Array, cap: float | None) -> Part:
        keys = read_keys(segment.keys)
        if cap is not None:
            keys = dataclasses.replace(keys, macros=(*keys.macros, ("SCORE_CAP", f"{np.float32(cap):.8e}f")))
        return Part(segment, keys, q, read_values(segment.values))

    def _prepared(self, keys: Any, q: Array) -> Queries:
        """The queries as the scores of these keys want them."""
        return kernels_of(keys).queries(self, keys, q)

    def _attend_at_once(self, parts: list[Part], visible: Visible, out: Array) -> None:
        long, short = [part for part in parts if not part.is_short], [part for part in parts if part.is_short]
        launches = []
        while long or short:
            main = long.pop(0) if long else short.pop(0)
            launches.append((main, short[:MOST_EXACT]))
            short = short[MOST_EXACT:]
        n_kv_heads, rows, head_dim = out.shape
        ends = self.scratch("attend.whole", (len(launches), n_kv_heads, rows, 2))
        if len(launches) == 1:
            self._launch_attend(*launches[0], visible, out, ends[0])
            return
        several = self.scratch("attend.several", (len(launches), *out.shape))
        for (main, exact), each, end in zip(launches, several, ends, strict=True):
            self._launch_attend(main, exact, visible, each, end)
        launch = Launch(LAYERS, "merge", (n_kv_heads * rows,), THREADS)
        self.driver.launch(launch, several, ends, len(launches), head_dim, out)

    def _launch_attend(self, main: Part, exact: list[Part], visible: Visible, out: Array, end: Array) -> None:
        """out (G, M, D) = attention over these parts alone; end (G, M, 2) = the maximum and the sum of weights."""
        n_kv_heads, rows, head_dim = out.shape
        keys, values = main.keys, main.values
        fused = self._fused(main, rows)
        held = fused.blocks if fused else ATTEND_BLOCKS.get(rows, 2)
        rounds = n_rounds(main.segment.first, main.segment.stop, tiles_at_once(rows, keys, values))
        n_tiles = n_rounds(main.segment.first, main.segment.stop, 1)
        # A block of tiled tokens is quick: one that takes exact tokens beside it is not to end last.
        exact_tiles = (
            max(1, min(EXACT_TILES, n_tiles // self.splits(n_tiles, n_kv_heads, held) // 8)) if fused else 1
        )
        exact_shares = [n_rounds(part.segment.first, part.most, exact_tiles) for part in exact]
        beside = sum(exact_shares)
        shares = min(self.splits(rounds, n_kv_heads, held, beside if fused else 0), MOST_SHARES - beside)
        n_shares = shares + sum(exact_shares)
        program = attend_program(keys, values, rows, bool(exact), fused)
        if fused:
            rotated, queries = out, Queries(main.q, fused.codes, fused.scale)
            values = dataclasses.replace(values, arrays=(*values.arrays, values.rotation.flips), rotation=None)
        else:
            rotated = out if values.rotation is None else self.scratch("attend.rotated", out.shape)
            queries = self._prepared(main.segment.keys, main.q)
        exact_segments = {
            f"exact{i}": self.segment_argument(part.segment, part.keys, part.values, n)
            for i, (part, n) in enumerate(zip(exact, exact_shares, strict=True), 1)
        }
        arguments = Struct(
            "AttendArgs",
            queries=query_argument(queries),
            exact_queries=main.q,
            pair=self.segment_argument(main.segment, keys, values, shares),
            **exact_segments,
            visible=self.visible_argument(visible, rows),
            block_softmax=self.scratch("attend.ends", (n_kv_heads, n_shares, rows, 2)),
            block_sums=self.scratch("attend.sums", (n_kv_heads, n_shares, rows, head_dim)),
            done=self._done(n_kv_heads),
            softmax=end,
            out=rotated,
            exact_out=out,
        )
        self.driver.launch(Launch(program, "attend", (n_shares, n_kv_heads), THREADS, early=True), arguments)
        if values.rotation is not None:
            self.rotate_back(values.rotation, rotated, out)

    def segment_argument(self, segment: Segment, keys: Reader, values: Reader, blocks: int = 0) -> Struct:
        """Returns a segment as the `Segment` of common.cu, whose tokens ``blocks`` blocks share."""
        stop, position = counter(self.driver, segment.stop), counter(self.driver, segment.position)
        stores = {"keys": store_argument(keys), "values": store_argument(values)}
        return Struct("Segment", **stores, first=segment.first, blocks=blocks, stop=stop, position=position)

    def visible_argument(self, visible: Visible, rows: int) -> Struct:
        """Returns the positions that ``rows`` queries of each KV head see as the `Visible` of common.cu."""
        lo, hi = (np.tile(x, rows // len(x)) for x in visible)
        return Struct("Visible", lo=int(lo[0]), hi=int(hi[0]), limits=self.limits(lo, hi), shift=self.driver.shift)

    def _done(self, n_kv_heads: int) -> Array:
        """Zeros, left as zeros by every launch."""
        if "attend.done" not in self._scratch or self._scratch["attend.done"].size < n_kv_heads:
            self._scratch["attend.done"] = self.driver.zeros((n_kv_heads,), np.uint32)
        return self._scratch["attend.done"]

    def _attend_through_scores(
        self, parts: list[Part], visible: Visible, out: Array, weights: Array | None
    ) -> None:
        n_kv_heads, rows, _ = out.shape
        prepared = [self._prepared(part.segment.keys, part.q) for part in parts]
        ends = list(itertools.accumulate((part.columns for part in parts), initial=0))
        shape = n_kv_heads, rows, ends[-1]
        buffer = self.scratch("attend.scores", shape) if weights is None else weights
        columns = [buffer[:, :, a:b] for a, b in itertools.pairwise(ends)]
        for part, queries, s in zip(parts, prepared, columns, strict=True):
            self.launch_scores(part.keys, queries, s, part.segment, visible)
        self.softmax(buffer, np.zeros(rows, np.int64), np.full(rows, shape[2]))
        out.fill(0)
        for part, p in zip(parts, columns, strict=True):
            self.launch_values(part.values, p, part.segment.first, part.most, out)

    def softmax(self, s: Array, lo: I64, hi: I64) -> None:
        """Makes rows of s (G, M, columns) sum to 1 over columns lo..hi (M,), 0 elsewhere."""
        n_kv_heads, rows, columns = s.shape
        launch = Launch(LAYERS, "softmax", (rows, n_kv_heads), 256 if columns <= 2048 else 1024)
        self.driver.launch(launch, scores_argument(s), columns, self.limits(lo, hi), int(lo[0]), int(hi[0]))

    def launch_scores(self, keys: Reader, queries: Queries, s: Array, segment: Segment, visible: Visible) -> None:
        """s (G, M, columns) = scores with the segment's first tokens, -inf where a query does not see them."""
        n_kv_heads, rows, columns = s.shape
        at_once, t0 = rows_at_once(rows), segment.first
        tiles, row_blocks = tiles_at_once(at_once, keys), -(-rows // at_once)
        splits = self.splits(n_rounds(t0, t0 + columns, tiles), n_kv_heads * row_blocks)
        launch = Launch(range_program("KEYS", keys, at_once), "scores", (splits, n_kv_heads, row_blocks), THREADS)
        positions = segment.positions
        stride = 0 if positions is None else positions.strides[0] // positions.itemsize
        tokens = self.segment_argument(segment, keys, keys), scores_argument(s), columns, positions, stride
        self.driver.launch(launch, query_argument(queries), *tokens, self.visible_argument(visible, rows))

    def launch_values(self, values: Reader, p: Array, t0: int, t1: int, out: Array) -> None:
        """out (G, M, D) += p (G, M, t1 - t0) times tokens t0..t1, rotated back."""
        n_kv_heads, rows, _ = p.shape
        at_once = rows_at_once(rows)
        tiles, row_blocks = tiles_at_once(at_once, values), -(-rows // at_once)
        splits = self.splits(n_rounds(t0, t1, tiles), n_kv_heads * row_blocks)
        partial = self.scratch("values", (n_kv_heads, splits, rows, values.width))
        launch = Launch(
            range_program("VALUES", values, at_once), "values", (splits, n_kv_heads, row_blocks), THREADS
        )
        self.driver.launch(launch, scores_argument(p), store_argument(values), t0, t1, rows, partial)
        if values.rotation is None:
            self._add_partial(partial, out)
        else:
            rotated = self.scratch("values.rotated", out.shape)
            rotated.fill(0)
            self._add_partial(partial, rotated)
            self.rotate_back(values.rotation, rotated, out)

    def _add_partial(self, partial: Array, out: Array) -> None:
        """out (G, ...) += the sum over the second axis of partial (G, splits, ...)."""
        n_kv_heads, splits = partial.shape[:2]
        n = out.size
        launch = Launch(LAYERS, "add_partial", (-(-n // 256),), 256)
        self.driver.launch(launch, partial, splits, n // n_kv_heads, n, out)

    def split_rope(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        q: Array | None,
        k: Array,
        v: Array,
        scale: float,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        halves: Halves | None = None,
    ) -> None:
        """Splits qkv (n, (H + 2 G) * D) into q (H, n, D), k and v (G, n, D), rotated by position; also in halves.

        q None: queries are wanted as halves only.
        """
        n_kv_heads, n, head_dim = k.shape
        n_heads = qkv.shape[1] // head_dim - 2 * n_kv_heads
        rope = Struct("Rope", cos=cos, sin=sin, half=cos.shape[1], shift=self.driver.shift)
        heads = (Struct("Heads", x=x, stride=0 if x is None else x.strides[0] // x.itemsize) for x in (q, k, v))
        norms = Struct("HeadNorms", q=q_norm if q_norm.size else None, k=k_norm if k_norm.size else None, eps=eps)
        also = Struct("Halves")
        if halves is not None:
            _, capacity, width = halves.k.shape
            also = Struct("Halves", **halves._asdict(), width=width, capacity=capacity)
        grid = n, n_heads + 2 * n_kv_heads
        launch = Launch(LAYERS, "split_rope", grid, THREADS, early=halves is None)
        sizes = n_heads, n_kv_heads, head_dim, float(scale)
        self.driver.launch(launch, qkv, rope, *heads, *sizes, norms, also)

    def hadamard(self, x: Array, flips: Array, out: Array) -> None:
        """out (A, n, width) = the rotation of x (A, n, D)."""
        rows, n, d = x.shape
        x, stride = per_head(x)
        self._transform("hadamard", out.shape[2], rows * n, x, n, stride, d, flips, out)

    def hadamard_back(self, x: Array, flips: Array, out: Array) -> None:
        """out (A, n, D) += the inverse rotation of x (A, n, width)."""
        rows, n, d = out.shape
        stride = out.strides[0] // out.itemsize
        self._transform("hadamard_back", x.shape[2], rows * n, contiguous(x), n, stride, d, flips, out)

    def _transform(self, name: str, width: int, rows: int, *arguments: Any) -> None:
        check_width(width)
        launch = Launch(Program(("exact",), (("WIDTH", width),), exact=True), name, (rows,), max(width // 2, 1))
        self.driver.launch(launch, *arguments[:-1], float(np.float32(1 / np.sqrt(width))), arguments[-1])

    def rotate(self, rotation: Any, x: Array) -> Array:
        """P x (A, n, width) of x (A, n, head_dim)."""
        if rotation.flips is None:
            return self.project(x, rotation.matrix)
        out = self.driver.empty((*x.shape[:2], rotation.width), np.float32)
        self.hadamard(x, rotation.flips, out)
        return out

    def rotate_back(self, rotation: Any, x: Array, out: Array) -> None:
        """out (A, n, head_dim) += the inverse of P of x (A, n, width)."""
        if rotation.flips is None:
            out += self.project(x, rotation.inverse)
        else:
            self.hadamard_back(x, rotation.flips, out)

    def project(self, x: Array, matrix: Array) -> Array:
        """x (G, n, D) times matrix (m, D) -> (G, n, m)."""
        n_kv_heads, n = x.shape[:2]
        if n > MATVEC_ROWS:
            return x @ matrix.T
        rows, columns = matrix.shape
        w = Matrix(rows, columns, 32, 1, 0, matrix)
        return matvec(self.driver, contiguous(x), w).reshape(n_kv_heads, n, -1)

    def attend_prompt(self, q: Array, k: Array, v: Array, earlier: int, window: int | None, out: Array) -> None:
        """out (n, n_heads * head_dim) = causal attention of queries q (n_heads, n, width), already scaled.

        All are float16. The queries are those of the last n of ``earlier`` + n tokens, the first of k and v
        (n_kv_heads, capacity, width). Token t sees max(0, t + 1 - window)..t. Channels from head_dim on are 0.
        """
        n_heads, n, width = q.shape
        n_kv_heads, capacity, _ = k.shape
        macros = ("WIDTH", width), ("HEAD_DIM", out.shape[1] // n_heads)
        program = Program(("prompt_attention",), macros)
        launch = Launch(program, "prompt_attention", (-(-n // PROMPT_ROWS), n_heads), THREADS)
        sizes = n, earlier, capacity, n_heads // n_kv_heads, window or 0
        self.driver.launch(launch, q, k, v, *sizes, out)


def attend_program(
    keys: Reader, values: Reader, rows: int, with_exact: bool, fused: Fused | None = None
) -> Program:
    """attend.cu for a pair, beside exact tokens or not; fused: by a kernel of the pair's own."""
    pair = (fused.file,) if fused else (keys.file, values.file)
    tiles = 1 if fused else tiles_at_once(rows, keys, values)
    types = ("KEYS", keys.name), ("VALUES", values.name), ("KEY_DIM", keys.width), ("HEAD_DIM", values.width)
    sizes = ("ROWS", rows), ("TILES", tiles), ("MOST_SHARES", MOST_SHARES)
    exact = (("EXACT", 1),) if with_exact else ()
    more = fused.macros if fused else ()
    files = tuple(dict.fromkeys(("rows", *pair, "attend")))
    return Program(files, (*types, *sizes, *exact, *keys.macros, *values.macros, *more))


def range_program(kind: str, reader: Reader, rows: int) -> Program:
    """ranges.cu for what reads KEYS or VALUES."""
    sizes = ("HEAD_DIM", reader.width), ("ROWS", rows), ("TILES", tiles_at_once(rows, reader))
    macros: Macros = ((kind, reader.name), ("KEY_DIM", reader.width), *sizes, *reader.macros)
    return Program(tuple(dict.fromkeys(("rows", reader.file, "ranges"))), macros)
