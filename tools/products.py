"""Products with packed weights: edgekv's kernels beside onnxruntime's MatMulNBits, taking turns.

    python tools/products.py --weights int4,int4-32,int8 --rows 1,4,64,512 --threads 1,2

A matrix of --columns x --outputs; a token's products (few rows) read copies of it in turn, which no cache holds.
Prints the least time of all rounds, bytes of weights per second and operations per second.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from edgekv.kernels import threads
from edgekv.kernels.cpu.products import FEW_ROWS, multiply
from edgekv.linear.formats import WEIGHTS, WeightFormat
from edgekv.linear.onnx import session_options
from edgekv.linear.quantize import n_blocks
from edgekv.linear.runtime import ort
from edgekv.linear.stored_weights import product_layout
from edgekv.types import F32, U8

COPIES, ROUNDS = 6, 8  # of a token's products; of many rows one, and half as many


def graph(codes: U8, scales: F32, form: WeightFormat, columns: int) -> bytes:
    """One product as onnxruntime computes it, activations rounded to bytes."""
    rows = len(codes)
    sizes = {"K": columns, "N": rows, "bits": form.bits, "block_size": form.block, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft", **sizes)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n])
        for name, n in (("x", columns), ("y", rows))
    ]
    weights = [
        helper.make_tensor("codes", TensorProto.UINT8, codes.shape, codes.tobytes(), raw=True),
        helper.make_tensor("scales", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "product", ends[:1], ends[1:], weights), opset_imports=opsets, ir_version=9
    )
    data: bytes = model.SerializeToString()
    return data


def least(ours: list[Callable[[], object]], theirs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of one call of each, the least of the rounds, which take turns."""
    best = [np.inf, np.inf]
    for _ in range(rounds):
        for i, calls in enumerate((ours, theirs)):
            begun = time.perf_counter()
            for call in calls:
                call()
            best[i] = min(best[i], (time.perf_counter() - begun) / len(calls))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="int4,int4-32,int8")
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=11008)
    parser.add_argument("--rows", default="1,4,64,512")
    parser.add_argument("--threads", default="1,2")
    arguments = parser.parse_args()
    rng, columns, outputs = np.random.default_rng(0), arguments.columns, arguments.outputs
    print(
        "| weights | threads | rows | ms | GB/s | GFLOP/s | onnxruntime, ms | GB/s | GFLOP/s |\n"
        + "|---" * 9
        + "|"
    )
    for form in (WEIGHTS[name] for name in arguments.weights.split(",")):
        blocks, layout = n_blocks(columns, form.block), product_layout(form)
        weights = [
            (
                rng.integers(0, 256, (outputs, blocks, form.block * form.bits // 8), np.uint8),
                rng.random((outputs, blocks), np.float32) / 100,
            )
            for _ in range(COPIES)
        ]
        n_bytes = sum(array.nbytes for array in weights[0])
        for n_threads in map(int, arguments.threads.split(",")):
            threads.configure(n_threads)
            options = session_options(n_threads)
            sessions = [ort.InferenceSession(graph(*each, form, columns), options) for each in weights]
            for n in map(int, arguments.rows.split(",")):
                x = rng.standard_normal((n, columns)).astype(np.float32)
                copies = COPIES if n <= FEW_ROWS else 1
                times = least(
                    [functools.partial(multiply, x, *each, layout) for each in weights[:copies]],
                    [functools.partial(session.run, None, {"x": x}) for session in sessions[:copies]],
                    ROUNDS if n <= FEW_ROWS else ROUNDS // 2,
                )
                cells = []
                for seconds in times:
                    work = 2 * n * columns * outputs / seconds / 1e9
                    cells.append(f"{seconds * 1e3:.2f} | {n_bytes / seconds / 1e9:.1f} | {work:.0f}")
                print(f"| `{form.name}` | {n_threads} | {n} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
