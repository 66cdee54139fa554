"""The CPU backend of float32 weights: each layer's blocks are onnxruntime sessions over the mapped store."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.experts import graph_width
from edgekv.linear.low_rank import Changes
from edgekv.linear.packed import PackedLinear
from edgekv.linear.runtime import ort
from edgekv.linear.store import WeightStore
from edgekv.linear.stored_experts import StoredExperts
from edgekv.machine import return_large_blocks
from edgekv.types import F32, Threads

LEAST_ROWS = 32  # of a prompt, that are worth a call of their own


def session_options(threads: int) -> ort.SessionOptions:
    """Of sessions that share the machine's cores with others, and with the kernels."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False  # one arena per session would keep every layer's scratch
    # Every session owns a pool: spinning workers of idle sessions would take the cores from the busy one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class OnnxBlock:
    """One graph of the store. CheckpointError where it can't be opened, or does something else."""

    def __init__(self, path: pathlib.Path, threads: int, width: int) -> None:
        """width: of its output rows."""
        self._path, self._width = path, width
        try:
            self._session = ort.InferenceSession(
                str(path), session_options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            raise self._damaged("open", error) from error

    def __call__(self, **inputs: F32) -> F32:
        try:
            (y,) = self._session.run(None, inputs)
        except Exception as error:
            raise self._damaged("run", error) from error
        if y.shape != (len(inputs["x"]), self._width) or y.dtype != np.float32:
            raise self._damaged("use", f"it gives {y.dtype} {y.shape}")
        result: F32 = y
        return result

    def _damaged(self, what: str, reason: object) -> CheckpointError:
        detail = str(reason).splitlines()[0][:200] if str(reason) else type(reason).__name__
        return CheckpointError(
            f"{self._path}: onnxruntime can't {what} it ({detail}); delete {self._path.parent} to rebuild"
        )


class OrtLinear(LinearBlocks):
    """The three blocks of every layer, run by onnxruntime.

    A session's threads can't be changed, and another set of sessions would keep the packed weights twice. So the
    sessions have those for a token, and where prompts are to have more, the others call with rows of their own.
    """

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        return_large_blocks()
        c = store.arch.config
        widths: dict[str, int] = {}
        for i in range(c.n_layers):
            widths |= {f"{i}.in.onnx": store.arch.widths(i)[0], f"{i}.out.onnx": graph_width(c, i)}
        widths["head.onnx"] = c.vocab_size
        with ThreadPoolExecutor(threads.prompt) as pool:
            blocks = list(
                pool.map(lambda item: OnnxBlock(store.folder / item[0], threads.decode, item[1]), widths.items())
            )
        self._in, self._out, self._head = blocks[0:-1:2], blocks[1:-1:2], blocks[-1]
        self._config, self._experts = c, StoredExperts(store, threads)
        self.weights_bytes, self.threads = store.nbytes, threads
        self._store, self._product_threads = store, threads
        self._callers = 1 + threads.prompt - threads.decode
        self._pool = ThreadPoolExecutor(self._callers, thread_name_prefix="edgekv-products")

    def warm_up(self) -> list[Callable[[], object]]:
        return self._experts.warm_up()

    def with_changes(self, changes: Changes) -> LinearBlocks:
        """The graphs have no place for them: NumPy multiplies, over the mapped store."""
        return PackedLinear(self._store, self._product_threads).with_changes(changes)

    @staticmethod
    def block(store: WeightStore, name: str, threads: int) -> OnnxBlock:
        """The first layer's ``attention_in`` or ``attention_out``, on so many threads."""
        if name == "attention_in":
            return OnnxBlock(store.folder / "0.in.onnx", threads, store.arch.widths(0)[0])
        return OnnxBlock(store.folder / "0.out.onnx", threads, graph_width(store.arch.config, 0))

    def attention_in(self, i: int, x: F32) -> F32:
        return self._run(self._in[i], x=x)

    def attention_out(self, i: int, x: F32, attention: F32) -> F32:
        y = self._run(self._out[i], x=x, attention=attention)
        size = self._config.hidden_size
        if self._config.experts_of(i) is None:
            return y
        x, normed, logits = np.split(y, (size, 2 * size), axis=1)
        return self._experts.add(x, normed, logits, i)

    def head(self, x: F32) -> F32:
        return self._run(self._head, x=x)

    def _run(self, block: OnnxBlock, **inputs: F32) -> F32:
        n = len(inputs["x"])
        parts = min(self._callers, n // LEAST_ROWS)
        if parts < 2:
            return block(**inputs)
        ends = [n * part // parts for part in range(parts + 1)]
        jobs = [
            self._pool.submit(block, **{name: rows[a:b] for name, rows in inputs.items()})
            for a, b in itertools.pairwise(ends)
        ]
        return np.concatenate([job.result() for job in jobs])
