"""The decoder on a GPU: weights, caches, attention and logits stay there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.decoder.cuda_attention import CudaAttention
from edgekv.decoder.cuda_graph import Replay
from edgekv.decoder.cuda_prompt import HalfPrompt, chunk_tokens
from edgekv.decoder.decoder import Decoder
from edgekv.decoder.prompt_attention import Scoring
from edgekv.decoder.rope_tables import RopeRotation
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.matvec import MATVEC_ROWS
from edgekv.kernels.cuda.program import Array, Driver
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.geometry import Workspace
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import attending
from edgekv.linear.cuda import CudaLinear
from edgekv.linear.cuda_weights import DeviceWeights
from edgekv.types import I64


class CudaDecoder(Decoder):
    """`Decoder` on the device: weights, scratch, caches and logits are in its memory."""

    def __init__(self, weights: DeviceWeights, driver: Driver, capacity: int, threads: int) -> None:
        kernels, linear, workspace = CudaKernels(driver), CudaLinear(weights), Workspace(driver)
        super().__init__(
            weights,
            linear,
            kernels,
            CudaAttention(kernels),
            capacity=capacity,
            threads=threads,
            workspace=workspace,
            chunk=None if linear.half is None else chunk_tokens(weights.arch.config, driver),
            upload=driver.upload,
        )
        self.driver, self._device_weights, self._device_kernels = driver, weights, kernels
        self._half: HalfPrompt | None = None
        if linear.half is not None and HalfPrompt.fits(self.config, driver):
            self._half = HalfPrompt(weights.arch, linear.half, kernels, workspace, self.chunk)
        self._replay = Replay(self)

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    @property
    def can_replay(self) -> bool:
        """Whether the position is all that differs between two steps, and where kernels look it up."""
        grows = any(rope.query_growth for rope in self.config.ropes)
        return self._ropes.is_fixed and not grows

    @property
    def n_replayed(self) -> int:
        """Steps so far that were replayed from a recording."""
        return self._replay.n_replayed

    def warm_up(self, caches: Sequence[KVCache]) -> list[Callable[[], object]]:
        return [functools.partial(self._warm_up, caches)]

    def _warm_up(self, caches: Sequence[KVCache]) -> None:
        """Compiles a scheme's kernels, or loads them from CuPy's cache, on throw-away random tokens."""
        cache, n = caches[-1], caches[-1].geometry.capacity
        cache.allocate(self.kernels, Workspace(self.driver))
        rng = np.random.default_rng(0)
        shape = (n, self.config.q_size + 2 * self.config.kv_size)
        qkv = self.driver.upload(rng.standard_normal(shape, dtype=np.float32))
        q, k, v = self._qkv_buffers("prefill", n)
        self._split(len(self._norms) - 1, qkv, self._ropes.at(0, n)[-1], q, k, v)
        if n > 1:
            cache.prefill(q[:, :-1], k[:, :-1], v[:, :-1])
            type(cache).finish_prefill([cache])
        cache.attend(q[:, -1:].copy(), k[:, -1:].copy(), v[:, -1:].copy())
        self._exact_attention(q, k, v, Scoring())

    def _prompt_layer(
        self, i: int, cache: KVCache, x: Array, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        if self._half is None or len(x) <= MATVEC_ROWS:
            self._exact_layer(i, cache, x, rotation, pause)
        else:
            self._half.layer(i, cache, x, rotation, self._norms[i])

    def embed(self, tokens: Sequence[int] | I64, start: int) -> Array:
        self.require_process()
        return self.embed_ids(self.driver.upload(np.asarray(tokens, np.int32)), start)

    def embed_ids(self, ids: Array, start: int) -> Array:
        """(n, hidden) of ids (n,) int32 on the device."""
        positions = "positions" if self._learned_positions else None
        x = self._device_weights.embed("embed", ids, positions, start)
        return x if self.config.embedding_scale == 1.0 else x * np.float32(self.config.embedding_scale)

    def step(self, token: int, caches: Sequence[LayerState]) -> Array:
        """Logits (vocab,) on the device after appending one token, valid until the next step."""
        return self._replay.step(token, attending(caches))

    def buffers(self) -> list[Array]:
        """All scratch that a step uses."""
        return [*self.workspace.buffers(), *self._device_kernels.buffers()]
