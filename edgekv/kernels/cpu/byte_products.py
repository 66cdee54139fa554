"""Products of bytes, four to a lane of int32, as this processor multiplies them."""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from edgekv.kernels.cpu import arm
from edgekv.kernels.cpu.compile import CPU_FEATURES
from edgekv.kernels.cpu.simd import LANES

Value = Any  # an llvmlite value

_I8, _I16, _I32 = (ir.IntType(n_bits) for n_bits in (8, 16, 32))
INTS = ir.VectorType(_I32, LANES)


def _vnni(builder: Any, words: Value, codes: Value, so_far: Value) -> Value:
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, so_far, words, codes)


def _byte_pairs(builder: Any, words: Value, codes: Value, so_far: Value) -> Value:
    pairs, fours = {
        4: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
        8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
        16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    }[words.type.count]
    int16 = ir.VectorType(_I16, 2 * words.type.count)
    bytes_ = ir.VectorType(_I8, 4 * words.type.count)
    twos = call(builder, pairs, int16, builder.bitcast(words, bytes_), builder.bitcast(codes, bytes_))
    return builder.add(so_far, call(builder, fours, so_far.type, twos, ir.Constant(int16, [1] * int16.count)))


def _narrow_byte_pairs(builder: Any, words: Value, codes: Value, so_far: Value) -> Value:
    return arm.by_register(builder, functools.partial(_byte_pairs, builder), words, codes, so_far)


def _arm(builder: Any, words: Value, codes: Value, so_far: Value) -> Value:
    return arm.add_products(builder, words, codes, so_far, "u")


def _plain(builder: Any, words: Value, codes: Value, so_far: Value) -> Value:
    byte = ir.Constant(INTS, [255] * LANES)
    for shift in range(0, 32, 8):
        by = ir.Constant(INTS, [shift] * LANES)
        a, b = (builder.and_(builder.lshr(x, by), byte) for x in (words, codes))
        so_far = builder.add(so_far, builder.mul(a, b))
    return so_far


def _arm_signed(builder: Any, codes: Value, signed: Value, so_far: Value) -> Value:
    return arm.add_products(builder, codes, signed, so_far, "s")


def _plain_signed(builder: Any, codes: Value, signed: Value, so_far: Value) -> Value:
    top = ir.Constant(INTS, [24] * LANES)
    for shift in range(0, 32, 8):
        to_top = ir.Constant(INTS, [24 - shift] * LANES)
        a, b = (builder.ashr(builder.shl(x, to_top), top) for x in (codes, signed))
        so_far = builder.add(so_far, builder.mul(a, b))
    return so_far


def call(builder: Any, name: str, kind: Any, *args: Value) -> Value:
    """Calls a function of LLVM's by name."""
    function_type = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _choose() -> Callable[..., Value]:
    if arm.IS_ARM:
        return _arm
    if "+avx512vnni" in CPU_FEATURES if LANES == 16 else "+avxvnni" in CPU_FEATURES:
        return _vnni
    if "+avx512bw" in CPU_FEATURES if LANES == 16 else "+avx2" in CPU_FEATURES:
        return _byte_pairs
    return _narrow_byte_pairs if "+ssse3" in CPU_FEATURES else _plain


products = _choose()
"""(builder, words, codes, so_far): adds four products of bytes to each lane of so_far."""
signed_products = {_arm: _arm_signed, _plain: _plain_signed}.get(products, products)
"""`products` of codes with signed bytes; x86 multiplies unsigned with signed anyway."""
in_pairs = products in (_byte_pairs, _narrow_byte_pairs)
"""Whether two products are summed in 16 bits, where they must fit."""
