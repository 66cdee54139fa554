"""A conversation with a model: load, generate, continue, rewind, report."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import ContextError, SessionError, TokenizerError
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.linear.store import Progress
from edgekv.machine import peak_rss_bytes, require_memory
from edgekv.models.decoder import Decoder
from edgekv.session.context_shift import find_overflow
from edgekv.session.embedding import embed
from edgekv.session.generation import Generation, Step
from edgekv.session.grammar import Constraint
from edgekv.session.model import Model, Path, find_device, resolve_device
from edgekv.session.plan import Plan
from edgekv.session.prompt import Prompt
from edgekv.session.report import ImagesReport, RunReport
from edgekv.session.sampling import Sampler, SamplingParams
from edgekv.session.saving import Saved, save
from edgekv.session.state import Conversation, LayerProgress
from edgekv.tokenizer import Tokenizer, load_tokenizer
from edgekv.vision import ImageSource, Vision, check_places, require_placeholder

F32 = npt.NDArray[np.float32]
WARM_UP = "compiling kernels (once per machine)"
WARM_UP_TOKENS = 700  # beyond the windows and budgets that the schemes have by default


class Session(Conversation):
    """One conversation with a model. Shares nothing with other sessions but, as `sibling`, the weights."""

    def __init__(
        self, model: Model, plan: Plan, decoder: Decoder, tokenizer: Tokenizer | None, settings: Any
    ) -> None:
        super().__init__(model, plan, decoder)
        self.tokenizer, self._settings = tokenizer, settings
        self.sampler: Sampler | None = None  # of the last text
        self._images: ImagesReport | None = None  # of the coming prompt
        self._new_report()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        kv: str | CacheSpec | None = None,
        ctx: int | None = None,
        weights: str = "auto",
        kv_budget: int | None = None,
        overflow: str = "stop",
        device: str = "cpu",
        threads: int | None = None,
        config: Path | None = None,
        tokenizer: Path | None = None,
        adapter: Path | None = None,
        progress: Progress | None = None,
    ) -> Session:
        """Opens a model for ``ctx`` tokens (default: 8192 or the model's positions).

        path: a Hugging Face folder, a .safetensors or .gguf file, or a store made by `edgekv quantize`. kv: a
        scheme of CACHES with its knobs, ``name:knob=value``, or auto within ``kv_budget`` bytes (default: dense;
        with a ``kv_budget``, ever fewer bits for the oldest tokens, so that it holds). weights: f32, int8, int4 or
        auto. overflow: stop or slide, when the conversation outgrows ctx. adapter: an
        adapter.safetensors trained for this checkpoint and this scheme. progress(stage, done, total) is called
        while weights are quantised. Raises an EdgeKVError: a bad file, a context beyond the model, too little
        memory (computed before it is taken).
        """
        way = find_overflow(overflow)
        model = Model.open(path, config=config, tokenizer=tokenizer, adapter=adapter)
        plan = Plan.make(model, kv=kv, ctx=ctx, weights=weights, kv_budget=kv_budget)
        session = cls._open(model, plan, device, threads, progress)
        session.overflow = way
        return session

    @classmethod
    def _open(
        cls, model: Model, plan: Plan, device: str, threads: int | None, progress: Progress | None
    ) -> Session:
        if model.adapter:
            model.adapter.require_scheme(plan.kv.scheme.name)
        device = resolve_device(device, plan.kv)
        place = find_device(device)
        place.require(plan.kv)
        require_memory(plan.parts(), place.free_bytes())
        vocabulary = None
        if model.tokenizer_path is not None:
            vocabulary = load_tokenizer(model.tokenizer_path, config=model.text_config)
        threads = threads or len(os.sched_getaffinity(0))
        decoder = place.decoder(model, model.weight_format(plan.weights), plan.ctx, threads, progress)
        if progress:
            progress(WARM_UP, 0, 1)
        for spec in (plan.kv, *map(CacheSpec.parse, plan.kv.scheme.packs_like)):
            decoder.warm_up(spec.layers(model.config, min(WARM_UP_TOKENS, plan.ctx)))
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

    @classmethod
    def restore(
        cls,
        path: Path,
        model: Path | Session,
        *,
        kv: str | CacheSpec | None = None,
        ctx: int | None = None,
        weights: str = "auto",
        overflow: str = "stop",
        device: str = "cpu",
        threads: int | None = None,
        config: Path | None = None,
        tokenizer: Path | None = None,
        adapter: Path | None = None,
        progress: Progress | None = None,
    ) -> Session:
        """The conversation that `save` wrote, with its scheme, context and sampler; its next tokens are those
        that the saved session would have had.

        model: where the weights are, with the options of `load`, or a session whose loaded weights to share (its
        context must be as long). Raises SessionError for a file that is damaged, foreign, or of another model,
        ``weights``, ``kv`` or ``ctx``, where these are given.
        """
        saved, way = Saved(path), find_overflow(overflow)
        saved.require_scheme(CacheSpec.parse(kv) if isinstance(kv, str) else kv, ctx)
        if isinstance(model, Session):
            saved.require_model(model.model)
            saved.require_weights(model.plan.weights)
            session = model.sibling(kv=saved.kv, ctx=saved.ctx)
        else:
            opened = Model.open(model, config=config, tokenizer=tokenizer, adapter=adapter)
            saved.require_model(opened)
            saved.require_weights(saved.weights if weights == "auto" else weights)
            plan = Plan.make(opened, kv=saved.kv, ctx=saved.ctx, weights=saved.weights)
            session = cls._open(opened, plan, device, threads, progress)
        session.overflow = way
        session._take(saved)
        return session

    def save(self, path: Path, *, compress: bool = False) -> int:
        """Writes the conversation, its compressed cache and its sampler to a file; returns the file's bytes.

        Whatever happens meanwhile, the file is the new one, whole, or what it was before. ``compress``: smaller by
        Huffman codes, slower to write and to read. Raises CheckpointError when it can't be written.
        """
        return save(self, path, compress)

    def load_saved(self, path: Path) -> None:
        """Replaces the conversation by a saved one of the same model, scheme and context.

        Raises SessionError, and keeps the present one, when the file does not fit.
        """
        saved = Saved(path)
        saved.require_model(self.model)
        saved.require_weights(self.plan.weights)
        saved.require_scheme(self.plan.kv, self.plan.ctx)
        self._new_caches()
        self._take(saved)

    def _take(self, saved: Saved) -> None:
        sampler = saved.sampler(self.config.vocab_size)
        try:
            spans = saved.fill(self.caches, self.config.hidden_size)
        except SessionError:
            self._new_caches()  # the present conversation is then computed again
            raise
        self.tokens, self.spans, self.n_dropped = list(saved.tokens), spans, saved.n_dropped
        self.memo, self.sampler = saved.memo, sampler
        self._new_report()

    def sibling(self, *, kv: str | CacheSpec | None = None, ctx: int | None = None) -> Session:
        """Another, empty conversation on the weights that are loaded, for up to as many tokens.

        The two share scratch memory: let one generate a token at a time. Raises ContextError, CacheError, and
        MemoryBudgetError when its cache doesn't fit.
        """
        ctx = ctx or self.plan.ctx
        if ctx > self.plan.ctx:
            raise ContextError(
                f"--ctx {ctx}: the session that it shares weights with has {self.plan.ctx}; load it with that many"
            )
        plan = Plan.make(self.model, kv=kv or self.plan.kv, ctx=ctx, weights=self.plan.weights)
        place = find_device(self._settings["device"])
        place.require(plan.kv)
        require_memory({"kv cache": plan.cache_bytes}, place.free_bytes())
        settings = self._settings | {"kv": str(plan.kv), "ctx": ctx}
        session = Session(self.model, plan, self._decoder, self.tokenizer, settings)
        session.overflow = self.overflow
        return session

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the beginning-of-text token is added only to an empty conversation."""
        return self.require_tokenizer().encode(text, bos=not self.tokens)

    @functools.cached_property
    def vision(self) -> Vision:
        """The model's vision encoder, loaded at its first use. Raises ImageError where there is none."""
        return Vision(self.model, self._decoder.threads)

    def prompt(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """Token ids and, in place of its `<image>` tokens, the embeddings of images: files or Pillow images.

        Without such tokens the images come first. Raises ImageError: a file that is no image, more or fewer images
        than `<image>` tokens, a model that takes none.
        """
        pieces = self.encode(prompt) if isinstance(prompt, str) else prompt
        if images:
            vision, tokenizer = self.vision, self.tokenizer
            require_placeholder(prompt, pieces, vision.image_token)
            bos = tokenizer.bos_id if tokenizer and not self.tokens else None
            pieces, self._images = vision.placed(pieces, images, bos)
        elif self.model.image_token is not None:
            check_places(pieces, self.model.image_token, 0)
        return pieces

    def prefill(
        self, prompt: str | Prompt, images: Sequence[ImageSource] = (), progress: LayerProgress | None = None
    ) -> F32:
        """(vocab,) float32: logits after a prompt, which is appended to the conversation. See `prompt`."""
        ids, spans = self._checked(self.prompt(prompt, images))
        return to_host(self.append(ids, spans, progress=progress)[0])

    def generate(
        self,
        prompt: str | Prompt,
        *,
        images: Sequence[ImageSource] = (),
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sampler | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        progress: LayerProgress | None = None,
    ) -> Iterator[Step]:
        """An iterator of tokens that continue the conversation with a prompt and ``images``: see `prompt`.

        ``sampling`` overrides ``temperature`` and ``seed``; a Sampler goes on with its series of random numbers,
        as with ``prompt=[]`` and `sampler` the last text does. ``constraint`` rules tokens out.
        Ends at an end-of-text token, a stop string, the constraint's end, ``max_new_tokens``, or a full context;
        `report().stop_reason` says which. progress(layer, n_layers) is called during prefill. Raises ContextError
        when the prompt does not fit.
        """
        params = sampling or SamplingParams(temperature=temperature, seed=seed)
        sampler = params if isinstance(params, Sampler) else Sampler(params, self.config.vocab_size)
        ids, spans = self._checked(self.prompt(prompt, images))
        self.sampler = sampler
        self._new_report()
        self._report.images, self._images = self._images, None
        chosen = dataclasses.asdict(sampler.params) | {"seed": sampler.seed}
        self._report.settings.update(chosen, max_new_tokens=max_new_tokens)
        generation = Generation(self, self._report, sampler, max_new_tokens, stop, constraint)
        return generation.steps(ids, spans, progress)

    def logits(self, prompt: Prompt) -> F32:
        """(n, vocab) float32: logits after each token id or row of embeddings, all of which are appended."""
        ids, spans = self._flat(prompt)
        self._check_prompt(ids)
        return to_host(self.append(ids, spans, n_logits=len(ids)))

    def embed(self, text: str | Sequence[int]) -> F32:
        """(hidden_size,) float32 of length 1: the text as a vector, apart from the conversation.

        Vectors of one model can be compared by their inner product. Raises ContextError for a text longer than the
        context.
        """
        ids = self.require_tokenizer().encode(text) if isinstance(text, str) else list(text)
        if not 1 <= len(ids) <= self.plan.ctx:
            raise ContextError(f"the text has {len(ids)} tokens; accepted: 1 to --ctx {self.plan.ctx}")
        return embed(self._decoder, ids)

    def reset(self) -> None:
        """Forgets the conversation; the model stays loaded."""
        self.rewind(0)
        self.n_dropped = 0
        self._new_report()

    def report(self) -> RunReport:
        """Counts, times and bytes of the last `generate`."""
        report, caches = self._report, self.caches
        report.cache_bytes = sum(cache.nbytes for cache in caches)
        visual = [cache.visual_bytes for cache in caches if cache.visual_bytes is not None]
        report.visual_cache_bytes = sum(visual) if visual else None
        report.weights_bytes = self._decoder.dense.weights_bytes
        report.bytes_read_per_token = self._decoder.weights.token_bytes + sum(c.bytes_read() for c in caches)
        report.peak_rss_bytes = peak_rss_bytes()
        seen = report.images.notes if report.images else ()
        dropped = [f"overflow: {self.n_dropped} tokens between the first and the latest were dropped"]
        report.notes = [*self.plan.notes, *seen, *(dropped if self.n_dropped else ()), *caches[0].notes()]
        return report

    def _new_report(self) -> None:
        self._report = RunReport(dict(self._settings), self.model.summary())

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.model.path} has no tokenizer: copy tokenizer.json, tokenizer.model, or vocab.json and "
                f"merges.txt beside the weights, or pass --tokenizer PATH"
            )
        return self.tokenizer
