"""The device cuda: what it can run, and the decoder on it; weights, caches and logits stay there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv.engine.cuda_graph import Replay
from edgekv.engine.decoder import Decoder, Device, RopeRotation, Scoring, seen
from edgekv.engine.model import Model
from edgekv.errors import CacheError, ConfigError
from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.cuda import driver as cupy_driver
from edgekv.kernels.cuda.driver import Array, Driver
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.matvec import MATVEC_ROWS
from edgekv.kernels.cuda.rope import MOST_WIDTH, Halves, padded_width
from edgekv.kvcache import CacheSpec, schemes
from edgekv.kvcache.cache import KVCache, LayerState, Workspace
from edgekv.kvcache.recurrent import attending
from edgekv.machine import all_cores
from edgekv.models.architecture import Architecture
from edgekv.models.config import ModelConfig
from edgekv.types import I64, TaskProgress
from edgekv.weights.cuda import NO_CHANGES, CudaOps, DeviceWeights, HalfOps, refuse_experts
from edgekv.weights.formats import WeightFormat

SCORES = 1 << 24  # float32 alive at once


class CudaAttention:
    """Blocks of query rows, all heads at once."""

    def __init__(self, kernels: CudaKernels) -> None:
        self.kernels = kernels

    def __call__(self, queries: Array, keys: Array, values: Array, scoring: Scoring) -> None:
        """See `PromptAttention` (prompt_attention.py); without sinks. Scratch: up to SCORES float32 scores."""
        if scoring.sinks is not None:
            raise ValueError("sinks are not known here: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        earlier = keys.shape[1] - n
        n_kv_heads = keys.shape[0]
        n_rep = n_heads // n_kv_heads
        step = max(1, SCORES // (n_heads * keys.shape[1]))
        for a in range(0, n, step):
            b = min(a + step, n)
            t0, t1 = earlier + a, earlier + b
            first, *ranges = seen(t0, t1, scoring.window)
            lo, hi = (np.tile(each, n_rep) for each in ranges)
            q = queries[:, a:b].copy().reshape(n_kv_heads, n_rep * (b - a), head_dim)
            s = q @ keys[:, first:t1].transpose(0, 2, 1)
            bound_scores(s, scoring.cap)
            self.kernels.softmax(s, lo, hi)
            queries[:, a:b] = (s @ values[:, first:t1]).reshape(n_heads, b - a, head_dim)


CHUNK_SHARE = 64  # of the card's memory: what a chunk's activations may take
LEAST_CHUNK, MOST_CHUNK = 256, 8192


def chunk_tokens(config: ModelConfig, driver: Driver) -> int:
    """Tokens whose activations are alive at a time: a power of two that fits the card."""
    c = config
    per_token = 6 * (2 * c.q_size + 2 * c.kv_size + 2 * c.intermediate_size + c.hidden_size)
    most = driver.memory_bytes // CHUNK_SHARE // per_token
    return max(LEAST_CHUNK, min(MOST_CHUNK, 1 << max(most, 1).bit_length() - 1))


class HalfPrompt:
    """The layers of one decoder over a prompt that fills empty caches."""

    def __init__(
        self, arch: Architecture, ops: HalfOps, kernels: CudaKernels, workspace: Workspace, chunk: int
    ) -> None:
        self.arch, self.ops, self.kernels, self.workspace, self.chunk = arch, ops, kernels, workspace, chunk

    @staticmethod
    def fits(config: ModelConfig, driver: Driver) -> bool:
        """Whether the device has what this takes, and attention is of the plain kind."""
        grows = any(rope.query_growth for rope in config.ropes)
        return driver.has_matrix_tiles and config.head_dim <= MOST_WIDTH and config.score_cap is None and not grows

    def layer(self, i: int, cache: KVCache, x: Array, rotation: RopeRotation, norms: tuple[Any, Any]) -> None:
        """Turns x (n, hidden) into layer i's result in place, and fills its cache."""
        n, c, array = len(x), self.arch.config, self.workspace.array
        width, chunk = padded_width(c.head_dim), self.chunk
        queries = array("prefill.q", (c.n_heads, n, c.head_dim)) if cache.sees_queries else None
        k = array("prefill.k", (c.n_kv_heads, n, c.head_dim))
        v = array("prefill.v", (c.n_kv_heads, n, c.head_dim))
        half_k = array("prefill.half_k", (c.n_kv_heads, n, width), np.float16)
        half_v = array("prefill.half_v", (c.n_kv_heads, n, width), np.float16)
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            part = slice(a, b)
            half_q = array("prefill.half_q", (c.n_heads, b - a, width), np.float16)
            out = array("prefill.half_out", (b - a, c.q_size), np.float16)
            self.kernels.split_rope_halves(
                *(self.arch.attention_in(self.ops, i, x[part]), *rotation.rows(a, b)[:2]),
                *(None if queries is None else queries[:, part], k[:, part], v[:, part]),
                *(c.layer_scales[i], *norms, c.norm_eps, Halves(half_q, half_k, half_v, a)),
            )
            self.kernels.attend_prompt(half_q, half_k, half_v, a, c.layer_windows[i], out)
            here = x[part]
            there = self.arch.attention_out(self.ops, i, here, out)
            if there is not here:  # HalfOps adds in place
                x[part] = there
        cache.prefill(k[:, :0] if queries is None else queries, k, v)


class CudaDecoder(Decoder):
    """`Decoder` on the device: weights, scratch, caches and logits are in its memory."""

    def __init__(self, weights: DeviceWeights, driver: Driver, capacity: int, threads: int) -> None:
        kernels, ops, workspace = CudaKernels(driver), CudaOps(weights), Workspace(driver)
        super().__init__(
            weights,
            ops,
            kernels,
            CudaAttention(kernels),
            capacity=capacity,
            threads=threads,
            workspace=workspace,
            chunk=None if ops.half is None else chunk_tokens(weights.arch.config, driver),
            upload=driver.upload,
        )
        self.driver, self._device_weights, self._device_kernels = driver, weights, kernels
        self._half: HalfPrompt | None = None
        if ops.half is not None and HalfPrompt.fits(self.config, driver):
            self._half = HalfPrompt(weights.arch, ops.half, kernels, workspace, self.chunk)
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


def runs(spec: CacheSpec) -> bool:
    """Whether the GPU reads all kinds of codecs that the scheme has."""
    codecs = spec.scheme.codecs_used(spec.knobs)
    return codecs is not None and all("cuda" in codec.backends for codec in codecs)


def require_layers(config: ModelConfig) -> None:
    """Raises ConfigError for a model with layers that do not attend, or with experts."""
    if config.experts:
        raise refuse_experts()
    if config.recurrences:
        raise ConfigError(
            f"device='cuda': it has no kernels for the layers of {config.model_type} that do not attend; use "
            "device='cpu'",
            field="device",
            value="cuda",
            accepted=["cpu", "numpy"],
        )


class CudaDevice(Device):
    """The GPU that CuPy finds first (CUDA_VISIBLE_DEVICES chooses another)."""

    def available(self, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Whether CuPy, a GPU and the kernels of scheme and layers are there."""
        lacks_layers = config is not None and (config.experts is not None or bool(config.recurrences))
        return runs(spec) and not lacks_layers and cupy_driver.available()

    def require(
        self, spec: CacheSpec, config: ModelConfig | None = None, *, slots: int = 1, loras: bool = False
    ) -> None:
        """Raises CacheError for a scheme without kernels, ConfigError for the rest, and without CuPy or a GPU."""
        if config is not None:
            require_layers(config)
        if slots > 1:  # a step is a recording of one conversation's
            raise ConfigError(
                f"slots={slots}: device='cuda' decodes one conversation at a time; use slots=1, or device='cpu'",
                field="slots",
                value=slots,
                accepted=["1"],
            )
        if loras:
            raise ConfigError(NO_CHANGES, field="loras")
        if not runs(spec):
            able = [name for name, scheme in schemes().items() if runs(CacheSpec(scheme, scheme.Knobs()))]
            raise CacheError(
                f"kv={spec.scheme.name!r} does not run on device='cuda'; these do: {', '.join(able)}; or use "
                "device='cpu'",
                field="kv",
                value=spec.scheme.name,
                accepted=able,
            )
        cupy_driver.require_cupy()

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        return cupy_driver.free_bytes()

    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> CudaDecoder:
        require_layers(model.config)
        driver = cupy_driver.CupyDriver()
        weights = DeviceWeights(model.store(form, progress), driver, progress)
        return CudaDecoder(weights, driver, capacity, all_cores(threads))
