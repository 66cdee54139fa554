"""A model's weights in the device's memory, read from its store once."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from edgekv.kernels.cuda.program import Array, Driver, Launch, Program
from edgekv.linear.store import WeightStore
from edgekv.models.architecture import Architecture
from edgekv.types import F32, TaskProgress

Ids = npt.NDArray[np.int64]
KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # KIND_... of layers.cu
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # of activations.cu
LAYERS = Program(("activations", "layers"))
NORM_THREADS = 512
MOST_BLOCKS = 65535  # in a grid's second direction
LOADING = "loading to the GPU"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer: ``data`` as the store has it, ``scales`` (rows, blocks) if quantized, ``bias`` (rows,).

    shift: (rows, blocks), by which each input of a block is multiplied too, where blocks have zero points or
    offsets.
    """

    rows: int
    columns: int
    bits: int
    block: int
    blocks: int
    data: Array
    scales: Array | None
    bias: Array | None
    shift: Array | None = None


class DeviceWeights:
    """Everything that decoding reads; `rows` looks embeddings up on the device."""

    def __init__(self, store: WeightStore, driver: Driver, progress: TaskProgress | None) -> None:
        self.arch: Architecture = store.arch
        self.nbytes, self.token_bytes = store.nbytes, store.token_bytes
        self.driver, self._store = driver, store
        self.linears: dict[str, Matrix] = {}
        self.vectors: dict[str, Array] = {}
        self.tables: dict[str, tuple[Array, int]] = {}
        names = store.arch.linears()
        for done, (name, linear) in enumerate(names.items(), 1):
            bias, form = store.bias(name), store.form.of(name)
            parts = ("weight",) if form.bits >= 16 else ("codes", "scales")
            data, *scales = (driver.upload(np.ascontiguousarray(store.raw(f"{name}.{part}"))) for part in parts)
            blocks = scales[0].shape[1] if scales else 0
            uploaded = None if bias is None else driver.upload(bias)
            shape = linear.rows, linear.columns, form.bits, form.block or 1, blocks
            shift = store.shift(name)
            if form.zeros and shift is not None:  # in place of the zero points
                more = shift.nbytes - store.raw(f"{name}.zeros").nbytes
                self.nbytes, self.token_bytes = self.nbytes + more, self.token_bytes + more
            shift = None if shift is None else driver.upload(np.ascontiguousarray(shift))
            self.linears[name] = Matrix(*shape, data, scales[0] if scales else None, uploaded, shift)
            if progress:
                progress(LOADING, done, len(names))
        for name in store.arch.vectors():
            self.vectors[name] = driver.upload(store.vector(name))
        for name in store.arch.tables():
            stored = store.raw(name)
            bits = stored if stored.dtype.itemsize == 4 else stored.view(np.uint16)
            self.tables[name] = driver.upload(np.ascontiguousarray(bits)), KINDS[store.table_dtypes[name]]

    def matrix(self, name: str) -> F32:
        """(rows, columns) float32 of the host, dequantized."""
        return self._store.matrix(name)

    def bias(self, name: str) -> F32 | None:
        """(rows,) float32 of the host; None: the linear has none."""
        return self._store.bias(name)

    def vector(self, name: str) -> F32:
        """(size,) float32 of the host."""
        return self._store.vector(name)

    def array(self, name: str) -> F32:
        """float32 of the host."""
        return self._store.array(name)

    def rows(self, table: str, ids: Ids) -> Array:
        """(n, hidden) float32 of the device."""
        return self.embed(table, self.driver.upload(ids.astype(np.int32)), None, 0)

    def embed(self, table: str, ids: Array, positions: str | None, start: int) -> Array:
        """Rows ``ids`` (n,) int32 of a table, plus rows start.. (and the shift) of another."""
        data, kind = self.tables[table]
        n, size = ids.shape[0], data.shape[1]
        other = self.tables[positions] if positions else (self.driver.shift, 0)
        x = self.driver.empty((n, size), np.float32)
        launch = Launch(LAYERS, "embed", (n,), 256)
        self.driver.launch(
            launch, data, kind, ids, *other, int(positions is not None), start, self.driver.shift, size, x
        )
        return x
