"""The measurements of `edgekv board`, one function each, on a model that is open."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import time

import msgspec
import numpy as np

from edgekv.board.energy import Metering
from edgekv.board.record import Bandwidth, Decode, Idle, Plan, Prompt, Shape, ThreadsRow
from edgekv.board.surroundings import Watch
from edgekv.decoder.decoder import Decoder
from edgekv.kernels.cpu import stream
from edgekv.kvcache import CacheSpec
from edgekv.linear.formats import weight_format
from edgekv.linear.random import random_folder
from edgekv.linear.store import is_store
from edgekv.machine import blas_threads, peak_rss_bytes, reset_peak_rss
from edgekv.models import architecture
from edgekv.quality.bench import SchemeTimer
from edgekv.quality.shape_model import shape_config, shape_model, unread_model
from edgekv.session.caches import open_caches
from edgekv.session.devices import find_device
from edgekv.session.plan import SessionPlan
from edgekv.session.sampling import Sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.types import TaskProgress

PASSES = 8  # over memory, for each number of threads
LEAST_TOKENS, MOST_TOKENS = 6, 64  # of a decoding that is timed
MOST_PROMPTS = 3
WARM_UP_PROMPT = 16


@dataclasses.dataclass(frozen=True)
class Opened:
    """A shape's decoder on ``threads`` (None: as many as are chosen at load), and what is known of it."""

    name: str
    threads: int | None
    decoder: Decoder
    facts: Shape


def open_shape(name: str, plan: Plan, threads: int | None, progress: TaskProgress | None) -> Opened:
    """The model in the cache folder, made there if it is not, and opened. Raises an EdgeKVError."""
    is_made = is_store(weights_folder(name, plan))
    begun = time.perf_counter()
    model = shape_model(name, None, _capacity(plan), plan.weights, progress)
    making_s = 0.0 if is_made else time.perf_counter() - begun
    form = model.weight_format(plan.weights)
    _forget_peak()
    begun = time.perf_counter()
    decoder = find_device("cpu").decoder(model, form, _capacity(plan), threads, progress)
    weight_threads = decoder.linear.threads
    facts = Shape(
        name=name,
        parameters=model.n_parameters,
        layers=model.config.n_layers,
        weights=form.name,
        weights_bytes=model.weights_bytes(form),
        threads=decoder.threads,
        decode_threads=weight_threads.decode if weight_threads else decoder.threads,
        prompt_threads=weight_threads.prompt if weight_threads else decoder.threads,
        making_s=making_s,
        opening_s=time.perf_counter() - begun,
        opening_peak_bytes=peak_rss_bytes(),
    )
    return Opened(name, threads, decoder, facts)


def with_making(facts: Shape, making_s: float) -> Shape:
    """The same, with the seconds that drawing the weights has taken in all."""
    return msgspec.structs.replace(facts, making_s=making_s)


def weights_folder(name: str, plan: Plan) -> pathlib.Path:
    """Where a shape's weights are in the cache folder, or would be."""
    config = shape_config(name, None, _capacity(plan))
    return random_folder(config, weight_format(plan.weights, architecture(config)))


def weights_bytes(name: str, plan: Plan) -> int:
    """Of a shape that need not be made."""
    model = unread_model(name, shape_config(name, None, _capacity(plan)))
    return model.weights_bytes(weight_format(plan.weights, model.arch))


def needed_bytes(name: str, plan: Plan, kv: str, depth: int) -> int:
    """Memory that a measurement takes: the weights, so many tokens in the cache, and room to compute."""
    model = unread_model(name, shape_config(name, None, _capacity(plan)))
    return sum(SessionPlan.make(model, kv=kv, ctx=depth + MOST_TOKENS + 1, weights=plan.weights).parts().values())


def bandwidth(n_threads: int) -> Bandwidth:
    """Of memory, by so many threads."""
    watch = Watch()
    probe = stream.Bandwidth(n_threads)
    watch.start()
    for _ in range(PASSES):
        probe.sample()
    watch.stop()
    return Bandwidth(n_threads, probe.best / 1e9, watch.span())


def threads_row(opened: Opened, n_threads: int, plan: Plan) -> ThreadsRow:
    """The shape as it was opened on ``n_threads``."""
    watch = Watch()
    timer = _timer(opened.decoder, CacheSpec.parse(plan.schemes[0]), 0)
    watch.start()
    _decode(timer, plan.seconds / 2)
    best = min(_prompt(opened.decoder, plan.schemes[0], plan.threads_prompt)[0] for _ in range(2))
    watch.stop()
    token_ms = float(np.median(timer.totals)) * 1e3
    return ThreadsRow(opened.name, n_threads, token_ms, plan.threads_prompt / best, watch.span())


def decode(opened: Opened, kv: str, depth: int, plan: Plan, metering: Metering, idle: Idle | None) -> Decode:
    """A token behind ``depth`` synthetic ones."""
    _forget_peak()
    watch = Watch(metering.throttle)
    spec = CacheSpec.parse(kv)
    timer = _timer(opened.decoder, spec, depth)
    metering.source.mark()
    watch.start()
    begun = time.perf_counter()
    _decode(timer, plan.seconds)
    ended = time.perf_counter()
    watch.stop()
    metering.source.mark()
    n = len(timer.totals)
    parts = {name: _median_ms([row.get(name, 0.0) for row in timer.coarse_rows]) for name in ("matmul", "attend")}
    return Decode(
        shape=opened.name,
        kv=kv,
        depth=depth,
        tokens=n,
        token_ms=_median_ms(timer.totals),
        token_ms_best=min(timer.totals) * 1e3,
        token_ms_p95=float(np.percentile(timer.totals, 95)) * 1e3,
        matmul_ms=parts["matmul"],
        attention_ms=parts["attend"],
        cache_bytes=sum(cache.nbytes for cache in timer.caches),
        bytes_read=opened.decoder.weights.token_bytes + sum(cache.bytes_read() for cache in timer.caches),
        peak_memory_bytes=peak_rss_bytes(),
        span=watch.span(),
        energy=metering.per_token(begun, ended, n, idle),
    )


def prompt(opened: Opened, kv: str, plan: Plan, metering: Metering, idle: Idle | None) -> Prompt:
    """A prompt of random tokens, read until `Plan.seconds` are over or MOST_PROMPTS are."""
    _forget_peak()
    watch = Watch(metering.throttle)
    _prompt(opened.decoder, kv, WARM_UP_PROMPT)
    metering.source.mark()
    watch.start()
    begun = time.perf_counter()
    runs: list[tuple[float, float]] = []
    while len(runs) < MOST_PROMPTS and (not runs or time.perf_counter() - begun < plan.seconds):
        runs.append(_prompt(opened.decoder, kv, plan.prompt))
    ended = time.perf_counter()
    watch.stop()
    metering.source.mark()
    return Prompt(
        shape=opened.name,
        kv=kv,
        tokens=plan.prompt,
        runs=len(runs),
        tokens_per_s=plan.prompt / min(prefill for prefill, _ in runs),
        first_token_s=min(first for _, first in runs),
        peak_memory_bytes=peak_rss_bytes(),
        span=watch.span(),
        energy=metering.per_token(begun, ended, plan.prompt * len(runs), idle),
    )


def _forget_peak() -> None:
    """Frees what was measured before (its caches are known to themselves), and counts memory from here."""
    gc.collect()
    reset_peak_rss()


def _capacity(plan: Plan) -> int:
    """Tokens that a decoder must be able to read."""
    return max(*plan.depths, plan.prompt) + MOST_TOKENS + 1


def _timer(decoder: Decoder, spec: CacheSpec, depth: int) -> SchemeTimer:
    """Caches that hold ``depth`` tokens, after a first token that compiles and touches everything."""
    timer = SchemeTimer(decoder, decoder.linear, decoder.kernels, spec, depth, MOST_TOKENS + 1)
    timer.fill()
    _decode(timer, 0.0, least=1)
    timer.totals.clear()
    timer.coarse_rows.clear()
    return timer


def _decode(timer: SchemeTimer, seconds: float, least: int = LEAST_TOKENS) -> None:
    """Tokens for so many seconds, at least ``least`` and at most MOST_TOKENS."""
    decoder = timer.decoder
    linear, kernels = decoder.linear, decoder.kernels
    begun = time.perf_counter()
    try:
        with blas_threads(1):
            for n in range(MOST_TOKENS):
                if n >= least and time.perf_counter() - begun >= seconds:
                    break
                timer.decode(1, fine=False)
    finally:
        decoder.linear, decoder.kernels = linear, kernels


def _prompt(decoder: Decoder, kv: str, n: int) -> tuple[float, float]:
    """Seconds that n tokens took through all layers, and those until the first token was chosen."""
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, n)
    caches = open_caches(decoder, CacheSpec.parse(kv), n)
    sampler = Sampler(SamplingParams(), decoder.config.vocab_size)
    begun = time.perf_counter()
    with blas_threads(decoder.threads):
        x = decoder.prefill(decoder.embed(ids, 0), caches)
        prefilled = time.perf_counter()
        sampler.sample(decoder.head(x[-1:])[0])
    return prefilled - begun, time.perf_counter() - begun


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(seconds)) * 1e3
