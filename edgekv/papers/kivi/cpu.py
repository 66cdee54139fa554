"""Decoding of KIVI's codes on the CPU: keys per channel of a group of tokens, values per token."""

from typing import Any

from edgekv.kernels.cpu.compile import fast_jit, jit
from edgekv.kernels.cpu.loops import address_of, floats, int64s
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.tile import TILE, decode_channels, decode_loop, decode_tokens, load_halves, tiled


@decode_loop
def _decode_keys(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    head_dim, codes, step, low, capacity, group, n_bits = _fields(args)
    n_bytes, steps, done = head_dim * n_bits // 8, scratch + 4 * head_dim, 0
    while done < n:
        n_tokens, token = min(n - done, group - (t + done) % group), g * capacity + t + done
        first = (g * (capacity // group) + (t + done) // group) * head_dim
        load_halves(low + 2 * first, head_dim, scratch)
        load_halves(step + 2 * first, head_dim, steps)
        to = tile + 4 * done * head_dim
        decode_channels(codes + token * n_bytes, n_bytes, n_bits, n_tokens, scratch, steps, to)
        done += n_tokens


@decode_loop
def _decode_values(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    _read_values(args, g, t, n, tile, scratch)


@decode_loop
def _decode_balanced(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes keys, and divides them by the balance by which they were multiplied."""
    _read_values(args, g, t, n, tile, scratch)
    head_dim, balance, to = get(int64s(args), 0), floats(get(int64s(args), 7)), floats(tile)
    for i in range(0, n * head_dim, head_dim):
        for d in range(head_dim):
            put(to, i + d, get(to, i + d) / get(balance, g * head_dim + d))


@fast_jit
def _read_values(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    head_dim, codes, step, low, capacity, n_spans, n_bits = _fields(args)
    n_bytes, steps = head_dim * n_bits // 8, scratch + 4 * TILE * n_spans
    for k in range(n_spans):
        first = (g * n_spans + k) * capacity + t
        load_halves(low + 2 * first, n, scratch + 4 * TILE * k)
        load_halves(step + 2 * first, n, steps + 4 * TILE * k)
    start = codes + (g * capacity + t) * n_bytes
    decode_tokens(start, n_bytes, n_bits, n, scratch, steps, head_dim // n_spans, tile)


@jit
def _fields(args: int) -> tuple[int, int, int, int, int, int, int]:
    x = int64s(args)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4), get(x, 5), get(x, 6)


def _args(codec: Any, *shape: int) -> tuple[int, ...]:
    addresses = (address_of(codec.arrays[name]) for name in ("codes", "step", "low"))
    return codec.head_dim, *addresses, *shape, 8 * codec.n_bytes // codec.head_dim


def _span_bytes(codec: Any) -> int:
    return 8 * TILE * int(codec.spans)


KERNELS = {
    "kivi_keys": tiled(
        lambda codec: _args(codec, codec.capacity, codec.group),
        _decode_keys,
        lambda codec: 8 * int(codec.head_dim),
    ),
    "kivi_values": tiled(lambda codec: _args(codec, codec.capacity, codec.spans), _decode_values, _span_bytes),
    "token_keys": tiled(
        lambda codec: (*_args(codec, codec.capacity, codec.spans), address_of(codec.balance)),
        _decode_balanced,
        _span_bytes,
    ),
}
