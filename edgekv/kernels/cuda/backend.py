"""What all kernel families share: scores, weighted sums and whole attention for any pair of codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels.cuda.codec import (
    I64,
    MOST_ROWS,
    THREADS,
    Codec,
    Queries,
    Scores,
    Span,
    is_exact,
    n_rounds,
    rows_at_once,
    strides,
    tiles_at_once,
)
from edgekv.kernels.cuda.program import Array, Driver, Program

MOST_SHARES = 128  # blocks that share the tokens of a KV head
ATTEND_BLOCKS = {1: 4}  # of attend.cu that a multiprocessor holds, by queries; else 2
MOST_CONSTANTS = 4096


class Backend:
    """The launches behind `edgekv.kernels.contract`; the families derive from it."""

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
        at_once = rows_at_once(rows)
        program = Program(
            (keys.file, "scores"),
            (
                ("KEYS", keys.kind),
                ("KEY_DIM", keys.width),
                ("HEAD_DIM", keys.width),
                ("ROWS", at_once),
                ("TILES", tiles_at_once(at_once, keys)),
                *keys.macros,
            ),
        )
        row_blocks = -(-rows // at_once)
        rounds = n_rounds(t0, t1, tiles_at_once(at_once, keys))
        self.driver.launch(
            *(
                program,
                "scores",
                (self._splits(rounds, groups * row_blocks, keys.blocks), groups, row_blocks),
                THREADS,
            ),
            *(*self._queries(queries), rows, *self._store(keys), t0, t1),
            *(s, *strides(s), s0),
        )

    def _launch_values(self, p: Array, s0: int, values: Codec, t0: int, t1: int, out: Array) -> None:
        groups, rows, _ = p.shape
        at_once = rows_at_once(rows)
        program = Program(
            (values.file, "values"),
            (
                ("VALUES", values.kind),
                ("HEAD_DIM", values.width),
                ("ROWS", at_once),
                ("TILES", tiles_at_once(at_once, values)),
                *values.macros,
            ),
        )
        row_blocks = -(-rows // at_once)
        rounds = n_rounds(t0, t1, tiles_at_once(at_once, values))
        splits = self._splits(rounds, groups * row_blocks, values.blocks)
        partial = self.scratch("values", (groups, splits, rows, values.width))
        self.driver.launch(
            *(program, "values", (splits, groups, row_blocks), THREADS),
            *(p, *strides(p), s0, *self._store(values), t0, t1, rows, partial),
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
            *(
                Program(("softmax",)),
                "softmax",
                (rows, groups),
                256 if columns <= 2048 else 1024,
                s,
                *strides(s),
                columns,
                rows,
            ),
            *(int(many), ends, int(lo[0]), int(hi[0]), self.driver.shift),
        )

    def _attend(self, s: Scores) -> None:
        """One launch if there is at most one store that is not of exact (f16) tokens, and two of those."""
        spans = sorted(s.spans, key=lambda span: is_exact(span))
        main, exact = spans[0], spans[1:]
        lo, hi = s.visible or (np.zeros(1, np.int64), np.zeros(1, np.int64))
        uniform = (lo == lo[0]).all() and (hi == hi[0]).all()
        fits = len(exact) <= 2 and s.shape[1] <= MOST_ROWS and len({id(span.out) for span in exact}) <= 1
        joined = all(map(is_exact, exact)) and main.keys.joins and main.values is not None and main.values.joins
        if not (uniform and fits and joined):
            self.probabilities(s)
            return
        groups, rows, _ = s.shape
        assert main.values is not None
        rounds = n_rounds(main.t0, main.t1, tiles_at_once(rows, main.keys, main.values))
        exact_parts = [n_rounds(span.t0, span.t1, 1) for span in exact]
        parts = [
            min(self._splits(rounds, groups, ATTEND_BLOCKS.get(rows, 2)), MOST_SHARES - sum(exact_parts)),
            *exact_parts,
        ]
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

    def _splits(self, rounds: int, others: int, blocks: int = 8) -> int:
        """Into how many parts to cut a range of rounds of which there are `others`.

        All of them run at once where a multiprocessor holds `blocks`: a few more would take as long again.
        """
        return max(1, min(rounds, self.driver.multiprocessors * blocks // others, MOST_SHARES))

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
            *(("ROWS", rows), ("TILES", tiles_at_once(rows, keys, values)), ("MOST_SHARES", MOST_SHARES)),
            *([("EXACT", 1)] if with_exact else []),
            *(*keys.macros, *values.macros),
        )
    )
    return Program(tuple(files), tuple(macros.items()))
