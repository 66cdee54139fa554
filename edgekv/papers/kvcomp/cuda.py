"""KVComp's Huffman codes on a GPU: encoded in blocks of tokens, and read as rows."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

from edgekv.kernels.arrays import contiguous
from edgekv.kernels.cuda.driver import Array, Launch, Program
from edgekv.kernels.cuda.kernels import CudaCodec, CudaKernels, Reader
from edgekv.papers.kvcomp.reference import TABLE_BITS

FOLDER = pathlib.Path(__file__).parent
ENCODE = Program((FOLDER / "encode",), exact=True)
PACK_THREADS = 256  # tokens of a block at most


def huffman_pack(
    cuda: CudaKernels,
    codes: Array,
    words: Array,
    lengths: Array,
    plain: Array,
    offsets: Array,
    b0: int,
    block: int,
    pool: Array,
) -> None:
    """Writes codes (G, n, D) as bit strings, as `edgekv.papers.kvcomp.reference.huffman_pack` does."""
    n_kv_heads, n, d = codes.shape
    launch = Launch(ENCODE, "huffman_pack", (n // block, n_kv_heads), PACK_THREADS)
    book = words, lengths, words.shape[1]
    cuda.driver.launch(launch, codes, d, *book, contiguous(plain), offsets, offsets.shape[1], b0, block, pool)


def _encode(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    codec.encode_by(functools.partial(huffman_pack, cuda), x, t0)


def _read(name: str) -> Callable[[Any], Reader]:
    def read(codec: Any) -> Reader:
        pool, offsets, bits, table, _, plain_bits, low, step = codec.store()
        block = bits.shape[1] // offsets.shape[1]
        macros = ("CODE_BLOCK", block), ("PLAIN_BITS", plain_bits), ("TABLE_BITS", TABLE_BITS)
        arrays = pool, offsets, bits, table, low, step
        return Reader(name, FOLDER / "read", arrays, bits.shape[1], codec.head_dim, macros, in_one_launch=False)

    return read


KERNELS = {
    "huffman_keys": CudaCodec(_read("RowKeys<HuffmanRow<false>>"), encode=_encode),
    "huffman_values": CudaCodec(values=_read("RowValues<HuffmanRow<true>>"), encode=_encode),
}
