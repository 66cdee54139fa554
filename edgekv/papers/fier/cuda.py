"""FIER's index: keys as one bit each, of two levels per channel and group of tokens."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.kernels.cuda.driver import Array, Launch, Program
from edgekv.kernels.cuda.loops import THREADS, Loops, Reader, Tools

FOLDER = pathlib.Path(__file__).parent
ENCODE = Program((FOLDER / "encode",), exact=True)


def encode_fier(
    tools: Tools, keys: Array, group: int, minmax: bool, signs: Array, levels: Array, b0: int, b1: int
) -> None:
    n_kv_heads, capacity, d = keys.shape
    launch = Launch(ENCODE, "encode_fier", (b1 - b0, n_kv_heads), THREADS)
    store = signs, levels, levels.shape[1], signs.shape[1]
    tools.driver.launch(launch, keys, capacity, d, group, int(minmax), *store, b0)


def _read(index: Any) -> Reader:
    signs, levels, group = index.arrays["signs"], index.arrays["levels"], index.block
    store = (signs, levels), levels.shape[1] * group, signs.shape[2], (("GROUP", group),)
    return Reader("FierKeys", FOLDER / "keys", *store, joins=False, tiles=2, blocks=16)


LOOPS = {"sign_index": Loops(_read)}
