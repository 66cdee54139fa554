"""Compares how blocks of GGUF files are decoded with ggml's own dequantization, bit for bit.

    python tools/bench/ggml_blocks.py BUILD/bin/libggml-base.so [--rows 4000]

Blocks are random bytes; of numbers that are not finite only that is compared. `read` is the tensor as it is read,
`stored` what products read of it: compiled decoding, or codes, scales and offsets. Exit 1: weights differ.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import tempfile

import gguf
import numpy as np

from edgekv.checkpoint.gguf import KEPT, NEAREST, UNPACKED, GgufTensor
from edgekv.checkpoint.tensors import MappedFile
from edgekv.types import F32
from edgekv.weights.formats import FORMATS
from edgekv.weights.integers import pack_numbers

COLUMNS = 512


class Traits(ctypes.Structure):  # struct ggml_type_traits of ggml.h: sizes, then the function
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("name", "block", "interleave", "block_bytes", "is_quantized")),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def stored(tensor: GgufTensor, n: int) -> F32:
    """Returns the weights of what a store holds of the tensor's n rows."""
    form = FORMATS[str(tensor.exact_format)]
    if form.kept:
        return form.dequantize({"blocks": tensor.raw_rows(0, n)}, COLUMNS)
    codes, scales, offsets = tensor.blocks(0, n)
    arrays = {"codes": pack_numbers(codes, form.bits), "scales": scales, "offsets": offsets}
    return form.dequantize({part: array for part, array in arrays.items() if array is not None}, COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--rows", type=int, default=4000, help=f"of {COLUMNS} weights of each type")
    arguments, rng, wrong = parser.parse_args(), np.random.default_rng(0), 0
    find, shape = ctypes.CDLL(arguments.library).ggml_get_type_traits, (arguments.rows, COLUMNS)
    find.restype = ctypes.POINTER(Traits)
    for kind in (*UNPACKED, *NEAREST, *KEPT):
        number, theirs = gguf.GGMLQuantizationType[kind], np.empty(shape, np.float32)
        block, size = gguf.GGML_QUANT_SIZES[number]
        raw = rng.integers(0, 256, (len(theirs), COLUMNS // block * size), np.uint8)
        find(int(number)).contents.to_float(raw.ctypes.data, theirs.ctypes.data, theirs.size)
        with tempfile.NamedTemporaryFile() as file, np.errstate(all="ignore"):
            entry = dict.fromkeys(("table", "transposed", "interleaved_heads", "offset", "start"), 0)
            entry |= {"kind": kind, "shape": shape, "rows": len(raw), "nbytes": raw.nbytes}
            raw.tofile(file.name)
            tensor = GgufTensor(MappedFile(pathlib.Path(file.name)), kind, entry)
            ways = [tensor.read()] + ([stored(tensor, len(raw))] if tensor.exact_format else [])
        finite = np.isfinite(theirs)
        for way, ours in zip(("read", "stored"), ways, strict=False):
            same = np.where(finite, ours.view(np.uint32) == theirs.view(np.uint32), ~np.isfinite(ours))
            by = np.abs(ours[finite] - theirs[finite]).max() / np.abs(theirs[finite]).max()
            counts = f"{(~same).sum():>9} of {same.size} differ, of which {finite.sum()} are finite"
            print(f"{kind:<8}{way:<8}{counts}, by {by:.1e} of the largest at most")
            wrong += bool((~same).any())
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
