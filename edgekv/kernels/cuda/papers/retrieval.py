"""Tokens of a store, side by side."""

from typing import Any

import numpy as np

from edgekv.kernels.cuda.driver import Array


def gather_tokens(kernels: Any, store: Array, tokens: Array, out: Array) -> None:
    out[:, : tokens.shape[1]] = store[np.arange(len(store), like=tokens)[:, None], tokens]
