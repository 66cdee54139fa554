"""The inner loops of attention alone, beside C loops of the same work: one thread, bytes in cache.

    python tools/loops.py --c ../shared/bench

Nanoseconds per key, or value, and query row, the least of many repeats, ours and C's by turns; the C loops (gcc)
have no centres, no scales and no middle levels. Softmax is that of attention, with nothing beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np

from edgekv.kernels import numpy_kernels
from edgekv.kernels.aligned import zeros
from edgekv.kernels.cpu import loops
from edgekv.kernels.cpu.calls import call_block, call_prepare
from edgekv.kernels.cpu.loops import address_of, bound
from edgekv.kernels.cpu.softmax import END, weigh
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues

TOKENS = 8192
SHAPES = tuple((d, rows) for d in (64, 128) for rows in (1, 4))
INSIDE = 64  # passes over the tokens in one measurement: calling it from Python takes as long as a pass
# Our loop -> what the C program of a file prints for the same work.
C = {
    "scan, 1 bit": ("limit_scan_x86.c", "nibble table, 1 bit"),
    "values, 2 bits": ("limit_values_x86.c", "values 2 bits"),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    name: str
    head_dim: int
    rows: int
    nanoseconds: float
    in_c: float | None


@numba.njit
def _score(loop: int, store: int, prepared: int, rows: int, n: int, step: int, s: int, scratch: int) -> None:
    for _ in range(INSIDE):
        for t in range(0, n, step):
            call_block(loop, store, prepared, rows, 0, t, step, s, step, scratch)


@numba.njit
def _add(loop: int, store: int, p: int, rows: int, n: int, step: int, out: int, scratch: int) -> None:
    for _ in range(INSIDE):
        for t in range(0, n, step):
            call_block(loop, store, p, step, rows, 0, t, step, out, scratch)


@numba.njit
def _weigh(s: int, rows: int, n: int, step: int, ends: int) -> None:
    for _ in range(INSIDE):
        for _ in range(0, n, step):
            weigh(s, step, rows, step, ends)


@numba.njit
def _prepare(loop: int, store: int, q: int, rows: int, prepared: int) -> None:
    call_prepare(loop, store, q, rows, 0, prepared)


def _filled(codec: Any, rng: np.random.Generator) -> Any:
    codec.bind({name: zeros(shape, dtype) for name, (shape, dtype) in codec.layout().items()}, numpy_kernels())
    codec.encode(rng.standard_normal((1, TOKENS, codec.head_dim), np.float32), 0)
    return codec


def _kernels(d: int, rows: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name, and what does INSIDE passes over TOKENS."""
    rng = np.random.default_rng(0)
    step = getattr(loops, "AT_ONCE", 64)
    s, out, ends = zeros((rows, step), np.float32), zeros((rows, d), np.float32), zeros((rows, END), np.float32)
    scratch, prepared = zeros((1 << 20,), np.uint8), zeros((1 << 20,), np.uint8)
    q = rng.standard_normal((rows, d), np.float32)
    s[:] = rng.random(s.shape, np.float32)
    to_s, to_out, to_scratch = address_of(s), address_of(out), address_of(scratch)
    kept: list[Any] = [s, out, ends, scratch, prepared, q]  # what the addresses point to
    for bits in (1, 2, 4):
        keys = _filled(CentredPlanes(1, TOKENS, d, bits=bits, key_scale=0.9, seed=0), rng)
        state, place = bound(keys), address_of(prepared)
        kept += [keys, state]
        store, loop = address_of(state.numbers), state.loops.score.address
        _prepare(state.loops.prepare.address, store, address_of(q), rows, place)
        args = loop, store, place, rows, TOKENS, step, to_s, to_scratch
        yield f"scan, {bits} bit{'s' * (bits > 1)}", functools.partial(_score, *args)
    for bits in (1, 2, 4):
        values = _filled(InterleavedValues(1, TOKENS, d, bits=bits, seed=0), rng)
        state = bound(values)
        kept += [values, state]
        args = state.loops.add.address, address_of(state.numbers), to_s, rows, TOKENS, step, to_out, to_scratch
        yield f"values, {bits} bit{'s' * (bits > 1)}", functools.partial(_add, *args)
    yield "softmax", functools.partial(_weigh, to_s, rows, TOKENS, step, address_of(ends))
    kept.clear()


def in_c(folder: pathlib.Path, work: pathlib.Path, d: int, rows: int) -> Callable[[], dict[str, float]]:
    """Compiles the C programs; a call of the result runs them: our loops' names -> nanoseconds."""
    programs = {}
    for file in {file for file, _ in C.values()}:
        programs[file] = work / f"{pathlib.Path(file).stem}-{d}-{rows}"
        command = [
            "gcc",
            "-O3",
            "-march=native",
            f"-DD={d}",
            f"-DR={rows}",
            str(folder / file),
            "-o",
            str(programs[file]),
        ]
        subprocess.run(command, check=True)

    def run() -> dict[str, float]:
        said = {
            file: subprocess.run([program], capture_output=True, text=True).stdout
            for file, program in programs.items()
        }
        found = {}
        for name, (file, printed) in C.items():
            line = next(line for line in said[file].splitlines() if printed in line)
            found[name] = float(re.findall(r"(\d+\.\d+) ns", line)[0])
        return found

    return run


def measure(d: int, rows: int, rounds: int, c: Callable[[], dict[str, float]] | None) -> list[Measured]:
    """The least of ``rounds`` rounds of 5 repeats each, C's programs in between."""
    best: dict[str, float] = {}
    best_c: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in _kernels(d, rows):
            for _ in range(5):
                begin = time.perf_counter()
                run()
                taken = (time.perf_counter() - begin) * 1e9 / (INSIDE * TOKENS * rows)
                best[name] = min(best.get(name, taken), taken)
        for name, taken in c().items() if c else ():
            best_c[name] = min(best_c.get(name, taken), taken)
    return [Measured(name, d, rows, round(best[name], 3), best_c.get(name)) for name in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--c", type=pathlib.Path, metavar="FOLDER", help="of the C loops; without it ours alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as work:
        for d, rows in SHAPES:
            c = in_c(arguments.c, pathlib.Path(work), d, rows) if arguments.c else None
            found += measure(d, rows, arguments.rounds, c)
    print(
        f"{'ns per token and row':<18}"
        + "".join(f"{f'D {d}, {rows} row' + 's' * (rows > 1):>22}" for d, rows in SHAPES)
    )
    for name in dict.fromkeys(one.name for one in found):
        each = [one for one in found if one.name == name]
        cells = [
            f"{one.nanoseconds:.2f}"
            + (f" (C {one.in_c:.2f}: x{one.nanoseconds / one.in_c:.2f})" if one.in_c else "")
            for one in each
        ]
        print(f"{name:<18}" + "".join(f"{cell:>22}" for cell in cells))
    if arguments.json:
        facts = {"tokens": TOKENS, "results": [dataclasses.asdict(one) for one in found]}
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
