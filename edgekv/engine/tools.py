"""Tools: their declarations as OpenAI's API has them, and calls as models write them, parsed and by a grammar."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from edgekv.engine.grammar_child import COMPACT
from edgekv.text import Tokenizer, possible_start

THINK, END_THINK = "<think>", "</think>"
CALL_START = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{}]', re.DOTALL)  # strings and brackets
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the only length that Mistral's templates accept
IsFunction = Annotated[str, Meta(pattern=r"^(function)\Z")]
Json = dict[str, Any]


class Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    function: Function
    type: IsFunction = "function"


class Tools(NamedTuple):
    """The functions in the prompt, and those of them that can be called.

    forced: whether the answer consists of calls. several: whether it can have more than one.
    """

    functions: tuple[Function, ...]
    callable: tuple[Function, ...]
    forced: bool
    several: bool


@dataclass(frozen=True)
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


def special_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the texts of those of MARKS that are one special token, which decoding leaves out, by its id."""
    found = {}
    for mark in MARKS:
        ids = tokenizer.encode(mark, bos=False)
        special = [i for i in ids if not tokenizer.token_bytes(i)]
        if len(special) == 1 and not tokenizer.decode(ids).strip():
            found[special[0]] = mark
    return found


class AnswerParser:
    """An incremental parser of answers: it takes text in pieces of any length, and returns OpenAI's deltas.

    A tool call is returned once it is complete. Of one that was cut off the arguments are incomplete JSON; without
    its whole name it is left out.

    thinks: whether the text begins within reasoning. form: the format of tool calls; None: no tools. forced:
    whether the text consists of calls only. plain: whether all of it is content.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        form: ToolFormat | None = None,
        forced: bool = False,
        plain: bool = False,
    ) -> None:
        self._tool_format, self._forced = form, forced
        self.is_cut = False  # whether the answer ended within a call
        self.content = self.reasoning = ""
        self.calls: list[Json] = []
        self._buffer, self._deltas = "", list[Json]()
        self._name: str | None = None  # of a call whose arguments follow apart from it
        self._is_first = True  # nothing was returned yet
        opening = self._read_reasoning if thinks else self._read_opening
        self._state: Callable[[bool], bool] = self._read_content if plain else opening

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._state == self._read_reasoning

    def push(self, text: str, last: bool = False) -> list[Json]:
        """Takes more text; returns the deltas that are certain now. last: no more text follows."""
        self._buffer += text
        while self._buffer and self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> list[Json]:
        """Returns the last deltas, at the end of the text."""
        return self.push("", last=True)

    # The states of the parser: each reads from the buffer, and returns whether the next state can go on with it.

    def _read_opening(self, last: bool) -> bool:
        """Reads the beginning of the text, or of the content after the reasoning."""
        text = self._buffer.lstrip()
        if not self._is_first:
            self._buffer = text
        if not last and (not text or (self._is_first and THINK.startswith(text))):
            return False
        if self._is_first and text.startswith(THINK):
            self._buffer, self._state = text[len(THINK) :].lstrip("\n"), self._read_reasoning
        elif self._tool_format is not None and not self._tool_format.begin and text.startswith("{"):
            self._buffer, self._state = text, self._read_between_calls
        else:
            self._state = self._read_content
        self._is_first = False
        return True

    def _read_reasoning(self, last: bool) -> bool:
        self._is_first = False
        return self._read_until(END_THINK, self._read_opening, last)

    def _read_content(self, last: bool) -> bool:
        mark = self._tool_format.begin if self._tool_format else ""
        return self._read_until(mark, self._read_between_calls, last)

    def _read_until(self, mark: str, next_state: Callable[[bool], bool], last: bool) -> bool:
        """Emits the text before ``mark``, but an end of it that may be the beginning of the mark."""
        start = self._buffer.find(mark) if mark else -1
        if start >= 0:
            self._emit_text(self._buffer[:start])
            self._buffer, self._state = self._buffer[start + len(mark) :], next_state
            return True
        safe = len(self._buffer) - (0 if last else possible_start(self._buffer, [mark]))
        self._emit_text(self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _read_between_calls(self, last: bool) -> bool:
        """Reads from the mark of a call, or the end of another call, to the brace that begins a call."""
        assert self._tool_format is not None
        if self._tool_format.args:
            return self._read_name(self._tool_format, last)
        closing = self._tool_format.closing.strip()
        text = self._buffer.lstrip(" \r\n\t,;[]")
        if closing and text.startswith(closing):
            text = text[len(closing) :].lstrip()
        elif not last and closing and closing.startswith(text):
            return False
        self._buffer = text
        if text.startswith("{"):
            self._state = self._read_call
        elif text:
            self._state = self._read_content
        return bool(text)

    def _read_name(self, form: ToolFormat, last: bool) -> bool:
        """Reads a name, and the mark before its arguments."""
        head, _, rest = self._buffer.partition(form.args)
        if rest := rest.lstrip():
            name = head.partition("[CALL_ID]")[0].strip()
            self._name, self._buffer, self._state = name, rest, self._read_call
        self.is_cut = last and not rest
        return bool(rest)

    def _read_call(self, last: bool) -> bool:
        """Reads a JSON object: a name with its arguments, or arguments alone."""
        end = object_end(self._buffer)
        if not end and not last:
            return False
        text, self._buffer = (self._buffer[:end], self._buffer[end:]) if end else (self._buffer, "")
        self.is_cut = not end
        head = CALL_START.match(text)
        if self._name is not None:
            self._add_call(self._name, text)
        elif head and (name := json_value(head[1])):
            arguments = text[head.end() :]
            self._add_call(name, arguments[: object_end(arguments) or len(arguments)])
        elif end:
            self._add_unordered_call(text)
        self._state = self._read_between_calls if self._name is None else self._read_content
        self._name = None
        return True

    def _add_unordered_call(self, text: str) -> None:
        """Adds a call whose fields have another order; an object that is no call is content."""
        value = json_value(text)
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, dict) and isinstance(value.get("name"), str):
            self._add_call(value["name"], json.dumps(arguments, ensure_ascii=False))
        else:
            self._emit_text(text)

    def _add_call(self, name: str, arguments: str) -> None:
        id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": id, "type": "function", "function": function})
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]})

    def _emit_text(self, text: str) -> None:
        if text and self.is_thinking:
            self.reasoning += text
            self._deltas.append({"reasoning_content": text})
        elif text and not self._forced:
            self.content += text
            self._deltas.append({"content": text})


def object_end(text: str) -> int:
    """Returns the length of the JSON object at the beginning of a text; 0: it is incomplete."""
    depth = 0
    for token in STRUCTURE.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return 0


def json_value(text: str) -> Any:
    """Returns the value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
