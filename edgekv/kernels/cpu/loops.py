"""Loops that are called by address, so that one walk over the tokens serves every codec.

All arguments are whole numbers: addresses, sizes and counts. Keys are read by `prepare` and `score`, values by
`add` and `finish`. ``args`` is the address of a codec's arguments (`CpuCodec.args`), ``g`` a KV head,
``rows`` the number of its queries: of each head that shares it, all query tokens.

    prepare(args, q, rows, g, prepared)
        writes queries (rows, head_dim) float32 to ``prepared`` in the form that `score` reads
    score(args, prepared, rows, g, t, n_tokens, s, stride, scratch)
        sets s[m * stride + i] to the score of row m with token t + i; `CpuCodec.at_once` bounds n_tokens
    add(args, p, stride, rows, g, t, n_tokens, out, scratch)
        adds p[m * stride + i] times token t + i to row m of out (rows, width)
    finish(args, sums, out, rows)
        adds sums (rows, width), rotated back, to out (rows, head_dim)
    decode(args, g, t, n, tile, scratch)
        writes tokens t..t + n of head g to tile (n, head_dim) float32, which `edgekv.kernels.cpu.tile` reads
    put(args, x, n, g, t0, scratch)
        stores x (n, head_dim) as tokens t0.. of head g, of codecs that take tokens one by one
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgekv.kernels import threads
from edgekv.kernels.cpu.compile import FAST, compile_loop, intrinsic, loop_address
from edgekv.kernels.interface import find_codec_kernels
from edgekv.types import F32

ALIGNMENT = 64
TOKENS_PER_CALL = 256  # tokens of a block of attention


class Loop:
    """A function of whole numbers, compiled, or loaded from the disk, when its address is first asked for."""

    def __init__(self, function: Callable[..., None], fastmath: Any = FAST, parallel: bool = False) -> None:
        """fastmath: LLVM's flags, False: arithmetic as written. parallel: `prange` runs on all threads."""
        self.function, self._options = function, (fastmath, parallel)

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code."""
        if self._options[1]:
            threads.count()  # starts Numba's threads, whose functions the machine code calls
        return loop_address(self.function, *self._options)

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """The function as Python calls it, with whole numbers."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * self.function.__code__.co_argcount)(self.address)

    def assembly(self) -> str:
        """Compiles the function and returns its assembly."""
        return str(compile_loop(self.function, *self._options)._library.get_asm_str())


score_loop = add_loop = Loop
exact_loop = functools.partial(Loop, fastmath=False)
prepare_loop = put_loop = finish_loop = exact_loop  # what they round is compared
parallel_loop = functools.partial(Loop, fastmath=False, parallel=True)


@intrinsic
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Calls the loop at an address; arguments: whole numbers, a tuple."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in given])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.none(types.intp, types.UniTuple(types.intp, len(arguments))), build


@dataclasses.dataclass(frozen=True)
class CpuCodec:
    """The loops of one kind of codec, and the sizes that they need.

    args: (codec) -> what loops get, addresses of arrays among them, which live as long as the codec.
    block: (codec) -> tokens that must be scored or added together, a power of two times 32. at_once: tokens that
    one call of ``score`` or ``add`` takes at most, unless a block has more; a multiple of 64. prepared, scratch:
    (codec, rows) -> bytes. put_scratch: (codec) -> bytes. width: (codec) -> channels of the sums of ``add``.
    encode: (codec, x (G, n, D), t0), stores x as tokens t0.. in place of `Codec.encode`.
    """

    args: Callable[[Any], tuple[int, ...]]
    score: Loop | None = None
    add: Loop | None = None
    prepare: Loop | None = None
    finish: Loop | None = None
    put: Loop | None = None
    decode: Loop | None = None
    block: Callable[[Any], int] = lambda codec: 64
    at_once: int = 64
    prepared: Callable[[Any, int], int] = lambda codec, rows: 0
    scratch: Callable[[Any, int], int] = lambda codec, rows: 0
    width: Callable[[Any], int] = lambda codec: codec.head_dim
    put_scratch: Callable[[Any], int] = lambda codec: 0
    encode: Callable[[Any, F32, int], None] | None = None

    def all(self) -> list[Loop]:
        """Returns the loops that the codec has."""
        loops = self.score, self.finish, self.add, self.decode, self.put, self.prepare
        return [loop for loop in loops if loop is not None]


DECODE_ONLY = CpuCodec(lambda codec: ())
"""The kernels of a codec without loops, which is read through `Codec.decode`."""


def kernels_of(codec: Any) -> CpuCodec:
    """Returns the kernels of a codec, or of a class of codecs."""
    return cast(CpuCodec, find_codec_kernels("cpu", codec) or DECODE_ONLY)


class BoundCodec:
    """A codec's loops and the arguments that they get, which this backend keeps in ``Codec.backend_state``.

    pair: of values, the `PairPlan` of them and their keys (`edgekv.kernels.cpu.attend`).
    """

    __slots__ = ("args", "loops", "pair")

    def __init__(self, loops: CpuCodec, codec: Any) -> None:
        self.loops, self.pair = loops, cast(Any, None)
        self.args = np.array(loops.args(codec), np.int64)


def bind(codec: Any) -> BoundCodec:
    """Returns a codec's loops and arguments, made once for the arrays that it holds."""
    state: BoundCodec | None = codec.backend_state
    if state is None:
        state = codec.backend_state = BoundCodec(kernels_of(codec), codec)
    return state


_start_of: Callable[[Any], Any] = (ctypes.c_char * 0).from_buffer


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first element. Raises ValueError if it is not C-contiguous."""
    try:
        return ctypes.addressof(_start_of(array))  # a fifth of the time of the other way
    except TypeError:  # read-only, or not contiguous
        if not array.flags.c_contiguous:
            message = f"an array of shape {array.shape} with strides {array.strides}; kernels take contiguous ones"
            raise ValueError(message) from None
        address: int = array.__array_interface__["data"][0]
        return address


def aligned_size(n_bytes: int) -> int:
    """Returns n_bytes rounded up to whole cache lines."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


_memory = threading.local()


def scratch_memory(name: str, n_bytes: int) -> int:
    """Returns the address of n_bytes of this Python thread, aligned, valid until the name is used again."""
    start, size, _ = getattr(_memory, name, (0, -1, None))
    if size < n_bytes:
        buffer = np.empty(n_bytes + ALIGNMENT, np.uint8)
        start = aligned_size(address_of(buffer))
        setattr(_memory, name, (start, n_bytes, buffer))
    return cast(int, start)


@intrinsic
def load_arguments(context: Any, address: Any, n: Any) -> Any:
    """Returns the n int64 at an address as a tuple; n: a literal."""
    if not isinstance(n, types.IntegerLiteral):
        return None  # Numba then asks again with the literal
    return _load_tuple(types.UniTuple(types.intp, n.literal_value), address, n)


@intrinsic
def load_tuple(context: Any, kind: Any, address: Any) -> Any:
    """Returns the NamedTuple of a class whose fields are the int64 at an address."""
    fields = types.NamedUniTuple(types.intp, len(kind.instance_class._fields), kind.instance_class)
    return _load_tuple(fields, kind, address)


def _load_tuple(kind: Any, *arguments: Any) -> Any:
    at = arguments.index(types.intp)

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start = builder.inttoptr(values[at], ir.IntType(64).as_pointer())
        loaded = [builder.load(builder.gep(start, [ir.IntType(64)(i)])) for i in range(kind.count)]
        return context.make_tuple(builder, kind, loaded)

    return kind(*arguments), build


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """Returns the float32 of the low 32 bits of a whole number: the inverse of `bits_of`."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.trunc(values[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.intp), build


def bits_of(x: float) -> int:
    """Returns the bits of x as float32: kernels get whole numbers."""
    return int(np.float32(x).view(np.int32))


def _pointer(kind: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), build

    return pointer


# The memory at an address, for `scalar.get` and `scalar.put`.
floats, halves, words = _pointer(types.float32), _pointer(types.uint16), _pointer(types.uint64)
chars, words32, ints, int64s = (_pointer(kind) for kind in (types.uint8, types.uint32, types.int32, types.int64))
signed_chars, doubles = _pointer(types.int8), _pointer(types.float64)
