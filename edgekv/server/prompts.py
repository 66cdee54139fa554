"""The prompts of requests: chat templates with tools and images, as token ids."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from edgekv.engine.session import Session
from edgekv.engine.tools import THINK, find_format, special_marks, tool_definitions, tools_as_text
from edgekv.server.requests import AnyRequest, ChatRequest, RequestError, prompt_list
from edgekv.text import Tokenizer
from edgekv.text.template import ChatEncoder, ChatTemplate, without_places
from edgekv.vision.images import decode_image
from edgekv.vision.model import Embeddings, Prompt, check_places, place_images, require_places

MAX_ANSWERS = 512
MAX_REUSED = 64  # latest answers of a conversation whose tokens are reused; the template is rendered for each
LOOKBACK_TOKENS = 8  # last tokens of a prompt, in which the mark of reasoning is searched
MAX_CACHED_IMAGES = 16  # files and their embeddings, some MB each


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids. thinks: whether the answer begins within the model's reasoning.

    images: the content of the image files, in the order of their tokens.
    """

    ids: list[int]
    thinks: bool = False
    images: tuple[bytes, ...] = ()


class RequestEncoder:
    """An encoder of requests for one model; thread-safe.

    form: the format of the model's tool calls. marks: the texts of the special tokens among MARKS, by token id.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, ctx: int, vocab_size: int) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._ctx, self._vocab_size = ctx, vocab_size
        self.form = find_format(template.source)
        self.marks = special_marks(tokenizer)
        self._turns = ChatEncoder(template, tokenizer)
        self._answers: OrderedDict[str, array[int]] = OrderedDict()  # text -> its tokens as generated
        self._lock = threading.Lock()

    def encode(self, request: AnyRequest) -> list[EncodedPrompt]:
        """Returns the tokens of each prompt. Raises RequestError if one does not fit, or is empty."""
        if isinstance(request, ChatRequest):
            return [self._chat(request)]
        field = request.names.get("prompt", "prompt")
        prompts = prompt_list(getattr(request, field), field)
        return [EncodedPrompt(self.ids(prompt, field)) for prompt in prompts]

    def ids(self, text: str | Sequence[int], field: str) -> list[int]:
        """Returns the token ids of a text, or checked ids. Raises RequestError, which names the field."""
        if isinstance(text, str):
            return self._check(self.tokenizer.encode(without_places(text, self.tokenizer)), field)
        return self._check(list(text), field)

    def remember(self, text: str, ids: list[int]) -> None:
        """Remembers an answer's tokens, as the next request contains its text only."""
        with self._lock:
            self._answers[text] = array("i", ids)
            self._answers.move_to_end(text)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def _chat(self, request: ChatRequest) -> EncodedPrompt:
        tools, messages, effort = request.tools_allowed, request.turns(), request.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        variables |= request.chat_template_kwargs or {}
        if self.template.knows_tools:
            variables |= {"tools": tool_definitions(tools.functions) if tools else None}
        else:
            messages = tools_as_text(messages, tools, self.form)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-MAX_REUSED:]
        with self._lock:
            known_tokens = {
                i: self._answers.get(messages[i]["content"])
                for i in answers
                if not {"tool_calls", "reasoning_content"} & messages[i].keys()
            }
        ids = self._check(self._turns.ids(messages, known_tokens.get, variables), request.names["prompt"])
        end = "".join(self.marks.get(i) or self.tokenizer.decode([i]) for i in ids[-LOOKBACK_TOKENS:])
        thinks = end.rstrip().endswith(THINK) and not (tools and tools.forced)
        images = tuple(decode_data_url(url) for url in request.images)
        return EncodedPrompt(ids, thinks=thinks, images=images)

    def _check(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise RequestError(400, f"{field!r} is empty: give at least one token", param=field)
        if len(ids) > self._ctx:
            message = f"the prompt has {len(ids)} tokens, this server's context is {self._ctx}: shorten it"
            raise RequestError(400, message, "context_length_exceeded", field)
        if (last := max(ids)) >= self._vocab_size:
            message = f"token id {last} is outside the model's vocabulary of {self._vocab_size}"
            raise RequestError(400, message, param=field)
        return ids


def decode_data_url(url: str) -> bytes:
    """Returns the bytes of a data URL. Raises RequestError for any other URL, which is not fetched."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        accepted = "data:image/png;base64,... (nothing is fetched from elsewhere)"
        raise RequestError(400, f"image_url is {url[:40]!r}; accepted: {accepted}", param="image_url")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"image_url is no base64 ({error}): encode the file again"
        raise RequestError(400, message, param="image_url") from None


class Images:
    """A cache of the embeddings of the latest MAX_CACHED_IMAGES images; thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._embedded = functools.lru_cache(MAX_CACHED_IMAGES)(self._embed)

    def with_embeddings(self, ids: Sequence[int], files: Sequence[bytes]) -> Prompt:
        """Returns the prompt with embeddings at its image tokens. Raises ImageError for an unreadable image."""
        token = self._session.model.image_token
        if not files:
            if token is not None:
                check_places(ids, token, 0)
            return ids
        vision = self._session.vision  # says what is missing
        require_places(ids, vision.image_token, len(files))
        return place_images(ids, vision.image_token, [self._embedded(file) for file in files], 0)

    def _embed(self, file: bytes) -> Embeddings:
        picture = decode_image(file, "the image")
        with self._session.exclusive():
            return self._session.vision(picture)
