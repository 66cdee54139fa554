"""A conversation with a model: load, generate, continue, rewind, save, report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from edgekv.decoder.decoder import Decoder
from edgekv.errors import ContextError, EdgeKVError, SessionError
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.linear.store import Progress
from edgekv.machine import format_bytes
from edgekv.session.caches import open_caches
from edgekv.session.context_shift import ContextShift, find_context_shift
from edgekv.session.draft_model import open_drafts
from edgekv.session.drafts import Drafts
from edgekv.session.embedding import embed
from edgekv.session.generation import Generation
from edgekv.session.grammar import Constraint
from edgekv.session.opening import Opened, fork, open_model, open_session, open_tokenizer, reopen
from edgekv.session.options import LoadOptions, Path
from edgekv.session.prompt import Spans
from edgekv.session.reader import LayerProgress, Reader
from edgekv.session.report import RunReport, measured
from edgekv.session.running import Running, Steps
from edgekv.session.sampling import Sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.session.saving import SavedState, save_state
from edgekv.session.state import State
from edgekv.tokenizer import Tokenizer
from edgekv.types import F32
from edgekv.vision import ImageSource, Vision, check_places, require_placeholder
from edgekv.vision.prompt import Embeddings, ImagesReport, Prompt


class Session:
    """One conversation with a model. Shares nothing with other sessions but, as a `fork`, the weights.

    A context manager: at its end, or with `close`, the caches are freed, and the session refuses to go on.
    model: the opened checkpoint; config: its shape; plan: scheme, context and bytes; tokenizer: None where the
    model has none.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.model, self.plan, self.config = opened.model, opened.plan, opened.model.config
        self.tokenizer: Tokenizer | None = opened.tokenizer
        self._running = Running()
        state = State(self._new_caches(), self.config.turns_anew)
        self._reader: Reader | None = Reader(state, opened.decoder, self.plan.ctx, self.model.placeholder)
        self._new_report()

    @classmethod
    def load(
        cls,
        path: Path,
        options: LoadOptions | None = None,
        *,
        progress: Progress | None = None,
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
        options = dataclasses.replace(options or LoadOptions(), **changes)
        shift = find_context_shift(options.overflow)
        session = cls(open_session(options, open_model(path, options), progress=progress))
        session.context_shift = shift
        session.drafts = open_drafts(options, session._opened, progress)
        return session

    @classmethod
    def restore(
        cls,
        path: Path,
        model: Path | Session,
        options: LoadOptions | None = None,
        *,
        progress: Progress | None = None,
        **changes: Any,
    ) -> Session:
        """The conversation that `save` wrote, with its scheme, context and sampler; its next tokens are those
        that the saved session would have had.

        model: where the weights are, with the options of `load`, or a session whose loaded weights to share (its
        context must be as long). Raises SessionError for a file that is damaged, foreign, or of another model,
        ``weights``, ``kv``, ``kv_budget`` or ``ctx``, where these are given.
        """
        options = dataclasses.replace(options or LoadOptions(), **changes)
        saved, shift = SavedState(path), find_context_shift(options.overflow)
        saved.require_scheme(options.kv, options.ctx, options.kv_budget)
        if isinstance(model, Session):
            saved.require_model(model.model)
            saved.require_weights(model.plan.weights)
            session = model.fork(kv=saved.kv, ctx=saved.ctx)
        else:
            session = cls(reopen(saved, open_model(model, options), options, progress=progress))
        session.context_shift = shift
        session.drafts = open_drafts(options, session._opened, progress)
        session._take(saved)
        return session

    def save(self, path: Path, *, compress: bool = False) -> int:
        """Writes the conversation, its compressed cache and its sampler to a file; returns the file's bytes.

        Whatever happens meanwhile, the file is the new one, whole, or what it was before. ``compress``: smaller by
        Huffman codes, slower to write and to read. Raises CheckpointError when it can't be written.
        """
        return save_state(path, self.state, self.model, self.plan, compress=compress)

    def load_state(self, path: Path) -> None:
        """Replaces the conversation by a saved one of the same model, scheme and context.

        Raises SessionError, and keeps the present one, when the file does not fit.
        """
        self._running.require_none()
        saved = SavedState(path)
        saved.require_model(self.model)
        saved.require_weights(self.plan.weights)
        saved.require_scheme(self.plan.kv, self.plan.ctx)
        self.state.caches = self._new_caches()
        self._take(saved)

    def _take(self, saved: SavedState) -> None:
        try:
            saved.fill(self.state, self.config.vocab_size, self.config.hidden_size)
        except EdgeKVError:
            self.state.caches = self._new_caches()  # the present conversation is then computed again
            raise
        self._new_report()

    def fork(self, *, kv: str | CacheSpec | None = None, ctx: int | None = None) -> Session:
        """Another, empty conversation on the weights that are loaded, for up to as many tokens.

        The two share scratch memory: let one generate a token at a time. Raises ContextError, CacheError, and
        MemoryBudgetError when its cache doesn't fit.
        """
        shift, drafts = self.context_shift, self.drafts
        session = Session(fork(self._opened, kv, ctx))
        session.context_shift = shift
        session.drafts = drafts and drafts.fork()
        return session

    def copy_from(self, other: Session) -> None:
        """Takes over the conversation of another session of the same model, scheme and context; both go on.

        Not how its last text was sampled. Raises SessionError while this one generates, and for another plan.
        """
        self._running.require_none()
        mine, theirs = self.plan, other.plan
        if self.model.path != other.model.path or (mine.kv, mine.ctx) != (theirs.kv, theirs.ctx):
            raise SessionError(f"{other!r} can't be taken over by {self!r}: model, kv and ctx must be the same")
        self.state.caches = self._new_caches()
        self.state.copy_from(other.state)

    def close(self) -> None:
        """Frees the caches; a text that is being generated ends. What has been closed may be closed again."""
        if self._reader is None:
            return
        self._running.close()
        self._reader.state.caches = []
        self._reader = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        about = f"{self.model.name}, kv {self.plan.kv.short}"
        if self._reader is None:
            return f"<edgekv.Session {about}, closed>"
        size = format_bytes(sum(cache.nbytes for cache in self.caches))
        return f"<edgekv.Session {about}, {len(self.tokens)} of {self.plan.ctx} tokens, cache {size}>"

    @property
    def reader(self) -> Reader:
        """What reads tokens into the state. Raises SessionError when the session is closed."""
        if self._reader is None:
            raise SessionError(f"this session of {self.model.name} is closed: load another, or restore one")
        return self._reader

    @property
    def state(self) -> State:
        """Tokens, caches, and all else that the next tokens depend on. Raises SessionError when it is closed."""
        return self.reader.state

    @property
    def decoder(self) -> Decoder:
        """The model's computation, which forks share."""
        return self.reader.decoder

    @property
    def tokens(self) -> list[int]:
        """Ids of prompt and output; the last may not be in the caches yet."""
        return self.state.tokens

    @property
    def caches(self) -> list[KVCache]:
        """One per layer."""
        return self.state.caches

    @property
    def spans(self) -> Spans:
        """Positions that hold embeddings; their tokens are placeholders."""
        return self.state.spans

    @property
    def sampler(self) -> Sampler | None:
        """That of the last text."""
        return self.state.sampler

    @property
    def memo(self) -> dict[str, Any]:
        """Whatever its owner wants to be saved with the session, as JSON."""
        return self.state.memo

    @property
    def n_past(self) -> int:
        """Tokens in the caches."""
        return self.state.n_past

    @property
    def n_dropped(self) -> int:
        """Tokens that left the conversation when it outgrew the context."""
        return self.state.n_dropped

    @property
    def context_shift(self) -> ContextShift:
        """What happens when the conversation outgrows the context."""
        return self.reader.context_shift

    @context_shift.setter
    def context_shift(self, shift: ContextShift) -> None:
        self.reader.context_shift = shift

    @property
    def drafts(self) -> Drafts | None:
        """What guesses the next tokens, so that one pass checks several."""
        return self.reader.drafts

    @drafts.setter
    def drafts(self, drafts: Drafts | None) -> None:
        self.reader.drafts = drafts

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the beginning-of-text token is added only to an empty conversation."""
        return self.require_tokenizer().encode(text, bos=not self.tokens)

    @functools.cached_property
    def vision(self) -> Vision:
        """The model's vision encoder, loaded at its first use. Raises ImageError where there is none."""
        return Vision(self.model, self.decoder.threads)

    def prompt(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """Token ids and, in place of its `<image>` tokens, the embeddings of images: files or Pillow images.

        Without such tokens the images come first. Raises ImageError: a file that is no image, more or fewer images
        than `<image>` tokens, a model that takes none.
        """
        return self._with_images(prompt, images)[0]

    def _with_images(
        self, prompt: str | Prompt, images: Sequence[ImageSource]
    ) -> tuple[Prompt, ImagesReport | None]:
        """As `prompt`, and what is to be reported of the images."""
        pieces, report = self.encode(prompt) if isinstance(prompt, str) else prompt, None
        if images:
            vision, tokenizer = self.vision, self.tokenizer
            require_placeholder(prompt, pieces, vision.image_token)
            bos = tokenizer.bos_id if tokenizer and not self.tokens else None
            pieces, report = vision.placed(pieces, images, bos)
        elif self.model.image_token is not None:
            check_places(pieces, self.model.image_token, 0)
        return pieces, report

    def prefill(
        self, prompt: str | Prompt, images: Sequence[ImageSource] = (), progress: LayerProgress | None = None
    ) -> F32:
        """(vocab,) float32: logits after a prompt, which is appended to the conversation. See `prompt`."""
        self._running.require_none()
        ids, spans = self.reader.fitted(self.prompt(prompt, images))
        return to_host(self.reader.append(ids, spans, progress=progress)[0])

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
    ) -> Steps:
        """An iterator of tokens that continue the conversation with a prompt and ``images``: see `prompt`.

        ``sampling`` overrides ``temperature`` and ``seed``; a Sampler goes on with its series of random numbers,
        as with ``prompt=[]`` and `sampler` the last text does. ``constraint`` rules tokens out.
        Ends at an end-of-text token, a stop string, the constraint's end, ``max_new_tokens``, or a full context;
        the last step's ``finish_reason`` says which. progress(layer, n_layers) is called during prefill. Raises
        ContextError when the prompt does not fit, and SessionError while another iterator is neither exhausted nor
        closed.
        """
        self._running.require_none()
        if max_new_tokens < 1:
            raise ContextError(
                f"max_new_tokens={max_new_tokens}: give 1 or more; `prefill` reads a prompt without an answer",
                field="max_new_tokens",
                value=max_new_tokens,
                accepted=["1 or more"],
            )
        params = sampling or SamplingParams(temperature=temperature, seed=seed)
        sampler = params if isinstance(params, Sampler) else Sampler(params, self.config.vocab_size)
        pieces, images_report = self._with_images(prompt, images)
        ids, spans = self.reader.fitted(pieces)
        self.state.sampler = sampler
        self._new_report()
        self._report.images = images_report
        chosen = dataclasses.asdict(sampler.params) | {"seed": sampler.seed}
        self._report.settings.update(chosen, max_new_tokens=max_new_tokens)
        generation = Generation(
            self.reader, self.tokenizer, self._report, sampler, max_new_tokens, stop, constraint
        )
        return self._running.begin(generation.steps(ids, spans, progress))

    def continued(self, params: SamplingParams) -> SamplingParams | Sampler:
        """The last text's sampler if it has these settings: its random numbers go on; else the settings."""
        last = self.sampler
        return last if last is not None and last.params == params else params

    def logits(self, prompt: Prompt) -> F32:
        """(n, vocab) float32: logits after each token id or row of embeddings, all of which are appended."""
        self._running.require_none()
        ids, spans = self.reader.flat(prompt)
        return to_host(self.reader.append(ids, spans, n_logits=len(ids)))

    def embed(self, text: str | Sequence[int]) -> F32:
        """(hidden_size,) float32 of length 1: the text as a vector, apart from the conversation.

        Vectors of one model can be compared by their inner product. Raises ContextError for a text longer than the
        context, TokenizerError for ids beyond the vocabulary.
        """
        ids = self.require_tokenizer().encode(text) if isinstance(text, str) else list(text)
        self.reader.require_known(ids)
        if not 1 <= len(ids) <= self.plan.ctx:
            raise ContextError(
                f"the text has {len(ids)} tokens; accepted: 1 to ctx={self.plan.ctx}",
                field="text",
                value=len(ids),
                accepted=[f"1 to {self.plan.ctx} tokens"],
            )
        return embed(self.decoder, ids)

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt: nothing after a rewind by a
        quarter of its exact window, else up to two windows (docs/quality.md). Raises SessionError while a text is
        being generated, ContextError for a number below 0.
        """
        self._running.require_none()
        if n_tokens < 0:
            raise ContextError(
                f"n_tokens={n_tokens}: that many tokens can't stay; give 0 or more, the number to keep",
                field="n_tokens",
                value=n_tokens,
                accepted=["0 or more"],
            )
        self.state.rewind(n_tokens)

    def align(self, prompt: Prompt) -> list[int | Embeddings]:
        """Rewinds to where the conversation and a prompt part; returns what `generate` must add to it.

        That is at least its last piece, whose logits are needed. Raises SessionError while a text is being
        generated.
        """
        self._running.require_none()
        return self.state.align(prompt)

    def reset(self) -> None:
        """Forgets the conversation; the model stays loaded."""
        self.rewind(0)
        self.state.n_dropped = 0
        self._new_report()

    def report(self) -> RunReport:
        """Counts, times and bytes of the last `generate`."""
        return measured(self._report, self.state, self.decoder, self.plan.notes)

    def _new_caches(self) -> list[KVCache]:
        opened = self._opened
        return open_caches(opened.decoder, opened.plan.kv, opened.plan.ctx, opened.model.adapter)

    def _new_report(self) -> None:
        self._report = RunReport(self._opened.settings(), self.model.summary(), compile_s=self._opened.compile_s)

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        return self.tokenizer or open_tokenizer(self.model)
