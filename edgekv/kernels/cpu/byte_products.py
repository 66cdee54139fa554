"""Products of bytes, four to a lane of int32, as this processor multiplies them."""

import functools
from collections.abc import Callable
from typing import Any

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import CPU_FEATURES
from edgekv.kernels.cpu.emit import LANES, Value

INTS = emit.vector(emit.I32, LANES)


def _vnni(b: Any, words: Value, codes: Value, so_far: Value) -> Value:
    return emit.call(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, so_far, words, codes)


def _byte_pairs(b: Any, words: Value, codes: Value, so_far: Value) -> Value:
    pairs, fours = {
        4: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
        8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
        16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    }[words.type.count]
    int16, int8 = (emit.vector(kind, n * words.type.count) for kind, n in ((emit.I16, 2), (emit.I8, 4)))
    twos = emit.call(b, pairs, int16, b.bitcast(words, int8), b.bitcast(codes, int8))
    return b.add(so_far, emit.call(b, fours, so_far.type, twos, emit.constant(int16, 1)))


def _narrow_byte_pairs(b: Any, words: Value, codes: Value, so_far: Value) -> Value:
    return emit.by_register(b, functools.partial(_byte_pairs, b), words, codes, so_far)


def _arm(b: Any, words: Value, codes: Value, so_far: Value, sign: str = "u") -> Value:
    return emit.add_products(b, words, codes, so_far, sign)


def _plain(b: Any, words: Value, codes: Value, so_far: Value, signed: bool = False) -> Value:
    top, to_bottom = emit.constant(INTS, 24), b.ashr if signed else b.lshr
    for shift in range(0, 32, 8):
        to_top = emit.constant(INTS, shift)
        x, y = (to_bottom(b.shl(each, to_top), top) for each in (words, codes))
        so_far = b.add(so_far, b.mul(x, y))
    return so_far


def _choose() -> Callable[..., Value]:
    if emit.IS_ARM:
        return _arm
    if "+avx512vnni" in CPU_FEATURES if LANES == 16 else "+avxvnni" in CPU_FEATURES:
        return _vnni
    if "+avx512bw" in CPU_FEATURES if LANES == 16 else "+avx2" in CPU_FEATURES:
        return _byte_pairs
    return _narrow_byte_pairs if "+ssse3" in CPU_FEATURES else _plain


products = _choose()
"""(builder, words, codes, so_far): adds four products of bytes to each lane of so_far."""
signed_products = {
    _arm: functools.partial(_arm, sign="s"),
    _plain: functools.partial(_plain, signed=True),
}.get(products, products)
"""`products` of codes with signed bytes; x86 multiplies unsigned with signed anyway."""
in_pairs = products in (_byte_pairs, _narrow_byte_pairs)
"""Whether two products are summed in 16 bits, where they must fit."""
