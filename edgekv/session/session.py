"""A conversation with a model: load, generate, continue, save, restore, fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from edgekv.errors import SessionError
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes
from edgekv.session.context_shift import find_context_shift
from edgekv.session.conversation import Conversation
from edgekv.session.draft_model import open_drafts
from edgekv.session.embedding import embed
from edgekv.session.generation import Generation
from edgekv.session.grammar import Constraint, find_constraint
from edgekv.session.opening import fork, load_model, open_model, reopen
from edgekv.session.options import LoadOptions, changed
from edgekv.session.running import StepIterator
from edgekv.session.sampling import Sampler, open_sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.session.saving import SavedState, save_state
from edgekv.types import F32, LayerProgress, Path, StageProgress
from edgekv.vision import ImageSource
from edgekv.vision.prompt import Prompt


class Session(Conversation):
    """One conversation with a model. Shares nothing with other sessions but, as a `fork`, the weights.

    A context manager: at its end, or with `close`, the caches are freed, and the session refuses to go on.
    model: the opened checkpoint; config: its shape; plan: scheme, context and bytes; tokenizer: None where the
    model has none; prompt_encoder: with the vision encoder of a model that sees.
    """

    @classmethod
    def load(
        cls,
        path: Path,
        options: LoadOptions | None = None,
        *,
        progress: StageProgress | None = None,
        **changes: Any,
    ) -> Session:
        """Opens a model for a new conversation.

        path: a Hugging Face folder, a .safetensors or .gguf file, a store made by `edgekv quantize`, "demo" or
        "scenes", which ship with edgekv, or a model of the Hub: "org/name", "org/name@revision" or
        "org/name:file.gguf", downloaded once. options: see `LoadOptions`; its fields may be given by name instead:
        ``Session.load("demo", kv="onebit", ctx=4096)``. progress(stage, done, total) is called while weights are
        quantized. Raises an EdgeKVError: a bad file or option, a context beyond the model, too little memory
        (computed before it is taken).
        """
        options = changed(options, changes)
        shift = find_context_shift(options.overflow)
        loaded = load_model(options, open_model(path, options), progress=progress)
        return cls(loaded, shift, open_drafts(options, loaded, progress))

    @classmethod
    def restore(
        cls,
        path: Path,
        model: Path | Session,
        options: LoadOptions | None = None,
        *,
        progress: StageProgress | None = None,
        **changes: Any,
    ) -> Session:
        """The conversation that `save` wrote, with its scheme, context and sampler; its next tokens are those
        that the saved session would have had.

        model: where the weights are, with the options of `load`, or a session whose loaded weights to share (its
        context must be as long). Raises SessionError for a file that is damaged, foreign, or of another model,
        ``weights``, ``kv``, ``kv_budget`` or ``ctx``, where these are given.
        """
        options = changed(options, changes)
        saved, shift = SavedState(path), find_context_shift(options.overflow)
        saved.require_scheme(options.kv, options.ctx, options.kv_budget)
        source = model._loaded if isinstance(model, Session) else open_model(model, options)
        loaded = reopen(saved, source, options, progress=progress)
        session = cls(loaded, shift, open_drafts(options, loaded, progress))
        saved.fill(session.state, session.config)
        return session

    def save(self, path: Path, *, compress: bool = False) -> int:
        """Writes the conversation, its compressed cache and its sampler to a file; returns the file's bytes.

        Whatever happens meanwhile, the file is the new one, whole, or what it was before. ``compress``: smaller by
        Huffman codes, slower to write and to read. Raises CheckpointError when it can't be written.
        """
        return save_state(path, self.state, self.model, self.lora, self.plan, compress=compress)

    def load_state(self, path: Path) -> None:
        """Replaces the conversation by a saved one of the same model, scheme and context, with its LoRA.

        Raises SessionError, and keeps the present one, when the file does not fit.
        """
        self._running.require_none()
        saved = SavedState(path)
        lora = saved.require_plan(self.model, self.plan)
        state = self._new_state()
        saved.fill(state, self.config)
        self.runner.state = state
        self._set_lora(lora)

    def fork(self, *, kv: str | CacheSpec | None = None, ctx: int | None = None) -> Session:
        """Another, empty conversation on the weights that are loaded, for up to as many tokens.

        The two share scratch memory. In one thread they may take turns, token by token; for threads of their own
        load with as many ``slots``, else SessionError is raised where one computes while the other does. Raises
        ContextError, CacheError, and MemoryBudgetError when its cache doesn't fit.
        """
        runner = self.runner
        return Session(fork(self._loaded, kv, ctx), runner.context_shift, runner.drafts and runner.drafts.fork())

    def copy_from(self, other: Session) -> None:
        """Takes over the conversation of another session of the same model, LoRA, scheme and context; both go on.

        Not how its last text was sampled. Raises SessionError while this one generates, and for another plan.
        """
        self._running.require_none()
        mine, theirs = self.plan, other.plan
        same_model = (self.model.path, self.lora) == (other.model.path, other.lora)
        if not same_model or (mine.kv, mine.ctx) != (theirs.kv, theirs.ctx):
            raise SessionError(
                f"{other!r} can't be taken over by {self!r}: model, LoRA, kv and ctx must be the same"
            )
        self.state.copy_from(other.state, self._new_state().caches)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        about = f"{self.model.name}, kv {self.plan.kv.short}"
        if self._runner is None:
            return f"<edgekv.Session {about}, closed>"
        held = f"{len(self.tokens)} of {self.plan.ctx} tokens, cache {format_bytes(self.state.nbytes)}"
        return f"<edgekv.Session {about}, {held}>"

    def computing(self) -> AbstractContextManager[object]:
        """Within it no conversation of these weights computes: for other work with all cores.

        One of another thread waits for its end where they were loaded with ``slots``; else it raises SessionError.
        """
        return self.runner.schedule.alone()

    def prefill(
        self, prompt: str | Prompt, images: Sequence[ImageSource] = (), progress: LayerProgress | None = None
    ) -> F32:
        """(vocab,) float32: logits after a prompt, which is appended to the conversation. See `prompt`."""
        self._running.require_none()
        ids, spans = self.runner.fit_prompt(self.prompt(prompt, images))
        return to_host(self.runner.append(ids, spans, progress=progress)[0])

    def generate(
        self,
        prompt: str | Prompt,
        *,
        images: Sequence[ImageSource] = (),
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sampler | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        json_schema: Mapping[str, Any] | None = None,
        constraint: Constraint | None = None,
        progress: LayerProgress | None = None,
    ) -> StepIterator:
        """An iterator of tokens that continue the conversation with a prompt and ``images``: see `prompt`.

        sampling: how tokens are chosen; a Sampler goes on with its series of random numbers, as with ``prompt=[]``
            and `state.sampler` the last text does. temperature, seed: these two of `SamplingParams` instead, the
            others at their defaults; without either the most probable token is taken.
        stop: texts that end the answer and are not part of it. json_schema: the answer is JSON of this schema, by
            the llguidance library; constraint: rules tokens out in a way of your own instead.
        progress(layer, n_layers) is called during prefill.

        Ends at an end-of-text token, a stop string, the constraint's end, ``max_new_tokens``, or a full context;
        the last step's ``finish_reason`` says which. Raises ContextError when the prompt does not fit, ConfigError
        for a schema that can't be followed, ``json_schema`` beside ``constraint`` and ``sampling`` beside
        ``temperature`` or ``seed``, SessionError while another iterator is neither exhausted nor closed.
        """
        self._running.require_none()
        constraint = find_constraint(json_schema, constraint, self.require_tokenizer, self.config.vocab_size)
        sampler = open_sampler(self.config.vocab_size, sampling, temperature, seed)
        generation = Generation(self.runner, self.tokenizer, sampler, max_new_tokens, stop, constraint)
        pieces, images_report = self.prompt_encoder.prompt(prompt, images, bos=not self.tokens)
        ids, spans = self.runner.fit_prompt(pieces)
        self._new_report(images_report, **sampler.settings(), max_new_tokens=max_new_tokens)
        return self._running.begin(generation.steps(ids, spans, self._report, progress))

    def logits(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> F32:
        """(n, vocab) float32: logits after each token id or row of embeddings of a prompt, which is appended.

        See `prompt`.
        """
        self._running.require_none()
        ids, spans = self.runner.flatten_prompt(self.prompt(prompt, images))
        return to_host(self.runner.append(ids, spans, n_logits=len(ids)))

    def embed(self, text: str | Sequence[int]) -> F32:
        """(hidden_size,) float32 of length 1: the text as a vector, apart from the conversation.

        Vectors of one model can be compared by their inner product. Raises ContextError for a text longer than the
        context, TokenizerError for ids beyond the vocabulary.
        """
        ids = self.require_tokenizer().encode(text) if isinstance(text, str) else list(text)
        self.runner.require_known(ids)
        with self.computing():
            return embed(self.decoder, ids, self.plan.ctx)
