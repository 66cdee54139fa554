"""Tokens of a store, side by side."""

import numpy as np

from edgekv.kernels.cpu.compile import Args, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import I64, U16

COPY_WORK = 4  # of one element, in multiply-adds: it comes from memory


def gather_tokens(store: U16, tokens: I64, out: U16) -> None:
    n_items = tokens.shape[0] * tokens.shape[1]
    args = store, np.ascontiguousarray(tokens), out
    run(_gather_items, n_items, COPY_WORK * n_items * store.shape[2], args)


@jit
def _gather_items(first: int, last: int, args: Args) -> None:
    store, tokens, out = args
    (_, capacity, head_dim), n, room = store.shape, tokens.shape[1], out.shape[1]
    store, tokens, out = store.reshape(-1), tokens.reshape(-1), out.reshape(-1)
    for item in range(first, last):
        source = (item // n * capacity + get(tokens, item)) * head_dim
        target = (item // n * room + item % n) * head_dim
        for d in range(head_dim):
            put(out, target + d, get(store, source + d))
