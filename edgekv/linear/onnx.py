"""The CPU backend: each block of each layer is one onnxruntime session over the store's mapped weights."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.runtime import ort
from edgekv.linear.store import WeightStore
from edgekv.machine import return_large_blocks
from edgekv.types import F32


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
    """The three blocks of every layer, run by onnxruntime with ``threads`` threads."""

    def __init__(self, store: WeightStore, threads: int) -> None:
        return_large_blocks()
        c = store.arch.config
        widths: dict[str, int] = {}
        for i in range(c.n_layers):
            widths |= {f"{i}.in.onnx": c.q_size + 2 * c.kv_size, f"{i}.out.onnx": c.hidden_size}
        widths["head.onnx"] = c.vocab_size
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            blocks = list(
                pool.map(lambda item: OnnxBlock(store.folder / item[0], threads, item[1]), widths.items())
            )
        self._in, self._out, self._head = blocks[0:-1:2], blocks[1:-1:2], blocks[-1]
        self.weights_bytes = store.nbytes

    def attention_in(self, i: int, x: F32) -> F32:
        return self._in[i](x=x)

    def attention_out(self, i: int, x: F32, attention: F32) -> F32:
        return self._out[i](x=x, attention=attention)

    def head(self, x: F32) -> F32:
        return self._head(x=x)
