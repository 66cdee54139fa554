"""Kernels compiled in a second process, while a model is read: Numba compiles one function at a time, on one core.

It compiles what packs and what reads a scheme's tokens, and leaves it where the process that started it looks.
That one compiles meanwhile what a prompt and every scheme need.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from edgekv import child, numba_cache
from edgekv.kernels import compiling, numba_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.geometry import Workspace
from edgekv.machine import all_cores

TOKENS = 700  # beyond the windows and budgets that the schemes have by default
SMALL = SimpleNamespace(
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    layer_windows=(None,),
    layer_recurrences=(None,),
    score_cap=None,
)


@contextlib.contextmanager
def compiled_ahead(spec: CacheSpec) -> Iterator[None]:
    """Runs the process within the block, unless it has run before, or could not help."""
    kinds = spec.scheme.kinds(spec.knobs)
    what = f"ahead {sorted(kinds or ())}"
    if not (kinds and numba_cache.folder(__file__) and all_cores() > 1) or compiling.are_kept(what):
        yield
        return
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            child.command(__name__, str(spec)), stdin=nothing, stdout=nothing, stderr=nothing
        )
    except OSError:
        yield
        return
    try:
        yield
        compiling.note_kept(what)
    finally:
        process.terminate()  # what it has not done by now is not needed any more
        process.wait()


def main(kv: str) -> None:
    """Compiles: first what packs tokens, then the loops that read them, the last one first."""
    from edgekv.kernels.cpu.loops import loops_of

    spec, rng = CacheSpec.parse(kv), np.random.default_rng(0)
    cache = spec.layers(SMALL, TOKENS)[0]
    cache.allocate(numba_kernels(1), Workspace())
    q, k, v = (rng.standard_normal((n, TOKENS - 1, 64), np.float32) for n in (2, 1, 1))
    cache.prefill(q, k, v)
    kinds = sorted(spec.scheme.kinds(spec.knobs) or (), key=lambda kind: kind == "f16")
    for loop in [loop for kind in kinds for loop in reversed(loops_of(kind).all())]:
        assert loop.address
