"""A short proof that this machine runs edgekv: kernels against their oracles, a golden text, one H1B generation.

python tools/arm/smoke.py [--shared ../shared]      with tools/arm/emulated.sh on an emulated Cortex-A76
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import time

import numpy as np

from edgekv import Session
from edgekv.kernels import Kernels, numba_kernels, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, Workspace

SCHEMES = (
    "dense",
    "h1b",
    "onebit:residual_length=0",
    "planes:residual_length=0",
)
TOLERANCE = 2e-3  # of the largest output: codes on the border of two steps may differ
N_TOKENS = 150
N_GOLDEN = 60


def attention(kv: str, kernels: Kernels) -> np.ndarray:
    """Returns the attention of the last of N_TOKENS random tokens: 2 heads on a KV head of 64 channels."""
    rng, spec = np.random.default_rng(0), CacheSpec.parse(kv)
    q, k, v = (rng.standard_normal((heads, N_TOKENS, 64)).astype(np.float32) for heads in (2, 1, 1))
    q /= np.float32(np.sqrt(64))
    cache = spec.scheme(Geometry(2, 1, 64, N_TOKENS), spec.config)
    cache.allocate(kernels, Workspace())
    cache.prefill(q[:, :-1], k[:, :-1], v[:, :-1])
    type(cache).finish_prefill([cache])
    return cache.attend(q[:, -1:], k[:, -1:], v[:, -1:]).copy()


def check_kernels() -> None:
    for kv in SCHEMES:
        begin = time.perf_counter()
        expected, got = attention(kv, numpy_kernels()), attention(kv, numba_kernels())
        error = float(np.abs(got - expected).max() / np.abs(expected).max())
        if not error <= TOLERANCE:
            raise SystemExit(f"{kv}: the kernels differ from NumPy by {error:.1e} of the largest output")
        print(f"{kv:<22} equals NumPy within {error:.0e}   {time.perf_counter() - begin:.1f} s")


def check_golden(shared: pathlib.Path) -> None:
    golden = json.loads((shared / "golden" / "stories260K_greedy200.json").read_text())
    session = Session.load(shared / "models" / "stories260K", kv="dense", weights="f32")
    expected = golden["token_ids"][: 1 + N_GOLDEN]
    steps = session.generate([golden["bos"]], max_new_tokens=N_GOLDEN, temperature=0.0)
    got = [golden["bos"], *(step.token for step in steps)]
    if got != expected:
        first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
        raise SystemExit(f"stories260K: token {first} is {got[first]}, not {expected[first]}")
    print(f"stories260K: {len(got)} greedy ids as they should be")


def check_h1b(shared: pathlib.Path) -> None:
    session = Session.load(shared / "models" / "stories260K", kv="h1b", weights="f32")
    steps = list(session.generate("Once upon a time", max_new_tokens=20))
    print(f"h1b wrote {len(steps)} tokens: {''.join(step.text for step in steps)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=pathlib.Path, default=pathlib.Path(__file__).parents[3] / "shared")
    shared = parser.parse_args().shared
    print(f"{platform.machine()}, NumPy {np.__version__}")
    check_kernels()
    if shared.is_dir():
        check_golden(shared)
        check_h1b(shared)
    else:
        print(f"{shared} is absent: no golden text")


if __name__ == "__main__":
    main()
