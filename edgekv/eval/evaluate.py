"""Evaluation: the quality of KV schemes on a text that goes through the caches token by token."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.adapter import Adapter
from edgekv.checks import refusal
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import (
    Options,
    SessionPlan,
    default_ctx,
    find_device,
    fit_head_bits,
    open_caches,
    open_model,
    open_tokenizer,
)
from edgekv.engine.runner import copy_used
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState, rewind
from edgekv.kvcache.choice import EXACT
from edgekv.kvcache.recurrent import attending
from edgekv.kvcache.registry import select_specs
from edgekv.machine import all_cores, blas_threads, machine_info, memory_errors
from edgekv.types import F32, F64, LayerProgress, Path, TaskProgress

LOGIT_ROWS = 256  # logits (rows, vocab) alive at once, twice
FIT_TOKENS = 1024
REFERENCE = "dense:dtype=f32"


@dataclasses.dataclass(frozen=True)
class Quality:
    """The quality of one scheme on one text. KL and top-1 compare its next-token distribution with dense's.

    ``*_second_half`` are means over the later half of each window, where the context is long.
    """

    kv: str
    tokens: int
    perplexity: float
    perplexity_ratio: float
    kl: float
    kl_second_half: float
    top1: float
    top1_second_half: float
    cache_bytes: int
    bytes_read_per_token: int
    seconds: float
    notes: tuple[str, ...]


def evaluate(
    decoder: Decoder,
    tokens: Sequence[int],
    ctx: int,
    specs: Sequence[CacheSpec],
    *,
    adapter: Adapter | None = None,
    progress: TaskProgress | None = None,
) -> list[Quality]:
    """Measures each scheme over consecutive windows of ``ctx`` tokens; `dense` in f32 is the reference.

    Every token attends to the scheme's own compressed form of the earlier ones. What a scheme fits on a prompt (a
    temperature, a codebook) it fits on the first `FIT_TOKENS` of each window, which it then reads again. adapter:
    its weights are the decoder's for all schemes and the reference; its parameters go to its own scheme alone.
    Raises ContextError where the text does not fill a window.
    """
    windows = [np.asarray(tokens[a : a + ctx]) for a in range(0, len(tokens) - ctx + 1, ctx)]
    if not windows or ctx < 2:
        raise refusal("ctx", ctx, f"2 or more; the text has {len(tokens)} tokens, and must fill a window")
    with memory_errors("measuring", decoder.backend.free_bytes):
        exact = [_hidden(decoder, window, CacheSpec.parse(REFERENCE), 0)[0] for window in windows]
        base = _compare(decoder, windows, exact, exact)
        results = []
        for spec in specs:
            begin = time.perf_counter()
            hidden = []
            for window in windows:
                report = progress and functools.partial(progress, spec.scheme.name)
                x, caches = _hidden(decoder, window, spec, min(FIT_TOKENS, ctx // 2), adapter, report)
                hidden.append(x)
            scores = _compare(decoder, windows, exact, hidden)
            results.append(
                Quality(
                    kv=str(spec),
                    tokens=sum(len(window) for window in windows),
                    perplexity_ratio=scores["perplexity"] / base["perplexity"],
                    cache_bytes=sum(cache.nbytes for cache in attending(caches)),
                    bytes_read_per_token=sum(cache.bytes_read() for cache in attending(caches)),
                    seconds=time.perf_counter() - begin,
                    notes=tuple(attending(caches)[0].notes()),
                    **scores,
                )
            )
        return results


def _hidden(
    decoder: Decoder,
    window: npt.NDArray[Any],
    spec: CacheSpec,
    fit_tokens: int,
    adapter: Adapter | None = None,
    progress: LayerProgress | None = None,
) -> tuple[F32, list[LayerState]]:
    """Reads a window into new caches; returns its final hidden states (n, hidden), and the caches."""
    caches = open_caches(decoder, spec, len(window), adapter)
    x = decoder.embed(window, 0)
    with blas_threads(decoder.threads):
        if fit_tokens:
            decoder.prefill(x[:fit_tokens].copy(), caches)
            rewind(caches, 0)
        return decoder.prefill(x, caches, progress, exact=False), caches


def _compare(
    decoder: Decoder, windows: Sequence[npt.NDArray[Any]], exact: Sequence[F32], hidden: Sequence[F32]
) -> dict[str, float]:
    rows = [_compare_window(decoder, *window) for window in zip(windows, exact, hidden, strict=True)]
    loss, kl, top1 = (np.stack(part) for part in zip(*rows, strict=True))  # (windows, n - 1)
    half = kl.shape[1] // 2
    return {
        "perplexity": float(np.exp(loss.mean())),
        "kl": float(kl.mean()),
        "kl_second_half": float(kl[:, half:].mean()),
        "top1": float(top1.mean()),
        "top1_second_half": float(top1[:, half:].mean()),
    }


def _compare_window(decoder: Decoder, window: npt.NDArray[Any], exact: F32, hidden: F32) -> tuple[F64, F64, F64]:
    """Returns the next token's negative log-likelihood, KL(dense || scheme) and top-1 agreement, each (n - 1,).

    exact, hidden (n, hidden_size): final hidden states with the reference and with the scheme.
    """
    n = len(window) - 1
    loss, kl, top1 = np.empty(n), np.empty(n), np.empty(n)
    for a in range(0, n, LOGIT_ROWS):
        rows = slice(a, min(a + LOGIT_ROWS, n))
        p = _log_softmax(decoder.head(exact[rows]))  # where the decoder computes
        q = p if hidden is exact else _log_softmax(decoder.head(hidden[rows]))
        loss[rows] = -to_host(q[np.arange(len(q)), window[rows.start + 1 : rows.stop + 1]])
        kl[rows] = to_host((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64))
        top1[rows] = to_host(p.argmax(axis=1)) == to_host(q.argmax(axis=1))
    return loss, kl, top1


def _log_softmax(logits: F32) -> F32:
    logits = logits - logits.max(axis=1, keepdims=True)
    shifted: F32 = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def copy_cache(source: LayerState, target: LayerState) -> None:
    """Copies a cache to an empty one of the same scheme and size."""
    state = source.state()
    for name, array in target.restore(state.counters, copy.deepcopy(state.extra)).items():
        copy_used(state.arrays[name], array)


class EvalInput:
    """The input of a measurement: the model at ``path``, whose weights `load` reads, and a tokenised text.

    options: of `LoadOptions`, all but kv and ctx. text_name: the text's name in `facts`. Raises an EdgeKVError for
    a bad file.
    """

    def __init__(self, path: Path, options: Options, text: str, text_name: str) -> None:
        self.options, self.text_name = options, text_name
        self.model = open_model(path, options)
        self.tokenizer = open_tokenizer(self.model)
        self.tokens = self.tokenizer.encode(text)
        self.threads = all_cores(options.threads)

    def schemes(self, specs: Sequence[CacheSpec], named: bool) -> tuple[list[CacheSpec], list[str]]:
        """Returns the schemes that device and model can run, and a line on each of the others.

        named: whether the user named them: then one of the others raises an EdgeKVError, as a missing device does.
        """
        device, config = find_device(self.options.device), self.model.config
        device.require(CacheSpec.parse(REFERENCE))
        for spec in specs if named else ():
            device.require(spec)
        return select_specs([spec for spec in specs if device.available(spec)], config, default_ctx(config), named)

    def load(self, ctx: int | None, progress: TaskProgress | None) -> tuple[Decoder, int]:
        """Loads the decoder; returns it and its window: ``ctx`` tokens, or a session's default."""
        plan = SessionPlan.make(self.model, kv=EXACT, ctx=ctx, weights=self.options.weights)
        form = self.model.weight_format(plan.weights)
        decoder = find_device(self.options.device).decoder(self.model, form, plan.ctx, self.threads, progress)
        return decoder, plan.ctx

    def with_head_bits(
        self, specs: Sequence[CacheSpec], decoder: Decoder, progress: TaskProgress | None
    ) -> list[CacheSpec]:
        """Returns the schemes with the bits that this model's heads get."""
        weights = self.model.weight_format(self.options.weights).name
        fit = fit_head_bits(self.model, weights, decoder, self.tokenizer, progress)
        return [fit(spec) for spec in specs]

    def facts(self, ctx: int, windows: int) -> dict[str, Any]:
        """Returns settings and machine of a measurement over up to ``windows`` windows of ``ctx`` tokens."""
        adapter = self.model.adapter
        settings = {
            "model": self.model.name,
            "identity": self.model.identity,
            "adapter": adapter and adapter.path.name,
            "lora": self.model.lora and str(self.model.lora),
            "text": self.text_name,
            "ctx": ctx,
            "windows": min(windows, len(self.tokens) // ctx),
            "weights": self.model.weight_format(self.options.weights).name,
            "fit_tokens": FIT_TOKENS,
            "threads": self.threads,
        }
        return {"settings": settings, "machine": machine_info()}
