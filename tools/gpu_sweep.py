"""How the kernels on tensor cores are best cut: products and attention in several ways, on the card that is there.

usage: python tools/gpu_sweep.py [products] [attention] [whole]
"""

from __future__ import annotations

import itertools
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import cupy  # noqa: E402
import gpu_decode  # noqa: E402
import gpu_measure  # noqa: E402
import numpy as np  # noqa: E402

from edgekv.checkpoint.shapes import load_shape  # noqa: E402
from edgekv.kernels.cuda import matvec, tiled_planes  # noqa: E402

TILINGS = [
    *(matvec.Tiling(8, ahead, 2) for ahead in (2, 3)),
    *(matvec.Tiling(16, ahead, 1) for ahead in (1, 2, 3)),
]
EXACT = (1, 2, 3)  # tiles of a block of exact tokens, at most
EARLY = (False, True)  # whether a product may begin before the one before it has ended
PRODUCTS = {  # rows, columns, norm, gate: of Llama 2 7B
    "qkv": (12288, 4096, True, None),
    "out": (4096, 4096, False, None),
    "gate, up": (22016, 4096, True, 0),
    "down": (4096, 11008, False, None),
}
SCHEMES = ("onebit", "planes")
DEPTHS = (8192, 32768)
WHOLE = tuple((text, depth) for depth in DEPTHS for text in ("dense", "onebit", "planes"))


def products(gpu: gpu_measure.Gpu) -> None:
    """Microseconds of each product of a layer, and of all; int4 weights, 128 to a scale."""
    print(f"| warps, ahead, blocks | {' | '.join(PRODUCTS)} | layer |")
    operands = {name: list(_operands(gpu, *size[:2])) for name, size in PRODUCTS.items()}
    expected: dict[str, Any] = {}
    launcher = gpu.driver._launch_early
    for early, tiling in [(False, None), *itertools.product(EARLY, TILINGS)]:
        gpu.driver.has_whole_tiles, gpu.driver._launch_early = tiling is not None, launcher if early else None
        matvec.TILING = matvec.FEW_TILES = tiling or matvec.TILING
        times = []
        for name, (_, columns, norm, gate) in PRODUCTS.items():
            x = expected.setdefault(f"{name}.x", gpu.normal(1, columns))
            more = {"norm": (cupy.ones(columns, np.float32), 1e-5) if norm else None, "gate": gate}

            def run(n: int | None, x: Any = x, more: Any = more, name: str = name) -> Any:
                for codes, scales in operands[name][:n]:
                    form = {"bits": 4, "block": 128, "columns": x.shape[1], **more}
                    y = matvec.packed_matvec(gpu.driver, x, codes, scales, **form)
                return y

            y = cupy.asnumpy(run(1))
            wanted = expected.setdefault(name, y)
            assert np.abs(y - wanted).max() < 1e-4 * np.abs(wanted).max(), (tiling, name)
            times.append(gpu.seconds(lambda run=run: run(None)) / len(operands[name]) * 1e6)
        shown = "as before" if tiling is None else f"{tuple(tiling)}{' early' if early else ''}"
        print(f"| {shown} | {' | '.join(f'{t:.2f}' for t in times)} | {sum(times):.2f} |", flush=True)


def _operands(gpu: gpu_measure.Gpu, rows: int, columns: int) -> Iterator[tuple[Any, Any]]:
    n = max(3, -(-3 * gpu.l2_bytes // (rows * columns // 2)))
    for _ in range(n):
        codes = gpu.rng.integers(0, 256, (rows, columns // 128, 64), dtype=np.uint8)
        yield codes, gpu.normal(rows, columns // 128)


def attention(gpu: gpu_measure.Gpu) -> None:
    """Microseconds of a layer's attention by tiles of a block of exact tokens."""
    print(f"| scheme | tokens | as before | {' | '.join(map(str, EXACT))} |")
    for text in SCHEMES:
        for depth in DEPTHS:
            gpu.driver.has_whole_tiles = False
            layers = gpu_measure.Layers.filled(gpu, gpu_measure.CacheSpec.parse(text), depth, 12)
            n = len(layers.caches)

            def result(layers: gpu_measure.Layers = layers) -> Any:
                cache, *token = (each[0] for each in (layers.caches, layers.queries, layers.keys, layers.values))
                found = cupy.asnumpy(cache.attend(*token))
                cache.advance(-1)
                return found

            expected, times = result(), [gpu.seconds(layers.attend) / n * 1e6]
            gpu.driver.has_whole_tiles = True
            for tiles in EXACT:
                tiled_planes.EXACT_TILES = tiles
                error = np.linalg.norm(result() - expected) / np.linalg.norm(expected)
                assert error < 4e-3, (text, depth, error)
                times.append(gpu.seconds(layers.attend) / n * 1e6)
            print(f"| {text} | {depth:,} | {' | '.join(f'{t:.1f}' for t in times)} |", flush=True)
            tiled_planes.EXACT_TILES = 3
            del layers
            cupy.get_default_memory_pool().free_all_blocks()


def whole(gpu: gpu_measure.Gpu) -> None:
    """Milliseconds of a token of Llama 2 7B's shape, int4."""
    gpu.driver.has_whole_tiles = True
    gpu_decode.PROMPTS = ()
    for r in gpu_decode.end_to_end(gpu, load_shape("llama2-7b"), WHOLE):
        figures = (r[name] or 0 for name in ("ms_per_token", "ms_per_token_mean", "mj_per_token"))
        print(f"| {r['scheme']} | {r['depth']:,} | {' | '.join(f'{x:.3f}' for x in figures)} |", flush=True)


def main(names: Sequence[str]) -> None:
    gpu, begin = gpu_measure.Gpu(), time.perf_counter()
    cut = matvec.TILING, matvec.FEW_TILES
    for section in (products, attention, whole):
        if not names or section.__name__ in names:
            print(f"\n== {section.__doc__}")
            section(gpu)
            print(f"{time.perf_counter() - begin:.0f} s so far")
            matvec.TILING, matvec.FEW_TILES = cut


if __name__ == "__main__":
    main(sys.argv[1:])
