"""CPU time of a token's linear layers with a LoRA beside int4 weights, and without.

usage: python tools/lora_speed.py [SHAPE] [--ranks N ...]

Random int4 weights, 4 layers, LoRAs on all projections of these, one thread; the mean of the fastest 6 of 30
steps, in turns, by the thread's own clock, which other processes disturb less than the wall's. "of two": tokens of
two conversations in one pass, which those of different LoRAs do not share.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from edgekv.checkpoint.shapes import load_shape
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.formats import WEIGHTS
from edgekv.linear.low_rank import LowRank
from edgekv.linear.packed import PackedLinear
from edgekv.linear.random import random_store
from edgekv.linear.store import WeightStore
from edgekv.machine import blas_threads
from edgekv.models.architecture import WeightPart
from edgekv.types import Threads

LAYERS, STEPS, FASTEST = 4, 30, 6


def some_changes(store: WeightStore, rank: int) -> dict[str, tuple[LowRank, ...]]:
    """Of every linear layer but the head."""

    def of(part: WeightPart) -> LowRank:
        shapes = (part.columns, rank), (rank, part.rows)
        return LowRank(*(np.full(shape, 0.01, np.float32) for shape in shapes))

    linears = store.arch.linears()
    return {name: tuple(map(of, linear.parts)) for name, linear in linears.items() if name != "head"}


def tokens(linear: LinearBlocks, store: WeightStore, n: int) -> float:
    """Milliseconds of all blocks but the head, with n rows."""
    c = store.arch.config
    x, attention = np.ones((n, c.hidden_size), np.float32), np.ones((n, c.q_size), np.float32)
    begin = time.thread_time()
    for i in range(c.n_layers):
        linear.attention_in(i, x)
        linear.attention_out(i, x, attention)
    return 1e3 * (time.thread_time() - begin)


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="llama3.2-1b")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 64])
    options = parser.parse_args()
    store = random_store(load_shape(options.shape, LAYERS) | {"vocab_size": 1000}, WEIGHTS["int4"])
    changes = {rank: some_changes(store, rank) for rank in options.ranks}
    plain = PackedLinear(store, Threads(1, 1))
    cases: dict[str, tuple[LinearBlocks, int]] = {
        "none": (plain, 1),
        **{f"rank {rank}": (plain.with_changes(each), 1) for rank, each in changes.items()},
        **{f"rank {rank}, of two": (plain.with_changes(each), 2) for rank, each in changes.items()},
    }
    times = np.empty((len(cases), STEPS))
    for step in range(STEPS):
        for k, (linear, n) in enumerate(cases.values()):
            with blas_threads(1):
                times[k, step] = tokens(linear, store, n)
    fastest = np.sort(times, axis=1)[:, :FASTEST].mean(axis=1)
    for (name, (linear, _)), ms in zip(cases.items(), fastest, strict=True):
        bytes_ratio = linear.changes_bytes / store.token_bytes
        print(f"| {name} | {ms:.2f} ms | x{ms / fastest[0]:.3f} | {100 * bytes_ratio:.0f}% |", flush=True)


if __name__ == "__main__":
    main()
