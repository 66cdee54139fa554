"""What is measured: a model, a text as its tokens, and the decoder that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.spec import suited
from edgekv.machine import all_cores, machine_info
from edgekv.quality.evaluate import REFERENCE
from edgekv.session.devices import find_device
from edgekv.session.head_bits import give_heads_bits
from edgekv.session.opening import open_model, open_tokenizer
from edgekv.session.options import LoadOptions
from edgekv.session.plan import SessionPlan, default_ctx
from edgekv.types import Path, TaskProgress


class EvalInput:
    """The model at ``path`` and a text; `load` then reads the weights.

    options: all but kv and ctx apply. text_name: what the text is called in `facts`. Raises an EdgeKVError for a
    bad file.
    """

    def __init__(self, path: Path, options: LoadOptions, text: str, text_name: str) -> None:
        self.options, self.text_name = options, text_name
        self.model = open_model(path, options)
        self.tokenizer = open_tokenizer(self.model)
        self.tokens = self.tokenizer.encode(text)
        self.threads = all_cores(options.threads)

    def schemes(self, specs: Sequence[CacheSpec], named: bool) -> tuple[list[CacheSpec], list[str]]:
        """Those that device and model can have; and a line on each of the others, where nobody ``named`` them.

        Raises an EdgeKVError where the device is missing, or one that is named can't be had.
        """
        device, config = find_device(self.options.device), self.model.config
        device.require(CacheSpec.parse(REFERENCE))
        for spec in specs if named else ():
            device.require(spec)
        return suited([spec for spec in specs if device.available(spec)], config, default_ctx(config), named)

    def load(self, ctx: int | None, progress: TaskProgress | None) -> tuple[Decoder, int]:
        """The decoder, and its window: ``ctx`` tokens or the default of a session."""
        plan = SessionPlan.make(self.model, kv=DEFAULT, ctx=ctx, weights=self.options.weights)
        form = self.model.weight_format(plan.weights)
        decoder = find_device(self.options.device).decoder(self.model, form, plan.ctx, self.threads, progress)
        return decoder, plan.ctx

    def fitted(
        self, specs: Sequence[CacheSpec], decoder: Decoder, progress: TaskProgress | None = None
    ) -> list[CacheSpec]:
        """The schemes with what is found for them on this model."""
        weights = self.model.weight_format(self.options.weights).name
        return [give_heads_bits(spec, self.model, weights, decoder, self.tokenizer, progress) for spec in specs]

    def facts(self, ctx: int, windows: int, fit_tokens: int) -> dict[str, Any]:
        """Settings and machine of a measurement over at most ``windows`` windows of ``ctx`` tokens, for JSON."""
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
            "fit_tokens": fit_tokens,
            "threads": self.threads,
        }
        return {"settings": settings, "machine": machine_info()}
