"""How a session is opened, and what it will take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from edgekv.checks import Count, check_fields, refused
from edgekv.engine.cpu import scratch_bytes
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts
from edgekv.errors import ConfigError, ContextError, unknown
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import resolve
from edgekv.kvcache.recurrent import recurrent_states
from edgekv.machine import format_bytes
from edgekv.models.config import ModelConfig
from edgekv.types import Path

OVERFLOWS = "stop", "slide"  # what happens when a conversation outgrows its context
LORA_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class LoadOptions(TypedDict, total=False):
    """The keyword options of `Session.load` and `Session.restore`, for type checkers; `Options` checks them.

    kv: the KV cache: "f16", "q8", "q4", "q3", "q2", "q1.5", a scheme with its knobs, ``name:knob=value,...``, or
        a CacheSpec. "auto", which None is too: the smallest of the former that passed the gate on this model, else
        q4; f16 where that saves little. With a ``kv_budget`` the most bits that hold it.
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
            raise unknown(ConfigError, "overflow", self.overflow, OVERFLOWS)
        if self.slots > 1 and self.draft not in ("none", "auto"):
            raise refused("draft", self.draft, "none or auto, with more than one slot")
        for name in self.loras:
            if not LORA_NAME.fullmatch(name):
                raise refused("loras", name, "names of 1 to 64 letters, digits, dots and dashes")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options by name. Raises ConfigError for a name that is none."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in names:
                text = f"{name}={value!r:.60} is no option; accepted: {', '.join(names)}"
                raise ConfigError(text, field=name, value=value, accepted=names)
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
            raise ContextError(
                f"ctx={ctx}: this model has {c.max_positions} positions; accepted: 1 to that",
                field="ctx",
                value=ctx,
                accepted=[f"1 to {c.max_positions}"],
            )
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
        caches = slots * self.cache_bytes
        held = self.weights_bytes - self.idle_bytes
        states = {"state": slots * self.state_bytes} if self.state_bytes else {}
        return {"weights": held, "kv cache": caches, **states, "scratch": self.scratch_bytes}
