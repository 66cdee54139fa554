"""Which experts a router's logits choose for each token, and how what they make of it is added up.

A pair is a token and one of its experts. `edgekv.linear.experts` says in NumPy what both are.
"""

from __future__ import annotations

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.jit import Scalar, jit
from edgekv.kernels.cpu.loops import Loop, address_of, floats, numbers, scratch_memory
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, I64

ZERO = np.float32(0)


def route(logits: F32, per_token: int, renormalized: bool) -> tuple[I64, I64, F32]:
    """Of logits (n, experts), the pairs in ascending order of experts, then of tokens: their experts, their tokens
    and their weights, each (n * per_token,). Those that `edgekv.linear.experts.choose` chooses.
    """
    logits = np.ascontiguousarray(logits)
    (n, count), m = logits.shape, len(logits) * per_token
    experts, tokens, weights = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.float32)
    memory = scratch_memory("routing", 12 * m + 8 * count)
    addresses = (address_of(array) for array in (logits, experts, tokens, weights))
    _ROUTE.call(n, count, per_token, renormalized, memory, *addresses)
    return experts, tokens, weights


def add_results(x: F32, results: F32, tokens: I64, weights: F32) -> F32:
    """x (n, channels) plus each pair's result (m, channels) times its weight (m,), in the order of the pairs."""
    total: F32 = x.copy()
    m, channels = results.shape
    addresses = (address_of(array) for array in (results, tokens, weights, total))
    given = np.array((*addresses, m, channels), np.int64)
    if results.size < launch.MIN_PARALLEL_WORK or threads.count() == 1:
        _ADD.run(channels, given)
    else:
        _ADD.run_parallel(channels, given)
    return total


def warm_up() -> None:
    """Compiles both."""
    x = np.zeros((1, 1), np.float32)
    _, tokens, weights = route(x, 1, True)
    add_results(x, x, tokens, weights)
    _ADD.run_parallel(0, np.zeros(6, np.int64))


def _route(
    n: int,
    count: int,
    per_token: int,
    renormalized: int,
    memory: int,
    logits: int,
    experts: int,
    tokens: int,
    weights: int,
) -> None:
    """memory: each token's experts, each expert's next place among the pairs, and each token's weights."""
    m = n * per_token
    chosen, places, own_weights = numbers(memory), numbers(memory + 8 * m), floats(memory + 8 * (m + count))
    for e in range(count):
        put(places, e, 0)
    for token in range(n):
        row, first, last = floats(logits + 4 * token * count), token * per_token, (token + 1) * per_token
        _put_largest(row, count, numbers(memory + 8 * first), per_token)
        largest, total = get(row, get(chosen, first)), ZERO
        for i in range(first, last):
            e = get(chosen, i)
            put(places, e, get(places, e) + 1)
            put(own_weights, i, np.exp(get(row, e) - largest))
            total += get(own_weights, i)
        if not renormalized:
            total = ZERO
            for e in range(count):
                total += np.exp(get(row, e) - largest)
        for i in range(first, last):
            put(own_weights, i, get(own_weights, i) / total)
    before = 0
    for e in range(count):
        n_pairs = get(places, e)
        put(places, e, before)
        before += n_pairs
    for i in range(m):
        e = get(chosen, i)
        place = get(places, e)
        put(places, e, place + 1)
        put(numbers(experts), place, e)
        put(numbers(tokens), place, i // per_token)
        put(floats(weights), place, get(own_weights, i))


@jit
def _put_largest(row: F32, count: int, chosen: I64, k: int) -> None:
    """chosen (k,) = where the k largest of row (count,) are, in descending order; NaN is behind all numbers."""
    for e in range(count):
        i = min(e, k)
        while i > 0 and _is_before(get(row, e), get(row, get(chosen, i - 1))):
            if i < k:
                put(chosen, i, get(chosen, i - 1))
            i -= 1
        if i < k:
            put(chosen, i, e)


@jit
def _is_before(x: Scalar, y: Scalar) -> bool:
    return x > y or (np.isnan(y) and not np.isnan(x))


def _add_channels(first: int, last: int, part: int, place: int) -> None:
    """Of channels first..last: threads share them, as a token's pairs are far apart."""
    given = numbers(place)
    results, tokens, weights, total = get(given, 0), numbers(get(given, 1)), floats(get(given, 2)), get(given, 3)
    m, channels = get(given, 4), get(given, 5)
    for pair in range(m):
        result, weight = floats(results + 4 * pair * channels), get(weights, pair)
        row = floats(total + 4 * get(tokens, pair) * channels)
        for i in range(first, last):
            put(row, i, get(row, i) + weight * get(result, i))


_ROUTE = Loop(_route, 9, exact=True)
_ADD = launch.Stage(_add_channels, exact=True)  # a channel's sum is the same in whichever share it is
