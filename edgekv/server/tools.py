"""How models write tool calls, a grammar that holds them to it, and words for templates that know no tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.server.checked_request import Tools
from edgekv.server.protocol import Function
from edgekv.session.grammar import require_bounded
from edgekv.session.matcher import COMPACT


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A call is begin, opening, {"name": ..., KEY: {...}}, closing; or, with ``args``: begin, name, args, {...}.

    begin: the mark of a call; "": the answer is a call where it begins with a brace. key: of the arguments.
    separator: between calls behind one mark; None: each has its own.
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
    """That of the model whose chat template's source is given."""
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral-args" if "[ARGS]" in template else "mistral"]
    if "tools" in template and '"parameters": ' in template and "<tool_call>" not in template:
        return TOOL_FORMATS["llama3"]
    return TOOL_FORMATS["hermes"]


def declared(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The tools as templates know them."""
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


def spelled_out(messages: Sequence[dict[str, Any]], tools: Tools | None, form: ToolFormat) -> list[dict[str, Any]]:
    """The messages with tools, calls and their results in words, for a template that knows none of these.

    The tools stand in the first question: some templates take no system message.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", ())
        if message["role"] == "tool":
            plain.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif calls:
            texts = [_written(call["function"]["name"], call["function"]["arguments"], form) for call in calls]
            plain.append({"role": "assistant", "content": "\n".join(filter(None, [content, *texts]))})
        else:
            plain.append(message)
    if tools is not None:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in declared(tools.functions))
        told = INSTRUCTIONS.format(tools=lines, example=_written("NAME", {"ARGUMENT": "VALUE"}, form))
        first = next((i for i, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            return [*plain, {"role": "user", "content": told}]
        plain[first] = {"role": "user", "content": f"{told}\n\n{plain[first]['content']}"}
    return plain


def _written(name: str, arguments: Any, form: ToolFormat) -> str:
    if form.args:
        return f"{form.begin}{name}{form.args}{json.dumps(arguments, ensure_ascii=False)}"
    call = json.dumps({"name": name, form.key: arguments}, ensure_ascii=False)
    return f"{form.begin}{form.opening}{call}{form.closing}"


def tools_grammar(
    tools: Tools, form: ToolFormat, marks: Mapping[int, str], schema: Mapping[str, Any] | None = None
) -> str:
    """Lark, as llguidance reads it: text and calls, or calls alone where they are forced.

    marks: of special tokens, by id. schema: of the text where there is no call. Raises ConfigError for a schema as
    `require_bounded`.
    """
    tokens = {mark: f"<[{i}]>" for i, mark in marks.items()}
    token = tokens.get(form.begin)
    begin = token or (_quoted(form.begin) if form.begin else "")
    rules = [f"body: {_joined(_quoted(form.opening), _calls(tools, form), _quoted(form.closing))}"]
    args = tokens.get(form.args) or _quoted(form.args)
    rules += [_function_rule(i, function, form, args) for i, function in enumerate(tools.callable)]
    if tools.forced or schema is not None:
        more = " call*" if tools.several and form.begin and form.separator is None else ""
        rules += [f"call: {_joined(begin, 'body')}"]
        if not tools.forced:
            rules += [f"start: call{more} | answer", f"answer: %json {_compact(schema or {})}"]
        else:
            rules += [f"start: call{more}"]
    elif not form.begin:
        rules += ["start: PLAIN | body", r"PLAIN: /([^{](.|\n)*)?/"]
    else:
        rules += ["start: call* tail" if tools.several else "start: call | tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
        rules += [f"head: TEXT {token}" if token else f"head[lazy]: TEXT {begin}", "call: head body"]
    return "\n".join(["%llguidance {}", *rules])


def _calls(tools: Tools, form: ToolFormat) -> str:
    one = f"({' | '.join(f'fn_{i}' for i in range(len(tools.callable)))})"
    if tools.several and form.separator is not None:
        return f"{one} ({_quoted(form.separator)} {one})*"
    return one


def _function_rule(i: int, function: Function, form: ToolFormat, args: str) -> str:
    if form.args:
        return f"fn_{i}: {_quoted(function.name)} {args} %json {_compact(_arguments(function))}"
    head = f'{{"name": {json.dumps(function.name)}, "{form.key}": '
    return f'fn_{i}: {_quoted(head)} %json {_compact(_arguments(function))} "}}"'


def _arguments(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: those that it names and no others, unless it says so."""
    schema = {"type": "object", **(function.parameters or {})}
    if "properties" in schema and not OPEN & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _compact(schema: Mapping[str, Any]) -> str:
    require_bounded(schema)
    return json.dumps({**schema, "x-guidance": COMPACT})


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
