"""The GPU backend, by CuPy: weights, scratch, caches and logits are in the GPU's memory.

A decode step is captured once as a CUDA graph and replayed for later tokens, so that no time passes between its
launches. While every cache's `KVCache.is_static` is True, the next step differs from the captured one only in
counters: positions, and where the stores end. A captured launch finds on the device how far each is from its
captured value (`GraphInputs`). Packing a block (`KVCache.flush`) is a graph of its own, captured when it is first
due; where it can't be captured it is done without one.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.engine.decoder import CHUNK, Backend, Decoder, RopeRotation, ScoreOptions, visible_range
from edgekv.engine.model import Model
from edgekv.errors import CacheError, ConfigError
from edgekv.kernels.cuda import driver as cupy_driver
from edgekv.kernels.cuda.driver import GRAPH_TOKENS, Array, CaptureError, Counter, Driver, GraphInputs, set_inputs
from edgekv.kernels.cuda.kernels import MAX_WIDTH, CudaKernels, HalfQKV, padded_width
from edgekv.kernels.cuda.matvec import MATVEC_ROWS
from edgekv.kernels.interface import bound_scores
from edgekv.kvcache import CacheSpec, schemes
from edgekv.kvcache.cache import KVCache, Workspace
from edgekv.kvcache.policies import FullCache, RollingCache, SinkWindowCache, Sizes
from edgekv.machine import all_cores
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights.cuda import CudaOps, DeviceWeights, device_model_format, lora_refusal
from edgekv.weights.formats import ModelFormat

MAX_SCORES = 1 << 24  # float32 scores of a prompt in memory at once
CHUNK_SHARE = 64  # a chunk's activations take at most this part of the card's memory: 1 / CHUNK_SHARE
MIN_CHUNK, MAX_CHUNK = 256, 8192  # tokens
MIN_REPLAYS = 8  # tokens left in the cache, for which a graph is worth its time
MAX_FAILURES = 3  # failed captures of a scheme, after which its steps are not captured
POSITIONS = "n_seen"  # the counter that all caches share
STORING = "append", "attend", "segments"  # methods by which a token is stored as the last one of the last segment
COUNTING = "is_static", "advance", "needs_flush", "flush"  # and those that decide how counters change
Counts = list[dict[str, int]]  # of each group of caches, the counters by name


def chunk_tokens(config: ModelConfig, driver: Driver) -> int:
    """Returns the tokens of a prompt that are computed together: a power of two that fits the card."""
    token_bytes = 6 * (2 * config.q_size + 2 * config.kv_size + 2 * config.intermediate_size + config.hidden_size)
    n = driver.memory_bytes // CHUNK_SHARE // token_bytes
    return max(MIN_CHUNK, min(MAX_CHUNK, 1 << max(n, 1).bit_length() - 1))


def supports(spec: CacheSpec) -> bool:
    """Returns whether the GPU has kernels for all codecs of a scheme."""
    codecs = spec.scheme.codecs_used(spec.config)
    return codecs is not None and all("cuda" in codec.backends for codec in codecs)


class CudaBackend(Backend):
    """The first GPU that CuPy finds (CUDA_VISIBLE_DEVICES chooses another)."""

    kernels: CudaKernels
    ops: CudaOps
    weights: DeviceWeights
    device_format = staticmethod(device_model_format)
    free_bytes = staticmethod(lambda: int(cupy_driver.require_cupy().cuda.runtime.memGetInfo()[0]))

    def __init__(self, weights: DeviceWeights, driver: Driver, threads: int) -> None:
        self.kernels, self.ops, self.weights = CudaKernels(driver), CudaOps(weights), weights
        self.driver, self.threads, self.free_bytes = driver, threads, driver.free_bytes
        self.workspace = Workspace(driver)
        c = weights.arch.config
        self.chunk = CHUNK if self.ops.half is None else chunk_tokens(c, driver)
        is_plain = c.score_cap is None and not any(rope.query_growth for rope in c.ropes)
        fits = driver.has_half_mma and c.head_dim <= MAX_WIDTH and is_plain
        self._half = self.ops.half if fits else None

    @classmethod
    def available(cls, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Returns whether there are CuPy, a GPU and kernels for the scheme and the model's layers."""
        lacks_layers = config is not None and (config.experts is not None or bool(config.recurrences))
        return supports(spec) and not lacks_layers and cupy_driver.available()

    @classmethod
    def require(
        cls, spec: CacheSpec, config: ModelConfig | None = None, *, slots: int = 1, loras: bool = False
    ) -> None:
        """Raises CacheError for a scheme without kernels, ConfigError for anything else that the GPU can't run."""
        advice = "or use {device:cpu}"
        if config is not None:
            require_layers(config)
        if slots > 1:  # a graph is of one conversation's step
            problem = "a GPU decodes one conversation at a time"
            raise ConfigError(problem, field="slots", value=slots, accepted=["1"], advice=advice)
        if loras:
            raise lora_refusal()
        if not supports(spec):
            names = [name for name, scheme in schemes().items() if supports(CacheSpec(scheme, scheme.Config()))]
            problem, value = "does not run on a GPU", spec.scheme.name
            raise CacheError(problem, field="kv", value=value, accepted=names, advice=advice)
        cupy_driver.require_cupy()

    @classmethod
    def open(
        cls, model: Model, form: ModelFormat, threads: int | None, progress: TaskProgress | None
    ) -> CudaBackend:
        require_layers(model.config)
        driver = Driver()
        return cls(DeviceWeights(model.store(form, progress), driver, progress), driver, all_cores(threads))

    def new_workspace(self) -> Workspace:
        return Workspace(self.driver)

    def upload(self, array: F32) -> Array:
        """Returns a copy of an array (any shape) on the device."""
        return self.driver.upload(array)

    def embed(self, tokens: Sequence[int] | I64, start: int) -> Array:
        """Returns the embeddings (n, hidden) of n tokens on the device."""
        return self.embed_ids(self.driver.upload(np.asarray(tokens, np.int32)), start)

    def embed_ids(self, ids: Array, start: int) -> Array:
        """Returns the embeddings (n, hidden) of ids (n,) int32, both on the device."""
        arch = self.weights.arch
        positions = "positions" if arch.learned_positions else None
        x = self.weights.embed("embed", ids, positions, start)
        return x if arch.config.embedding_scale == 1.0 else x * np.float32(arch.config.embedding_scale)

    def prefill_attention(self, queries: Array, keys: Array, values: Array, options: ScoreOptions) -> None:
        """Computes `Backend.prefill_attention` of queries (n_heads, n, head_dim) without sinks, for all heads."""
        if options.sinks is not None:
            raise ValueError("a GPU has no kernels for sinks: leave them out")
        n_heads, n, head_dim = queries.shape
        n_rep, earlier = n_heads // len(keys), keys.shape[1] - n
        n_queries = max(1, MAX_SCORES // (n_heads * keys.shape[1]))  # at a time
        for a in range(0, n, n_queries):
            b = min(a + n_queries, n)
            first, *ranges = visible_range(earlier + a, earlier + b, options.window)
            lo, hi = (np.tile(limits, n_rep) for limits in ranges)
            q = queries[:, a:b].copy().reshape(len(keys), n_rep * (b - a), head_dim)
            s = q @ keys[:, first : earlier + b].transpose(0, 2, 1)
            bound_scores(s, options.cap)
            self.kernels.softmax(s, lo, hi)
            queries[:, a:b] = (s @ values[:, first : earlier + b]).reshape(n_heads, b - a, head_dim)

    def prefill_layer(
        self, i: int, cache: KVCache, x: Array, rotation: RopeRotation, norms: tuple[Any, Any]
    ) -> bool:
        """Attends over a prompt x (n, hidden) in half precision; returns False, without work, where it can't."""
        n, arch, array = len(x), self.weights.arch, self.workspace.array
        if self._half is None or n <= MATVEC_ROWS:
            return False
        c, width = arch.config, padded_width(arch.config.head_dim)
        queries = array("prefill.q", (c.n_heads, n, c.head_dim)) if cache.needs_prompt_queries else None
        k, v = (array(f"prefill.{kind}", (c.n_kv_heads, n, c.head_dim)) for kind in "kv")
        half_k, half_v = (array(f"prefill.half_{kind}", (c.n_kv_heads, n, width), np.float16) for kind in "kv")
        for a in range(0, n, self.chunk):
            b = min(a + self.chunk, n)
            half_q = array("prefill.half_q", (c.n_heads, b - a, width), np.float16)
            out = array("prefill.half_out", (b - a, c.q_size), np.float16)
            chunk = x[a:b]
            self.kernels.split_rope(
                *(arch.pre_attention(self._half, i, chunk), *rotation.rows(a, b)[:2]),
                *(None if queries is None else queries[:, a:b], k[:, a:b], v[:, a:b]),
                *(c.layer_scales[i], *norms, c.norm_eps, HalfQKV(half_q, half_k, half_v, a)),
            )
            self.kernels.prefill_attention(half_q, half_k, half_v, a, c.layer_windows[i], out)
            result = arch.post_attention(self._half, i, chunk, out)
            if result is not chunk:  # otherwise it was added in place
                x[a:b] = result
        cache.prefill(k[:, :0] if queries is None else queries, k, v)
        return True

    def reserve_row(self, cache: KVCache) -> tuple[HalfQKV, ...]:
        if not _from_policy(type(cache), *STORING) or not (cache.is_static() or isinstance(cache, RollingCache)):
            return ()
        cache.require_room(1)
        cache.advance(1)
        keys, values, _, stop, *_ = cache.segments()[-1]  # which the token is the last of
        if keys.kind == values.kind == "f16":
            return (HalfQKV(None, keys.arrays["half"], values.arrays["half"], stop - 1),)
        cache.advance(-1)
        return ()

    def new_graph_runner(self, decoder: Decoder) -> GraphRunner:
        return GraphRunner(decoder, self)


def require_layers(config: ModelConfig) -> None:
    """Raises ConfigError for a model with layers that do not attend, or with experts."""
    recurrent = f"the layers of {config.model_type} that do not attend" if config.recurrences else None
    if what := "mixtures of experts" if config.experts else recurrent:
        raise ConfigError(f"it has no kernels for {what}", field="device", value="cuda", accepted=["cpu", "numpy"])


class CapturedGraph(NamedTuple):
    """A CUDA graph, with the counters at its capture and what each replay adds to them."""

    launch: Callable[[], None]
    inputs: GraphInputs
    captured: Counts
    increments: Counts
    buffers: list[Array]  # that it uses, kept alive


class CacheGroup:
    """Caches that have the same counters at every step: those of one scheme with the same options and sizes."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.caches, self.first = caches, caches[0]

    @staticmethod
    def of(caches: Sequence[KVCache]) -> list[CacheGroup]:
        """Returns the groups of the caches."""
        groups: dict[Hashable, list[KVCache]] = {}
        for cache in caches:
            sizes = (item for item in vars(cache).items() if isinstance(item[1], (int, Sizes)))  # and counters
            layer = None if _from_policy(type(cache), *COUNTING) else cache.geometry.layer
            key = type(cache), repr(cache.config), cache.capacity, cache.geometry.sliding_window, layer, *sizes
            groups.setdefault(key, []).append(cache)
        return [CacheGroup(members) for members in groups.values()]

    def counts(self) -> dict[str, int]:
        """Returns the caches' counters by name."""
        return self.first.state().counters

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Gives all caches these counters."""
        for cache in self.caches:
            vars(cache).update(counts)

    def next_step(self) -> tuple[Hashable, bool]:
        """Returns the next step's topology, equal for steps of equal launches, and whether it flushes."""
        cache, window = self.first, self.first.geometry.sliding_window
        cache.advance(1)
        try:
            return (len(cache.segments()), window is not None and cache.n_seen > window), cache.needs_flush()
        finally:
            cache.advance(-1)


class Conversation:
    """A conversation's caches, and the graphs that take its steps while nothing but counters changes."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.groups = tuple(caches), list[CacheGroup]()  # grouped for the first capture
        options = {(type(cache), id(cache.config)): cache.config for cache in caches}
        self.kinds = frozenset((kind, repr(config)) for (kind, _), config in options.items())
        self.step_graph: CapturedGraph | None = None
        self.topologies: list[Hashable] = []  # of the captured step, one for each group
        self.flush_graphs: dict[Hashable, CapturedGraph | None] = {}  # None: it can't be captured
        self.note_step()

    def present_counts(self) -> Counts:
        """Returns the groups' counters as they are."""
        return [group.counts() for group in self.groups]

    def note_step(self) -> None:
        """Notes the counters after a step, and the deltas with which the graph takes the next one, if it can."""
        graph, self.counts = self.step_graph, self.present_counts()
        self.next_replay: tuple[CapturedGraph, list[int]] | None = None
        if graph is None or self.counts[0][POSITIONS] > graph.captured[0][POSITIONS] + GRAPH_TOKENS:
            return
        are_static = all(group.first.is_static() for group in self.groups)
        if are_static and self.topologies == [group.next_step()[0] for group in self.groups]:
            self.next_replay = graph, self.deltas(graph)

    def deltas(self, graph: CapturedGraph) -> list[int]:
        """Returns the deltas of the graph's sums of counters."""
        counter_deltas = {
            _counter_key(i, name): count - captured[name]
            for i, (counts, captured) in enumerate(zip(self.present_counts(), graph.captured, strict=True))
            for name, count in counts.items()
        }
        return graph.inputs.deltas(counter_deltas)


class GraphRunner:
    """Takes a decoder's steps by replaying CUDA graphs of the conversation that it served last."""

    def __init__(self, decoder: Decoder, backend: CudaBackend) -> None:
        self._decoder, self._backend, self._driver = decoder, backend, backend.driver
        self._compiled: set[Hashable] = set()  # kinds of caches whose kernels are compiled (`Conversation.kinds`)
        self._failures: collections.Counter[Hashable] = collections.Counter()
        self.n_replayed = 0
        self.forget()

    def forget(self) -> None:
        """Drops all graphs: something other than counters may have changed."""
        self._driver.stream.synchronize()  # until then a replay may read the pinned memory that this frees
        self._conversation: Conversation | None = None

    def step(self, token: int, caches: Sequence[KVCache]) -> Array:
        """Returns the logits (vocab,) after appending one token, valid until the next step."""
        now = self._conversation
        if now and (now.caches != tuple(caches) or now.counts != now.present_counts()):
            self.forget()  # others have changed them, perhaps what they point to
            now = None
        now, self._conversation = now or Conversation(caches), None  # if the step fails
        if now.next_replay is None:
            self._capture_step(now)
        if now.next_replay is None:
            self._compiled.add(now.kinds)
            keeps_arrays = all(cache.is_static() and cache.flush_is_static for cache in caches)
            x = self._decoder.forward(self._decoder.embed((token,), caches[0].n_seen), caches)
            logits: Array = self._decoder.head(x)[0]
        else:
            self._replay(now, *now.next_replay, token)
            self.n_replayed += 1
            keeps_arrays, logits = self._flush(now), self._logits
        if keeps_arrays:
            now.note_step()  # while the device computes
            self._conversation = now
        return logits

    def _capture_step(self, now: Conversation) -> None:
        """Captures the next token's step, without taking it, where that is possible and worth its time."""
        if now.step_graph:
            self.forget()
        kinds, start, now.step_graph = now.kinds, now.caches[0].n_seen, None
        ready = self._decoder.can_replay and kinds in self._compiled and self._failures[kinds] < MAX_FAILURES
        room = now.caches[0].geometry.capacity - start
        if not ready or room < MIN_REPLAYS or not all(cache.is_static() for cache in now.caches):
            return
        now.groups = now.groups or CacheGroup.of(now.caches)
        next_steps = [group.next_step() for group in now.groups]
        if any(flushes for _, flushes in next_steps):
            return

        def step() -> None:
            x = self._decoder.forward(self._backend.embed_ids(self._driver.ids, start), now.caches)
            self._logits = self._decoder.head(x)[0]

        now.step_graph, now.topologies = self._capture(step, now.groups), [topology for topology, _ in next_steps]
        self._failures[kinds] += now.step_graph is None
        now.note_step()

    def _capture(self, work: Callable[[], None], groups: list[CacheGroup]) -> CapturedGraph | None:
        """Captures ``work`` with the counters as they are, without doing it; None where it can't be captured."""
        set_inputs(self._driver, None)  # compiles
        inputs, captured = GraphInputs(self._driver, POSITIONS), [group.counts() for group in groups]
        increments: Counts = []

        def work_on_counters() -> None:
            before = [group.counts() for group in groups]
            try:
                for i, (group, counts) in enumerate(zip(groups, captured, strict=True)):
                    terms = {name: ((_counter_key(i, name), 1),) for name in counts}
                    group.set_counts({name: Counter(n, terms[name], inputs) for name, n in counts.items()})
                set_inputs(self._driver, inputs.pinned)
                work()
                increments[:] = [
                    {name: n - counts[name] for name, n in group.counts().items()}
                    for group, counts in zip(groups, captured, strict=True)
                ]
            finally:
                for group, counts in zip(groups, before, strict=True):
                    group.set_counts(counts)
            set_inputs(self._driver, None)  # for what is not replayed

        try:
            launch = self._driver.capture(work_on_counters)
        except CaptureError:
            return None
        # Others may ask for larger buffers while these are in use.
        buffers = [*self._backend.workspace.buffers(), *self._backend.kernels.buffers()]
        return CapturedGraph(launch, inputs, captured, increments, buffers)

    def _replay(self, now: Conversation, graph: CapturedGraph, deltas: list[int], token: int) -> None:
        graph.inputs.write(token, deltas)
        graph.launch()
        graph.inputs.replayed.record(self._driver.stream)
        for group, increments in zip(now.groups, graph.increments, strict=True):
            counts = group.counts()
            group.set_counts({name: counts[name] + n for name, n in increments.items() if n})

    def _flush(self, now: Conversation) -> bool:
        """Packs what is due after a token, by a replay where it can be captured; returns whether arrays stayed."""
        due = [(i, group) for i, group in enumerate(now.groups) if group.first.needs_flush()]
        caches = [cache for _, group in due for cache in group.caches]

        def flush() -> None:
            for cache in caches:
                cache.flush()

        if not (keeps_arrays := all(cache.flush_is_static for cache in caches)):
            self.forget()
        if not due or not keeps_arrays:
            flush()
            return keeps_arrays
        # `flush` may compare counters: each pattern of equal ones has its own graph.
        counts = ((i, list(group.counts().values())) for i, group in due)
        key = tuple((i, *map(of_group.index, of_group)) for i, of_group in counts)
        if key not in now.flush_graphs:
            now.flush_graphs[key] = self._capture(flush, now.groups)
        if graph := now.flush_graphs[key]:
            deltas, n_seen = now.deltas(graph), caches[0].n_seen
            caches[0].n_seen = 0  # see `SinkWindowCache.flush`
            self._replay(now, graph, deltas, 0)
            for cache in caches:
                cache.n_seen = n_seen
        else:
            flush()
        return True


@functools.cache
def _from_policy(kind: type[KVCache], *names: str) -> bool:
    """Returns whether a scheme takes all of these methods from one policy."""
    policies = FullCache, SinkWindowCache, RollingCache
    return any(all(getattr(kind, name) is getattr(policy, name) for name in names) for policy in policies)


def _counter_key(group: int, name: str) -> Hashable:
    return name if name == POSITIONS else (group, name)
