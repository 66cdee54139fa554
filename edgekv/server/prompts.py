"""The prompts of requests: chat templates with tools and images, as token ids; and the grammar of tool calls."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.engine.grammar_child import COMPACT
from edgekv.engine.session import Session
from edgekv.server.requests import AnyRequest, ChatRequest, Function, RequestError, Tools, prompt_list
from edgekv.text import Tokenizer
from edgekv.text.template import ChatEncoder, ChatTemplate, without_places
from edgekv.vision.images import decode_image
from edgekv.vision.model import Embeddings, Prompt, check_places, place_images, require_places

REMEMBERED_ANSWERS = 512
KNOWN = 64  # latest answers of a conversation whose own tokens are used; the template is rendered once for each
LOOKED_BACK = 8  # last tokens of a prompt, in which the mark of reasoning is searched
KEPT_IMAGES = 16  # files and their embeddings, some MB each
THINK, END_THINK = "<think>", "</think>"


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
        self.marks = dict(pair for mark in MARKS if (pair := self._special(mark)))
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
            return self._checked(self.tokenizer.encode(without_places(text, self.tokenizer)), field)
        return self._checked(list(text), field)

    def remember(self, text: str, ids: list[int]) -> None:
        """Remembers an answer's tokens, as the next request contains its text only."""
        with self._lock:
            self._answers[text] = array("i", ids)
            self._answers.move_to_end(text)
            while len(self._answers) > REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)

    def _chat(self, request: ChatRequest) -> EncodedPrompt:
        tools, messages, effort = request.tools_allowed, request.turns(), request.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        variables |= request.chat_template_kwargs or {}
        if self.template.knows_tools:
            variables |= {"tools": tool_definitions(tools.functions) if tools else None}
        else:
            messages = tools_as_text(messages, tools, self.form)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-KNOWN:]
        with self._lock:
            known_tokens = {
                i: self._answers.get(messages[i]["content"])
                for i in answers
                if not {"tool_calls", "reasoning_content"} & messages[i].keys()
            }
        ids = self._checked(self._turns.ids(messages, known_tokens.get, variables), request.names["prompt"])
        end = "".join(self.marks.get(i) or self.tokenizer.decode([i]) for i in ids[-LOOKED_BACK:])
        thinks = end.rstrip().endswith(THINK) and not (tools and tools.forced)
        images = tuple(decode_data_url(url) for url in request.images)
        return EncodedPrompt(ids, thinks=thinks, images=images)

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise RequestError(400, f"{field!r} is empty: give at least one token", param=field)
        if len(ids) > self._ctx:
            message = f"the prompt has {len(ids)} tokens, this server's context is {self._ctx}: shorten it"
            raise RequestError(400, message, "context_length_exceeded", field)
        if (last := max(ids)) >= self._vocab_size:
            message = f"token id {last} is outside the model's vocabulary of {self._vocab_size}"
            raise RequestError(400, message, param=field)
        return ids

    def _special(self, mark: str) -> tuple[int, str] | None:
        """Returns (id, mark) if the mark is one special token, else None."""
        ids = self.tokenizer.encode(mark, bos=False)
        special = [i for i in ids if not self.tokenizer.token_bytes(i)]
        return (special[0], mark) if len(special) == 1 and not self.tokenizer.decode(ids).strip() else None


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
    """A cache of the embeddings of the latest KEPT_IMAGES images; thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._embedded = functools.lru_cache(KEPT_IMAGES)(self._embed)

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


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls: begin, opening, {"name": ..., KEY: {...}}, closing.

    args: the mark between name and arguments, where a call is: begin, name, args, {...}; "": not so.
    begin: the mark of a call; "": an answer that begins with a brace is a call. key: the key of the arguments.
    separator: the text between calls after one mark; None: each call has its own mark.
    """

    begin: str
    opening: str
    key: str
    closing: str
    separator: str | None = None
    args: str = ""


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "\n", "arguments", "\n</tool_call>"),  # Hermes, Qwen, SmolLM
    "mistral": ToolFormat("[TOOL_CALLS]", "[", "arguments", "]", separator=", "),
    "mistral-args": ToolFormat("[TOOL_CALLS]", "", "arguments", "", args="[ARGS]"),  # since Mistral Small 3.2
    "llama3": ToolFormat("", "", "parameters", ""),
}
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>")
OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
INSTRUCTIONS = """\
You may call one or more of these functions, given by their JSON schemas:
{tools}
To call a function answer with its name and its arguments as JSON, and nothing after it:
{example}"""


def find_format(template: str) -> ToolFormat:
    """Returns the format of tool calls that a chat template's source uses."""
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral-args" if "[ARGS]" in template else "mistral"]
    if "tools" in template and '"parameters": ' in template and "<tool_call>" not in template:
        return TOOL_FORMATS["llama3"]
    return TOOL_FORMATS["hermes"]


def tool_definitions(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Returns tool definitions for chat templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {"type": "object", "properties": {}},
            },
        }
        for function in functions
    ]


def tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Tools | None, form: ToolFormat
) -> list[dict[str, Any]]:
    """Returns the messages with tools, calls and results as text, for a template without tools.

    The tools are described in the first question, as some templates take no system message.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", ())
        if message["role"] == "tool":
            plain.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif calls:
            texts = [_call_text(call["function"]["name"], call["function"]["arguments"], form) for call in calls]
            plain.append({"role": "assistant", "content": "\n".join(filter(None, [content, *texts]))})
        else:
            plain.append(message)
    if tools is not None:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tool_definitions(tools.functions))
        instructions = INSTRUCTIONS.format(tools=lines, example=_call_text("NAME", {"ARGUMENT": "VALUE"}, form))
        first = next((i for i, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            return [*plain, {"role": "user", "content": instructions}]
        plain[first] = {"role": "user", "content": f"{instructions}\n\n{plain[first]['content']}"}
    return plain


def _call_text(name: str, arguments: Any, form: ToolFormat) -> str:
    if form.args:
        return f"{form.begin}{name}{form.args}{json.dumps(arguments, ensure_ascii=False)}"
    call = json.dumps({"name": name, form.key: arguments}, ensure_ascii=False)
    return f"{form.begin}{form.opening}{call}{form.closing}"


def tools_grammar(
    tools: Tools, form: ToolFormat, marks: Mapping[int, str], schema: Mapping[str, Any] | None = None
) -> str:
    """Returns the Lark grammar, for llguidance, of answers with calls; without other text if calls are forced.

    marks: the texts of special tokens, by id. schema: the JSON schema of an answer without calls.
    """
    tokens = {mark: f"<[{i}]>" for i, mark in marks.items()}

    def quoted(text: str) -> str:
        return tokens.get(text) or (json.dumps(text) if text else "")

    begin, rules = quoted(form.begin), []
    for i, function in enumerate(tools.callable):
        arguments: dict[str, Any] = {"type": "object", **(function.parameters or {})}
        if "properties" in arguments and not OPEN & arguments.keys():
            arguments["additionalProperties"] = False  # no properties but the declared ones, by default
        head, tail = f"{quoted(function.name)} {quoted(form.args)}", ""
        if not form.args:
            head, tail = json.dumps(f'{{"name": {json.dumps(function.name)}, "{form.key}": '), '"}"'
        rules.append(f"fn_{i}: {head} %json {_schema_text(arguments)} {tail}")
    call = f"({' | '.join(f'fn_{i}' for i in range(len(tools.callable)))})"
    if tools.several and form.separator is not None:
        call = f"{call} ({quoted(form.separator)} {call})*"
    rules.append(f"body: {quoted(form.opening)} {call} {quoted(form.closing)}")
    if tools.forced or schema is not None:
        repeated = " call*" if tools.several and form.begin and form.separator is None else ""
        rules += [f"call: {begin} body", f"start: call{repeated}{'' if tools.forced else ' | answer'}"]
        if not tools.forced:
            rules.append(f"answer: %json {_schema_text(schema or {})}")
    elif not form.begin:
        rules += ["start: PLAIN | body", r"PLAIN: /([^{](.|\n)*)?/"]
    else:
        rules += ["start: call* tail" if tools.several else "start: call | tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
        lazy = "" if form.begin in tokens else "[lazy]"
        rules += [f"head{lazy}: TEXT {begin}", "call: head body"]
    return "\n".join(["%llguidance {}", *rules])


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": COMPACT})
