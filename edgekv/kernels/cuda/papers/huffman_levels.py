"""Error-bounded levels: codes of a fixed relative step within each channel of a block or each token."""

from __future__ import annotations

from edgekv.kernels.cuda.driver import Array, Launch
from edgekv.kernels.cuda.loops import THREADS, Tools, per_head
from edgekv.kernels.cuda.papers.huffman import ENCODE


def quantize_channels(
    tools: Tools,
    x: Array,
    relative_step: float,
    levels: int,
    block: int,
    codes: Array,
    low: Array,
    step: Array,
    b0: int,
) -> None:
    n_kv_heads, n, d = x.shape
    x, stride = per_head(x)
    launch = Launch(ENCODE, "quantize_channels", (n // block, n_kv_heads), THREADS)
    form = float(relative_step), levels, block
    tools.driver.launch(launch, x, stride, n, d, *form, codes, low, step, low.shape[1], b0)


def quantize_tokens(
    tools: Tools, x: Array, relative_step: float, levels: int, codes: Array, low: Array, step: Array, t0: int
) -> None:
    n_kv_heads, n, d = x.shape
    x, stride = per_head(x)
    launch = Launch(ENCODE, "quantize_tokens", (n, n_kv_heads), 32)
    form = float(relative_step), levels
    tools.driver.launch(launch, x, stride, d, *form, codes, low, step, low.shape[1], t0)
