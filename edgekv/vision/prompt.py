"""Prompts with images: pieces that are embeddings instead of tokens, and where they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edgekv.errors import ImageError
from edgekv.text.template import PLACEHOLDER
from edgekv.types import F32

VISUAL = "visual"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """A piece of a prompt: ``rows`` (n, hidden_size) float32 in place of n tokens, and what they stand for.

    ``modality``: spans of "visual" ones are marked in the caches (`KVCache.mark_images`), others are text.
    """

    rows: F32
    modality: str = VISUAL


Prompt = Sequence[int | Embeddings]


@dataclasses.dataclass
class ImagesReport:
    """The images of one prompt: how many, the tokens that they take, and the seconds that reading them took."""

    n: int
    tokens: int
    seconds: float
    notes: list[str]


def check_places(prompt: Prompt, image_token: int, n_images: int) -> None:
    """ImageError unless the prompt has a placeholder for each image, or none at all."""
    n_places = sum(piece == image_token for piece in prompt if not isinstance(piece, Embeddings))
    if n_places and n_places != n_images:
        raise ImageError(
            f"the prompt has {n_places} image placeholder(s), token {image_token}, for {n_images} image(s): give "
            "one for each, or write none, and the images come first"
        )


def require_places(prompt: Prompt, image_token: int, n_images: int) -> None:
    """ImageError unless the prompt that a chat template wrote has a placeholder for each image."""
    if image_token not in prompt:
        raise ImageError(
            f"the chat template writes no image token {image_token} for the {n_images} image(s) of these "
            "messages: give one that keeps `<image>` with `chat_template`"
        )
    check_places(prompt, image_token, n_images)


def require_placeholder(prompt: str | Prompt, pieces: Prompt, image_token: int | None) -> None:
    """ImageError where the prompt's text says `<image>` and the tokenizer does not."""
    if isinstance(prompt, str) and PLACEHOLDER in prompt and image_token not in pieces:
        raise ImageError(
            f"the tokenizer does not read {PLACEHOLDER} as the model's image token {image_token}: add it to "
            f"tokenizer.json, or leave {PLACEHOLDER} out of the prompt, and the images come first"
        )


def place_images(prompt: Prompt, image_token: int, images: Sequence[Embeddings], n_first: int) -> Prompt:
    """The prompt with an image at each placeholder; without any, they follow its first ``n_first`` pieces."""
    places = [i for i, piece in enumerate(prompt) if not isinstance(piece, Embeddings) and piece == image_token]
    if not places:
        return [*prompt[:n_first], *images, *prompt[n_first:]]
    placed = dict(zip(places, images, strict=True))
    return [placed.get(i, piece) for i, piece in enumerate(prompt)]
