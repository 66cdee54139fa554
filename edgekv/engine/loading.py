"""Loads a model for sessions: options, the plan of what it will take, and weights that are ready to compute."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np

from edgekv.checkpoint.adapter import Adapter
from edgekv.checkpoint.hub import shipped_file
from edgekv.checks import Count, check_fields, refusal, require_names
from edgekv.engine.cpu import scratch_bytes
from edgekv.engine.decoder import WARM_UP_TOKENS, Backend, Decoder
from edgekv.engine.drafts import DRAFTS, NONE, open_drafts
from edgekv.engine.model import Model
from edgekv.engine.runner import State
from edgekv.engine.scheduler import SHARED_CHUNK, BatchScheduler, SerialScheduler
from edgekv.engine.verdicts import Verdicts
from edgekv.errors import ConfigError, ContextError
from edgekv.files import Memo
from edgekv.kernels.kernel_cache import compile_seconds
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import AUTO, EXACT, resolve
from edgekv.kvcache.mixed_bits import FIT_TOKENS, MIN_FIT_TOKENS, HeadNoise, NoiseProbe
from edgekv.kvcache.planes import PlanesConfig
from edgekv.kvcache.recurrent import attending, open_layers, recurrent_states
from edgekv.machine import blas_threads, format_bytes, memory_errors, parse_bytes, parse_tokens, require_memory
from edgekv.models.config import ModelConfig
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.types import Path, TaskProgress
from edgekv.vision.model import Vision

OVERFLOWS = "stop", "slide"  # what happens when a conversation outgrows its context
LORA_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class LoadOptions(TypedDict, total=False):
    """The keyword options of `Session.load` and `Session.restore`, whose defaults `Options` has.

    kv: the KV cache: "f16", "q8", "q4", "q3", "q2", "q1.5", a scheme with its options, ``name:option=value,...``,
        or a CacheSpec. "auto", which None is too, leaves the choice to `edgekv.kvcache.choice`: what passed the
        gate on this model, else what lost little everywhere. With a ``kv_budget`` the most bits that hold it.
    ctx: tokens that the conversation can have, also as a text ("8k"); None is 8192, or the model's positions where
        these are fewer.
    weights: the format of the weights: "f32", "int8", "q5", "q4", "q3", "q2", or "auto", by its size. With
        ",head=int8" behind it the language-model head has another format.
    kv_budget: bytes that the cache may take, also as a text ("300M"); None is no bound.
    overflow: what happens when the conversation outgrows ``ctx``: "stop" (the text ends), or "slide" (the
        first tokens and the latest ones stay, the oldest between them go).
    draft: what guesses the next tokens, so that one pass checks several (greedy text: docs/drafts.md). "none",
        "ngram" (what followed the latest tokens where they stood before), or "auto" (ngram on the device cpu).
    device: "cpu" (Numba), "cuda" (CuPy), "numpy" (the slow reference), or "auto": cuda where CuPy, a GPU and the
        scheme's kernels are, else cpu.
    threads: cores to use; None is all that this process may use, and for weight products as many of them as a
        short measurement at the first load finds fastest, which is then remembered.
    slots: conversations that may generate at once, each a `Session.fork` in a thread of its own: their tokens
        share passes of the linear layers, and a prompt is read between them. More than 1: device "cpu" or
        "numpy", and no drafts.
    config: a config.json for a .safetensors file that has none beside it.
    tokenizer: a tokenizer's file or folder, where none lies beside the weights.
    adapter: an adapter.safetensors that was trained for this checkpoint and this scheme.
    lora: a LoRA as PEFT saves it, as FOLDER or FOLDER:scale, merged into the checkpoint's weights.
    loras: LoRAs by name, each as FOLDER or FOLDER:scale, beside the weights: `Session.use_lora` chooses one for a
        conversation. Device "cpu" or "numpy".
    prefix_cache: bytes of the disk, in edgekv's cache folder, for what conversations have read, so that others
        that begin alike, also after a restart, read it from there (docs/sessions.md); None keeps nothing.
    """

    kv: str | CacheSpec | None
    ctx: int | str | None
    weights: str
    kv_budget: int | str | None
    overflow: str
    draft: str
    device: str
    threads: int | None
    slots: int
    config: Path | None
    tokenizer: Path | None
    adapter: Path | None
    lora: Path | None
    loras: Mapping[str, Path]
    prefix_cache: int | str | None


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked values of `LoadOptions`, and their defaults. Raises an EdgeKVError whose field is the option."""

    kv: str | CacheSpec | None = None
    ctx: Count | None = None
    weights: str = "auto"
    kv_budget: Count | None = None
    overflow: str = "stop"
    draft: str = "none"
    device: str = AUTO
    threads: Count | None = None
    slots: Count = 1
    config: Path | None = None
    tokenizer: Path | None = None
    adapter: Path | None = None
    lora: Path | None = None
    loras: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    prefix_cache: Count | None = None

    def __post_init__(self) -> None:
        for name, read in (("kv_budget", parse_bytes), ("prefix_cache", parse_bytes), ("ctx", parse_tokens)):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, read(value, name))
        check_fields(self)
        for name, words in (("overflow", OVERFLOWS), ("draft", DRAFTS)):
            if (value := getattr(self, name)) not in words:
                raise ConfigError("unknown", field=name, value=value, accepted=words)
        if self.slots > 1 and self.draft not in (NONE, AUTO):
            raise refusal("draft", self.draft, "none or auto, with more than one slot")
        for name in self.loras:
            if not LORA_NAME.fullmatch(name):
                raise refusal("loras", name, "names of 1 to 64 letters, digits, dots and dashes")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Makes options of the values by name. Raises ConfigError for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        require_names(values, names, "a session")
        return cls(**values)


DEFAULT_CTX = 8192


def default_ctx(config: ModelConfig) -> int:
    """Returns the tokens of the context where ``ctx`` is not given."""
    return min(DEFAULT_CTX, config.max_positions)


@dataclasses.dataclass(frozen=True)
class SessionPlan:
    """The scheme, weight format and memory of a session. Bytes are exact, those of scratch an upper bound.

    ctx: tokens that it can hold. kv: its scheme. weights: name of the weight format. weights_bytes: weights in the
    device's memory, or mapped. idle_bytes: those of them that need none, experts that a token leaves out.
    cache_bytes: all KV caches; f16_bytes: the same in f16. state_bytes: layers that do not attend, with their
    snapshots. scratch_bytes: buffers while a prompt of ``ctx`` tokens is read. notes: what was chosen for the
    user, or lost, a line each.
    """

    ctx: int
    kv: CacheSpec
    weights: str
    weights_bytes: int
    idle_bytes: int
    cache_bytes: int
    f16_bytes: int
    state_bytes: int
    scratch_bytes: int
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        model: Model,
        *,
        kv: str | CacheSpec | None = None,
        ctx: int | None = None,
        weights: str = "auto",
        sizes: tuple[int, int] | None = None,
        kv_budget: int | None = None,
        fit: Callable[[CacheSpec], CacheSpec] = lambda spec: spec,
        device: str = "cpu",
    ) -> SessionPlan:
        """Makes the plan for options of `LoadOptions`; device: not auto. fit: `fit_head_bits` of a loaded model.

        sizes: weights_bytes and idle_bytes, where they are not those of the format ``weights``.
        Raises ContextError for a context that the model can't have, CacheError and ConfigError for unknown names
        and for a scheme that does not fit the budget.
        """
        c = model.config
        ctx = default_ctx(c) if ctx is None else ctx
        if not 1 <= ctx <= c.max_positions:
            what = f"this model has {c.max_positions} positions"
            raise ContextError(what, field="ctx", value=ctx, accepted=[f"1 to {c.max_positions}"])
        form = model.weight_format(weights)
        held = find_device(device).device_format(form)
        weights_bytes, idle = sizes or (model.weights_bytes(held), model.idle_bytes(held))
        state_bytes = sum(state.planned_bytes() for state in recurrent_states(c, ctx))

        model_bytes, passed = weights_bytes - idle + state_bytes, functools.partial(Verdicts(model).passed, ctx)
        spec, notes = resolve(kv, c, ctx, kv_budget, model_bytes, passed, fit)
        caches = spec.layers(c, ctx)
        if weights_note := model.weights_note(form):
            notes.append(weights_note)
        if idle and c.experts:
            read = idle * c.experts.per_token // (c.experts.count - c.experts.per_token)
            notes.append(
                f"{format_bytes(idle)} of the weights are experts that a token leaves out: they stay in the file, "
                f"and a machine without memory for them reads up to {format_bytes(read)} for each token"
            )
        return cls(
            ctx=ctx,
            kv=spec,
            weights=form.name,
            weights_bytes=weights_bytes,
            idle_bytes=idle,
            cache_bytes=sum(cache.planned_bytes() for cache in caches),
            f16_bytes=CacheSpec.parse(EXACT).planned_bytes(c, ctx),
            state_bytes=state_bytes,
            scratch_bytes=scratch_bytes(c, ctx, needs_prompt_queries=caches[0].needs_prompt_queries),
            notes=tuple(notes),
        )

    def parts(self, slots: int = 1) -> dict[str, int]:
        """Returns the bytes of ``slots`` conversations at once, by what they are for."""
        parts = {"weights": self.weights_bytes - self.idle_bytes, "kv cache": slots * self.cache_bytes}
        states = {"state": slots * self.state_bytes} if self.state_bytes else {}
        return parts | states | {"scratch": self.scratch_bytes}


DEVICES = {
    "cpu": "edgekv.engine.cpu:CpuBackend",  # Numba
    "numpy": "edgekv.engine.cpu:NumpyBackend",  # the reference: slow, exact
    "cuda": "edgekv.engine.cuda:CudaBackend",  # CuPy
}


def find_device(name: str) -> type[Backend]:
    """Returns the backend called ``name``. Raises ConfigError (field device) for an unknown name."""
    if name not in DEVICES:
        advice = "did you mean cuda?" if name.lower() == "gpu" else ""
        raise ConfigError("unknown", field="device", value=name, accepted=(AUTO, *DEVICES), advice=advice)
    module, _, backend = DEVICES[name].partition(":")
    result: type[Backend] = getattr(importlib.import_module(module), backend)
    return result


def resolve_device(name: str, spec: CacheSpec, config: ModelConfig | None = None) -> str:
    """Returns the device that ``name`` means: auto is cuda where it has the scheme and the model, else cpu."""
    if name != AUTO:
        return name
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return "cpu"  # without importing what a GPU needs
    return "cuda" if find_device("cuda").available(spec, config) else "cpu"


def open_caches(
    decoder: Decoder, spec: CacheSpec, capacity: int, adapter: Adapter | None = None
) -> list[LayerState]:
    """Allocates an empty cache, or recurrent state, of ``capacity`` tokens for every layer.

    adapter: its parameters are loaded where they are for this scheme. Raises CacheError where the scheme can't
    have the model's shape.
    """
    caches = open_layers(spec, decoder.config, capacity)
    if adapter and adapter.scheme == spec.scheme.name:
        adapter.adapt(attending(caches))
    with memory_errors("taking the caches' memory", decoder.backend.free_bytes):
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
    return caches


FIT_TEXT = "demo/prose.txt"
FIT_TASK = "mixed bits (once per model)"
FIT_FORMAT = 4  # of the remembered measurement


def fit_head_bits(
    model: Model,
    weights: str,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    progress: TaskProgress | None = None,
) -> Callable[[CacheSpec], CacheSpec]:
    """Returns a function that gives the heads of a scheme with mixed bits their bits; others it returns unchanged.

    Measures on the first `FIT_TOKENS` of `FIT_TEXT`, once for each model, adapter and format of ``weights``.
    Without a tokenizer, enough positions or the text, heads have bits by their order alone.
    """
    config = model.config

    @functools.cache
    def noise() -> HeadNoise | None:
        memo = Memo(f"bits/{model.adapted_identity}-{weights}.json", FIT_FORMAT)
        if remembered := memo.read():
            return HeadNoise(**{name: np.array(rows) for name, rows in remembered.items()})
        path, n = shipped_file(FIT_TEXT), min(FIT_TOKENS, config.max_positions)
        text = path.read_text(encoding="utf-8")[: 16 * FIT_TOKENS] if path else ""
        tokens = tokenizer.encode(text)[:n] if tokenizer else []
        if len(tokens) < MIN_FIT_TOKENS:
            return None
        measured = _measure_noise(decoder, tokens, progress)
        memo.keep({name: array.tolist() for name, array in measured._asdict().items()})
        return measured

    def fit(spec: CacheSpec) -> CacheSpec:
        options = spec.config
        if not (isinstance(options, PlanesConfig) and options.needs_fit and (measured := noise())):
            return spec
        windows = [config.layer_windows[i] for i in config.attending]
        return dataclasses.replace(spec, config=options.with_head_bits(measured, windows, config.head_dim))

    return fit


def _measure_noise(decoder: Decoder, tokens: list[int], progress: TaskProgress | None) -> HeadNoise:
    probes = open_layers(CacheSpec(NoiseProbe, None), decoder.config, len(tokens))
    for probe in probes:
        probe.allocate(decoder.kernels, decoder.workspace)
    layers = None if progress is None else lambda done, total: progress(FIT_TASK, done, total)
    with blas_threads(decoder.threads):
        decoder.prefill(decoder.embed(tokens, 0), probes, layers)
    layers_noise = [probe.noise for probe in probes if isinstance(probe, NoiseProbe)]
    return HeadNoise(*map(np.stack, zip(*layers_noise, strict=True)))


WARM_UP_TASK = "compiling kernels (once per machine)"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights ready to compute, shared by a session and its forks.

    plan: that of the session for which it was loaded. decoders: by the name of the LoRA beside the weights, None
    without one. compile_s: seconds that compiling kernels took; 0 where they were compiled before.
    """

    model: Model
    plan: SessionPlan
    decoders: Mapping[str | None, Decoder]
    scheduler: SerialScheduler | BatchScheduler
    device: str
    tokenizer: Tokenizer | None
    compile_s: float

    @functools.cached_property
    def vision(self) -> Vision:
        """The model's vision encoder, loaded at its first use. Raises ImageError where there is none."""
        return Vision(self.model, self.scheduler.threads)

    def decoder(self, lora: str | None) -> Decoder:
        """Returns the decoder with one of ``loras``; None: without. Raises ConfigError for an unknown name."""
        if lora not in self.decoders:
            raise ConfigError("unknown", field="lora", value=str(lora), accepted=self.model.loras)
        return self.decoders[lora]

    def fork_plan(self, kv: str | CacheSpec, ctx: int, kv_budget: int | None) -> SessionPlan:
        """Makes the plan of another conversation on these weights. Raises the errors of `Session.fork`."""
        if ctx > self.plan.ctx:
            what = f"the session that it shares weights with has {self.plan.ctx}"
            accepted, advice = [f"1 to {self.plan.ctx}"], "load that with more"
            raise ContextError(what, field="ctx", value=ctx, accepted=accepted, advice=advice)
        weights = self.plan.weights
        fit = fit_head_bits(self.model, weights, self.decoders[None], self.tokenizer)
        options: dict[str, Any] = {"kv": kv, "ctx": ctx, "weights": weights, "kv_budget": kv_budget}
        plan = SessionPlan.make(self.model, **options, fit=fit, device=self.device)
        find_device(self.device).require(plan.kv)
        return plan

    def new_state(self, plan: SessionPlan) -> State:
        """Makes an empty conversation, its caches allocated. Raises MemoryBudgetError where they don't fit."""
        require_memory({"kv cache": plan.cache_bytes + plan.state_bytes}, self.decoders[None].backend.free_bytes())
        caches = open_caches(self.decoders[None], plan.kv, plan.ctx, self.model.adapter)
        return State(caches, self.model.config.rope_invalidates_keys)

    def settings(self, plan: SessionPlan, lora: str | None) -> dict[str, Any]:
        """Returns the settings of a report by their options' names, with the threads of the weight products."""
        decoder = self.decoders[lora]
        weight_threads = decoder.ops.threads
        return {
            "kv": str(plan.kv),
            "weights": plan.weights,
            "ctx": plan.ctx,
            "device": self.device,
            "threads": decoder.threads,
            "decode_threads": weight_threads and weight_threads.decode,
            "prompt_threads": weight_threads and weight_threads.prompt,
            "adapter": self.model.adapter and self.model.adapter.path.name,
            "lora": self.model.lora_text(lora),
        }


def open_model(path: Path, options: Options) -> Model:
    """Opens the model at ``path`` with the files that the options name. Raises CheckpointError or ConfigError."""
    names = ("config", "tokenizer", "adapter", "lora", "loras")
    return Model.open(path, **{name: getattr(options, name) for name in names})


def load_model(options: Options, model: Model, progress: TaskProgress | None = None) -> LoadedModel:
    """Checks the options against model and machine, then loads weights and compiles kernels.

    progress(task, done, total) is called meanwhile. Raises an EdgeKVError, as `Session.load`.
    """
    requested = {name: getattr(options, name) for name in ("kv", "ctx", "weights", "kv_budget")}
    plan = SessionPlan.make(model, **requested)
    if model.adapter:
        model.adapter.require_scheme(plan.kv.scheme.name)
        model.adapter.adapt(attending(open_layers(plan.kv, model.config, plan.ctx)))  # refuses bad values
    device = resolve_device(options.device, plan.kv, model.config)
    backend = find_device(device)
    backend.require(plan.kv, model.config, slots=options.slots, loras=bool(model.loras))
    open_drafts(options.draft, model.config, device, options.slots)  # refuses those that the model can't have
    requested["device"] = device
    plan = SessionPlan.make(model, **requested)
    parts = plan.parts(options.slots) | ({"loras": model.loras_bytes} if model.loras else {})
    require_memory(parts, backend.free_bytes())
    tokenizer = open_tokenizer(model) if model.tokenizer_path is not None else None
    form = model.weight_format(plan.weights)
    with backend.precompiling(plan.kv), memory_errors("loading", backend.free_bytes):
        decoder = backend.decoder(model, form, plan.ctx, options.threads, progress)
        fit = fit_head_bits(model, plan.weights, decoder, tokenizer, progress)
        plan = SessionPlan.make(model, **requested, fit=fit)
        compile_s = warm_up(decoder, plan.kv, plan.ctx, progress)
    scheduler = (SerialScheduler if options.slots == 1 else BatchScheduler)(decoder.threads)
    if options.slots > 1:
        decoder.chunk = min(decoder.chunk, SHARED_CHUNK)
    decoders: dict[str | None, Decoder] = {None: decoder}
    for name in model.loras:
        decoders[name] = decoder.with_lora(model.lora_deltas(name))
        for compile_products in decoders[name].ops.warm_up():  # the base model's may be others
            compile_products()
    return LoadedModel(model, plan, decoders, scheduler, device, tokenizer, compile_s)


def open_tokenizer(model: Model) -> Tokenizer:
    """Loads the model's tokenizer. Raises TokenizerError where it has none, or a damaged one."""
    folder = model.path if model.path.is_dir() else model.path.parent
    return load_tokenizer(model.tokenizer_path or folder, config=model.text_config)


def warm_up(decoder: Decoder, kv: CacheSpec, ctx: int, progress: TaskProgress | None) -> float:
    """Compiles the kernels of the scheme, or loads compiled ones; returns the seconds of compiling."""
    calls = list(decoder.warm_up(kv.layers(decoder.config, min(WARM_UP_TOKENS, ctx))))
    before = compile_seconds()
    for i, call in enumerate(calls):
        if progress:
            progress(WARM_UP_TASK, i, len(calls))
        call()
    if progress:
        progress(WARM_UP_TASK, len(calls), len(calls))
    return compile_seconds() - before
