"""New tokens into their stores, also in a recorded step whose tokens come elsewhere when it is replayed."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.counter import Counter, place
from edgekv.kernels.cuda.loops import loops_of
from edgekv.kernels.cuda.program import Array, CannotRecord, Launch, Program
from edgekv.kernels.cuda.rows import ENCODE
from edgekv.kernels.cuda.tiles import THREADS, per_head


class AppendKernels(Backend):
    """New tokens of a pair of codecs, or of one."""

    def encode(self, codec: Any, x: Array, t0: int) -> None:
        store = loops_of(codec).encode
        assert store is not None, codec.kind
        store(self, codec, x, t0)

    def append(self, keys: Any, values: Any, k: Array, v: Array, t0: int) -> None:
        if keys.kind == values.kind == "f16" and k.shape[1] == 1:
            self._append_f16(keys, values, k, v, t0)
            return
        for codec, x in ((keys, k), (values, v)):
            if isinstance(t0, Counter) and not loops_of(codec).placed:
                self._encode_aside(codec, x, t0)
            else:
                codec.encode(x, t0)

    def _append_f16(self, keys: Any, values: Any, k: Array, v: Array, t0: int) -> None:
        """One launch."""
        (k, k_stride), (v, v_stride) = per_head(k), per_head(v)
        key_store, value_store = keys.arrays["half"], values.arrays["half"]
        n_kv_heads, capacity, d = key_store.shape
        launch = Launch(ENCODE, "append_f16", (2, n_kv_heads), THREADS, early=True)
        stores = key_store, capacity, value_store, value_store.shape[1]
        self.driver.launch(launch, k, k_stride, v, v_stride, d, *stores, *place(self.driver, t0))

    def _encode_aside(self, codec: Any, x: Array, t0: Counter) -> None:
        """Packs whole blocks as tokens 0.. of a small store, and copies that to where t0 will be.

        For encoders that can't take a token to a place that moves.
        """
        aside = copy.copy(codec)
        aside.capacity = x.shape[1]
        layouts = aside.layout(), codec.layout()
        aside.arrays = {name: self.driver.zeros(*spec) for name, spec in layouts[0].items()}
        aside.encode(x, 0)
        for name, ((small, dtype), (large, _)) in (
            (name, (spec, layouts[1][name])) for name, spec in layouts[0].items()
        ):
            axis = next((i for i, sizes in enumerate(zip(small, large, strict=True)) if len(set(sizes)) > 1), None)
            if axis is None:
                if codec.capacity != aside.capacity:
                    raise CannotRecord(f"{codec.kind}: where the tokens of {name!r} are")
                axis = 1
            each = int(np.prod(small[axis + 1 :])) * np.dtype(dtype).itemsize  # bytes of a token, or of a block
            tokens = codec.capacity // large[axis]
            for first, last, together in _runs(codec, small):
                outer, n_bytes = (
                    int(np.prod((last - first, *small[1:axis]))) // together,
                    small[axis] * each * together,
                )
                launch = Launch(Program(("move",)), "copy_block", (-(-n_bytes // 256), outer), 256)
                to = codec.arrays[name][first:last], large[axis] * each * together, each * together, tokens
                self.driver.launch(launch, aside.arrays[name][first:last], n_bytes, *to, *place(self.driver, t0))


def _runs(codec: Any, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Rows first..last of an array of which so many lie together in each block: those of a head's planes."""
    if not (hasattr(codec, "first_plane") and len(shape) > 2 and shape[0] == codec.bits.sum()):
        return [(0, shape[0], 1)]
    runs, first = [], 0
    for bits, heads in itertools.groupby(codec.bits.tolist()):
        last = first + bits * len(list(heads))
        runs.append((first, last, bits))
        first = last
    return runs
