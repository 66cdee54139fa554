"""The backend of a GPU, by CuPy; weights, scratch, caches and logits are in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.engine.cuda_graph import Replay
from edgekv.engine.decoder import CHUNK, Backend, Decoder, RopeRotation, ScoreOptions, visible_range
from edgekv.engine.model import Model
from edgekv.errors import CacheError, ConfigError
from edgekv.kernels.cuda import driver as cupy_driver
from edgekv.kernels.cuda.driver import Array, Driver
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.matvec import MATVEC_ROWS
from edgekv.kernels.cuda.rope import MOST_WIDTH, Halves, padded_width
from edgekv.kernels.interface import bound_scores
from edgekv.kvcache import CacheSpec, schemes
from edgekv.kvcache.cache import KVCache, Workspace
from edgekv.machine import all_cores
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights.cuda import NO_CHANGES, CudaOps, DeviceWeights, refuse_experts
from edgekv.weights.formats import WeightFormat

SCORES = 1 << 24  # float32 alive at once
CHUNK_SHARE = 64  # of the card's memory: what a chunk's activations may take
LEAST_CHUNK, MOST_CHUNK = 256, 8192


def chunk_tokens(config: ModelConfig, driver: Driver) -> int:
    """Tokens whose activations are alive at a time: a power of two that fits the card."""
    c = config
    per_token = 6 * (2 * c.q_size + 2 * c.kv_size + 2 * c.intermediate_size + c.hidden_size)
    most = driver.memory_bytes // CHUNK_SHARE // per_token
    return max(LEAST_CHUNK, min(MOST_CHUNK, 1 << max(most, 1).bit_length() - 1))


def runs(spec: CacheSpec) -> bool:
    """Whether the GPU reads all kinds of codecs that the scheme has."""
    codecs = spec.scheme.codecs_used(spec.knobs)
    return codecs is not None and all("cuda" in codec.backends for codec in codecs)


class CudaBackend(Backend):
    """The GPU that CuPy finds first (CUDA_VISIBLE_DEVICES chooses another)."""

    free_bytes = staticmethod(lambda: cupy_driver.free_bytes())

    def __init__(self, weights: DeviceWeights, driver: Driver, threads: int) -> None:
        self.kernels = self.device_kernels = CudaKernels(driver)
        self.ops = self._device_ops = CudaOps(weights)
        self.weights = self.device_weights = weights
        self.driver, self.threads, self.free_bytes = driver, threads, driver.free_bytes
        self.workspace, c = Workspace(driver), weights.arch.config
        self.chunk = CHUNK if self._device_ops.half is None else chunk_tokens(c, driver)
        is_plain = c.score_cap is None and not any(rope.query_growth for rope in c.ropes)
        fits = driver.has_matrix_tiles and c.head_dim <= MOST_WIDTH and is_plain
        self._half = self._device_ops.half if fits else None

    @classmethod
    def available(cls, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Whether CuPy, a GPU and the kernels of scheme and layers are there."""
        lacks_layers = config is not None and (config.experts is not None or bool(config.recurrences))
        return runs(spec) and not lacks_layers and cupy_driver.available()

    @classmethod
    def require(
        cls, spec: CacheSpec, config: ModelConfig | None = None, *, slots: int = 1, loras: bool = False
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

    @classmethod
    def open(
        cls, model: Model, form: WeightFormat, threads: int | None, progress: TaskProgress | None
    ) -> CudaBackend:
        require_layers(model.config)
        driver = cupy_driver.CupyDriver()
        return cls(DeviceWeights(model.store(form, progress), driver, progress), driver, all_cores(threads))

    def new_workspace(self) -> Workspace:
        return Workspace(self.driver)

    def upload(self, array: F32) -> Array:
        """The array (any shape) on the device."""
        return self.driver.upload(array)

    def embed(self, tokens: Sequence[int] | I64, start: int) -> Array:
        """(n, hidden) of n tokens, on the device."""
        return self.embed_ids(self.driver.upload(np.asarray(tokens, np.int32)), start)

    def embed_ids(self, ids: Array, start: int) -> Array:
        """(n, hidden) of ids (n,) int32 on the device."""
        arch = self.weights.arch
        positions = "positions" if arch.learned_positions else None
        x = self.device_weights.embed("embed", ids, positions, start)
        return x if arch.config.embedding_scale == 1.0 else x * np.float32(arch.config.embedding_scale)

    def attend_prompt(self, queries: Array, keys: Array, values: Array, options: ScoreOptions) -> None:
        """`Backend.attend_prompt` of queries (n_heads, n, head_dim), all heads at once; without sinks."""
        if options.sinks is not None:
            raise ValueError("sinks are not known here: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        n_kv_heads, earlier = len(keys), keys.shape[1] - n
        n_rep = n_heads // n_kv_heads
        step = max(1, SCORES // (n_heads * keys.shape[1]))
        for a in range(0, n, step):
            b = min(a + step, n)
            first, *ranges = visible_range(earlier + a, earlier + b, options.window)
            lo, hi = (np.tile(each, n_rep) for each in ranges)
            q = queries[:, a:b].copy().reshape(n_kv_heads, n_rep * (b - a), head_dim)
            s = q @ keys[:, first : earlier + b].transpose(0, 2, 1)
            bound_scores(s, options.cap)
            self.kernels.softmax(s, lo, hi)
            queries[:, a:b] = (s @ values[:, first : earlier + b]).reshape(n_heads, b - a, head_dim)

    def prompt_layer(
        self, i: int, cache: KVCache, x: Array, rotation: RopeRotation, norms: tuple[Any, Any]
    ) -> bool:
        """A prompt x (n, hidden) in half precision, on cards with matrix tiles; False: take the exact way."""
        n, arch, array = len(x), self.weights.arch, self.workspace.array
        if self._half is None or n <= MATVEC_ROWS:
            return False
        c, width = arch.config, padded_width(arch.config.head_dim)
        queries = array("prefill.q", (c.n_heads, n, c.head_dim)) if cache.needs_prompt_queries else None
        k, v = (array(f"prefill.{part}", (c.n_kv_heads, n, c.head_dim)) for part in "kv")
        half_k, half_v = (array(f"prefill.half_{part}", (c.n_kv_heads, n, width), np.float16) for part in "kv")
        for a in range(0, n, self.chunk):
            b = min(a + self.chunk, n)
            half_q = array("prefill.half_q", (c.n_heads, b - a, width), np.float16)
            out = array("prefill.half_out", (b - a, c.q_size), np.float16)
            here = x[a:b]
            self.device_kernels.split_rope_halves(
                *(arch.attention_in(self._half, i, here), *rotation.rows(a, b)[:2]),
                *(None if queries is None else queries[:, a:b], k[:, a:b], v[:, a:b]),
                *(c.layer_scales[i], *norms, c.norm_eps, Halves(half_q, half_k, half_v, a)),
            )
            self.device_kernels.attend_prompt(half_q, half_k, half_v, a, c.layer_windows[i], out)
            there = arch.attention_out(self._half, i, here, out)
            if there is not here:  # HalfOps adds in place
                x[a:b] = there
        cache.prefill(k[:, :0] if queries is None else queries, k, v)
        return True

    def new_replay(self, decoder: Decoder) -> Replay:
        return Replay(decoder, self)

    def buffers(self) -> list[Array]:
        """All scratch that a step uses, arrays of (n_bytes,)."""
        return [*self.workspace.buffers(), *self.device_kernels.buffers()]


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
