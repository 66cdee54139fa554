"""Words at any byte of bit strings."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.compile import intrinsic

_I64 = ir.IntType(64)


@intrinsic
def load_word(context: Any, array: Any, index: Any) -> Any:
    """Bytes index..index + 8 of a flat uint8 array as a uint64, the first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(simd._pointer(context, builder, array, args, _I64), align=1)

    return types.uint64(array, types.uint64), build


@intrinsic
def store_word(context: Any, array: Any, index: Any, word: Any) -> Any:
    """Writes a uint64 to bytes index..index + 8 of a flat uint8 array, the lowest byte first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], simd._pointer(context, builder, array, args, _I64), align=1)
        return context.get_dummy_value()

    return types.none(array, types.uint64, types.uint64), build
