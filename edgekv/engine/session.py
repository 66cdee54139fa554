"""A conversation with a model: load, generate, continue, save, restore, fork."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from edgekv.checks import Count, Natural, checked, checked_value, refusal
from edgekv.engine.decoder import Decoder
from edgekv.engine.drafts import open_drafts
from edgekv.engine.grammar import Constraint, JsonSchema
from edgekv.engine.loading import (
    LoadedModel,
    LoadOptions,
    Options,
    SessionPlan,
    load_model,
    open_caches,
    open_model,
    open_tokenizer,
    warm_up,
)
from edgekv.engine.prefix_store import PrefixStore
from edgekv.engine.report import FinishReason, RunReport, add_measurements
from edgekv.engine.runner import Runner, State
from edgekv.engine.sampling import Sampler, SamplingParams, Settings, open_sampler
from edgekv.engine.session_file import SavedState, save_state
from edgekv.errors import ConfigError, ContextError, SessionError
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import EXACT
from edgekv.machine import format_bytes, memory_errors
from edgekv.text import StreamDecoder, Tokenizer, possible_start
from edgekv.text.template import without_places
from edgekv.types import F32, LayerProgress, Path, TaskProgress
from edgekv.vision.images import ImageSource
from edgekv.vision.model import Embeddings, ImagesReport, Prompt, Vision, check_places, require_placeholder
from edgekv.weights.ops import NumpyOps

if TYPE_CHECKING:
    from typing_extensions import Unpack


SHARED_OPTIONS = ("device", "threads", "slots", "config", "tokenizer", "adapter", "lora", "loras", "prefix_cache")
"""The options that all sessions on the same loaded weights have in common."""
MORE = "raise ctx for more, or let overflow slide"
Stop = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Stops = Stop | Sequence[Stop]
Finish = tuple[FinishReason, str]  # why a text ended: for programs, and for people


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token.

    token: its id. text: what can be printed now; empty while a character or a stop string may go on.
    latency_s: seconds for this token, of the first one with the prompt; of tokens from one pass the first has all.
    finish_reason: None, or in the last step why the text ended: "stop" (an end-of-text token, a stop string, the
        end of a schema) or "length" (max_new_tokens, or a full context). finish_message: the same for people.
    """

    token: int
    text: str
    latency_s: float
    finish_reason: FinishReason | None = None
    finish_message: str | None = None


StepIterator = Generator[Step, None, None]


def _runner_property(name: str, doc: str) -> Any:
    """Returns a property that reads an attribute of a session's runner. It raises SessionError when closed."""
    read = operator.attrgetter(name)
    return property(lambda session: read(session._runner), doc=doc)


class Session:
    """One conversation with a model. A `fork` shares the weights with another session, and nothing else.

    A context manager: at its end, as with `close`, the caches are freed, and the session refuses to go on.
    model: the opened checkpoint. config: its shape. plan: scheme, context and bytes. tokenizer: None where the
    model has none. lora: the name of the LoRA beside the weights, or None. can_slide: whether the oldest tokens
    leave when the context is full. Methods that change the conversation raise SessionError while a text is being
    generated.
    """

    @classmethod
    def load(cls, path: Path, *, progress: TaskProgress | None = None, **options: Unpack[LoadOptions]) -> Session:
        """Loads a model for a new conversation: ``Session.load("demo", ctx=4096)``.

        path: a Hugging Face folder, a .safetensors or .gguf file, a store made by `edgekv quantize`, "demo" or
        "scenes", which ship with edgekv, or a model of the Hub: "org/name", "org/name@revision" or
        "org/name:file.gguf", downloaded once. options: see `LoadOptions`. progress(task, done, total) is called
        while weights are quantized and kernels compiled. Raises an EdgeKVError: a bad file or option, a context
        beyond the model, too little memory (computed before it is taken).
        """
        requested, path = Options.of(options), checked_value("model", path, Path)
        checked_value("progress", progress, TaskProgress | None)
        loaded = load_model(requested, open_model(path, requested), progress)
        return cls(loaded, loaded.plan, requested, compile_s=loaded.compile_s)

    @classmethod
    def restore(
        cls,
        path: Path,
        model: Path | Session,
        *,
        progress: TaskProgress | None = None,
        **options: Unpack[LoadOptions],
    ) -> Session:
        """Restores the conversation that `save` wrote; the same tokens follow as in the saved session.

        model: where the weights are, or a session whose loaded weights to share (its context must be as long).
        options: those of `load`. ``kv``, ``ctx`` and ``weights`` are the file's: leave them out, or give the same.
            With a session as the model, ``kv_budget``, ``overflow`` and ``draft`` apply, and the others are those
            of that session: leave them out, or give the same.

        Raises SessionError for a file that is damaged or foreign, or was written with another model, ``kv``,
        ``ctx`` or ``weights``; ConfigError for an option that contradicts the session which shares its weights;
        CacheError for a file of more than ``kv_budget`` bytes.
        """
        checked_value("progress", progress, TaskProgress | None)
        requested, saved = Options.of(options), SavedState(checked_value("session", path, Path))
        saved.require(requested.kv, requested.ctx, requested.weights)
        if isinstance(model, Session):
            saved.require(None, None, model.plan.weights)
            shared = {name: getattr(model._options, name) for name in SHARED_OPTIONS}
            for name in sorted(options.keys() & shared.keys()):
                if getattr(requested, name) not in (shared[name], getattr(model._loaded, name, shared[name])):
                    what = f"the session that shares its weights has {shared[name]!r}"
                    raise ConfigError(what, field=name, value=options.get(name), advice=f"leave {{{name}}} out")
            lora = saved.require_model(model.model)
            session = model._fork(saved.kv, saved.ctx, dataclasses.replace(requested, **shared), lora)
        else:
            opened = open_model(checked_value("model", model, Path), requested)
            lora = saved.require_model(opened)
            as_saved = dataclasses.replace(requested, kv=saved.kv, ctx=saved.ctx, weights=saved.weights)
            loaded = load_model(as_saved, opened, progress)
            session = cls(loaded, loaded.plan, requested, lora=lora, compile_s=loaded.compile_s)
        saved.open_state(session._state, session.config)
        return session

    def __init__(
        self,
        loaded: LoadedModel,
        plan: SessionPlan,
        options: Options,
        *,
        lora: str | None = None,
        compile_s: float = 0.0,
    ) -> None:
        """Makes an empty conversation on loaded weights; called by `load`, `restore` and `fork`."""
        self.model, self.plan, self.config = loaded.model, plan, loaded.model.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.lora = lora
        self._loaded, self._options, self._compile_s = loaded, options, compile_s
        drafts = open_drafts(options.draft, self.config, loaded.device, options.slots)
        self.can_slide, state = options.overflow == "slide", loaded.new_state(plan)
        self._open_runner: Runner | None = Runner(
            state, loaded.decoder(lora), loaded.scheduler, plan.ctx, self.model.placeholder, self.can_slide, drafts
        )
        self._report = self._new_report()
        self._prefixes = PrefixStore(self.model, options.prefix_cache) if options.prefix_cache else None
        self._start_lock = threading.Lock()
        self._steps: weakref.ref[StepIterator] | None = None  # its caller may exhaust, close or drop it

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        runner, status = self._open_runner, "closed"
        if runner is not None:
            status = f"{runner.n_held} of {runner.ctx} tokens, cache {format_bytes(self.nbytes)}"
        return f"<edgekv.Session {self.model.name}, kv {self.plan.kv.short}, {status}>"

    @property
    def _runner(self) -> Runner:
        if self._open_runner is None:
            raise SessionError(f"this session of {self.model.name} is closed: load another, or restore one")
        return self._open_runner

    @property
    def _state(self) -> State:
        return self._runner.state

    nbytes: int = _runner_property("state.nbytes", "The bytes of the caches' arrays.")
    caches: Sequence[LayerState] = _runner_property("state.caches", "The layers' caches or states, to be read.")
    tokens: list[int] = _runner_property("state.tokens", "Ids of prompts and texts; the caches may lack the last.")
    memo: dict[str, Any] = _runner_property("state.memo", "JSON that is saved with the session, for its owner.")
    last_sampler: Sampler | None = _runner_property("state.sampler", "The sampler of the last text.")
    n_dropped: int = _runner_property("state.n_dropped", "Tokens that left when the context was full.")
    n_held: int = _runner_property("n_held", "Tokens of the conversation, at most those of the context.")
    n_read: int = _runner_property("n_read", "Tokens that the latest prompt put into the caches.")

    @property
    def vision(self) -> Vision:
        """The model's vision encoder. Raises ImageError where there is none."""
        return self._loaded.vision

    def require_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises TokenizerError where it has none."""
        return self.tokenizer or open_tokenizer(self.model)

    def require_idle(self) -> None:
        """Raises SessionError while a text is being generated, and in a closed session."""
        self._idle_runner()

    def _idle_runner(self) -> Runner:
        if self._running_steps() is not None:
            raise SessionError("this session is generating a text: exhaust or close its iterator first")
        self._runner.require_free()
        return self._runner

    def _running_steps(self) -> StepIterator | None:
        steps = self._steps and self._steps()
        return steps if steps and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED else None

    def _new_report(self, images: ImagesReport | None = None, **settings: Any) -> RunReport:
        all_settings = self._loaded.settings(self.plan, self.lora) | settings
        return RunReport(all_settings, self.model.summary(), images=images, compile_s=self._compile_s)

    @checked()
    def encode(self, text: str) -> list[int]:
        """Encodes a prompt to token ids; the beginning-of-text token is added only to an empty conversation."""
        return self.require_tokenizer().encode(text, bos=not self.tokens)

    @checked()
    def encode_prompt(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """Encodes a prompt to token ids, with embeddings of images (files or Pillow's) for its `<image>`s.

        Without such tokens the images come first; in a text without images `<image>` is text. Raises ImageError
        for a file that is no image, more or fewer images than `<image>` tokens, and a model without vision.
        """
        return self._prompt(prompt, images, bos=not self.tokens)[0]

    def _prompt(
        self, prompt: str | Prompt, images: Sequence[ImageSource], bos: bool
    ) -> tuple[Prompt, ImagesReport | None]:
        """Encodes as `encode_prompt` does, and reports on the images. bos: whether it begins a conversation."""
        if isinstance(prompt, str):
            tokenizer = self.require_tokenizer()
            text = prompt if images else without_places(prompt, tokenizer)
            pieces: Prompt = tokenizer.encode(text, bos=bos)
        else:
            pieces = prompt
        token = self.model.image_token
        if images:
            require_placeholder(prompt, pieces, self.vision.image_token)
            first = self.tokenizer.bos_id if self.tokenizer and bos else None
            with self.exclusive():
                return self.vision.place_images(pieces, images, first)
        if token is not None:
            check_places(pieces, token, 0)
        return pieces, None

    def exclusive(self) -> AbstractContextManager[object]:
        """Returns a context in which no other conversation on these weights computes: for work with all cores.

        A conversation of another thread waits for its end where the weights were loaded with ``slots``; else it
        raises SessionError.
        """
        return self._runner.scheduler.exclusive()

    @checked()
    def prefill(
        self, prompt: str | Prompt, images: Sequence[ImageSource] = (), progress: LayerProgress | None = None
    ) -> F32:
        """Appends a prompt (see `encode_prompt`); returns the logits (vocab,) float32 after it."""
        runner = self._idle_runner()
        ids, spans = runner.fit_prompt(self.encode_prompt(prompt, images), runner.slides)
        return to_host(runner.append(ids, spans, progress=progress)[0])

    @checked()
    def generate(
        self,
        prompt: str | Prompt,
        *,
        images: Sequence[ImageSource] = (),
        max_new_tokens: Count = 128,
        sampling: SamplingParams | Sampler | None = None,
        stop: Stops = (),
        json_schema: Mapping[str, Any] | None = None,
        constraint: Constraint | None = None,
        progress: LayerProgress | None = None,
        **settings: Unpack[Settings],
    ) -> StepIterator:
        """Continues the conversation with a prompt (see `encode_prompt`); returns an iterator of tokens.

        The conversation changes with the iterator's first step.
        sampling: how tokens are chosen; a Sampler goes on with its series of random numbers: `last_sampler` and
            ``prompt=[]`` continue the last text. settings: fields of `SamplingParams` instead, as in
            ``temperature=0.0``, the others from the model's generation_config.json, or their defaults.
        stop: texts that end the answer and are not part of it. json_schema: the answer is JSON of this schema, by
            the llguidance library. constraint: another rule for which tokens may come.
        progress(layer, n_layers) is called during prefill.

        The last step's ``finish_reason`` says why the text ended. Raises ContextError for a prompt that does not
        fit, ConfigError for a schema that can't be followed and settings that exclude each other, SessionError
        while another iterator is neither exhausted nor closed.
        """
        runner = self._idle_runner()
        if json_schema is not None:
            if constraint is not None:
                what = "a JSON schema beside a constraint: give one of them, as a schema is a constraint"
                raise ConfigError(what, field="json_schema")
            constraint = JsonSchema(json_schema, self.require_tokenizer(), self.config.vocab_size)
        defaults = self.model.sampling if sampling is None else SamplingParams()
        sampler = open_sampler(self.config.vocab_size, sampling, settings, defaults)
        pieces, images_report = self._prompt(prompt, images, bos=not self.tokens)
        ids, spans = runner.fit_prompt(pieces, runner.slides)
        report = self._new_report(images_report, **sampler.settings(), max_new_tokens=max_new_tokens)
        report.prefill_tokens = len(ids)  # until they are read
        matcher = StopMatcher(stop)
        stream = StreamDecoder(self.tokenizer, at_start=False) if self.tokenizer else None
        eos = self.tokenizer.eos_ids if self.tokenizer else ()

        def generated() -> StepIterator:
            try:
                runner.state.sampler = sampler
                begin = time.perf_counter()
                logits: F32 = runner.append(ids, spans, progress=progress)[0]
                report.drafts, report.prefill_tokens = runner.begin_drafts(), runner.n_read
                report.prefill_s = time.perf_counter() - begin
                for n in range(1, max_new_tokens + 1):
                    same_pass = runner.is_ready
                    if n > 1:
                        begin = time.perf_counter()
                        logits = runner.next_logits()
                    token = choose_token(runner, sampler, logits, constraint, self.model.image_token)
                    complete = constraint is not None and constraint.accept(token)
                    latency = time.perf_counter() - begin
                    if n == 1:
                        report.time_to_first_token_s = latency
                    else:
                        report.add_latency(latency, same_pass)
                    text, stopped = matcher.push(stream.push(token) if stream and token not in eos else "")
                    finish = find_finish(runner, token in eos, stopped, complete, n == max_new_tokens)
                    if finish is None:
                        yield Step(token, text, latency)
                        continue
                    report.finish_reason, report.finish_message = finish
                    if stream and not stopped:  # what was held back in case a stop string, or a character, went on
                        rest, stopped = matcher.push(stream.flush())
                        text += rest if stopped else rest + matcher.flush()
                    yield Step(token, text, latency, *finish)
                    return
            finally:
                runner.end_text()

        steps = generated()
        with self._start_lock:
            self._idle_runner()  # another thread may have begun a text meanwhile
            self._steps, self._report = weakref.ref(steps), report
        return steps

    @checked()
    def logits(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> F32:
        """Appends a prompt of n tokens to the conversation; returns the logits (n, vocab) float32 after each."""
        runner = self._idle_runner()
        ids, spans = runner.fit_prompt(self.encode_prompt(prompt, images))
        return to_host(runner.append(ids, spans, n_logits=len(ids)))

    @checked()
    def embed(self, text: str | Sequence[int]) -> F32:
        """Returns a text as a vector (hidden_size,) float32 of length 1; the conversation is not touched.

        The vector is the mean of the tokens' last hidden states after the final norm; two of one model are
        compared by their inner product. Raises ContextError for a text longer than the context, TokenizerError
        for ids outside the vocabulary.
        """
        pieces = self._prompt(text, (), bos=True)[0]
        ids = [piece for piece in pieces if isinstance(piece, int)]
        runner, ctx = self._runner, self.plan.ctx
        runner.read_prompt(ids, may_be_empty=True)
        if not 1 <= len(ids) <= ctx:
            accepted = [f"1 to {ctx} tokens, the context"]
            raise ContextError(f"the text has {len(ids)} tokens", field="text", accepted=accepted)
        with self.exclusive():
            decoder, weights = runner.decoder, runner.decoder.weights
            caches = open_caches(decoder, CacheSpec.parse(EXACT), len(ids))
            hidden = to_host(decoder.prefill(decoder.embed(ids, 0), caches))
            states: F32 = np.asarray(weights.arch.final_norm(NumpyOps(weights), hidden), np.float32)
        mean = states.mean(axis=0)
        result: F32 = mean / np.linalg.norm(mean)
        return result

    def report(self) -> RunReport:
        """Returns counts, times and bytes of the last `generate`."""
        return add_measurements(self._report, self._state, self._runner.decoder, self.plan)

    @checked()
    def rewind(self, n_tokens: Natural) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        Tokens of these that the scheme can't keep are computed again with the next prompt: none after a rewind by
        a quarter of its exact window, else up to two windows (docs/lab/quality.md). Raises ContextError below 0
        and beyond the conversation.
        """
        state = self._idle_runner().state
        if n_tokens > len(state.tokens):
            raise refusal("n_tokens", n_tokens, f"0 to {len(state.tokens)}, the tokens there are")
        state.rewind(n_tokens)

    @checked()
    def align(self, prompt: str | Prompt) -> list[int | Embeddings]:
        """Rewinds to where the conversation and a whole prompt differ; returns the rest of it, for `generate`.

        With ``prefix_cache`` a conversation on disk that shares more of the prompt's beginning takes its place.
        The rest is at least the prompt's last piece, whose logits are needed. A text is encoded as the beginning
        of a conversation.
        """
        runner = self._idle_runner()
        pieces = self._prompt(prompt, (), bos=True)[0] if isinstance(prompt, str) else prompt
        runner.read_prompt(pieces)
        if self._prefixes is not None:
            before, new_state = runner.state, functools.partial(self._loaded.new_state, self.plan)
            n_held = min(before.common_prefix(pieces)[0], before.n_cached)
            if state := self._prefixes.take(pieces, n_held, self.plan, self.lora, new_state):
                state.memo, state.sampler, state.n_dropped = before.memo, before.sampler, before.n_dropped
                runner.state = state
        return runner.state.align(pieces)

    @checked()
    def replace(self, prompt: Prompt) -> None:
        """Replaces the conversation between two tokens of a text, which goes on after ``prompt``."""
        self._runner.replace(prompt)

    def keep_prefix(self, between: Callable[[bool], None] = lambda is_copied: None) -> None:
        """Writes what was read to the ``prefix_cache`` on disk, unless that has most of it; does nothing without.

        `close` does so as well. An error of the disk is ignored. between: is called with False often, where it may
        raise to stop, and with True once, when the conversation may go on.
        """
        if self._prefixes is not None:
            self._prefixes.keep(self._idle_runner().state, self.plan, self.lora, between)

    def shared_prefix(self, prompt: Prompt) -> int:
        """Returns how many tokens the conversation and a prompt have in common at their beginning."""
        return self._state.common_prefix(prompt)[0]

    def reset(self) -> None:
        """Forgets the conversation, with the history that a chat keeps of it; the model stays loaded."""
        self.use_lora(self.lora)

    def close(self) -> None:
        """Ends a text that is being generated, and frees the caches. A second call does nothing."""
        steps = self._running_steps()
        if steps is not None:
            steps.close()
        if self._open_runner is not None:
            with contextlib.suppress(SessionError):  # another thread computes
                self.keep_prefix()
            self._open_runner.state.caches = []
            self._open_runner = None

    @checked()
    def use_lora(self, name: str | None) -> None:
        """Forgets the conversation, and uses one of the loaded ``loras`` from now on; None: none.

        Raises ConfigError for an unknown name.
        """
        decoder = self._loaded.decoder(name)
        self._idle_runner().state.clear()
        self._use_decoder(decoder, name)

    def _use_decoder(self, decoder: Decoder, lora: str | None) -> None:
        self._runner.decoder, self.lora = decoder, lora
        self._report = self._new_report()

    @checked(path="session")
    def save(self, path: Path) -> int:
        """Writes conversation, compressed cache and sampler to a file, whole or not at all; returns its bytes.

        Raises CheckpointError when it can't be written.
        """
        return save_state(path, self._state, self.model, self.lora, self.plan)

    @checked(path="session")
    def load_state(self, path: Path) -> None:
        """Replaces the conversation by a saved one of the same model, scheme and context, and takes its LoRA.

        On an error the present one stays: SessionError for a file that does not fit, MemoryBudgetError where its
        caches don't fit beside the present ones.
        """
        saved, runner = SavedState(path), self._idle_runner()
        lora = saved.require_model(self.model)
        saved.require(self.plan.kv, self.plan.ctx, self.plan.weights)
        state = self._loaded.new_state(self.plan)
        saved.open_state(state, self.config)
        runner.state = state
        self._use_decoder(self._loaded.decoder(lora), lora)

    @checked()
    def fork(self, *, kv: str | CacheSpec | None = None, ctx: int | str | None = None) -> Session:
        """Makes another, empty conversation on the loaded weights, with at most this one's context.

        In one thread the two may take turns, token by token; for threads of their own load with as many ``slots``.
        Raises ContextError, CacheError, and MemoryBudgetError when its cache doesn't fit.
        """
        _, ctx = self._runner, Options.of({"ctx": ctx}).ctx or self.plan.ctx  # a closed session refuses
        return self._fork(self.plan.kv if kv is None else kv, ctx, self._options, self.lora)

    def _fork(self, kv: str | CacheSpec, ctx: int, options: Options, lora: str | None) -> Session:
        loaded = self._loaded
        plan = loaded.fork_plan(kv, ctx, options.kv_budget)
        session = Session(loaded, plan, options, lora=lora)
        session._prefixes = self._prefixes  # which knows the files already
        if plan.kv != self.plan.kv:
            session._compile_s = warm_up(loaded.decoder(lora), plan.kv, plan.ctx, None)
            session._report = session._new_report()
        return session

    @checked()
    def copy_from(self, other: Session) -> None:
        """Replaces the conversation by a copy of another session's, of the same model, LoRA, scheme and context.

        Its sampler is not copied. Raises SessionError where these differ, MemoryBudgetError where the copied
        caches don't fit beside the present ones.
        """
        state = self._idle_runner().state
        mine, theirs = ((s.model.path, s.lora, s.plan.kv, s.plan.ctx) for s in (self, other))
        if mine != theirs:
            raise SessionError(f"{other} can't be taken over by {self}: model, LoRA, kv and ctx must be the same")
        state.copy_from(other._state, self._loaded.new_state(self.plan).caches)


def choose_token(
    runner: Runner, sampler: Sampler, logits: F32, constraint: Constraint | None, image_token: int | None
) -> int:
    """Chooses the next token by logits (vocab,), and adds it to the conversation."""
    with memory_errors("choosing a token", runner.decoder.backend.free_bytes):
        masked = constraint.allowed(to_host(logits)) if constraint else None
        if image_token is not None:
            masked = (logits if masked is None else masked).copy()
            masked[image_token : image_token + 1] = -np.inf
        token = sampler.sample(logits, runner.state.tokens, masked)
    runner.add(token)
    return token


def find_finish(runner: Runner, is_eos: bool, stopped: bool, complete: bool, is_last: bool) -> Finish | None:
    """Returns why the text ends with its latest token; None where it goes on."""
    ends: dict[Finish, bool] = {
        ("stop", "end of text"): is_eos,
        ("stop", "stop string"): stopped,
        ("stop", "end of schema"): complete,
        ("length", "max_new_tokens"): is_last,
        ("length", f"context full ({runner.ctx} tokens); {MORE}"): runner.is_full,
    }
    return next((end for end, has_come in ends.items() if has_come), None)


class StopMatcher:
    """A filter of text that arrives in pieces: it ends at stop strings, and holds back what may begin one.

    The stop string completed first ends the text, wherever the pieces are cut; of two completed by the same
    character, the longer one.
    """

    def __init__(self, stops: Stops) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns text that can be printed, and whether a stop string was found.

        The stop string itself and all that follows it are never returned.
        """
        if self.stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]], True
        safe = len(text) - possible_start(text, self._stops)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """Returns the text that is held back, once no more will come."""
        text, self._held = self._held, ""
        return text
