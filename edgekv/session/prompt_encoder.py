"""Texts and images of one model as prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from edgekv.session.model import Model
from edgekv.session.opening import open_tokenizer
from edgekv.session.schedule import Schedule
from edgekv.tokenizer import Tokenizer
from edgekv.vision import ImageSource, Vision, check_places, require_placeholder
from edgekv.vision.prompt import ImagesReport, Prompt, without_places


class PromptEncoder:
    """Encodes with the model's tokenizer, None where it has none, and its vision encoder, loaded when it is used.

    schedule: where the vision encoder waits for its turn.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None, schedule: Schedule) -> None:
        self.model, self.tokenizer, self._schedule = model, tokenizer, schedule

    @functools.cached_property
    def vision(self) -> Vision:
        """The model's vision encoder. Raises ImageError where there is none."""
        return Vision(self.model, self._schedule.threads)

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        return self.tokenizer or open_tokenizer(self.model)

    def encode(self, text: str, bos: bool) -> list[int]:
        """Token ids; bos: behind the beginning-of-text token, where the model has one."""
        return self.require_tokenizer().encode(text, bos=bos)

    def prompt(
        self, prompt: str | Prompt, images: Sequence[ImageSource], bos: bool
    ) -> tuple[Prompt, ImagesReport | None]:
        """Ids with embeddings of images at their places, and what is to be reported of the images; None: none.

        See `Session.prompt`. bos: whether the prompt begins a conversation. Raises ImageError.
        """
        if isinstance(prompt, str) and not images:
            prompt = without_places(prompt, self.require_tokenizer())
        pieces = self.encode(prompt, bos) if isinstance(prompt, str) else prompt
        token = self.model.image_token
        if images:
            require_placeholder(prompt, pieces, self.vision.image_token)
            first = self.tokenizer.bos_id if self.tokenizer and bos else None
            with self._schedule.alone():
                return self.vision.placed(pieces, images, first)
        if token is not None:
            check_places(pieces, token, 0)
        return pieces, None
