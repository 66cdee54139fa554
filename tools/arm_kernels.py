"""The decode kernels whose machine code tools/arm_asm.py reads, and a call that compiles each.

The loops of a codec are compiled by themselves; where arrays are needed they are zeros, since what is compiled
depends on their types alone.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from edgekv.kernels import numba_kernels
from edgekv.kernels.cpu import gather, interleaved_values, ints, planes, rows
from edgekv.kernels.cpu.loops import Loop
from edgekv.kernels.cpu.papers import fier, int4, kivi, signs
from edgekv.kernels.cpu.sparse_attention import CHOSEN


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One inner loop to be found and counted.

    function: that holds it, module.name under `edgekv.kernels.cpu`, or the name of an emitted one. call: compiles
    it. emitted: gives the machine code that the emitted function is in. work: names in WORK, of which the loop has
    most. needed: so many multiplications, or bits, for one token of 128 channels and one query
    row. outer: tokens that one pass of each loop around it does, as far as they are counted.
    """

    function: str
    call: Callable[[], None]
    work: tuple[str, ...]
    needed: int
    outer: tuple[float, ...] = ()
    rank: int = 0  # among the loops with work, by how much
    parts: int = 0  # codes in a byte, where a function is compiled for several numbers of them
    emitted: Callable[[], str] | None = None


DOT = ("udot.4s", "sdot.4s", "umull.8h", "umull2.8h", "smull.8h", "smull2.8h")
FLOAT = ("fmla.4s", "fmls.4s", "fmul.4s")
COUNT = ("cnt.16b",)
TESTS, SHIFTS = ("cmtst.4s", "cmeq.4s"), ("ushl.16b",)


def compiled(loop: Loop | None) -> Callable[[], None]:
    """A loop is compiled when its address is asked for."""
    assert loop is not None

    def call() -> None:
        assert loop.address

    return call


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def nothing() -> None:
    """It is compiled already."""


def emitted(
    loop: Loop | None, function: str, work: tuple[str, ...], needed: int, outer: tuple[float, ...] = ()
) -> Kernel:
    """The largest loop of a function that `edgekv.kernels.cpu.emit` writes."""
    assert loop is not None
    return Kernel(function, nothing, work, needed, emitted=loop.assembly)


def weigh_assembly() -> str:
    """The softmax of a block has no loop of its own: attention's walk calls it."""
    weigh = importlib.import_module("edgekv.kernels.cpu.softmax").weigh
    caller = numba.njit("int64(int64, int64, int64, int64, int64)")(lambda *args: weigh(*args))
    (assembly,) = caller.inspect_asm().values()
    return str(assembly)


k: Any = numba_kernels()
INTS = ints.LOOPS


def split_rope() -> None:
    none, angles = f32(0), f32(1, 64)
    q, key, value = f32(1, 1, 128), f32(1, 1, 128), f32(1, 1, 128)
    k.split_rope(f32(1, 384), angles, angles, q, key, value, 1.0, none, none, 1e-5)


KERNELS = {
    "scores f16": emitted(rows.LOOPS["f16"].score, "score_rows_1", FLOAT, 128),
    "scores f16, 4 rows": emitted(rows.LOOPS["f16"].score, "score_rows_4", FLOAT, 128),
    "values f16": emitted(rows.LOOPS["f16"].add, "add_rows_1", FLOAT, 128),
    "values f16, 4 rows": emitted(rows.LOOPS["f16"].add, "add_rows_4", FLOAT, 128),
    "scores 8-bit": Kernel("codes.dot_row", compiled(INTS["symmetric_keys"].score), FLOAT, 128, (16,), parts=1),
    "values 8-bit": Kernel("codes.add_row", compiled(INTS["symmetric_values"].add), FLOAT, 128, parts=1),
    "scores 4-bit": Kernel("codes.dot_row", nothing, FLOAT, 128, (16,), parts=2),
    "values 4-bit": Kernel("codes.add_row", nothing, FLOAT, 128, parts=2),
    "kivi scores": Kernel("codes.dot_row", compiled(kivi.LOOPS["kivi_keys"].score), FLOAT, 128, (16,), parts=4),
    "kivi values": Kernel("codes.add_row", compiled(kivi.LOOPS["kivi_values"].add), FLOAT, 128, parts=4),
    "h1b scores": Kernel("papers.signs._score_block", compiled(signs.LOOPS["signs"].score), COUNT, 256, (32,)),
    "h1b values": emitted(int4.LOOPS["int4"].add, "add_nibbles", DOT, 2 * 128),
    "onebit scores": Kernel("planes._score_block", compiled(planes.CENTRED.score), COUNT, 5 * 128, (32 / 5, 32)),
    "onebit centres": Kernel("centres.centre_scores", nothing, DOT, 20),
    "onebit values": emitted(interleaved_values.LOOPS["interleaved"].add, "add_columns_2_1", DOT, 128),
    "onebit values, 2 rows": emitted(interleaved_values.LOOPS["interleaved"].add, "add_columns_2_2", DOT, 128),
    "onebit values, 4 rows": emitted(interleaved_values.LOOPS["interleaved"].add, "add_columns_2_4", DOT, 128),
    "bitplane key unpacked": Kernel("refine.estimate", compiled(gather.LOOPS["plane_values"].again), SHIFTS, 512),
    "bitplane key": Kernel("refine.estimate", nothing, DOT, 512, (1, 1)),
    "bitplane value, 4 planes": Kernel("refine.add_planes", nothing, TESTS, 512),
    "bitplane value, 2 planes": Kernel("refine.add_planes", nothing, TESTS, 256, rank=1),
    "fier scores": Kernel("papers.fier._score_word", compiled(fier.LOOPS["sign_index"].score), TESTS, 128, (16,)),
    "fier key": Kernel("sparse_attention._score_row", compiled(CHOSEN["f16"].score), FLOAT, 128, (1,)),
    "fier value": Kernel("sparse_attention._add_tokens", compiled(CHOSEN["f16"].add), FLOAT, 128),
    "softmax": Kernel("weigh", nothing, ("shl.4s",), 1, emitted=weigh_assembly),
    "rope": Kernel("rope._rotate", split_rope, FLOAT, 256),
}
