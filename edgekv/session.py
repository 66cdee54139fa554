"""A conversation with a model: load, generate, continue, rewind, report."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.dense.store import Progress
from edgekv.errors import ContextError, TokenizerError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.auto import check_budget, choose
from edgekv.kvcache.base import KVCache, rewind
from edgekv.machine import available_memory_bytes, peak_rss_bytes, require_memory
from edgekv.model import Model, Path, find_device
from edgekv.models.attention import BLOCK_ROWS
from edgekv.models.decoder import CHUNK, Decoder
from edgekv.report import RunReport
from edgekv.sampling import Sampler, SamplingParams, StopMatcher
from edgekv.threads import blas_threads
from edgekv.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

F32 = npt.NDArray[np.float32]
DEFAULT_CTX = 8192
WARM_UP = "compiling kernels (once per machine)"
WARM_UP_TOKENS = 700  # beyond the windows and budgets that the schemes have by default


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token: its id, the text that can be printed now, and the seconds it took.

    The first step's latency contains the prompt's prefill. ``stop`` says why generation ended here, else None.
    """

    token: int
    text: str
    latency_s: float
    stop: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a session will take, known before anything is loaded. Bytes are exact but for ``scratch_bytes``."""

    ctx: int
    kv: CacheSpec
    weights: str
    weights_bytes: int
    cache_bytes: int
    scratch_bytes: int
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls, model: Model, *, kv: str | CacheSpec, ctx: int | None, weights: str, kv_budget: int | None = None
    ) -> Plan:
        """Raises ContextError for a context that the model can't have, CacheError and ConfigError for names.

        kv "auto" is the best scheme within ``kv_budget`` bytes (default: a quarter of the free memory).
        """
        c = model.config
        if ctx is None:
            ctx = min(DEFAULT_CTX, c.max_positions)
        if not 1 <= ctx <= c.max_positions:
            raise ContextError(f"--ctx {ctx}: this model has {c.max_positions} positions; accepted: 1 to that")
        notes = []
        if kv == "auto":
            spec, reason = choose(c, ctx, kv_budget or available_memory_bytes() // 4)
            notes.append(reason)
        else:
            spec = CacheSpec.parse(kv) if isinstance(kv, str) else kv
            if kv_budget is not None:
                check_budget(spec, c, ctx, kv_budget)
        form = model.weight_format(weights)
        caches = spec.layers(c, ctx)
        dense_tokens = ctx * (c.hidden_size + c.q_size + 2 * c.kv_size) + BLOCK_ROWS * ctx
        chunk = CHUNK * (3 * c.intermediate_size + 4 * c.hidden_size) + c.vocab_size
        return cls(
            ctx=ctx,
            kv=spec,
            weights=form.name,
            weights_bytes=model.weights_bytes(form),
            cache_bytes=sum(cache.planned_bytes for cache in caches),
            scratch_bytes=4 * (dense_tokens + chunk),
            notes=tuple(notes),
        )

    def parts(self) -> dict[str, int]:
        return {"weights": self.weights_bytes, "kv cache": self.cache_bytes, "scratch": self.scratch_bytes}


class Session:
    """One conversation: a decoder, its KV caches and what has been said. Shares nothing with other sessions."""

    def __init__(
        self, model: Model, plan: Plan, decoder: Decoder, tokenizer: Tokenizer | None, settings: Any
    ) -> None:
        self.model, self.plan, self.tokenizer = model, plan, tokenizer
        self.config = model.config
        self._decoder, self._settings = decoder, settings
        self.caches: list[KVCache] = plan.kv.layers(model.config, plan.ctx)
        if model.adapter:
            model.adapter.adapt(self.caches)
        for cache in self.caches:
            cache.allocate(decoder.kernels, decoder.workspace)
        self.tokens: list[int] = []  # prompt and output; the last may not be in the caches yet
        self._new_report()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        kv: str | CacheSpec = "dense",
        ctx: int | None = None,
        weights: str = "auto",
        kv_budget: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
        config: Path | None = None,
        tokenizer: Path | None = None,
        adapter: Path | None = None,
        progress: Progress | None = None,
    ) -> Session:
        """Opens a model for ``ctx`` tokens (default: 8192 or the model's positions).

        path: a Hugging Face folder, a .safetensors file, or a store made by `edgekv quantize`. kv: a scheme of
        CACHES with its knobs, ``name:knob=value``, or auto within ``kv_budget`` bytes. weights: f32, int8,
        int4 or auto. adapter: an adapter.safetensors trained for this checkpoint and this scheme.
        progress(stage, done, total) is called while weights are quantised. Raises an EdgeKVError: a bad file, a
        context beyond the model, too little memory (computed before it is taken).
        """
        model = Model.open(path, config=config, tokenizer=tokenizer, adapter=adapter)
        plan = Plan.make(model, kv=kv, ctx=ctx, weights=weights, kv_budget=kv_budget)
        if model.adapter:
            model.adapter.require_scheme(plan.kv.scheme.name)
        require_memory(plan.parts(), available_memory_bytes())
        vocabulary = None
        if model.tokenizer_path is not None:
            vocabulary = load_tokenizer(model.tokenizer_path, config=model.raw_config)
        threads = threads or len(os.sched_getaffinity(0))
        decoder = find_device(device).decoder(model, model.weight_format(weights), plan.ctx, threads, progress)
        if progress:
            progress(WARM_UP, 0, 1)
        decoder.warm_up(plan.kv.layers(model.config, min(WARM_UP_TOKENS, plan.ctx)))
        if progress:
            progress(WARM_UP, 1, 1)
        settings = {
            "kv": str(plan.kv),
            "weights": plan.weights,
            "ctx": plan.ctx,
            "device": device,
            "threads": threads,
            "adapter": model.adapter and model.adapter.path.name,
        }
        return cls(model, plan, decoder, vocabulary, settings)

    @property
    def n_past(self) -> int:
        """Tokens in the caches."""
        return self.caches[0].n_seen

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the beginning-of-text token is added only to an empty conversation."""
        return self._require_tokenizer().encode(text, bos=not self.tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Step]:
        """An iterator of tokens that continue the conversation with ``prompt`` (text or token ids).

        ``sampling`` overrides ``temperature`` and ``seed``. Ends at an end-of-text token, a stop string,
        ``max_new_tokens``, or a full context; `report().stop_reason` says which. progress(layer, n_layers)
        is called during prefill. Raises ContextError when the prompt does not fit.
        """
        params = sampling or SamplingParams(temperature=temperature, seed=seed)
        sampler = Sampler(params, self.config.vocab_size)
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        pending = self.tokens[self.n_past :]  # the last answer's final token
        self._check_prompt(ids, pending)
        self._new_report()
        self._report.settings.update(dataclasses.asdict(params), seed=sampler.seed, max_new_tokens=max_new_tokens)
        return self._steps(pending, ids, sampler, max_new_tokens, StopMatcher(stop), progress)

    def _steps(
        self,
        pending: list[int],
        ids: list[int],
        sampler: Sampler,
        max_new_tokens: int,
        matcher: StopMatcher,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Step]:
        report = self._report
        stream = StreamDecoder(self.tokenizer, at_start=False) if self.tokenizer else None
        eos = self.tokenizer.eos_ids if self.tokenizer else ()
        begin = time.perf_counter()
        logits = self._prefill(pending + ids, progress)
        self.tokens.extend(ids)
        for produced in range(1, max_new_tokens + 1):
            if produced > 1:
                begin = time.perf_counter()
                logits = self._forward_one()
            token = sampler.sample(logits, self.tokens)
            self.tokens.append(token)
            latency = time.perf_counter() - begin
            if produced == 1:
                report.time_to_first_token_s = latency
            else:
                report.decode_latencies_s.append(latency)
            text, stopped = matcher.push(stream.push(token) if stream and token not in eos else "")
            reason = self._stop_reason(token in eos, stopped, produced == max_new_tokens)
            report.stop_reason = reason
            if reason and not stopped:
                text += self._rest(matcher, stream)
            yield Step(token, text, latency, reason)
            if reason:
                return

    def _stop_reason(self, eos: bool, stopped: bool, last: bool) -> str | None:
        if eos:
            return "end of text"
        if stopped:
            return "stop string"
        if last:
            return "max_new_tokens"
        if len(self.tokens) > self.plan.ctx:
            return f"context full ({self.plan.ctx} tokens); raise --ctx for more"
        return None

    @staticmethod
    def _rest(matcher: StopMatcher, stream: StreamDecoder | None) -> str:
        text, stopped = matcher.push(stream.flush()) if stream else ("", False)
        return text if stopped else text + matcher.flush()

    def _prefill(self, ids: list[int], progress: Callable[[int, int], None] | None) -> F32:
        """Logits (vocab,) after the ids."""
        start, begin = self.n_past, time.perf_counter()
        with self._undo_on_error(start), blas_threads(self._decoder.threads):
            hidden = self._decoder.prefill(self._decoder.embed(ids, start), self.caches, progress)
            logits: F32 = self._decoder.head(hidden[-1:])[0]
        self._report.prefill_tokens = len(ids)
        self._report.prefill_s = time.perf_counter() - begin
        return logits

    def _forward_one(self) -> F32:
        with self._undo_on_error(self.n_past), blas_threads(1):
            logits: F32 = self._decoder.step(self.tokens[-1], self.caches)
            return logits

    def logits(self, ids: Sequence[int]) -> F32:
        """(n, vocab) float32: logits after each of the ids, which are appended to the conversation."""
        pending = self.tokens[self.n_past :]
        self._check_prompt(list(ids), pending)
        with self._undo_on_error(self.n_past):
            hidden = self._decoder.prefill(self._decoder.embed([*pending, *ids], self.n_past), self.caches)
        self.tokens.extend(int(t) for t in ids)
        return self._decoder.head(hidden[len(pending) :])

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt.
        """
        rewind(self.caches, n_tokens)
        del self.tokens[n_tokens:]

    def reset(self) -> None:
        """Forgets the conversation; the model stays loaded."""
        self.rewind(0)
        self._new_report()

    def report(self) -> RunReport:
        """Counts, times and bytes of the last `generate`."""
        report = self._report
        report.cache_bytes = sum(cache.nbytes for cache in self.caches)
        report.weights_bytes = self._decoder.dense.weights_bytes
        read = sum(cache.bytes_read() for cache in self.caches)
        report.bytes_read_per_token = self._decoder.weights.token_bytes + read
        report.peak_rss_bytes = peak_rss_bytes()
        report.notes = [*self.plan.notes, *self.caches[0].notes()]
        return report

    def _new_report(self) -> None:
        c = self.config
        shape = {
            "name": self.model.path.name,
            "model_type": c.model_type,
            "n_parameters": self.model.n_parameters,
            "identity": self.model.identity,
        }
        names = ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_positions")
        self._report = RunReport(dict(self._settings), {**shape, **{name: getattr(c, name) for name in names}})

    def _check_prompt(self, ids: list[int], pending: list[int]) -> None:
        if not ids and not pending:
            raise ContextError("the prompt is empty: give at least one token")
        room = self.plan.ctx - self.n_past - len(pending)
        if len(ids) > room:
            raise ContextError(
                f"the prompt has {len(ids)} tokens and {max(room, 0)} of --ctx {self.plan.ctx} are free; "
                f"shorten it or raise --ctx (this model: up to {self.config.max_positions})"
            )
        bad = [t for t in ids if not 0 <= t < self.config.vocab_size]
        if bad:
            raise TokenizerError(
                f"token id {bad[0]} is outside the model's vocabulary of {self.config.vocab_size}"
            )

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.model.path} has no tokenizer: copy tokenizer.json, tokenizer.model, or vocab.json and "
                f"merges.txt beside the weights, or pass --tokenizer PATH"
            )
        return self.tokenizer

    def _undo_on_error(self, n_past: int) -> _Undo:
        return _Undo(self.caches, n_past)


class _Undo:
    """Rewinds every layer's cache to the same length when a step is interrupted between layers."""

    def __init__(self, caches: Sequence[KVCache], n_past: int) -> None:
        self.caches, self.n_past = caches, n_past

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            rewind(self.caches, self.n_past)
