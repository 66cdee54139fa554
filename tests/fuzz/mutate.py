"""Seeded damage to bytes and to JSON, and the kinds of input that are damaged."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

KINDS: dict[str, Callable[..., object]] = {}
"""Each makes a damaged input from whole material, in a folder, and gives it to what reads it."""
RARE = {"template": 20, "remembered": 10, "weights": 4, "numbers": 4}
"""Slow kinds: a case in so many rounds."""


def kind(function: Callable[..., object]) -> Callable[..., Any]:
    """Registers a function (material, folder, rng) as the kind of its name."""
    KINDS[function.__name__] = function
    return function


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2, 1 << 31, 1 << 63, 10**30, 10**400, 0.5, 1e-300, 1e308),
    *(math.nan, math.inf, -math.inf),
    *("", "x", "\ud800", "a" * 10_000, [], {}, [[]], [None] * 100, {"a": {"b": []}}),
)
NUMBERS = (0, 1, 2, 127, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)


def damaged(data: bytes, rng: random.Random, head: int = 1 << 30) -> bytes:
    """Returns data with some flips, cuts, repeats and lying sizes, mostly within the first ``head`` bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        if not out:
            break
        at = rng.randrange(min(len(out), head))
        what = rng.randrange(7)
        if what == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            out[at] = rng.choice((0, 1, 127, 128, 255))
        elif what == 2:
            size = rng.choice((2, 4, 8))
            out[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif what == 3:
            del out[at:]
        elif what == 4:
            del out[at : at + rng.randrange(1, 64)]
        elif what == 5:
            piece = out[at : at + rng.randrange(1, 64)]
            out[at:at] = piece * rng.choice((1, 2, 100))
        else:
            out[at:at] = rng.randbytes(rng.randrange(1, 16))
    return bytes(out)


SINGLES = np.array([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0], "<f4")
HALVES = np.array([math.nan, math.inf, -math.inf, 60000, -60000, 6e-8, 0], "<f2")
NUMBERS_AS_BYTES = (*map(np.float32.tobytes, SINGLES), *map(np.float16.tobytes, HALVES), b"\xff", b"\x7f", b"\x80")


def poisoned(data: bytes, rng: random.Random, head: int = 0) -> bytes:
    """Returns data with runs of NaN, infinities and extreme numbers behind the first ``head`` bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        number = rng.choice(NUMBERS_AS_BYTES)
        n = rng.choice((1, 1, 16, 64, 1 << 30))
        start = head + rng.randrange(max(1, len(out) - head)) // 4 * 4 if n < 1 << 30 else head
        n = min(n, (len(out) - start) // len(number))
        out[start : start + n * len(number)] = number * n
    return bytes(out)


def poisoned_tensors(data: bytes, rng: random.Random) -> bytes:
    """Returns a .safetensors file with such numbers in one of its tensors, or anywhere."""
    start = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return poisoned(data, rng, start)
    header = json.loads(data[8:start])
    names = [name for name in header if name != "__metadata__"]
    a, b = (start + offset for offset in header[rng.choice(names)]["data_offsets"])
    return data[:a] + poisoned(data[a:b], rng) + data[b:]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Returns the paths of all entries."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


def mutated(value: Any, rng: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """Returns a copy with a few entries replaced, removed, repeated, renamed or scaled."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        every = list(places(value))
        if not every:
            return rng.choice(odd)
        *parents, last = rng.choice(every)
        home = value
        for key in parents:
            home = home[key]
        old, what = home[last], rng.randrange(8)
        if what == 0:
            del home[last]
        elif what == 1 and isinstance(home, dict):
            home[rng.choice(("", "type", "x", str(last) + "x"))] = home.pop(last)
        elif what == 2 and isinstance(home, list):
            home.extend([old] * rng.choice((1, 2, 1000)))
        elif what == 3 and isinstance(old, (int, float)) and abs(old) < 1 << 62:
            home[last] = rng.choice((old + 1, old - 1, old * 2, -old, float(old), str(old), [old]))
        elif what == 4:
            home[last] = copy.deepcopy(rng.choice(every)[-1])
        else:
            home[last] = copy.deepcopy(rng.choice(odd))
    return value


def as_json(value: Any, rng: random.Random) -> bytes:
    """Returns its text, which is now and then damaged too, or nested without end."""
    text = json.dumps(value).encode()
    what = rng.randrange(12)
    if what == 0:
        return damaged(text, rng)
    if what == 1:
        return text.replace(b"{}", b"[" * 50_000, 1) if b"{}" in text else b"[" * 50_000
    return text
