"""The decode kernels whose machine code tools/arm_asm.py reads, in what tools/arm_compile.py has compiled."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One inner loop to be found and counted.

    function: that holds it, module.name under `edgekv.kernels.cpu`, or the name of a function that
    `edgekv.kernels.cpu.emit` writes into ``loop``, the name of a compiled loop. work: names in WORK, of which the
    loop has most. needed: so many multiplications, or bits, for one token of 128 channels and one query row.
    outer: tokens, times rows, that one pass of each loop around it does, as far as they are counted.
    """

    function: str
    work: tuple[str, ...]
    needed: int
    outer: tuple[float, ...] = ()
    rank: int = 0  # among the loops with work, by how much
    parts: int = 0  # codes in a byte, where a function is compiled for several numbers of them
    loop: str = ""
    straight: bool = False  # a function without a loop: all of it is counted


DOT = ("udot.4s", "sdot.4s", "umull.8h", "umull2.8h", "smull.8h", "smull2.8h")
FLOAT = ("fmla.4s", "fmls.4s", "fmul.4s")
COUNT = ("cnt.16b",)
TABLE = ("tbl.16b",)
HALF = ("fcvtl.4s", "fcvtl2.4s")
TESTS, SHIFTS = ("cmtst.4s", "cmeq.4s"), ("ushl.16b",)
BITS = (1, 2, 3, 4)
F16_SCORE, F16_ADD, COLUMNS, SCAN = "f16.score", "f16.add", "interleaved.add", "centred_planes.score"

KERNELS = {
    "scores f16": Kernel("score_rows_1", FLOAT, 128, (4,), loop=F16_SCORE),
    "scores f16, 4 rows": Kernel("score_rows_4", FLOAT, 128, (16,), loop=F16_SCORE),
    "values f16": Kernel("add_rows_1", FLOAT, 128, loop=F16_ADD),
    "values f16, 4 rows": Kernel("add_rows_4", FLOAT, 128, loop=F16_ADD),
    "scores 8-bit": Kernel("codes.dot_row", FLOAT, 128, (16,), parts=1),
    "scores 8-bit, 4 rows": Kernel("codes.dot_four_rows", FLOAT, 128, parts=1),
    "values 8-bit": Kernel("codes.add_row", FLOAT, 128, parts=1),
    "values 8-bit, 4 rows": Kernel("codes.add_four_rows", FLOAT, 128, parts=1),
    "scores 4-bit": Kernel("codes.dot_row", FLOAT, 128, (16,), parts=2),
    "scores 4-bit, 4 rows": Kernel("codes.dot_four_rows", FLOAT, 128, parts=2),
    "values 4-bit": Kernel("codes.add_row", FLOAT, 128, parts=2),
    "values 4-bit, 4 rows": Kernel("codes.add_four_rows", FLOAT, 128, parts=2),
    "kivi scores": Kernel("codes.dot_row", FLOAT, 128, (16,), parts=4),
    "kivi scores, 4 rows": Kernel("codes.dot_four_rows", FLOAT, 128, parts=4),
    "kivi values": Kernel("codes.add_row", FLOAT, 128, parts=4),
    "kivi values, 4 rows": Kernel("codes.add_four_rows", FLOAT, 128, parts=4),
    "h1b scores": Kernel("papers.signs._score_block", COUNT, 256, (32,)),
    "h1b values": Kernel("add_nibbles", DOT, 2 * 128, loop="int4.add"),
    **{
        f"{bits}-bit scan" + ("" if rows == 1 else f", {rows} rows"): Kernel(
            f"score_planes_{rows}", TABLE, 128 * bits, (outer[0] / bits, *outer[1:]), loop=SCAN
        )
        for bits in BITS
        for rows, outer in {1: (64, 64, 64), 2: (128, 128, 128), 4: (128, 128, 256, 256)}.items()
    },
    "centres": Kernel("score_planes_1", DOT, 20, (64,), loop=SCAN),
    "centres, 2 rows": Kernel("score_planes_2", DOT, 20, (128,), loop=SCAN),
    "weights in bytes": Kernel("round_weights_1", HALF, 1, loop=COLUMNS, straight=True),
    **{
        f"{bits}-bit values" + ("" if rows == 1 else f", {rows} rows"): Kernel(
            f"add_columns_{bits}_{rows}",
            DOT,
            256 if bits == 3 else 128,
            (channels * rows * 256 / 128,),
            loop=COLUMNS,
        )
        for bits in BITS
        for rows, channels in {1: 8, 2: 8, 4: 4}.items()  # of 256 tokens in one pass of the outer loop
    },
    "bitplane key unpacked": Kernel("refine.estimate", SHIFTS, 512),
    "bitplane key": Kernel("refine.estimate", DOT, 512, (1, 1)),
    "bitplane value, 4 planes": Kernel("refine.add_planes", TESTS, 512),
    "bitplane value, 2 planes": Kernel("refine.add_planes", TESTS, 256, rank=1),
    "fier scores": Kernel("papers.fier._score_word", TESTS, 128, (16,)),
    "fier key": Kernel("sparse_attention._score_row", FLOAT, 128, (1,)),
    "fier value": Kernel("sparse_attention._add_tokens", FLOAT, 128),
    "softmax": Kernel("weigh", ("shl.4s",), 1, loop="softmax.weigh"),
    "rope": Kernel("rope._rotate", FLOAT, 256),
}
