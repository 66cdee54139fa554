"""The decode kernels whose machine code tools/arm_asm.py reads, and a call that compiles each.

All arrays are zeros: what is compiled depends on their types alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kernels import numba_kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One inner loop to be found and counted.

    function: that holds it, module.name under `edgekv.kernels.cpu`. call: compiles it. work: names in WORK, of
    which the loop has most. needed: so many multiplications, or bits, for one token of 128 channels and one query
    row. outer: tokens that one pass of each loop around it does, as far as they are counted.
    """

    function: str
    call: Callable[[], None]
    work: tuple[str, ...]
    needed: int
    outer: tuple[float, ...] = ()
    rank: int = 0  # among the loops with work, by how much


DOT = ("udot.4s", "sdot.4s", "umull.8h", "umull2.8h", "smull.8h", "smull2.8h")
FLOAT = ("fmla.4s", "fmls.4s", "fmul.4s")
COUNT = ("cnt.16b",)
TESTS, SHIFTS = ("cmtst.4s", "cmeq.4s"), ("ushl.16b",)


def zeros(kind: str, *shape: int) -> Any:
    return np.zeros(shape, kind)


k: Any = numba_kernels()
f32, u8, u16, u32, u64, i32 = (functools.partial(zeros, kind) for kind in ("f4", "u1", "u2", "u4", "u8", "i4"))
q, s, p, out = f32(1, 1, 128), f32(1, 1, 64), f32(1, 1, 64), f32(1, 1, 128)
one = np.ones(1, np.int64)
planes_of_keys = u64(1, 1, 2, 64), u16(1, 64)
centres = u8(1, 1, 5, 64), u16(1, 1, 5)


def scores_f16() -> None:
    k.scores_f16(q, u16(1, 64, 128), 0, 64, s, 0)


def values_f16() -> None:
    k.values_f16(p, 0, u16(1, 64, 128), 0, 64, out)


def attend_planes() -> None:
    values = u64(1, 64, 2, 2), u64(1, 64, 2, 2), u16(1, 64)
    keys = (*planes_of_keys, u64(1, 64, 3, 2))
    results = out, f32(1, 1, 1), f32(1, 1), np.zeros((1, 2), np.int64)
    k.attend_planes(p, 0, 0, 64, q, q, f32(1), *keys, *values, 1e-3, 1, *results)


def scores_sym(n_bytes: int) -> Callable[[], None]:
    return lambda: k.scores_sym(q, u8(1, 2, n_bytes, 32), u16(1, 64), 0, 64, s, 0)


def values_sym(n_bytes: int) -> Callable[[], None]:
    return lambda: k.values_sym(p, 0, u8(1, 64, n_bytes, 1), u16(1, 64), 0, 64, out)


def scores_kivi() -> None:
    k.scores_kivi(q, u8(1, 2, 32, 32), u16(1, 2, 128), u16(1, 2, 128), 0, 64, s, 0)


def values_kivi() -> None:
    k.values_kivi(p, 0, u8(1, 64, 32), u16(1, 4, 64), u16(1, 4, 64), 0, 64, out)


def scores_signs() -> None:
    k.scores_signs(u64(1, 1, 4), u64(1, 1, 4, 64), 0, 64, f32(1, 1), s, 0)


def values_int4() -> None:
    k.values_int4(p, 0, u8(1, 64, 64), u16(1, 64), u8(1, 64), 0, 64, out)


def scores_centred() -> None:
    k.scores_centred(q, u64(1, 1, 5, 2), f32(1, 1), *planes_of_keys, *centres, 0, 64, s, 0)


def values_quads() -> None:
    k.values_quads(p, 0, u8(1, 1, 4, 128, 4), u16(1, 64), 0, 64, out)


def scores_fier() -> None:
    k.scores_fier(q, u32(1, 2, 128), u16(1, 2, 2, 128), 32, 0, 2, s, 0)


def scores_at() -> None:
    k.scores_f16_at(q, u16(1, 64, 128), i32(1, 1, 1), one, s)


def values_at() -> None:
    k.values_f16_at(p, u16(1, 64, 128), i32(1, 1, 1), one, out)


def softmax() -> None:
    k.softmax(s, 0 * one, 64 * one)


def nothing() -> None:
    """It is compiled already."""


def split_rope() -> None:
    none, angles = f32(0), f32(1, 64)
    k.split_rope(f32(1, 384), angles, angles, q, f32(1, 1, 128), f32(1, 1, 128), 1.0, none, none, 1e-5)


KERNELS = {
    "scores f16": Kernel("dense._score_row", scores_f16, FLOAT, 128, (1,)),
    "scores f16, 4 rows": Kernel("dense._score_four_rows", nothing, FLOAT, 128, (4,)),
    "values f16": Kernel("dense._add_block", values_f16, FLOAT, 128),
    "scores 8-bit": Kernel("codes.dot_row", scores_sym(128), FLOAT, 128, (16,)),
    "values 8-bit": Kernel("codes.add_row", values_sym(128), FLOAT, 128),
    "scores 4-bit": Kernel("codes.dot_row", scores_sym(64), FLOAT, 128, (16,)),
    "values 4-bit": Kernel("codes.add_row", values_sym(64), FLOAT, 128),
    "kivi scores": Kernel("codes.dot_row", scores_kivi, FLOAT, 128, (16,)),
    "kivi values": Kernel("codes.add_row", values_kivi, FLOAT, 128),
    "h1b scores": Kernel("signs._score_block", scores_signs, COUNT, 256, (32,)),
    "h1b values": Kernel("int4._add_row", values_int4, FLOAT, 128),
    "onebit scores": Kernel("planes._score_block", scores_centred, COUNT, 5 * 128, (32 / 5, 32)),
    "onebit centres": Kernel("planes._scores_items", nothing, DOT, 20),
    "onebit values": Kernel("quads._add_tile", values_quads, DOT, 128, (4,)),
    "onebit values, 2 rows": Kernel("quads._add_two_tiles", nothing, DOT, 128, (8,)),
    "bitplane key unpacked": Kernel("refine.estimate", attend_planes, SHIFTS, 512),
    "bitplane key": Kernel("refine.estimate", nothing, DOT, 512, (1, 1)),
    "bitplane value, 4 planes": Kernel("refine.add_planes", nothing, TESTS, 512),
    "bitplane value, 2 planes": Kernel("refine.add_planes", nothing, TESTS, 256, rank=1),
    "fier scores": Kernel("fier._score_word", scores_fier, TESTS, 128, (16,)),
    "fier key": Kernel("retrieval._score_row", scores_at, FLOAT, 128, (1,)),
    "fier value": Kernel("retrieval._add_tokens", values_at, FLOAT, 128),
    "softmax": Kernel("softmax._softmax_row", softmax, ("fcvtzs.4s",), 1),
    "rope": Kernel("rope._rotate", split_rope, FLOAT, 256),
}
