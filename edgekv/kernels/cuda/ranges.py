"""The three steps of attention through a buffer: scores of a range of tokens, softmax, weighted sums."""

from __future__ import annotations

from typing import Any

from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.loops import Queries, Reader
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.rope import RotateKernels
from edgekv.kernels.cuda.tiles import THREADS, n_rounds, rows_at_once, strides, tiles_at_once
from edgekv.types import I64

SEES_ALL = 1 << 30


class RangeKernels(RotateKernels):
    """Launches of scores.cu, softmax.cu and values.cu for any codec."""

    def softmax(self, s: Array, lo: I64, hi: I64) -> None:
        n_kv_heads, rows, columns = s.shape
        launch = Launch(Program(("softmax",)), "softmax", (rows, n_kv_heads), 256 if columns <= 2048 else 1024)
        self.driver.launch(launch, s, *strides(s), columns, rows, *self.per_token(lo, hi))

    def launch_scores(
        self,
        keys: Reader,
        queries: Queries,
        t0: int,
        t1: int,
        s: Array,
        segment: Segment | None = None,
        visible: Visible | None = None,
    ) -> None:
        """s (G, M, t1 - t0) = scores with tokens t0..t1, -inf where a query does not see the segment's token."""
        n_kv_heads, rows, _ = s.shape
        at_once = rows_at_once(rows)
        tiles, row_blocks = tiles_at_once(at_once, keys), -(-rows // at_once)
        sizes = ("KEY_DIM", keys.width), ("HEAD_DIM", keys.width), ("ROWS", at_once), ("TILES", tiles)
        program = Program((keys.file, "scores"), (("KEYS", keys.name), *sizes, *keys.macros))
        splits = self.splits(n_rounds(t0, t1, tiles), n_kv_heads * row_blocks, keys.blocks)
        launch = Launch(program, "scores", (splits, n_kv_heads, row_blocks), THREADS)
        places = self._places(segment, visible)
        store = *self.store_arguments(keys), keys.capacity
        self.driver.launch(launch, *self.query_arguments(queries), rows, *store, t0, t1, s, *strides(s), *places)

    def _places(self, segment: Segment | None, visible: Visible | None) -> tuple[Any, ...]:
        """For scores.cu: where the tokens stand and what the queries see; by default all."""
        shift = self.driver.shift
        if segment is None or visible is None:
            return shift, 0, SEES_ALL, self.driver.still, 0, self.driver.still, 1, 0, shift, 0, SEES_ALL, shift
        positions = segment.positions
        stride = 0 if positions is None else positions.strides[0] // positions.itemsize
        ends = *place(self.driver, segment.stop), *place(self.driver, segment.position)
        where = shift if positions is None else positions, stride, *ends
        return *where, len(visible[0]), *self.per_token(*visible), shift

    def launch_values(self, values: Reader, p: Array, t0: int, t1: int, out: Array) -> None:
        """out (G, M, D) += p (G, M, t1 - t0) times tokens t0..t1, rotated back."""
        n_kv_heads, rows, _ = p.shape
        at_once = rows_at_once(rows)
        tiles, row_blocks = tiles_at_once(at_once, values), -(-rows // at_once)
        sizes = ("HEAD_DIM", values.width), ("ROWS", at_once), ("TILES", tiles)
        program = Program((values.file, "values"), (("VALUES", values.name), *sizes, *values.macros))
        splits = self.splits(n_rounds(t0, t1, tiles), n_kv_heads * row_blocks, values.blocks)
        partial = self.scratch("values", (n_kv_heads, splits, rows, values.width))
        launch = Launch(program, "values", (splits, n_kv_heads, row_blocks), THREADS)
        store = *self.store_arguments(values), values.capacity
        self.driver.launch(launch, p, *strides(p), *store, t0, t1, rows, partial)
        if values.rotation is None:
            self.add_partial(partial, out)
        else:
            rotated = self.scratch("values.rotated", out.shape)
            rotated.fill(0)
            self.add_partial(partial, rotated)
            self.rotate_back(values.rotation, rotated, out)

    def query_arguments(self, queries: Queries) -> tuple[Array, Array, Array]:
        """What kernels are given of the queries; the device's zeros stand for what there is not."""
        nothing = self.driver.shift
        others = (nothing if x is None else x for x in (queries.codes, queries.scale))
        return queries.x, *others

    def store_arguments(self, reader: Reader, n: int = 6) -> tuple[Array, ...]:
        """A reader's arrays, filled up to n arguments."""
        return (*reader.arrays, *[self.driver.shift] * (n - len(reader.arrays)))
