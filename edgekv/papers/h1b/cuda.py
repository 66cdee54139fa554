"""H1B-KV's sign sketches on a GPU: one bit per element of a projection, of keys and of queries."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from edgekv.kernels.cuda.driver import Array, Launch, Program, counter
from edgekv.kernels.cuda.kernels import THREADS, CudaCodec, CudaKernels, Queries, Reader, per_head

FOLDER = pathlib.Path(__file__).parent
ENCODE = Program((FOLDER / "encode",))
ENCODE_TOKENS = 512  # projected at a time: bounds the projected keys, bits / head_dim times x


def pack_signs(cuda: CudaKernels, x: Array, codes: Array, t0: int) -> None:
    """Packs the signs of x (G, n, bits) into codes (G, blocks, words, tokens of a block) from token t0 on."""
    n_kv_heads, n, bits = x.shape
    x, stride = per_head(x)
    launch = Launch(ENCODE, "pack_signs", (n, n_kv_heads), min(THREADS, bits))
    store = codes, codes.shape[1], codes.shape[3]
    cuda.driver.launch(launch, x, stride, bits, *store, counter(cuda.driver, t0))


def pack_sign_rows(cuda: CudaKernels, x: Array) -> Array:
    """Returns the signs of x (G, n, bits) as (G, n, bits / 64) words."""
    words = cuda.driver.empty((*x.shape[:2], x.shape[2] // 64, 1), np.uint64)
    pack_signs(cuda, x, words, 0)
    return words[..., 0]


def _encode(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    for a in range(0, x.shape[1], ENCODE_TOKENS):
        projected = cuda.project(codec.centred(x[:, a : a + ENCODE_TOKENS]), codec.projection)
        pack_signs(cuda, projected, codec.arrays["signs"], t0 + a)


def _read(codec: Any) -> Reader:
    signs = codec.arrays["signs"]
    _, blocks, words, tile = signs.shape
    return Reader("SignKeys", FOLDER / "keys", (signs,), blocks * tile, 64 * words, tiles=4)


def _sketches(cuda: CudaKernels, codec: Any, q: Array) -> Queries:
    """Returns the queries' signs, with scales (equations 3 and 5): row r * n + j has head r's temperature."""
    codes = pack_sign_rows(cuda, cuda.project(q, codec.projection))
    scale = np.repeat(1 / (codec.bits * codec.tau), q.shape[1] // codec.tau.shape[1], axis=1)
    return Queries(codes, codes, cuda.constant(scale))


KERNELS = {"signs": CudaCodec(_read, queries=_sketches, encode=_encode, capturable=True)}
