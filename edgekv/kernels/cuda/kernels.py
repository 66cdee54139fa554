"""The CUDA backend: attention over segments and within prompts, encoders of new tokens, rotations.

A launch of attend.cu stores no scores: thread blocks share the tokens, each with a running softmax. It takes one
segment of any pair of codecs and two of float16. Results of launches are merged by the sums of their weights.
Prompts, requested probabilities, and tokens at arbitrary positions go through a buffer of scores (ranges.cu).
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
    GRAPH_TOKENS,
    Array,
    CaptureError,
    Counter,
    Driver,
    Launch,
    Macros,
    Program,
    Struct,
    counter,
)
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, Matrix, matvec
from edgekv.kernels.interface import Segment, Visible, Workspace, find_codec_kernels
from edgekv.types import I64

THREADS, TILE = 128, 64
MAX_ROWS = 8  # query rows of a thread block
MAX_CHANNELS = 1024
MAX_SPLITS = 128  # of the tokens of a KV head, each a thread block's
MAX_CONSTANTS = 4096
ENCODE = Program(("exact",), exact=True)
BLOCKS_AT_ONCE = {1: 4}  # thread blocks of attend.cu on a multiprocessor, by query rows; otherwise 2
MAX_EXACT = 2  # float16 segments that a launch takes beside its first segment
MAX_EXACT_TOKENS = 2048  # tokens of each of these; a longer segment is the first one of a launch
EXACT_TILES = 3  # most tiles of float16 tokens per thread block, in a launch of a fused kernel
ALL_VISIBLE = np.zeros(1, np.int64), np.full(1, 1 << 30)
PREFILL_ROWS, MAX_WIDTH = 64, 256  # queries of a thread block of prefill_attention.cu, channels of a head
LAYERS = Program(("layers",))


def padded_width(head_dim: int) -> int:
    """Returns the channels of a head in prefill_attention.cu: head_dim rounded up to a multiple of 16."""
    return -(-head_dim // 16) * 16


class HalfQKV(NamedTuple):
    """Float16 copies of queries, keys and values that `split_rope` writes, with zeros behind head_dim channels.

    q: (n_heads, n, width), or None. k, v: (n_kv_heads, capacity, width), written from token ``first`` on.
    """

    q: Array | None
    k: Array
    v: Array
    first: int


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a kernel reads the keys or the values of a codec.

    name: the C++ type that reads them, in ``file`` (as in `Program.files`), compiled with ``macros``. arrays: the
    fields a, b, .. of its `Store` in common.cu, with room for ``capacity`` tokens. width: channels of a token.
    in_one_launch: whether attend.cu takes it. tiles: tiles of 64 tokens that a block reads at once, so that enough
    bytes are on their way. rotation: what rotates the values' sums back.
    """

    name: str
    file: Any
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    in_one_launch: bool = True
    tiles: int = 1
    rotation: Any = None


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries x (G, M, width), what a key codec derives from them (codes), and a factor of each (scale (G, M))."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None


def plain_queries(cuda: CudaKernels, codec: Any, q: Array) -> Queries:
    """Returns queries (G, M, D) unchanged, for keys whose scores are plain products."""
    return Queries(q)


class Fused(NamedTuple):
    """A kernel for one pair of codecs that replaces the loop of attend.cu.

    file, macros: its source, and macros beside those of all pairs. max_rows: query rows of a launch.
    blocks_at_once: its thread blocks on a multiprocessor. It gets queries as the model makes them, with codes and
    scale as in `Queries`.
    """

    file: pathlib.Path
    macros: Macros
    max_rows: int
    blocks_at_once: int
    codes: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class CudaCodec:
    """The CUDA kernels of a kind of codec; ``cuda`` is the backend.

    keys, values: (codec) -> how it is read as keys, or as values.
    queries: (cuda, codec, q (G, M, D)) -> the queries in the form that its scores need.
    encode: (cuda, codec, x (G, n, D), t0) stores x as tokens t0..; without it `Codec.encode` does.
    capturable: whether ``encode`` takes a t0 that changes between replays (a `Counter`).
    fused: (driver, query rows, keys, values) -> the kernel for this codec's keys with those values, or None.
    """

    keys: Callable[[Any], Reader] | None = None
    values: Callable[[Any], Reader] | None = None
    queries: Callable[[CudaKernels, Any, Array], Queries] = plain_queries
    encode: Callable[[CudaKernels, Any, Array, int], None] | None = None
    capturable: bool = False
    fused: Callable[[Driver, int, Any, Any], Fused | None] = lambda *pair: None


def kernels_of(codec: Any) -> CudaCodec:
    """Returns the kernels of a codec, or of a codec class. Raises CacheError (field kv) where there are none."""
    kernels = find_codec_kernels("cuda", codec)
    if kernels is None:
        raise CacheError(
            f"codec of kind {codec.kind!r}: no kernels for a GPU", field="kv", advice="use {device:cpu}"
        )
    return cast(CudaCodec, kernels)


def read_keys(codec: Any) -> Reader:
    """Returns how a codec's keys are read."""
    make = kernels_of(codec).keys
    assert make is not None, codec.kind
    return make(codec)


def read_values(codec: Any) -> Reader:
    """Returns how a codec's values are read."""
    make = kernels_of(codec).values
    assert make is not None, codec.kind
    return make(codec)


def rows_per_block(rows: int) -> int:
    """Returns the query rows of a block: a power of two, so that few variants are compiled."""
    return min(MAX_ROWS, 1 << (rows - 1).bit_length())


def tiles_per_round(rows: int, *readers: Reader) -> int:
    """Returns the tiles that a block reads at once: one for many query rows, whose sums fill the registers."""
    return min(reader.tiles for reader in readers) if rows <= 2 else 1


def n_rounds(t0: int, t1: int, tiles: int) -> int:
    """Returns how many rounds of `tiles` tiles the tokens t0..t1 take."""
    return -(-(-(-int(t1) // TILE) - int(t0) // TILE) // tiles)


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
    """Returns x (G, n, D) with contiguous rows in each head, and the number of elements between heads."""
    n, d = x.shape[1:]
    if x.strides[2] != x.itemsize or (n > 1 and x.strides[1] != d * x.itemsize):
        x = x.copy()
    return x, x.strides[0] // x.itemsize if x.shape[0] > 1 else n * d


def check_width(width: int) -> None:
    """Raises CacheError where a head has more channels than a block can hold."""
    if width > MAX_CHANNELS:
        raise CacheError(
            f"head_dim {width}: a GPU takes at most {MAX_CHANNELS} channels", advice="use {device:cpu}"
        )


class KVInput(NamedTuple):
    """A segment with the readers of its keys and values, and the queries q (G, M, D) that attend to it."""

    segment: Segment
    keys: Reader
    q: Array
    values: Reader

    @property
    def in_one_launch(self) -> bool:
        """Whether attend.cu takes it."""
        return self.segment.positions is None and self.keys.in_one_launch and self.values.in_one_launch

    @property
    def is_short(self) -> bool:
        """Whether it is float16 and short enough to go beside another segment in a launch."""
        kinds = {self.segment.keys.kind, self.segment.values.kind}
        return kinds == {"f16"} and self.columns <= MAX_EXACT_TOKENS

    @property
    def last_stop(self) -> int:
        """Where the tokens end at the latest while a graph is replayed."""
        stop = self.segment.stop
        spare = GRAPH_TOKENS if isinstance(stop, Counter) else 0
        return min(int(stop) + spare, max(self.keys.capacity, int(stop)))

    @property
    def columns(self) -> int:
        """Columns of its scores."""
        return self.last_stop - self.segment.first


class CudaKernels:
    """The functions of `edgekv.kernels.interface.Kernels` on the GPU.

    Arrays are the driver's; ranges (lo, hi, counts) stay NumPy arrays on the host.
    """

    backend = "cuda"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._workspace = Workspace(driver)
        self.scratch = self._workspace.array
        self._done_counts: dict[int, Array] = {}
        self._constants: dict[tuple[Any, ...], Array] = {}

    def constant(self, x: Array | npt.NDArray[Any]) -> Array:
        """Returns a small operand such as (G, R) on the device; a host's array is uploaded once per value."""
        if not isinstance(x, np.ndarray):
            return x
        key = x.shape, x.dtype.str, x.tobytes()
        if key not in self._constants:
            if len(self._constants) >= MAX_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.driver.upload(x)
        return self._constants[key]

    def buffers(self) -> list[Array]:
        """Returns the arrays (size,) that launches use beside their operands."""
        return [*self._workspace.buffers(), *self._constants.values(), *self._done_counts.values()]

    def n_splits(self, rounds: int, n_ranges: int, blocks_at_once: int = 8, reserved: int = 0) -> int:
        """Returns how many thread blocks share each of ``n_ranges`` ranges of rounds, beside ``reserved`` others.

        As many as the GPU runs at once: one block more would wait for a second round and double the time.
        """
        n_running = self.driver.multiprocessors * blocks_at_once // n_ranges - reserved
        return max(1, min(rounds, n_running, MAX_SPLITS))

    def limits(self, lo: I64, hi: I64) -> Array | None:
        """Returns lo and hi (n,) as (2, n) int32 of the device; None where all are equal."""
        differ = (lo != lo[0]).any() or (hi != hi[0]).any()
        return self.constant(np.stack([lo, hi]).astype(np.int32)) if differ else None

    def encode(self, codec: Any, x: Array, t0: int) -> None:
        """Stores x (G, n, D) from token t0 on. Raises CaptureError for a `Counter` if the encoder takes none."""
        kernels: CudaCodec | None = find_codec_kernels("cuda", codec)
        if isinstance(t0, Counter) and kernels and not kernels.capturable:
            raise CaptureError(f"{codec.kind}: its encoder takes no t0 that changes between replays")
        if kernels and kernels.encode:
            kernels.encode(self, codec, x, t0)
        else:
            codec.encode(x, t0)

    def append(self, keys: Any, values: Any, k: Array, v: Array, t0: int) -> None:
        """Stores k and v (G, n, D) as tokens t0.. of two codecs."""
        self.encode(keys, k, t0)
        self.encode(values, v, t0)

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
        """Sets out (H, n, D) to the attention of queries (H, n, D); weights (G, M, columns) to probabilities."""
        if sinks is not None:
            raise ValueError("the CUDA kernels have no sinks: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        n_kv_heads = segments[0].keys.n_kv_heads
        shape = n_kv_heads, n_heads // n_kv_heads * n, head_dim
        q, result = queries.reshape(shape), out.reshape(shape)
        inputs = [self._input(segment, q, cap) for segment in segments if segment.stop > segment.first]
        if not inputs:
            out.fill(0)
        elif n > 1 or shape[1] > MAX_ROWS or weights is not None or not all(seg.in_one_launch for seg in inputs):
            self._attend_through_scores(inputs, visible, result, weights)
        elif shape[1] <= (max_rows := self._max_rows(inputs)):
            self._attend_at_once(inputs, visible, result)
        else:
            for a in range(0, shape[1], max_rows):
                rows = q[:, a : a + max_rows].copy()
                self._attend_at_once([seg._replace(q=rows) for seg in inputs], visible, rows)
                result[:, a : a + max_rows] = rows

    def _max_rows(self, inputs: list[KVInput]) -> int:
        return min([MAX_ROWS, *(fused.max_rows for seg in inputs if (fused := self._find_fused(seg, 1)))])

    def _find_fused(self, seg: KVInput, rows: int) -> Fused | None:
        keys, values = seg.segment.keys, seg.segment.values
        return kernels_of(keys).fused(self.driver, rows, keys, values)

    def scores(self, codec: Any, queries: Array, t0: int, t1: int, s: Array) -> None:
        """Sets s (G, M, t1 - t0) to the scores of queries (G, M, D) with a codec's tokens t0..t1."""
        segment, prepared = Segment(codec, codec, t0, t1), self._prepare(codec, queries)
        self.launch_scores(read_keys(codec), prepared, s, segment, ALL_VISIBLE)

    def _input(self, segment: Segment, q: Array, cap: float | None) -> KVInput:
        keys = read_keys(segment.keys)
        if cap is not None:
            keys = dataclasses.replace(keys, macros=(*keys.macros, ("SCORE_CAP", f"{np.float32(cap):.8e}f")))
        return KVInput(segment, keys, q, read_values(segment.values))

    def _prepare(self, keys: Any, q: Array) -> Queries:
        return kernels_of(keys).queries(self, keys, q)

    def _attend_at_once(self, inputs: list[KVInput], visible: Visible, out: Array) -> None:
        long, short = [seg for seg in inputs if not seg.is_short], [seg for seg in inputs if seg.is_short]
        launches = []
        while long or short:
            main = long.pop(0) if long else short.pop(0)
            launches.append((main, short[:MAX_EXACT]))
            short = short[MAX_EXACT:]
        n_kv_heads, rows, head_dim = out.shape
        softmaxes = self.scratch("attend.softmaxes", (len(launches), n_kv_heads, rows, 2))
        if len(launches) == 1:
            self._launch(*launches[0], visible, out, softmaxes[0])
            return
        outs = self.scratch("attend.outs", (len(launches), *out.shape))
        for (main, exact), launch_out, softmax in zip(launches, outs, softmaxes, strict=True):
            self._launch(main, exact, visible, launch_out, softmax)
        launch = Launch(LAYERS, "merge", (n_kv_heads * rows,), THREADS)
        self.driver.launch(launch, outs, softmaxes, len(launches), head_dim, out)

    def _launch(self, main: KVInput, exact: list[KVInput], visible: Visible, out: Array, softmax: Array) -> None:
        """Sets out (G, M, D) to attention over these parts; softmax (G, M, 2): its maximum and sum of weights."""
        n_kv_heads, rows, head_dim = out.shape
        keys, values = main.keys, main.values
        fused = self._find_fused(main, rows)
        blocks_at_once = fused.blocks_at_once if fused else BLOCKS_AT_ONCE.get(rows, 2)
        rounds = n_rounds(main.segment.first, main.segment.stop, tiles_per_round(rows, keys, values))
        n_tiles = n_rounds(main.segment.first, main.segment.stop, 1)
        # A fused kernel's blocks are quick: those with float16 tokens must not end last.
        fused_tiles = n_tiles // self.n_splits(n_tiles, n_kv_heads, blocks_at_once)
        exact_tiles = max(1, min(EXACT_TILES, fused_tiles // 8)) if fused else 1
        exact_splits = [n_rounds(seg.segment.first, seg.last_stop, exact_tiles) for seg in exact]
        n_exact = sum(exact_splits)
        pair_splits = self.n_splits(rounds, n_kv_heads, blocks_at_once, n_exact if fused else 0)
        pair_splits = min(pair_splits, MAX_SPLITS - n_exact)
        n_splits = pair_splits + n_exact
        program = attend_program(keys, values, rows, bool(exact), fused)
        if fused:
            rotated, queries = out, Queries(main.q, fused.codes, fused.scale)
            values = dataclasses.replace(values, arrays=(*values.arrays, values.rotation.flips), rotation=None)
        else:
            rotated = out if values.rotation is None else self.scratch("attend.rotated", out.shape)
            queries = self._prepare(main.segment.keys, main.q)
        exact_segments = {
            f"exact{i}": self.segment_argument(seg.segment, seg.keys, seg.values, n)
            for i, (seg, n) in enumerate(zip(exact, exact_splits, strict=True), 1)
        }
        arguments = Struct(
            "AttendArgs",
            queries=query_argument(queries),
            exact_queries=main.q,
            pair=self.segment_argument(main.segment, keys, values, pair_splits),
            **exact_segments,
            visible=self.visible_argument(visible, rows),
            split_softmax=self.scratch("attend.split_softmax", (n_kv_heads, n_splits, rows, 2)),
            split_sums=self.scratch("attend.split_sums", (n_kv_heads, n_splits, rows, head_dim)),
            done=self._done(n_kv_heads),
            softmax=softmax,
            out=rotated,
            exact_out=out,
        )
        self.driver.launch(Launch(program, "attend", (n_splits, n_kv_heads), THREADS, early=True), arguments)
        if values.rotation is not None:
            self.rotate_back(values.rotation, rotated, out)

    def segment_argument(self, segment: Segment, keys: Reader, values: Reader, n_splits: int = 0) -> Struct:
        """Returns a segment as the `Segment` of common.cu, whose tokens are in so many splits."""
        stop, position = (counter(self.driver, x) for x in (segment.stop, segment.position))
        stores = {"keys": store_argument(keys), "values": store_argument(values)}
        return Struct("Segment", **stores, first=segment.first, n_splits=n_splits, stop=stop, position=position)

    def visible_argument(self, visible: Visible, rows: int) -> Struct:
        """Returns the positions that ``rows`` queries of each KV head see as the `Visible` of common.cu."""
        lo, hi = (np.tile(x, rows // len(x)) for x in visible)
        limits, delta = self.limits(lo, hi), self.driver.position_delta
        return Struct("Visible", lo=int(lo[0]), hi=int(hi[0]), limits=limits, position_delta=delta)

    def _done(self, n_kv_heads: int) -> Array:
        """Returns counts (n_kv_heads,) of the splits that are done: zeros, which every launch leaves as zeros."""
        if n_kv_heads not in self._done_counts:
            self._done_counts[n_kv_heads] = self.driver.zeros((n_kv_heads,), np.uint32)
        return self._done_counts[n_kv_heads]

    def _attend_through_scores(
        self, inputs: list[KVInput], visible: Visible, out: Array, weights: Array | None
    ) -> None:
        n_kv_heads, rows, _ = out.shape
        queries = [self._prepare(seg.segment.keys, seg.q) for seg in inputs]
        ends = list(itertools.accumulate((seg.columns for seg in inputs), initial=0))
        shape = n_kv_heads, rows, ends[-1]
        buffer = self.scratch("attend.scores", shape) if weights is None else weights
        columns = [buffer[:, :, a:b] for a, b in itertools.pairwise(ends)]
        for seg, q, s in zip(inputs, queries, columns, strict=True):
            self.launch_scores(seg.keys, q, s, seg.segment, visible)
        self.softmax(buffer, np.zeros(rows, np.int64), np.full(rows, shape[2]))
        out.fill(0)
        for seg, p in zip(inputs, columns, strict=True):
            self.launch_values(seg.values, p, seg.segment.first, seg.last_stop, out)

    def softmax(self, s: Array, lo: I64, hi: I64) -> None:
        """Takes the softmax of rows of s (G, M, columns) over columns lo..hi (M,), in place; 0 elsewhere."""
        n_kv_heads, rows, columns = s.shape
        launch = Launch(LAYERS, "softmax", (rows, n_kv_heads), 256 if columns <= 2048 else 1024)
        self.driver.launch(launch, scores_argument(s), columns, self.limits(lo, hi), int(lo[0]), int(hi[0]))

    def launch_scores(self, keys: Reader, queries: Queries, s: Array, segment: Segment, visible: Visible) -> None:
        """Sets s (G, M, columns) to scores with the segment's tokens, -inf where a query does not see one."""
        n_kv_heads, rows, columns = s.shape
        block_rows, t0 = rows_per_block(rows), segment.first
        tiles, grid_z = tiles_per_round(block_rows, keys), -(-rows // block_rows)
        n_splits = self.n_splits(n_rounds(t0, t0 + columns, tiles), n_kv_heads * grid_z)
        launch = Launch(range_program("KEYS", keys, block_rows), "scores", (n_splits, n_kv_heads, grid_z), THREADS)
        positions = segment.positions
        stride = 0 if positions is None else positions.strides[0] // positions.itemsize
        tokens = self.segment_argument(segment, keys, keys), scores_argument(s), columns, positions, stride
        self.driver.launch(launch, query_argument(queries), *tokens, self.visible_argument(visible, rows))

    def launch_values(self, values: Reader, p: Array, t0: int, t1: int, out: Array) -> None:
        """Adds p (G, M, t1 - t0) times values t0..t1, rotated back, to out (G, M, D)."""
        n_kv_heads, rows, _ = p.shape
        block_rows = rows_per_block(rows)
        tiles, grid_z = tiles_per_round(block_rows, values), -(-rows // block_rows)
        n_splits = self.n_splits(n_rounds(t0, t1, tiles), n_kv_heads * grid_z)
        partial = self.scratch("values", (n_kv_heads, n_splits, rows, values.width))
        program = range_program("VALUES", values, block_rows)
        launch = Launch(program, "values", (n_splits, n_kv_heads, grid_z), THREADS)
        self.driver.launch(launch, scores_argument(p), store_argument(values), t0, t1, rows, partial)
        if values.rotation is None:
            self._add_partial(partial, out)
        else:
            rotated = self.scratch("values.rotated", out.shape)
            rotated.fill(0)
            self._add_partial(partial, rotated)
            self.rotate_back(values.rotation, rotated, out)

    def _add_partial(self, partial: Array, out: Array) -> None:
        """Adds the sum over the second axis of partial (G, splits, ...) to out (G, ...)."""
        (n_kv_heads, n_splits), n = partial.shape[:2], out.size
        launch = Launch(LAYERS, "add_partial", (-(-n // 256),), 256)
        self.driver.launch(launch, partial, n_splits, n // n_kv_heads, n, out)

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
        halves: HalfQKV | None = None,
    ) -> None:
        """Splits qkv (n, (H + 2 G) * D) into q (H, n, D), k and v (G, n, D), q and k rotated by position.

        halves: where float16 copies go, too. If queries do, q may be None.
        """
        n_kv_heads, n, head_dim = k.shape
        n_heads = qkv.shape[1] // head_dim - 2 * n_kv_heads
        rope = Struct("Rope", cos=cos, sin=sin, half=cos.shape[1], position_delta=self.driver.position_delta)
        heads = (Struct("Heads", x=x, stride=0 if x is None else x.strides[0] // x.itemsize) for x in (q, k, v))
        norms = Struct("HeadNorms", q=q_norm if q_norm.size else None, k=k_norm if k_norm.size else None, eps=eps)
        copies = Struct("HalfQKV")
        if halves is not None:
            _, capacity, width = halves.k.shape
            fields = halves._asdict() | {"first": counter(self.driver, halves.first)}
            copies = Struct("HalfQKV", **fields, width=width, capacity=capacity)
        launch = Launch(LAYERS, "split_rope", (n, n_heads + 2 * n_kv_heads), THREADS, early=True)
        sizes = n_heads, n_kv_heads, head_dim, float(scale)
        self.driver.launch(launch, qkv, rope, *heads, *sizes, norms, copies)

    def hadamard(self, x: Array, flips: Array, out: Array) -> None:
        """Sets out (A, n, width) to the Walsh-Hadamard rotation of x (A, n, D)."""
        rows, n, d = x.shape
        x, stride = per_head(x)
        self._transform("hadamard", out.shape[2], rows * n, x, n, stride, d, flips, out)

    def hadamard_back(self, x: Array, flips: Array, out: Array) -> None:
        """Adds the inverse rotation of x (A, n, width) to out (A, n, D)."""
        (rows, n, d), stride = out.shape, out.strides[0] // out.itemsize
        self._transform("hadamard_back", x.shape[2], rows * n, contiguous(x), n, stride, d, flips, out)

    def _transform(self, name: str, width: int, rows: int, *arguments: Any) -> None:
        check_width(width)
        launch = Launch(Program(("exact",), (("WIDTH", width),), exact=True), name, (rows,), max(width // 2, 1))
        self.driver.launch(launch, *arguments[:-1], float(np.float32(1 / np.sqrt(width))), arguments[-1])

    def rotate(self, rotation: Any, x: Array) -> Array:
        """Returns x (A, n, head_dim) rotated: (A, n, width)."""
        if rotation.flips is None:
            return self.project(x, rotation.matrix)
        out = self.driver.empty((*x.shape[:2], rotation.width), np.float32)
        self.hadamard(x, rotation.flips, out)
        return out

    def rotate_back(self, rotation: Any, x: Array, out: Array) -> None:
        """Adds the inverse rotation of x (A, n, width) to out (A, n, head_dim)."""
        if rotation.flips is None:
            out += self.project(x, rotation.inverse)
        else:
            self.hadamard_back(x, rotation.flips, out)

    def project(self, x: Array, matrix: Array) -> Array:
        """Returns x (G, n, D) times the transpose of matrix (m, D): (G, n, m)."""
        n_kv_heads, n = x.shape[:2]
        if n > MATVEC_ROWS:
            return x @ matrix.T
        rows, columns = matrix.shape
        w = Matrix(rows, columns, 32, 1, 0, matrix)
        return matvec(self.driver, contiguous(x), w).reshape(n_kv_heads, n, -1)

    def prefill_attention(
        self, q: Array, k: Array, v: Array, earlier: int, window: int | None, out: Array
    ) -> None:
        """Sets out (n, n_heads * head_dim) to the causal attention of scaled queries q (n_heads, n, width).

        All are float16. k and v (n_kv_heads, capacity, width) begin with ``earlier`` + n tokens, whose last n are
        those of the queries. Token t sees max(0, t + 1 - window)..t. Channels from head_dim on are 0.
        """
        n_heads, n, width = q.shape
        n_kv_heads, capacity, _ = k.shape
        program = Program(("prefill_attention",), (("WIDTH", width), ("HEAD_DIM", out.shape[1] // n_heads)))
        launch = Launch(program, "prefill_attention", (-(-n // PREFILL_ROWS), n_heads), THREADS)
        sizes = n, earlier, capacity, n_heads // n_kv_heads, window or 0
        self.driver.launch(launch, q, k, v, *sizes, out)


def attend_program(
    keys: Reader, values: Reader, rows: int, with_exact: bool, fused: Fused | None = None
) -> Program:
    """Returns attend.cu for a pair of codecs; with_exact: beside float16 tokens, fused: by the pair's kernel."""
    pair = (fused.file,) if fused else (keys.file, values.file)
    tiles = 1 if fused else tiles_per_round(rows, keys, values)
    types = ("KEYS", keys.name), ("VALUES", values.name), ("KEY_DIM", keys.width), ("HEAD_DIM", values.width)
    sizes = ("ROWS", rows), ("TILES", tiles), ("MAX_SPLITS", MAX_SPLITS)
    exact = (("EXACT", 1),) if with_exact else ()
    fused_macros = fused.macros if fused else ()
    files = tuple(dict.fromkeys(("rows", *pair, "attend")))
    return Program(files, (*types, *sizes, *exact, *keys.macros, *values.macros, *fused_macros))


def range_program(kind: str, reader: Reader, rows: int) -> Program:
    """Returns ranges.cu for a reader; kind: KEYS or VALUES."""
    sizes = ("HEAD_DIM", reader.width), ("ROWS", rows), ("TILES", tiles_per_round(rows, reader))
    macros: Macros = ((kind, reader.name), ("KEY_DIM", reader.width), *sizes, *reader.macros)
    return Program(tuple(dict.fromkeys(("rows", reader.file, "ranges"))), macros)
