"""What products of activations with packed weights are made of: the words, the formats, and a product's numbers.

    row       activations of one token, (columns,) float32; a product has n of them
    output    one row of the weights, (columns,), or the number that it gives for a row
    block     elements of a row, or of an output, with one scale: 32 or 128
    unit      the blocks whose codes fill a vector of VECTOR bytes, or a block of several vectors
    record    a unit of a row, rounded to bytes
    tile      OUTPUTS outputs, multiplied with few rows (`products`)
    panel     outputs unpacked side by side, multiplied with many rows (`product_panels`)
    shift     what an output's zero points or offsets add to it (`product_shifts`)

A rounded row (`quantized_rows`) is a run of records, one for each unit:

    elements    a byte each: of each vector of codes those of its bytes' low bits, then those of the high bits
    sums        an int32 for each lane of codes: minus the weights' zero point times the sum of its elements,
                or, as panels want it, of the whole block's
    scales      a float32 for each lane: its block's

Behind the records of a row are the sums of its blocks' elements as float32, for shifts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numba import types

from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.calls import call
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.simd import LANES

VECTOR = 4 * LANES  # bytes
OUTPUTS = 4  # of a tile
# By bits, see `CodeLayout.zero_point`. Arm multiplies signed bytes: codes of 8 bits become such.
ZERO_POINTS = {4: 8, 8: 0 if arm.IS_ARM else 128}
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # what such codes stand for, doubled, plus 12


class CodeLayout(NamedTuple):
    """A weight format: bits of a code, elements of a block; e2m1: codes are floating-point numbers (`E2M1`)."""

    bits: int
    block: int
    e2m1: bool = False

    @property
    def zero_point(self) -> int:
        """What codes, as they are multiplied, are more than they stand for."""
        return E2M1[0] if self.e2m1 else ZERO_POINTS[self.bits]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    @property
    def vectors(self) -> int:
        """Vectors of a unit's codes."""
        return max(1, self.block_bytes // VECTOR)

    @property
    def blocks(self) -> int:
        """Blocks of a unit."""
        return max(1, VECTOR // self.block_bytes)

    @property
    def parts(self) -> int:
        """Codes in a byte, hence vectors of elements for each vector of codes."""
        return 8 // self.bits

    @property
    def sums_at(self) -> int:
        """Bytes before a record's sums."""
        return self.vectors * self.parts * VECTOR

    @property
    def scales_at(self) -> int:
        """Bytes before a record's scales."""
        return self.sums_at + VECTOR

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return self.scales_at + VECTOR

    @property
    def can_shift(self) -> bool:
        """Whether there are weights with zero points or offsets in this format."""
        return self.bits == 4 and not self.e2m1

    def gap(self, blocks: int) -> int:
        """Bytes of a rounded row: its records, and its blocks' sums."""
        return -(-blocks // self.blocks) * self.record + (-(-blocks // LANES) * VECTOR if self.can_shift else 0)


class Product(NamedTuple):
    """One product as kernels get it: addresses and sizes. They are compiled for the class, hence its layout."""

    x: int  # (n, columns) float32
    n: int  # rows
    columns: int
    is_panel: int  # 0: tiles
    records: int  # rounded rows; behind the last of them room for a block of float32 of each
    outputs: int
    y: int  # (n, outputs) float32
    panels: int  # scratch of each thread, `product_panels.PANEL_BYTES`
    blocks: int  # of an output, and of a row; from here on what only depends on the weights
    gap: int  # bytes from a rounded row to the next one
    codes: int
    row_bytes: int  # of an output's codes
    scales: int  # (outputs, blocks) float32
    offsets: int  # (outputs, blocks) float32; 0: none
    zeros: int  # in place of offsets zero points, two to a byte; 0: none
    shift: int  # address of what adds their share, `product_shifts.SHIFT`; 0: there are none


class Int4(Product):
    layout = CodeLayout(4, 128)


class Int4In32(Product):
    layout = CodeLayout(4, 32)


class Int8(Product):
    layout = CodeLayout(8, 128)


class Int8In32(Product):
    layout = CodeLayout(8, 32)


class Float4In32(Product):
    layout = CodeLayout(4, 32, e2m1=True)


PRODUCTS = {product.layout: product for product in (Int4, Int4In32, Int8, Int8In32, Float4In32)}


def layout_of(product: Any) -> CodeLayout:
    """Of the Numba type of a `Product`."""
    layout: CodeLayout = product.instance_class.layout
    return layout


class RowsAt(NamedTuple):
    """Rows inside a kernel, rounded or of y: the first one's address, and the bytes from one to the next."""

    first: Value
    gap: Value

    def row(self, b: Any, m: int) -> Value:
        """The address of row m."""
        return b.add(self.first, b.mul(self.gap, emit.I64(m)))


class OutputsAt(NamedTuple):
    """Outputs inside a kernel: the first one's codes and scales; bytes of codes, and blocks, to the next one's."""

    codes: Value
    row_bytes: Value
    scales: Value
    blocks: Value


def fields(b: Any, product: Value, *names: str) -> list[Value]:
    """Of a `Product` inside a kernel."""
    return [b.extract_value(product, Product._fields.index(name)) for name in names]


def before_sums(b: Any, product: Value) -> Value:
    """Bytes of a rounded row before the sums of its blocks."""
    gap, blocks = fields(b, product, "gap", "blocks")
    vectors = b.sdiv(b.add(blocks, emit.I64(LANES - 1)), emit.I64(LANES))
    return b.sub(gap, b.mul(vectors, emit.I64(VECTOR)))


def row_groups(
    b: Any, n: Value, counts: Sequence[int], x: RowsAt, y: RowsAt
) -> Iterator[tuple[int, RowsAt, RowsAt]]:
    """Loops over n rows of x and of y: counts[0] rows in each pass, those left over counts[1] in each, and so on.

    What the caller emits for one (count, x, y) is the body of a loop.
    """
    done = emit.I64(0)
    for count in counts:
        with emit.loop(b, done, n, count) as turn:
            x_first, y_first = b.add(x.first, b.mul(turn.i, x.gap)), b.add(y.first, b.mul(turn.i, y.gap))
            yield count, RowsAt(x_first, x.gap), RowsAt(y_first, y.gap)
        done = turn.i


def _of_layout(name: str) -> Any:
    @intrinsic
    def number(context: Any, product: Any) -> Any:
        n = getattr(layout_of(product), name)

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return emit.I64(n)

        return types.intp(product), build

    return number


# Elements of a block, and blocks of a unit, inside a kernel.
block_size, blocks_of_unit = _of_layout("block"), _of_layout("blocks")


@intrinsic
def call_shift(context: Any, shift: Any, output: Any, start: Any, n: Any, memory: Any, place: Any) -> Any:
    """Calls `product_shifts.SHIFT` by its address."""
    return call(5)


@intrinsic
def product_at(context: Any, product: Any, numbers: Any) -> Any:
    """The `Product` of a class, whose fields are int64 at an address."""
    kind = types.NamedUniTuple(types.intp, len(Product._fields), product.instance_class)

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        fields = [emit.load(b, emit.I64, args[1], 8 * i) for i in range(len(Product._fields))]
        return context.make_tuple(b, kind, fields)

    return kind(product, types.intp), build


@intrinsic
def put_product(context: Any, product: Any, numbers: Any) -> Any:
    """The fields of a `Product` to an address, for `product_at`."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        for i, field in enumerate(fields(b, args[0], *Product._fields)):
            emit.store(b, field, args[1], 8 * i)
        return context.get_dummy_value()

    return types.none(product, types.intp), build
