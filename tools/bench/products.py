"""Measures products with packed weights: milliseconds, bytes and operations a second, by rows and threads.

    python tools/bench/products.py --weights int4,int4-32,q4 --rows 1,4,64,512 --threads 1,2

A matrix of --columns x --outputs; a token's products (few rows) read copies of it in turn, which no cache holds.
Prints the least time of all rounds. Formats are those of `edgekv.weights.formats` in fewer than 32 bits.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from edgekv.checkpoint.tensors import BFLOAT16
from edgekv.kernels import threads
from edgekv.kernels.cpu.matmul import QuantizedMatmul, QuantizedWeights
from edgekv.kernels.interface import GEMV_ROWS
from edgekv.types import Array
from edgekv.weights.cpu import stored_weights
from edgekv.weights.formats import FORMATS, WeightFormat

COPIES, ROUNDS = 6, 8  # of a token's products; of many rows one, and half as many


def drawn(rng: np.random.Generator, form: WeightFormat, rows: int, columns: int) -> QuantizedWeights:
    """Draws random weights in a format."""
    kinds, arrays = {"F32": np.float32, "BF16": BFLOAT16}, dict[str, Array]()
    for part, (dtype, shape) in form.arrays(rows, columns).items():
        numbers = rng.random(shape, np.float32) / 100 if dtype in kinds else rng.integers(0, 256, shape)
        arrays[part] = numbers.astype(kinds.get(dtype, np.uint8))
    return stored_weights(form, arrays)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="int4,int4-32,int8,q4")
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=11008)
    parser.add_argument("--rows", default="1,4,64,512")
    parser.add_argument("--threads", default="1,2")
    arguments = parser.parse_args()
    rng, columns, outputs = np.random.default_rng(0), arguments.columns, arguments.outputs
    print("| weights | threads | rows | ms | GB/s | GFLOP/s |\n" + "|---" * 6 + "|")
    for form in (FORMATS[name] for name in arguments.weights.split(",")):
        weights = [drawn(rng, form, outputs, columns) for _ in range(COPIES)]
        products = [QuantizedMatmul(each) for each in weights]
        n_bytes = sum(array.nbytes for array in weights[0] if isinstance(array, np.ndarray))
        for n_threads in map(int, arguments.threads.split(",")):
            threads.configure(n_threads)
            for n in map(int, arguments.rows.split(",")):
                x = rng.standard_normal((n, columns)).astype(np.float32)
                own, least = products[: COPIES if n <= GEMV_ROWS else 1], np.inf
                for _ in range(ROUNDS if n <= GEMV_ROWS else ROUNDS // 2):
                    begun = time.perf_counter()
                    for product in own:
                        product(x)
                    least = min(least, (time.perf_counter() - begun) / len(own))
                speeds = f"{n_bytes / least / 1e9:.1f} | {2 * n * columns * outputs / least / 1e9:.0f}"
                print(f"| `{form.name}` | {n_threads} | {n} | {least * 1e3:.2f} | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
