"""Keys in planes and interleaved values on a GPU: encoders, readers, and tiled attention over a pair of them.

Tiled attention runs on tensor cores and rotates the queries itself.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from edgekv.codecs.planes import GAUSS_STEP, MAX_FOUR_SUM
from edgekv.kernels.cuda.driver import Array, Driver, Launch, Program, counter
from edgekv.kernels.cuda.kernels import (
    MAX_CHANNELS,
    THREADS,
    TILE,
    CudaCodec,
    CudaKernels,
    Fused,
    Queries,
    Reader,
    check_width,
)

FOLDER = pathlib.Path(__file__).parent
WIDTHS, MAX_ROWS = (64, 128), 4  # channels of a head, and query rows, that tiled.cu takes


def encode_centres(cuda: CudaKernels, x: Array, codes: Array, step: Array, t0: int) -> None:
    """Stores the means of x (G, n, D) from token t0 on and takes them off x."""
    n_kv_heads, n, d = x.shape
    check_width(d)
    launch = Launch(encode_program(), "encode_centres", (n // TILE, n_kv_heads), THREADS)
    cuda.driver.launch(launch, x, d, codes, step, step.shape[1], counter(cuda.driver, t0))


def encode_keys(cuda: CudaKernels, x: Array, planes: Array, scale: Array, t0: int) -> None:
    """Stores x (G, n, D) in planes (G, blocks, bits, 4, D / 8, 16) from token t0 on."""
    n_kv_heads, n, d = x.shape
    bits = planes.shape[2]
    launch = Launch(encode_program(bits), "encode_keys", (n, n_kv_heads), 32)
    store = planes, planes.shape[1], scale, scale.shape[1]
    cuda.driver.launch(launch, x, d, bits, *store, counter(cuda.driver, t0))


def encode_interleaved(cuda: CudaKernels, x: Array, codes: Array, scale: Array, t0: int) -> None:
    """Stores x (G, n, D) in codes (G, blocks, 2 * bits, D, 4) from token t0 on."""
    n_kv_heads, n, d = x.shape
    bits = codes.shape[2] // 2
    levels = cuda.scratch("levels", x.shape, np.uint8)
    launch = Launch(encode_program(bits), "encode_interleaved", (n // TILE, n_kv_heads), THREADS)
    store = codes, codes.shape[1], scale, scale.shape[1]
    cuda.driver.launch(launch, x, d, bits, levels, *store, counter(cuda.driver, t0))


@functools.cache
def encode_program(bits: int = 1) -> Program:
    """Returns encode.cu for codes of some bits in `encode_keys` and `encode_interleaved`."""
    macros = (
        ("MAX_CHANNELS", MAX_CHANNELS),
        ("GAUSS_STEP", str(GAUSS_STEP[bits])),
        ("MAX_FOUR_SUM", MAX_FOUR_SUM),
    )
    return Program(("exact", FOLDER / "encode"), macros, exact=True)


def _read_keys(codec: Any) -> Reader:
    a, bits = codec.arrays, int(codec.bits.max())
    arrays = a["planes"], a["scale"], a["centres"], a["centre_step"], codec.heads
    macros = ("KEY_BITS", bits), ("KEY_HEADS", int(codec.bits.min() < bits))
    return Reader("RowKeys<PlaneRow, 16>", FOLDER / "read", arrays, a["scale"].shape[1], codec.width, macros)


def _rounded(cuda: CudaKernels, codec: Any, q: Array) -> Queries:
    """Returns q (G, M, D) rotated, and then once more rounded to whole numbers: (G, M, 2 * width)."""
    x = cuda.rotate(codec.rotation, q * cuda.constant(codec.query_factors)[:, None])
    out = cuda.driver.empty((*q.shape[:2], 2 * codec.width), np.float32)
    launch = Launch(encode_program(), "round_queries", (x.shape[0] * x.shape[1],), min(THREADS, codec.width))
    cuda.driver.launch(launch, x, codec.width, cuda.constant(codec.key_scale), x.shape[1], out)
    return Queries(out)


def _read_values(codec: Any) -> Reader:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    bits = int(codec.bits.max())
    macros = ("VALUE_BITS", bits), ("VALUE_HEADS", int(codec.bits.min() < bits))
    store = (codes, scale, codec.heads), scale.shape[1], codes.shape[3], macros
    return Reader("RowValues<InterleavedRow, 16>", FOLDER / "read", *store, rotation=codec.rotation)


def _tiled(driver: Driver, rows: int, keys: Any, values: Any) -> Fused | None:
    """Returns tiled.cu where the GPU has integer tensor cores and neither codec pads its heads."""
    fits = values.kind == "interleaved" and keys.width == keys.head_dim == values.head_dim and keys.width in WIDTHS
    if not (driver.has_integer_mma and fits):
        return None
    bits, factor = max(int(keys.bits.max()), int(values.bits.max())), f"{np.float32(1 / np.sqrt(keys.width)):.9g}f"
    blocks = 3 if rows == 1 and bits <= 2 else 2  # of threads on a multiprocessor: decides a thread's registers
    macros = ("TILED", 1), ("BLOCKS_AT_ONCE", blocks), ("HADAMARD_FACTOR", factor), ("MAX_FOUR_SUM", MAX_FOUR_SUM)
    return Fused(FOLDER / "tiled", macros, MAX_ROWS, blocks, keys.query_flips, keys.key_scale)


def _encode_keys(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    codec.encode_by(functools.partial(encode_centres, cuda), functools.partial(encode_keys, cuda), x, t0)


def _encode_values(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    codec.encode_by(functools.partial(encode_interleaved, cuda), x, t0)


KERNELS = {
    "centred_planes": CudaCodec(_read_keys, queries=_rounded, encode=_encode_keys, capturable=True, fused=_tiled),
    "interleaved": CudaCodec(values=_read_values, encode=_encode_values, capturable=True),
}
