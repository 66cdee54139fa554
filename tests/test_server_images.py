"""Images in messages, read by the small model of drawn scenes, which says what is in them."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from scenes import draw_scene, render
from serving import open_endpoints, openai_client

from edgekv import Session
from edgekv.server.limits import ServerLimits

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def drawn(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(render(draw_scene(rng, 3), rng))


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def turn(text: str, *images: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    limits, session = ServerLimits(max_request=16 << 20, max_bodies=96 << 20), Session.load("scenes", ctx=1024)
    with session, open_endpoints(session, TEMPLATE, limits=limits) as http, openai_client(http) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "scenes", "messages": messages, "max_tokens": 60, "temperature": 0} | options
    )


def names_all_things(text: str, seed: int) -> bool:
    """Returns whether the text names every thing of the picture by its colour."""
    things = draw_scene(np.random.default_rng(seed), 3)
    return all(f"{thing.colour} {thing.kind}" in text for thing in things)


def test_a_picture_is_described(client: openai.OpenAI) -> None:
    """Another picture is not mistaken for the one in the cache."""
    for seed in (1, 2, 1):
        answer = ask(client, turn("Describe the picture.", url(drawn(seed))))
        assert names_all_things(answer.choices[0].message.content, seed)
        assert answer.usage.prompt_tokens > 256


def test_two_pictures_and_a_next_turn(client: openai.OpenAI) -> None:
    """The next turn reads no picture again."""
    first = turn("Describe the second picture.", url(drawn(4)), url(drawn(5)))
    answer = ask(client, first)
    text = answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 512
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, first, stream=True)) == text
    question = {"role": "user", "content": "How many objects are in the picture?"}
    second = ask(client, first, {"role": "assistant", "content": text}, question)
    assert second.usage.prompt_tokens_details.cached_tokens > 512


BAD = {
    "https://example.org/x.png": "nothing is fetched",
    "file:///etc/passwd": "nothing is fetched",
    "data:image/png;base64,@@@": "base64",
    "data:image/png;base64,AAAA": "no image that can be read",
    "data:image/png;base64,": "no image that can be read",
    "data:image/png;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode(): "no image",
    url(Image.new("1", (12000, 12000))): "pixels",
}


def test_what_is_no_image(client: openai.OpenAI) -> None:
    for given, message in BAD.items():
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, turn("Describe the picture.", given))
