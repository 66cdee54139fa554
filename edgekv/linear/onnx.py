"""The CPU backend: each block of each layer is one onnxruntime session over the store's mapped weights."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from edgekv.errors import CheckpointError
from edgekv.linear.store import Store
from edgekv.machine import return_large_blocks

F32 = npt.NDArray[np.float32]


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


def _open(path: pathlib.Path, threads: int) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own unrelated exception types
        detail = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: onnxruntime can't open it ({detail}); delete {path.parent} to rebuild"
        ) from error


class OrtDense:
    """The three blocks of every layer, run by onnxruntime with ``threads`` threads."""

    def __init__(self, store: Store, threads: int) -> None:
        return_large_blocks()
        n = store.arch.config.n_layers
        names = [f"{i}.{end}.onnx" for i in range(n) for end in ("in", "out")] + ["head.onnx"]
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            sessions = list(pool.map(lambda name: _open(store.folder / name, threads), names))
        self._in, self._out, self._head = sessions[0:-1:2], sessions[1:-1:2], sessions[-1]
        self.weights_bytes = store.nbytes

    def attention_in(self, i: int, x: F32) -> F32:
        result: F32 = self._in[i].run(None, {"x": x})[0]
        return result

    def attention_out(self, i: int, x: F32, attention: F32) -> F32:
        result: F32 = self._out[i].run(None, {"x": x, "attention": attention})[0]
        return result

    def head(self, x: F32) -> F32:
        result: F32 = self._head.run(None, {"x": x})[0]
        return result
