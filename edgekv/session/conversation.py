"""What a session holds on a loaded model, and what of it is forgotten; the decoder does not run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.decoder.decoder import Decoder
from edgekv.errors import SessionError
from edgekv.session.caches import open_caches
from edgekv.session.context_shift import ContextShift
from edgekv.session.drafts import Drafts
from edgekv.session.model_runner import ModelRunner
from edgekv.session.opening import LoadedModel
from edgekv.session.prompt_encoder import PromptEncoder
from edgekv.session.report import RunReport, measured
from edgekv.session.running import Running
from edgekv.session.state import State
from edgekv.tokenizer import Tokenizer
from edgekv.vision import ImageSource
from edgekv.vision.prompt import Embeddings, ImagesReport, Prompt


class Conversation:
    """A `Session` but for what loads, runs, saves and forks it. Its attributes: see there."""

    def __init__(self, loaded: LoadedModel, context_shift: ContextShift, drafts: Drafts | None) -> None:
        self._loaded = loaded
        self.model, self.plan, self.config = loaded.model, loaded.plan, loaded.model.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self._running = Running()
        self.prompt_encoder = PromptEncoder(loaded.model, loaded.tokenizer, loaded.schedule)
        self._runner: ModelRunner | None = ModelRunner(
            self._new_state(),
            loaded.decoder,
            loaded.schedule,
            self.plan.ctx,
            self.model.placeholder,
            context_shift,
            drafts,
        )
        self._new_report()

    @property
    def runner(self) -> ModelRunner:
        """What runs the decoder, with its drafts and context shift. Raises SessionError when it is closed."""
        if self._runner is None:
            raise SessionError(f"this session of {self.model.name} is closed: load another, or restore one")
        return self._runner

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
        return self._loaded.lora

    def use_lora(self, name: str | None) -> None:
        """Forgets the conversation, and goes on with one of the ``loras`` that were loaded; None: without.

        Raises ConfigError for another name, SessionError while a text is being generated.
        """
        self._running.require_none()
        self._loaded.with_lora(name)
        self.reset()
        self._set_lora(name)

    def _set_lora(self, name: str | None) -> None:
        self._loaded = self._loaded.with_lora(name)
        self.runner.decoder = self._loaded.decoder
        self._new_report()

    @property
    def tokens(self) -> list[int]:
        """Ids of prompt and output; the last may not be in the caches yet."""
        return self.state.tokens

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        return self.prompt_encoder.require_tokenizer()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the beginning-of-text token is added only to an empty conversation."""
        return self.prompt_encoder.encode(text, bos=not self.tokens)

    def prompt(self, prompt: str | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """Token ids and, in place of its `<image>` tokens, the embeddings of images: files or Pillow images.

        Without such tokens the images come first. Raises ImageError: a file that is no image, more or fewer images
        than `<image>` tokens, a model that takes none.
        """
        return self.prompt_encoder.prompt(prompt, images, bos=not self.tokens)[0]

    def close(self) -> None:
        """Frees the caches; a text that is being generated ends. What has been closed may be closed again."""
        if self._runner is not None:
            self._running.close()
            self._runner.state.caches = []
            self._runner = None

    def rewind(self, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens`` of the conversation.

        What a scheme can't keep of them is computed again with the next prompt: nothing after a rewind by a
        quarter of its exact window, else up to two windows (docs/quality.md). Raises SessionError while a text is
        being generated, ContextError for a number below 0.
        """
        self._running.require_none()
        self.state.rewind(n_tokens)

    def align(self, prompt: str | Prompt) -> list[int | Embeddings]:
        """Rewinds to where the conversation and a whole prompt part; returns what `generate` must add to it.

        That is at least its last piece, whose logits are needed. A text is encoded as the beginning of a
        conversation. Raises SessionError while a text is being generated.
        """
        self._running.require_none()
        whole = self.prompt_encoder.prompt(prompt, (), bos=True)[0] if isinstance(prompt, str) else prompt
        return self.state.align(whole)

    def reset(self) -> None:
        """Forgets the conversation; the model stays loaded."""
        self.rewind(0)
        self.state.n_dropped = 0
        self._new_report()

    def report(self) -> RunReport:
        """Counts, times and bytes of the last `generate`."""
        return measured(self._report, self.state, self.decoder, self.plan.notes)

    def _new_state(self) -> State:
        """An empty conversation, with its caches allocated."""
        caches = open_caches(self._loaded.decoder, self.plan.kv, self.plan.ctx, self.model.adapter)
        return State(caches, self.config.keys_change)

    def _new_report(self, images: ImagesReport | None = None, **settings: Any) -> None:
        loaded, settings = self._loaded, self._loaded.settings() | settings
        self._report = RunReport(settings, self.model.summary(), images=images, compile_s=loaded.compile_s)
