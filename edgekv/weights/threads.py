"""How many threads weight products are fastest with: measured once per machine and shape, and remembered.

A token's products are bound by memory, which fewer cores than all may read as fast, or faster; those of a prompt
are bound by computing. Both are timed on one block of the model itself, so that its weights' format and the
machine's instructions count. A product's sums do not depend on how many threads share it, so neither does a text.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import numpy as np

from edgekv.files import Memo
from edgekv.machine import all_cores, machine_info
from edgekv.models.architecture import Architecture
from edgekv.types import F32, Threads
from edgekv.weights.cpu import CpuOps
from edgekv.weights.formats import WeightFormat
from edgekv.weights.store import WeightStore

MEMO, MOST_REMEMBERED = Memo("threads.json", 3), 256
FEW_CORES = 2  # so many are all used, unmeasured
ENOUGH = 0.97  # of the best speed
PROBE_WEIGHTS = 12 << 20  # elements of a block that small caches do not hold, or not four times
PROMPT_ROWS = 32
LEAST_ROUNDS, DECODE_S = 3, 0.08  # rounds of one token, each with every number of threads; and their seconds
PROMPT_ROUNDS = 2


def product_threads(store: WeightStore, threads: int | None) -> Threads:
    """``threads`` for both; None: what is remembered of this machine and shape, measured now if nothing is."""
    if threads is not None or all_cores() <= FEW_CORES:
        return Threads(all_cores(threads), all_cores(threads))
    known = remembered(store.arch, store.form)
    if known is None:
        decode, prompt = measure(store, candidates(all_cores()))
        known = choice(decode, prompt)
        others = list((MEMO.read() or {}).items())[1 - MOST_REMEMBERED :]
        MEMO.keep({**dict(others), _key(store.arch, store.form): known})
    return known


def candidates(cores: int) -> list[int]:
    """Numbers of threads worth trying, the most first: all cores, three quarters, half and a quarter of them."""
    return sorted({-(-cores * quarters // 4) for quarters in (1, 2, 3, 4)}, reverse=True)


def choice(decode_s: Mapping[int, float], prompt_s: Mapping[int, float]) -> Threads:
    """Of seconds by number of threads: the fewest that are nearly as fast as the fastest."""
    decode = _fewest(decode_s)
    return Threads(decode, max(decode, _fewest(prompt_s)))


def measure(store: WeightStore, numbers: list[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one block by number of threads, the best of a few rounds: for a token, and for PROMPT_ROWS.

    They take turns, on weights that small caches do not hold.
    """
    name, widths = _block(store.arch)
    blocks = {n: _open(store, name, n) for n in numbers}
    decode_s, prompt_s = dict.fromkeys(numbers, np.inf), dict.fromkeys(numbers, np.inf)
    rng = np.random.default_rng(0)
    rows = {part: rng.standard_normal((PROMPT_ROWS, width), np.float32) for part, width in widths.items()}
    row = {part: x[:1] for part, x in rows.items()}
    for block in blocks.values():
        block(**row)
    begun, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - begun < DECODE_S:
        _time(blocks, row, decode_s)
        rounds += 1
    for _ in range(PROMPT_ROUNDS):
        _time(blocks, rows, prompt_s)
    return decode_s, prompt_s


def remembered(arch: Architecture, form: WeightFormat) -> Threads | None:
    """What was measured here for weights of this shape and format; None: nothing yet."""
    entry = (MEMO.read() or {}).get(_key(arch, form))
    return entry and Threads(*entry)


def _time(blocks: Mapping[int, Callable[..., F32]], inputs: dict[str, F32], best: dict[int, float]) -> None:
    for n, block in blocks.items():
        begun = time.perf_counter()
        block(**inputs)
        best[n] = min(best[n], time.perf_counter() - begun)


def _fewest(seconds: Mapping[int, float]) -> int:
    return min(n for n, s in seconds.items() if s * ENOUGH <= min(seconds.values()))


def _open(store: WeightStore, name: str, n: int) -> Callable[..., F32]:
    """The first layer's ``attention_in`` or ``attention_out`` on n threads."""
    ops = CpuOps(store, Threads(n, n))
    return functools.partial(getattr(store.arch, name), ops, 0)


def _block(arch: Architecture) -> tuple[str, dict[str, int]]:
    """A block's name and the widths of its inputs: the first layer's smaller one if that is large enough."""
    c = arch.config
    fused, mixed = arch.widths(0)
    if c.hidden_size * fused >= PROBE_WEIGHTS:
        return "attention_in", {"x": c.hidden_size}
    return "attention_out", {"x": c.hidden_size, "attention": mixed}


def _key(arch: Architecture, form: WeightFormat) -> str:
    """The machine, and the shape of the block: models that share both are served alike."""
    machine, c = machine_info(), arch.config
    name, (fused, mixed) = _block(arch)[0], arch.widths(0)
    shape = f"{name} {form.name} {c.hidden_size} {fused} {mixed} {c.intermediate_size}"
    where = f"{machine['board'] or machine['cpu']}, {machine['cores']} cores"
    return f"{where}, edgekv {machine['versions']['edgekv']}: {shape}"
