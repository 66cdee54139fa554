"""From options to what a session runs on: the model, its plan, its decoder, ready to compute."""

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
from edgekv.checks import Count, check_fields, refused
from edgekv.engine.cpu import scratch_bytes
from edgekv.engine.decoder import Backend, Decoder
from edgekv.engine.model import Model, Verdicts, sampling_defaults
from edgekv.engine.runner import State
from edgekv.engine.sampling import SamplingParams
from edgekv.engine.scheduler import SHARED_CHUNK, BatchScheduler, SerialScheduler
from edgekv.errors import ConfigError, ContextError
from edgekv.files import Memo
from edgekv.kernels.kernel_cache import compile_seconds
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import resolve
from edgekv.kvcache.mixed_bits import FIT_TOKENS, MIN_FIT_TOKENS, HeadNoise, NoiseProbe
from edgekv.kvcache.planes import PlanesConfig
from edgekv.kvcache.recurrent import attending, open_layers, recurrent_states
from edgekv.machine import blas_threads, format_bytes, memory_errors, require_memory
from edgekv.models.config import ModelConfig
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.types import Path, TaskProgress
from edgekv.vision.model import Vision

AUTO = "auto"
OVERFLOWS = "stop", "slide"  # what happens when a conversation outgrows its context
LORA_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class LoadOptions(TypedDict, total=False):
    """The keyword options of `Session.load` and `Session.restore`, for type checkers; `Options` checks them.

    kv: the KV cache: "f16", "q8", "q4", "q3", "q2", "q1.5", a scheme with its options, ``name:option=value,...``,
        or a CacheSpec. "auto", which None is too: the smallest of the former that passed the gate on this model,
        else q4; f16 where that saves little. With a ``kv_budget`` the most bits that hold it.
    ctx: tokens that the conversation can have; None is 8192, or the model's positions where these are fewer.
    weights: the format of the weights: "f32", "int8", "int8-32", "int4", "int4-32", or "auto", by its size. With
        ",head=int8" behind it the language-model head has another format.
    kv_budget: bytes that the cache may take; None is no bound.
    overflow: what happens when the conversation outgrows ``ctx``: "stop" (the text ends), or "slide" (the
        first tokens and the latest ones stay, the oldest between them go).
    draft: what guesses the next tokens, so that one pass checks several; the text is what it is without. "none",
        "ngram" (what followed the latest tokens where they stood before), or "auto" (ngram on the device cpu).
    device: "cpu" (Numba), "cuda" (CuPy), "numpy" (the slow reference), or
        "auto": cuda where CuPy, a GPU and the scheme's kernels are, else cpu. The command line's default is auto;
        here it is cpu, so that a program gives the same text on every machine and takes no GPU that it was not
        told to take.
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
    """

    kv: str | CacheSpec | None
    ctx: int | None
    weights: str
    kv_budget: int | None
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The values of `LoadOptions`, checked. Raises an EdgeKVError whose field is the option."""

    kv: str | CacheSpec | None = None
    ctx: Count | None = None
    weights: str = "auto"
    kv_budget: Count | None = None
    overflow: str = "stop"
    draft: str = "none"
    device: str = "cpu"
    threads: Count | None = None
    slots: Count = 1
    config: Path | None = None
    tokenizer: Path | None = None
    adapter: Path | None = None
    lora: Path | None = None
    loras: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.overflow not in OVERFLOWS:
            raise ConfigError("unknown", field="overflow", value=self.overflow, accepted=OVERFLOWS)
        if self.slots > 1 and self.draft not in ("none", "auto"):
            raise refused("draft", self.draft, "none or auto, with more than one slot")
        for name in self.loras:
            if not LORA_NAME.fullmatch(name):
                raise refused("loras", name, "names of 1 to 64 letters, digits, dots and dashes")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options by name. Raises ConfigError for a name that is none."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given.keys() - {*names}:
            raise ConfigError("there is no such option", field=name, value=given[name], accepted=names)
        return cls(**given)


DEFAULT_CTX = 8192


def default_ctx(config: ModelConfig) -> int:
    """Tokens of the context where nobody says."""
    return min(DEFAULT_CTX, config.max_positions)


@dataclasses.dataclass(frozen=True)
class SessionPlan:
    """What a session will take. Bytes are exact but for ``scratch_bytes``, an upper estimate.

    ctx: tokens that it can hold. kv: its scheme. weights: the format's name. weights_bytes: what decoding maps.
    idle_bytes: of these, experts that a token leaves out, which need no memory. cache_bytes: of all KV caches.
    state_bytes: of layers that do not attend, with their snapshots. scratch_bytes: while a prompt of ``ctx``
    tokens is read. notes: what was chosen for the user, or lost, a line each.
    """

    ctx: int
    kv: CacheSpec
    weights: str
    weights_bytes: int
    idle_bytes: int
    cache_bytes: int
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
        kv_budget: int | None = None,
        fit: Callable[[CacheSpec], CacheSpec] = lambda spec: spec,
    ) -> SessionPlan:
        """The plan for options of `LoadOptions`; with ``fit`` of a loaded model (`heads_bits`) the one to open.

        Raises ContextError for a context that the model can't have, CacheError and ConfigError for unknown names
        and for a scheme that does not fit the budget.
        """
        c = model.config
        ctx = default_ctx(c) if ctx is None else ctx
        if not 1 <= ctx <= c.max_positions:
            what = f"this model has {c.max_positions} positions"
            raise ContextError(what, field="ctx", value=ctx, accepted=[f"1 to {c.max_positions}"])
        form = model.weight_format(weights)
        weights_bytes, idle = model.weights_bytes(form), model.idle_bytes(form)
        held = weights_bytes - idle
        state_bytes = sum(state.planned_bytes() for state in recurrent_states(c, ctx))

        spec, notes = resolve(kv, c, ctx, kv_budget, held + state_bytes, Verdicts(model).passed, fit)
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
            state_bytes=state_bytes,
            scratch_bytes=scratch_bytes(c, ctx, needs_prompt_queries=caches[0].needs_prompt_queries),
            notes=tuple(notes),
        )

    def parts(self, slots: int = 1) -> dict[str, int]:
        """Bytes by what they are for, of so many conversations at once."""
        parts = {"weights": self.weights_bytes - self.idle_bytes, "kv cache": slots * self.cache_bytes}
        states = {"state": slots * self.state_bytes} if self.state_bytes else {}
        return parts | states | {"scratch": self.scratch_bytes}


DEVICES = {
    "cpu": "edgekv.engine.cpu:CpuBackend",  # Numba
    "numpy": "edgekv.engine.cpu:NumpyBackend",  # the reference: slow, exact
    "cuda": "edgekv.engine.cuda:CudaBackend",  # CuPy
}


def find_device(name: str) -> type[Backend]:
    """The backend of that name. Raises ConfigError (field device)."""
    if name not in DEVICES:
        raise ConfigError("unknown", field="device", value=name, accepted=(AUTO, *DEVICES))
    module, _, backend = DEVICES[name].partition(":")
    result: type[Backend] = getattr(importlib.import_module(module), backend)
    return result


def resolve_device(name: str, spec: CacheSpec, config: ModelConfig | None = None) -> str:
    """What ``auto`` means here for this scheme and model: cuda where it can be had; other names stay."""
    if name != AUTO:
        return name
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return "cpu"  # without a look at all that a GPU would need
    return "cuda" if find_device("cuda").available(spec, config) else "cpu"


def open_caches(
    decoder: Decoder, spec: CacheSpec, capacity: int, adapter: Adapter | None = None
) -> list[LayerState]:
    """An empty cache of ``capacity`` tokens for every layer, or the state of one that does not attend.

    An adapter's parameters go in where it is for this scheme. Raises CacheError where the scheme can't have the
    model's shape.
    """
    caches = open_layers(spec, decoder.config, capacity)
    if adapter and adapter.scheme == spec.scheme.name:
        adapter.adapt(attending(caches))
    with memory_errors("taking the caches' memory", decoder.backend.free_bytes):
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
    return caches


TEXT = "demo/prose.txt"
TASK = "mixed bits (once per model)"
FORMAT = 4


def heads_bits(
    model: Model,
    weights: str,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    progress: TaskProgress | None = None,
) -> Callable[[CacheSpec], CacheSpec]:
    """What makes of a scheme that with the bits of every head in its options, where these are given out by need.

    Measured on the first `FIT_TOKENS` of `TEXT`, once for each model, adapter and format of ``weights``. Without
    a tokenizer, with too few positions or without the text schemes stay as they are: heads then have bits by
    their order alone.
    """
    config = model.config

    @functools.cache
    def noise() -> HeadNoise | None:
        memo = Memo(f"bits/{model.adapted_identity}-{weights}.json", FORMAT)
        if remembered := memo.read():
            return HeadNoise(**{name: np.array(rows) for name, rows in remembered.items()})
        path, n = shipped_file(TEXT), min(FIT_TOKENS, config.max_positions)
        text = path.read_text(encoding="utf-8")[: 16 * FIT_TOKENS] if path else ""
        tokens = tokenizer.encode(text)[:n] if tokenizer else []
        if len(tokens) < MIN_FIT_TOKENS:
            return None
        measured = _measured_noise(decoder, tokens, progress)
        memo.keep({name: array.tolist() for name, array in measured._asdict().items()})
        return measured

    def fit(spec: CacheSpec) -> CacheSpec:
        given = spec.config
        if not (isinstance(given, PlanesConfig) and given.needs_fit and (found := noise())):
            return spec
        windows = [config.layer_windows[i] for i in config.attending]
        return dataclasses.replace(spec, config=given.with_head_bits(found, windows, config.head_dim))

    return fit


def _measured_noise(decoder: Decoder, tokens: list[int], progress: TaskProgress | None) -> HeadNoise:
    probes = open_layers(CacheSpec(NoiseProbe, None), decoder.config, len(tokens))
    for probe in probes:
        probe.allocate(decoder.kernels, decoder.workspace)
    layers = None if progress is None else lambda done, total: progress(TASK, done, total)
    with blas_threads(decoder.threads):
        decoder.prefill(decoder.embed(tokens, 0), probes, layers)
    layers_noise = [probe.noise for probe in probes if isinstance(probe, NoiseProbe)]
    return HeadNoise(*map(np.stack, zip(*layers_noise, strict=True)))


WARM_UP = "compiling kernels (once per machine)"
WARM_UP_TOKENS = 700  # beyond the windows and budgets that the schemes have by default


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's weights ready to compute with: what a session and its forks share.

    plan: of the session that it was loaded for. decoders: by the name of the LoRA beside the weights, None without
    one. compile_s: seconds that compiling kernels took; 0 where they were compiled before.
    """

    model: Model
    plan: SessionPlan
    decoders: Mapping[str | None, Decoder]
    scheduler: SerialScheduler
    device: str
    tokenizer: Tokenizer | None
    compile_s: float

    @functools.cached_property
    def vision(self) -> Vision:
        """The model's vision encoder, loaded at its first use. Raises ImageError where there is none."""
        return Vision(self.model, self.scheduler.threads)

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """How the model wants its tokens to be chosen. Raises ConfigError where its file is damaged."""
        return sampling_defaults(self.model)

    def decoder(self, lora: str | None) -> Decoder:
        """With one of the model's ``loras``; None: without. Raises ConfigError for an unknown name."""
        if lora not in self.decoders:
            raise ConfigError("unknown", field="lora", value=str(lora), accepted=self.model.loras)
        return self.decoders[lora]

    def fork_plan(self, kv: str | CacheSpec, ctx: int, kv_budget: int | None) -> SessionPlan:
        """The plan of another conversation on these weights. Raises as `Session.fork`."""
        if ctx > self.plan.ctx:
            what, accepted = (
                f"the session that it shares weights with has {self.plan.ctx}",
                f"1 to {self.plan.ctx}",
            )
            raise ContextError(what, field="ctx", value=ctx, accepted=[accepted], advice="load that with more")
        weights = self.plan.weights
        fit = heads_bits(self.model, weights, self.decoders[None], self.tokenizer)
        plan = SessionPlan.make(self.model, kv=kv, ctx=ctx, weights=weights, kv_budget=kv_budget, fit=fit)
        find_device(self.device).require(plan.kv)
        return plan

    def new_state(self, plan: SessionPlan) -> State:
        """An empty conversation, with its caches allocated. Raises MemoryBudgetError where they don't fit."""
        require_memory({"kv cache": plan.cache_bytes + plan.state_bytes}, self.decoders[None].backend.free_bytes())
        caches = open_caches(self.decoders[None], plan.kv, plan.ctx, self.model.adapter)
        return State(caches, self.model.config.rope_invalidates_keys)

    def settings(self, plan: SessionPlan, lora: str | None) -> dict[str, Any]:
        """For the report: every setting by its option's name, and the threads of the weight products."""
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
    """The model at ``path`` with the files that the options name. Raises CheckpointError or ConfigError."""
    names = ("config", "tokenizer", "adapter", "lora", "loras")
    return Model.open(path, **{name: getattr(options, name) for name in names})


def load_model(options: Options, model: Model, progress: TaskProgress | None = None) -> LoadedModel:
    """Checks the options against model and machine, then loads weights and compiles kernels.

    progress(task, done, total) is called meanwhile. Raises an EdgeKVError, as `Session.load`.
    """
    given = {name: getattr(options, name) for name in ("kv", "ctx", "weights", "kv_budget")}
    plan = SessionPlan.make(model, **given)
    if model.adapter:
        model.adapter.require_scheme(plan.kv.scheme.name)
    device = resolve_device(options.device, plan.kv, model.config)
    place = find_device(device)
    place.require(plan.kv, model.config, slots=options.slots, loras=bool(model.loras))
    parts = plan.parts(options.slots) | ({"loras": model.loras_bytes} if model.loras else {})
    require_memory(parts, place.free_bytes())
    tokenizer = open_tokenizer(model) if model.tokenizer_path is not None else None
    form = model.weight_format(plan.weights)
    with place.precompiling(plan.kv), memory_errors("loading", place.free_bytes):
        decoder = place.decoder(model, form, plan.ctx, options.threads, progress)
        plan = SessionPlan.make(model, **given, fit=heads_bits(model, plan.weights, decoder, tokenizer, progress))
        compile_s = warm_up(decoder, plan.kv, plan.ctx, progress)
    scheduler = SerialScheduler(decoder.threads)
    if options.slots > 1:
        scheduler, decoder.chunk = BatchScheduler(decoder.threads), min(decoder.chunk, SHARED_CHUNK)
    decoders: dict[str | None, Decoder] = {None: decoder}
    for name in model.loras:
        decoders[name] = decoder.with_lora(model.lora_deltas(name))
        for compile_products in decoders[name].ops.warm_up():  # the base model's may be others
            compile_products()
    return LoadedModel(model, plan, decoders, scheduler, device, tokenizer, compile_s)


def open_tokenizer(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises TokenizerError where it has none, or a damaged one."""
    folder = model.path if model.path.is_dir() else model.path.parent
    return load_tokenizer(model.tokenizer_path or folder, config=model.text_config)


def warm_up(decoder: Decoder, kv: CacheSpec, ctx: int, progress: TaskProgress | None) -> float:
    """Compiles the kernels of the scheme; returns the seconds.

    Before any clock of a text starts. 0 where all were compiled before and are only loaded.
    """
    calls = list(decoder.warm_up(kv.layers(decoder.config, min(WARM_UP_TOKENS, ctx))))
    before = compile_seconds()
    for i, call in enumerate(calls):
        if progress:
            progress(WARM_UP, i, len(calls))
        call()
    if progress:
        progress(WARM_UP, len(calls), len(calls))
    return compile_seconds() - before
