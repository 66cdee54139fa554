"""Products with packed weights: edgekv's kernels beside onnxruntime's MatMulNBits, taking turns.

    python tools/products.py --weights int4,int4-32,int8 --rows 1,4,64,512 --threads 1,2

A matrix of --columns x --outputs; a token's products (few rows) read copies of it in turn, which no cache holds.
Prints the least time of all rounds, bytes of weights per second and operations per second. Formats are those of
`edgekv.linear.formats` in fewer than 32 bits; onnxruntime has none with offsets.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from edgekv.kernels import threads
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.kernels.cpu.products import FEW_ROWS, PackedProduct
from edgekv.linear.formats import FORMATS, WeightFormat
from edgekv.linear.onnx import session_options
from edgekv.linear.quantize import n_blocks
from edgekv.linear.runtime import ort
from edgekv.linear.stored_weights import product_layout

COPIES, ROUNDS = 6, 8  # of a token's products; of many rows one, and half as many


def drawn(rng: np.random.Generator, form: WeightFormat, rows: int, columns: int) -> PackedWeights:
    """Any weights in a format."""
    blocks = n_blocks(columns, form.block)
    codes = rng.integers(0, 256, (rows, blocks, form.block * form.bits // 8), np.uint8)
    scales, offsets = (rng.random((rows, blocks), np.float32) / 100 for _ in range(2))
    zeros = rng.integers(0, 256, (rows, -(-blocks // 2)), np.uint8)
    shift = {"offsets": offsets} if form.offsets else {"zeros": zeros} if form.zeros else {}
    return PackedWeights(codes, scales, product_layout(form), **shift)


def graph(weights: PackedWeights, form: WeightFormat, columns: int) -> bytes:
    """One product as onnxruntime computes it, activations rounded to bytes."""
    codes, scales, zeros = weights.codes, weights.scales, weights.zeros
    rows, inputs = len(codes), ["x", "codes", "scales", *(["zeros"] if zeros is not None else [])]
    sizes = {"K": columns, "N": rows, "bits": form.bits, "block_size": form.block, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **sizes)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n])
        for name, n in (("x", columns), ("y", rows))
    ]
    tensors = [
        helper.make_tensor("codes", TensorProto.UINT8, codes.shape, codes.tobytes(), raw=True),
        helper.make_tensor("scales", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
    ]
    if zeros is not None:
        tensors.append(helper.make_tensor("zeros", TensorProto.UINT8, zeros.shape, zeros.tobytes(), raw=True))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "product", ends[:1], ends[1:], tensors), opset_imports=opsets, ir_version=9
    )
    data: bytes = model.SerializeToString()
    return data


def least(rounds: int, *all_calls: list[Callable[[], object]]) -> list[float]:
    """Seconds of one call of each kind, the least of the rounds, which take turns."""
    best = [np.inf] * len(all_calls)
    for _ in range(rounds):
        for i, calls in enumerate(all_calls):
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
    for form in (FORMATS[name] for name in arguments.weights.split(",")):
        weights = [drawn(rng, form, outputs, columns) for _ in range(COPIES)]
        products = [PackedProduct(each) for each in weights]
        n_bytes = sum(array.nbytes for array in weights[0] if isinstance(array, np.ndarray))
        for n_threads in map(int, arguments.threads.split(",")):
            threads.configure(n_threads)
            options = session_options(n_threads)
            theirs = [] if form.offsets else [graph(each, form, columns) for each in weights]
            sessions = [ort.InferenceSession(each, options) for each in theirs]
            for n in map(int, arguments.rows.split(",")):
                x = rng.standard_normal((n, columns)).astype(np.float32)
                copies = COPIES if n <= FEW_ROWS else 1
                calls = [[functools.partial(product, x) for product in products[:copies]]]
                if sessions:
                    calls.append([functools.partial(session.run, None, {"x": x}) for session in sessions[:copies]])
                cells, times = [], least(ROUNDS if n <= FEW_ROWS else ROUNDS // 2, *calls)
                for seconds in times:
                    work = 2 * n * columns * outputs / seconds / 1e9
                    cells.append(f"{seconds * 1e3:.2f} | {n_bytes / seconds / 1e9:.1f} | {work:.0f}")
                print(f"| `{form.name}` | {n_threads} | {n} | {' | '.join([*cells, '| |'][:2])} |", flush=True)


if __name__ == "__main__":
    main()
