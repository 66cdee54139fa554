"""What Arm processors add to the explicit vectors: products of bytes, register by register."""

import functools
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, config

from edgekv.kernels.cpu.compile import CPU_FEATURES

Value = Any  # an llvmlite value
IS_ARM = platform.machine() == "aarch64"
SUM_OF_PRODUCTS = """
define i32 @f(<16 x i8> %a, <16 x i8> %b) {
  %x = zext <16 x i8> %a to <16 x i32>
  %y = zext <16 x i8> %b to <16 x i32>
  %z = mul <16 x i32> %x, %y
  %s = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %z)
  ret i32 %s
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""

_I8, _I16, _I32 = (ir.IntType(n_bits) for n_bits in (8, 16, 32))
_BYTES16, _BYTES8 = ir.VectorType(_I8, 16), ir.VectorType(_I8, 8)
_EIGHT, _FOUR = ir.VectorType(_I16, 8), ir.VectorType(_I32, 4)


@functools.cache
def has_dot() -> bool:
    """Whether LLVM multiplies bytes in dot products for the processor that Numba compiles for.

    On Linux the processor's name tells it; LLVM's list of features never does.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    name = config.CPU_NAME or binding.get_host_cpu_name()
    machine = target.create_target_machine(cpu=name, features=CPU_FEATURES, opt=3)
    return "udot" in machine.emit_assembly(binding.parse_assembly(SUM_OF_PRODUCTS))


def add_products(builder: Any, a: Value, b: Value, so_far: Value, sign: str) -> Value:
    """so_far + the products of four bytes to a lane; sign is "u" or "s". Those of b, or of a, are at most 127."""
    return by_register(builder, functools.partial(_dot if has_dot() else _pairs, builder, sign), a, b, so_far)


def _dot(builder: Any, sign: str, a: Value, b: Value, so_far: Value) -> Value:
    a, b = builder.bitcast(a, _BYTES16), builder.bitcast(b, _BYTES16)
    return call(builder, f"llvm.aarch64.neon.{sign}dot.v4i32.v16i8", _FOUR, so_far, a, b)


def _pairs(builder: Any, sign: str, a: Value, b: Value, so_far: Value) -> Value:
    """Without dot products: in 16 bits, where two products have room."""
    a, b = builder.bitcast(a, _BYTES16), builder.bitcast(b, _BYTES16)
    products = []
    for half in (_places(range(8)), _places(range(8, 16))):
        low, high = builder.shuffle_vector(a, a, half), builder.shuffle_vector(b, b, half)
        products.append(call(builder, f"llvm.aarch64.neon.{sign}mull.v8i16", _EIGHT, low, high))
    pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", _EIGHT, *products)
    return builder.add(so_far, call(builder, f"llvm.aarch64.neon.{sign}addlp.v4i32.v8i16", _FOUR, pairs))


def by_register(builder: Any, operation: Callable[..., Value], *vectors: Value) -> Value:
    """The operation on each 128 bits of the vectors."""
    n_registers = vectors[0].type.count * _bits(vectors[0].type.element) // 128
    results = []
    for register in range(n_registers):
        parts = []
        for vector in vectors:
            n = vector.type.count // n_registers
            parts.append(builder.shuffle_vector(vector, vector, _places(range(register * n, (register + 1) * n))))
        results.append(operation(*parts))
    while len(results) > 1:
        whole = _places(range(2 * results[0].type.count))
        results = [builder.shuffle_vector(*results[i : i + 2], whole) for i in range(0, len(results), 2)]
    return results[0]


def _places(lanes: range) -> Value:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))


def _bits(element: Any) -> int:
    width: int = element.width
    return width


def call(builder: Any, name: str, kind: Any, *args: Value) -> Value:
    function_type = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)
