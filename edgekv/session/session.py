"""A conversation with a model: load, generate, continue, save, restore, fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from edgekv.checks import Count, Natural, checked
from edgekv.decoder.decoder import Decoder
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.session.context_shift import find_context_shift
from edgekv.session.draft_model import open_drafts
from edgekv.session.embedding import embed
from edgekv.session.generation import Generation, StepIterator
from edgekv.session.grammar import Constraint, find_constraint
from edgekv.session.held import Held
from edgekv.session.model_runner import ModelRunner
from edgekv.session.opening import load_model, open_model, reopen
from edgekv.session.options import LoadOptions, changed
from edgekv.session.prompt_encoder import PromptEncoder
from edgekv.session.report import RunReport, measured
from edgekv.session.sampling import Sampler, Stops, open_sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.session.saving import SavedState, save_state
from edgekv.session.state import State
from edgekv.tokenizer import Tokenizer
from edgekv.types import F32, LayerProgress, Path, TaskProgress
from edgekv.vision import ImageSource
from edgekv.vision.prompt import Embeddings, Prompt


class Session:
    """One conversation with a model. Shares nothing with other sessions but, as a `fork`, the weights.

    A context manager: at its end, or with `close`, the caches are freed, and the session refuses to go on.
    model: the opened checkpoint; config: its shape; plan: scheme, context and bytes; tokenizer: None where the
    model has none; prompt_encoder: with the vision encoder of a model that sees.
    What changes the conversation raises SessionError while a text is being generated.
    """

    @classmethod
    @checked(path="model")
    def load(
        cls,
        path: Path,
        options: LoadOptions | None = None,
        *,
        progress: TaskProgress | None = None,
        **changes: Any,
    ) -> Session:
        """Opens a model for a new conversation.

        path: a Hugging Face folder, a .safetensors or .gguf file, a store made by `edgekv quantize`, "demo" or
        "scenes", which ship with edgekv, or a model of the Hub: "org/name", "org/name@revision" or
        "org/name:file.gguf", downloaded once. options: see `LoadOptions`; its fields may be given by name instead:
        ``Session.load("demo", kv="onebit", ctx=4096)``. progress(task, done, total) is called while weights are
        quantized and kernels compiled. Raises an EdgeKVError: a bad file or option, a context beyond the model,
        too little memory (computed before it is taken).
        """
        options = changed(options, changes)
        shift = find_context_shift(options.overflow)
        loaded = load_model(options, open_model(path, options), progress=progress)
        return cls(Held(loaded, shift, open_drafts(options, loaded, progress)))

    @classmethod
    @checked(path="session")
    def restore(
        cls,
        path: Path,
        model: Path | Session,
        options: LoadOptions | None = None,
        *,
        progress: TaskProgress | None = None,
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
        source = model._held.loaded if isinstance(model, Session) else open_model(model, options)
        loaded = reopen(saved, source, options, progress=progress)
        session = cls(Held(loaded, shift, open_drafts(options, loaded, progress)))
        saved.fill(session.state, session.config)
        return session

    def __init__(self, held: Held) -> None:
        self._held, loaded = held, held.loaded
        self.model, self.plan, self.config = loaded.model, loaded.plan, loaded.model.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.prompt_encoder = PromptEncoder(loaded.model, loaded.tokenizer, loaded.schedule)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._held)

    @property
    def runner(self) -> ModelRunner:
        """What runs the decoder, with its drafts and context shift. Raises SessionError when it is closed."""
        return self._held.runner

    @property
    def state(self) -> State:
        """Tokens, caches, and all else that the next tokens depend on. Raises SessionError when it is closed."""
        return self.runner.state

    @property
    def decoder(self) -> Decoder:
        """The model's computation, which forks share."""
        return self.runner.decoder

    @property
    def lora(self) -> str | None:
        """The name of the LoRA that is applied beside the weights."""
        return self._held.loaded.lora

    @property
    def nbytes(self) -> int:
        """Bytes of its caches' arrays, with those of a draft model."""
        return self._held.nbytes

    @property
    def tokens(self) -> list[int]:
        """Ids of prompt and output; the last may not be in the caches yet."""
        return self.state.tokens

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        return self.prompt_encoder.require_tokenizer()

    def require_idle(self) -> None:
        """Raises SessionError while a text is being generated, and when it is closed."""
        _ = self._held.idle_runner

    @checked()
    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the beginning-of-text token is added only to an empty conversation."""
        return self.prompt_encoder.encode(text, bos=not self.tokens)

    @checked()
    def prompt(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """Token ids and, in place of its `<image>` tokens, the embeddings of images: files or Pillow images.

        Without such tokens the images come first; in a text without images `<image>` is text. Raises ImageError: a
        file that is no image, more or fewer images than `<image>` tokens, a model that takes none.
        """
        return self.prompt_encoder.prompt(prompt, images, bos=not self.tokens)[0]

    def computing(self) -> AbstractContextManager[object]:
        """Within it no conversation of these weights computes: for other work with all cores.

        One of another thread waits for its end where they were loaded with ``slots``; else it raises SessionError.
        """
        return self.runner.schedule.alone()

    @checked()
    def prefill(
        self, prompt: str | Prompt, images: Sequence[ImageSource] = (), progress: LayerProgress | None = None
    ) -> F32:
        """(vocab,) float32: logits after a prompt, which is appended to the conversation. See `prompt`."""
        runner = self._held.idle_runner
        ids, spans = runner.fit_prompt(self.prompt(prompt, images))
        return to_host(runner.append(ids, spans, progress=progress)[0])

    @checked()
    def generate(
        self,
        prompt: str | Prompt,
        *,
        images: Sequence[ImageSource] = (),
        max_new_tokens: Count = 128,
        sampling: SamplingParams | Sampler | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: Stops = (),
        json_schema: Mapping[str, Any] | None = None,
        constraint: Constraint | None = None,
        progress: LayerProgress | None = None,
    ) -> StepIterator:
        """An iterator of tokens that continue the conversation with a prompt and ``images``: see `prompt`.

        Nothing of the conversation changes before its first step.
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
        runner = self._held.idle_runner
        constraint = find_constraint(json_schema, constraint, self.require_tokenizer, self.config.vocab_size)
        sampler = open_sampler(self.config.vocab_size, sampling, temperature, seed)
        image_token = self.model.image_token
        generation = Generation(runner, self.tokenizer, sampler, max_new_tokens, stop, constraint, image_token)
        pieces, images_report = self.prompt_encoder.prompt(prompt, images, bos=not self.tokens)
        ids, spans = runner.fit_prompt(pieces)
        settings = sampler.settings() | {"max_new_tokens": max_new_tokens}
        report = self._held.loaded.new_report(images_report, **settings)
        report.prefill_tokens = len(ids)  # until they are read
        return self._held.generating(generation.steps(ids, spans, report, progress), report)

    @checked()
    def logits(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> F32:
        """(n, vocab) float32: logits after each token id or row of embeddings of a prompt, which is appended.

        See `prompt`.
        """
        runner = self._held.idle_runner
        ids, spans = runner.flatten_prompt(self.prompt(prompt, images))
        return to_host(runner.append(ids, spans, n_logits=len(ids)))

    @checked()
    def embed(self, text: str | Sequence[int]) -> F32:
        """(hidden_size,) float32 of length 1: the text as a vector, apart from the conversation.

        Vectors of one model can be compared by their inner product. Raises ContextError for a text longer than the
        context, TokenizerError for ids beyond the vocabulary.
        """
        pieces = self.prompt_encoder.prompt(text, (), bos=True)[0]
        ids = [piece for piece in pieces if isinstance(piece, int)]
        self.runner.require_known(ids)
        with self.computing():
            return embed(self.decoder, ids, self.plan.ctx)

    def report(self) -> RunReport:
        """Counts, times and bytes of the last `generate`."""
        return measured(self._held.report, self.state, self.decoder, self.plan.notes)

    @checked()
    def rewind(self, n_tokens: Natural) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt: nothing after a rewind by a
        quarter of its exact window, else up to two windows (docs/quality.md). Raises ContextError below 0.
        """
        self._held.idle_runner.state.rewind(n_tokens)

    @checked()
    def align(self, prompt: str | Prompt) -> list[int | Embeddings]:
        """Rewinds to where the conversation and a whole prompt part; returns what `generate` must add to it.

        That is at least its last piece, whose logits are needed. A text is encoded as the beginning of a
        conversation.
        """
        runner = self._held.idle_runner
        whole = self.prompt_encoder.prompt(prompt, (), bos=True)[0] if isinstance(prompt, str) else prompt
        runner.require_prompt(whole)
        return runner.state.align(whole)

    def reset(self) -> None:
        """Forgets the conversation, with the history that a chat keeps of it; the model stays loaded."""
        self._held.reset(self.lora)

    def close(self) -> None:
        """Frees the caches; a text that is being generated ends. What has been closed may be closed again."""
        self._held.close()

    @checked()
    def use_lora(self, name: str | None) -> None:
        """Forgets the conversation, and goes on with one of the ``loras`` that were loaded; None: without.

        Raises ConfigError for another name.
        """
        self._held.reset(name)

    @checked(path="session")
    def save(self, path: Path, *, compress: bool = False) -> int:
        """Writes the conversation, its compressed cache and its sampler to a file; returns the file's bytes.

        Whatever happens meanwhile, the file is the new one, whole, or what it was before. ``compress``: smaller by
        Huffman codes, slower to write and to read. Raises CheckpointError when it can't be written.
        """
        return save_state(path, self.state, self.model, self.lora, self.plan, compress=compress)

    @checked(path="session")
    def load_state(self, path: Path) -> None:
        """Replaces the conversation by a saved one of the same model, scheme and context, with its LoRA.

        Raises SessionError, and keeps the present one, when the file does not fit; MemoryBudgetError where its
        caches don't fit beside the present ones.
        """
        self._held.restore(SavedState(path))

    @checked()
    def fork(self, *, kv: str | CacheSpec | None = None, ctx: Count | None = None) -> Session:
        """Another, empty conversation on the weights that are loaded, for up to as many tokens.

        The two share scratch memory. In one thread they may take turns, token by token; for threads of their own
        load with as many ``slots``, else SessionError is raised where one computes while the other does. Raises
        ContextError, CacheError, and MemoryBudgetError when its cache doesn't fit.
        """
        return Session(self._held.fork(kv, ctx))

    @checked()
    def copy_from(self, other: Session) -> None:
        """Takes over the conversation of another session of the same model, LoRA, scheme and context; both go on.

        Not how its last text was sampled. Raises SessionError for another plan, MemoryBudgetError where its caches
        don't fit beside the present ones.
        """
        self._held.copy_from(other._held)
