"""From options to what a session runs on: the model, its plan, its decoder, ready to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from edgekv.decoder.decoder import Decoder
from edgekv.errors import ConfigError, ContextError, TokenizerError, unknown
from edgekv.kernels.compiling import CompileClock
from edgekv.kvcache import CacheSpec
from edgekv.machine import memory_errors, require_memory
from edgekv.session.caches import open_caches
from edgekv.session.context_shift import ContextShift
from edgekv.session.devices import find_device, resolve_device
from edgekv.session.drafts import Drafts
from edgekv.session.head_bits import give_heads_bits
from edgekv.session.model import Model
from edgekv.session.model_runner import ModelRunner
from edgekv.session.options import LoadOptions
from edgekv.session.plan import SessionPlan
from edgekv.session.report import RunReport
from edgekv.session.saving import SavedState
from edgekv.session.schedule import SHARED_CHUNK, OneAtATime, Schedule, Together
from edgekv.session.state import State
from edgekv.tokenizer import Tokenizer, load_tokenizer
from edgekv.types import Path, TaskProgress
from edgekv.vision.prompt import ImagesReport

WARM_UP = "compiling kernels (once per machine)"
WARM_UP_TOKENS = 700  # beyond the windows and budgets that the schemes have by default


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What a session runs on.

    model: the opened checkpoint. plan: scheme, context and bytes. decoders: with the weights loaded, by the name
    of the LoRA beside them, None without one. schedule: the way to them. device: its name in DEVICES. tokenizer:
    None where the model has none. compile_s: seconds that compiling kernels took; 0 where they were compiled
    before. lora: the name of the conversation's own.
    """

    model: Model
    plan: SessionPlan
    decoders: Mapping[str | None, Decoder]
    schedule: Schedule
    device: str
    tokenizer: Tokenizer | None
    compile_s: float = 0.0
    lora: str | None = None

    @property
    def decoder(self) -> Decoder:
        """The conversation's own."""
        return self.decoders[self.lora]

    def with_lora(self, name: str | None) -> LoadedModel:
        """For a conversation with one of the model's ``loras``; None: without. ConfigError for an unknown name."""
        if name not in self.decoders:
            raise unknown(ConfigError, "lora", str(name), tuple(self.model.loras))
        return dataclasses.replace(self, lora=name)

    def settings(self) -> dict[str, Any]:
        """For the report: every setting by its option's name, and the threads of the weight products."""
        weight_threads = self.decoder.linear.threads
        return {
            "kv": str(self.plan.kv),
            "weights": self.plan.weights,
            "ctx": self.plan.ctx,
            "device": self.device,
            "threads": self.decoder.threads,
            "decode_threads": weight_threads and weight_threads.decode,
            "prompt_threads": weight_threads and weight_threads.prompt,
            "adapter": self.model.adapter and self.model.adapter.path.name,
            "lora": self.model.lora_text(self.lora),
        }

    def require_room(self) -> None:
        """Raises MemoryBudgetError where there is no memory for one more conversation's caches."""
        needed = {"kv cache": self.plan.cache_bytes + self.plan.state_bytes}
        require_memory(needed, find_device(self.device).free_bytes())

    def new_state(self) -> State:
        """An empty conversation, with its caches allocated. Raises MemoryBudgetError where they don't fit."""
        self.require_room()
        caches = open_caches(self.decoder, self.plan.kv, self.plan.ctx, self.model.adapter)
        return State(caches, self.model.config.keys_change)

    def new_runner(self, context_shift: ContextShift | None = None, drafts: Drafts | None = None) -> ModelRunner:
        """What computes an empty conversation; see there."""
        state, ctx, placeholder = self.new_state(), self.plan.ctx, self.model.placeholder
        return ModelRunner(state, self.decoder, self.schedule, ctx, placeholder, context_shift, drafts)

    def new_report(self, images: ImagesReport | None = None, **settings: Any) -> RunReport:
        """Of a text that has not begun. settings: its own."""
        return RunReport(self.settings() | settings, self.model.summary(), images=images, compile_s=self.compile_s)


def open_model(path: Path, options: LoadOptions) -> Model:
    """The model at ``path`` with the files that the options name. Raises CheckpointError or ConfigError."""
    return Model.open(
        path,
        config=options.config,
        tokenizer=options.tokenizer,
        adapter=options.adapter,
        lora=options.lora,
        loras=options.loras,
    )


def load_model(
    options: LoadOptions,
    model: Model,
    *,
    progress: TaskProgress | None = None,
    beside: Mapping[str, int] = MappingProxyType({}),
) -> LoadedModel:
    """Checks the options against model and machine, then loads weights and compiles kernels.

    beside: bytes that will be taken, too, by what they are for. progress(task, done, total) is called
    meanwhile. Raises an EdgeKVError, as `Session.load`.
    """
    plan = SessionPlan.make(
        model, kv=options.kv, ctx=options.ctx, weights=options.weights, kv_budget=options.kv_budget
    )
    if model.adapter:
        model.adapter.require_scheme(plan.kv.scheme.name, *plan.kv.scheme.aliases)
    device = resolve_device(options.device, plan.kv, model.config)
    place = find_device(device)
    place.require_layers(model.config)
    place.require(plan.kv)
    place.require_slots(options.slots)
    if model.loras:
        place.require_loras()
    parts = plan.parts(options.slots) | ({"loras": model.loras_bytes} if model.loras else {})
    require_memory({**parts, **beside}, place.free_bytes())
    tokenizer = open_tokenizer(model) if model.tokenizer_path is not None else None
    form = model.weight_format(plan.weights)
    with place.preparing(plan.kv), memory_errors("loading", place.free_bytes):
        decoder = place.decoder(model, form, plan.ctx, options.threads, progress)
        kv = give_heads_bits(plan.kv, model, plan.weights, decoder, tokenizer, progress)
        plan = plan.with_kv(kv, model)
        compile_s = warm_up(decoder, plan.kv, plan.ctx, progress)
    schedule: Schedule = OneAtATime(decoder.threads)
    if options.slots > 1:
        schedule, decoder.chunk = Together(decoder.threads), min(decoder.chunk, SHARED_CHUNK)
    decoders: dict[str | None, Decoder] = {None: decoder}
    for name in model.loras:
        decoders[name] = decoder.with_changes(model.changes(name))
        for compile_products in decoders[name].linear.warm_up():  # the base model's may be others
            compile_products()
    return LoadedModel(model, plan, decoders, schedule, device, tokenizer, compile_s)


def reopen(
    saved: SavedState, model: Model | LoadedModel, options: LoadOptions, *, progress: TaskProgress | None = None
) -> LoadedModel:
    """As `load_model`, with scheme, context and weights of a saved session; or a `fork` of a loaded model.

    Raises SessionError where it belongs to another model, or to other weights than the options name.
    """
    if isinstance(model, LoadedModel):
        lora = saved.require_model(model.model)
        saved.require_weights(model.plan.weights)
        return fork(model, saved.kv, saved.ctx).with_lora(lora)
    lora = saved.require_model(model)
    saved.require_weights(saved.weights if options.weights == "auto" else options.weights)
    as_saved = dataclasses.replace(options, kv=saved.kv, ctx=saved.ctx, weights=saved.weights)
    return load_model(as_saved, model, progress=progress).with_lora(lora)


def fork(loaded: LoadedModel, kv: str | CacheSpec | None, ctx: int | None) -> LoadedModel:
    """The same weights for another conversation; None: its scheme, its context. Raises as `Session.fork`."""
    options = LoadOptions(kv=loaded.plan.kv if kv is None else kv, ctx=loaded.plan.ctx if ctx is None else ctx)
    if ctx is not None and ctx > loaded.plan.ctx:
        raise ContextError(
            f"ctx={ctx}: the session that it shares weights with has {loaded.plan.ctx}; load it with that many",
            field="ctx",
            value=ctx,
            accepted=[f"1 to {loaded.plan.ctx}"],
        )
    plan = SessionPlan.make(loaded.model, kv=options.kv, ctx=options.ctx, weights=loaded.plan.weights)
    kv = give_heads_bits(plan.kv, loaded.model, plan.weights, loaded.decoders[None], loaded.tokenizer)
    plan = plan.with_kv(kv, loaded.model)
    find_device(loaded.device).require(plan.kv)
    forked = dataclasses.replace(loaded, plan=plan, compile_s=0.0)
    forked.require_room()
    if plan.kv == loaded.plan.kv:
        return forked
    return dataclasses.replace(forked, compile_s=warm_up(loaded.decoder, plan.kv, plan.ctx, None))


def open_tokenizer(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises TokenizerError where it has none, or a damaged one."""
    if model.tokenizer_path is None:
        raise TokenizerError(
            f"{model.path} has no tokenizer: copy tokenizer.json, tokenizer.model, or vocab.json and merges.txt "
            "beside the weights, or pass tokenizer=PATH",
            field="tokenizer",
        )
    return load_tokenizer(model.tokenizer_path, config=model.text_config)


def warm_up(decoder: Decoder, kv: CacheSpec, ctx: int, progress: TaskProgress | None) -> float:
    """Compiles the kernels of the scheme, and of those that it comes to use as it fills; returns the seconds.

    Before any clock of a text starts. 0 where all were compiled before and are only loaded.
    """
    specs = (kv, *map(CacheSpec.parse, kv.scheme.packs_like))
    n = min(WARM_UP_TOKENS, ctx)
    calls = [call for spec in specs for call in decoder.warm_up(spec.layers(decoder.config, n))]
    with CompileClock() as clock:
        for i, call in enumerate(calls):
            if progress:
                progress(WARM_UP, i, len(calls))
            call()
    if progress:
        progress(WARM_UP, len(calls), len(calls))
    return clock.seconds
