"""Tools: how models write calls, how answers are held to the tools' schemas, and what a client gets of it."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
from serving import TOOL_TEMPLATE, open_endpoints, openai_client

from edgekv import Session
from edgekv.engine.grammar import Grammar
from edgekv.engine.tools import TOOL_FORMATS, AnswerParser, Function, Tools, tools_grammar
from edgekv.errors import ConfigError
from edgekv.server.prompts import MAX_REUSED, RequestEncoder
from edgekv.server.requests import ChatRequest, parse_request
from edgekv.text import load_tokenizer
from edgekv.text.template import ChatTemplate


def tool(name: str, properties: Any, **more: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters |= {"additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "description": "Tells it", "parameters": parameters}}


CITY: Any = {"type": "string", "enum": ["Paris", 'a "b" }', "Köln"]}
DAYS: Any = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = tool("weather", {"city": {"$ref": "#/$defs/City"}, "days": DAYS}, **{"$defs": {"City": CITY}})
CLOCK = tool("clock", {"zone": {"type": "string", "enum": ["UTC", "CET"]}})
USER: Any = [{"role": "user", "content": "How is the weather?"}]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def client(demo: Session) -> Iterator[openai.OpenAI]:
    with open_endpoints(demo, TOOL_TEMPLATE) as http, openai_client(http) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any = USER, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "demo", "messages": messages, "tools": [WEATHER, CLOCK], "max_tokens": 120} | options
    )


def test_a_forced_call_follows_its_schema(client: openai.OpenAI) -> None:
    for choice, seed in ((named("weather"), 0), (named("weather"), 1), (named("clock"), 2), ("required", 0)):
        answer = ask(client, tool_choice=choice, seed=seed).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.id
        arguments, name = json.loads(call.function.arguments), call.function.name
        assert choice in ("required", named(name))
        assert arguments.keys() == ({"city", "days"} if name == "weather" else {"zone"})
        allowed = {"city": CITY["enum"], "days": range(1, 10), "zone": ("UTC", "CET")}
        assert all(value in allowed[key] for key, value in arguments.items())


@pytest.mark.parametrize("n", [1, 5, 40, 120])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(n: int, client: openai.OpenAI) -> None:
    """Whole and streamed, however early it is cut, if at all."""
    whole = ask(client, tool_choice=named("weather"), max_tokens=n, seed=1).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    reason = "length" if n < 120 else "tool_calls"
    assert (whole.finish_reason, whole.message.content or None) == (reason, None)
    assert [name for name, _ in calls] == (["weather"] if n > 20 else [])
    stream = ask(client, tool_choice=named("weather"), max_tokens=n, seed=1, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == reason
    told = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(each.name, each.arguments) for each in told] == calls


def test_an_agents_loop_with_two_tools(client: openai.OpenAI) -> None:
    """Calls, results, an answer: the conversation comes back whole, as the client's own objects."""
    messages: list[Any] = [{"role": "system", "content": "You are a clerk."}, *USER]
    for name in ("weather", "clock"):
        message = ask(client, messages, tool_choice=named(name), seed=2).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in message.tool_calls]
        messages += [message, *results]
    final = ask(client, messages, tool_choice="none", max_tokens=10)
    assert final.choices[0].message.content
    assert final.usage.prompt_tokens_details.cached_tokens > 100  # what the calls read is not read again


def test_reasoning_is_apart(client: openai.OpenAI) -> None:
    """The template begins it; the demo model never ends it."""
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(client, tools=openai.omit, max_tokens=12, temperature=0, extra_body=extra)
    assert answer.choices[0].message.content == ""
    assert len(answer.choices[0].message.reasoning_content) > 10
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    off = ask(client, tools=openai.omit, max_tokens=12, temperature=0, reasoning_effort="none")
    assert not hasattr(off.choices[0].message, "reasoning_content")


CALL = '{"name": "weather", "arguments": {"city": "a \\"b\\" }", "days": 3}}'
ARGUMENTS = {"city": 'a "b" }', "days": 3}
CALLED = ("weather", ARGUMENTS)
NAMES = f'[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{CALL[33:-1]}[TOOL_CALLS]f[ARGS]{{"a": {{"b": 1}}}}'
TEXTS: list[tuple[str, str, list[Any]]] = [  # form, text; content, [reasoning] and (name, arguments) of it
    ("hermes", "Hello < there", ["Hello < there"]),
    ("hermes", f"Well. <tool_call>\n{CALL}\n</tool_call>", ["Well. ", CALLED]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>", [CALLED] * 2),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", [CALLED, "Done."]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    ("hermes", "<tool_call>{x}</tool_call>", ["{x}"]),
    ("hermes", 'Well. <tool_call>\n{"name": "we', ["Well. "]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [("f", '{"a')]),
    ("hermes", "<think>\nHm <b>.\n</think>\n\nYes.", [["Hm <b>.\n"], "Yes."]),
    ("hermes", f"<think>Hm</think>\n<tool_call>{CALL}</tool_call>", [["Hm"], CALLED]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", [CALLED] * 2),
    ("mistral-args", f"Well.{NAMES}", ["Well.", CALLED, ("f", {"a": {"b": 1}})]),
    ("mistral-args", "[TOOL_CALLS]f", []),
    ("llama3", CALL.replace("arguments", "parameters"), [CALLED]),
]


def joined(deltas: list[dict[str, Any]]) -> list[Any]:
    """Joins neighbours of a kind: texts, [reasoning], (name, arguments)."""
    found: list[Any] = []
    for delta in deltas:
        functions = [call["function"] for call in delta.get("tool_calls", ())]
        found += [(function["name"], _loaded(function["arguments"])) for function in functions]
        for kind, field in ((str, "content"), (list, "reasoning_content")):
            if text := delta.get(field, ""):
                joins = bool(found) and isinstance(found[-1], kind)
                text = ("".join(found[-1]) if joins else "") + text
                found[len(found) - joins :] = [text if kind is str else [text]]
    return found


def _loaded(text: str) -> Any:
    """Returns JSON's value; what was cut off is its text, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_answers_are_taken_apart(length: int) -> None:
    """However the text is cut."""
    for form, text, expected in TEXTS:
        parser = AnswerParser(form=TOOL_FORMATS[form])
        deltas = [d for i in range(0, len(text), length) for d in parser.push(text[i : i + length])]
        assert joined([*deltas, *parser.end()]) == expected, text


def accepts(demo: Session, grammar: str, text: str) -> bool:
    """Returns whether all of the text passes, and it could end here."""
    tokenizer = demo.require_tokenizer()
    constraint = Grammar(grammar, tokenizer, demo.config.vocab_size)
    try:
        for token in tokenizer.encode_inside(text):
            constraint.accept(token)
    except ConfigError:
        return False
    ends = constraint.allowed(np.zeros(demo.config.vocab_size, np.float32))[list(tokenizer.eos_ids)]
    return bool(np.isfinite(ends).all())


def functions() -> tuple[Function, ...]:
    tools = parse_request({"model": "m", "messages": USER, "tools": [WEATHER, CLOCK]}, ChatRequest).tools
    return tuple(tool.function for tool in tools or ())


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_grammars(demo: Session, form: str) -> None:
    kind = TOOL_FORMATS[form]
    good = f'{{"name": "weather", "{kind.key}": {{"city":"Paris","days":3}}}}'
    whole = f"{kind.begin}{kind.opening}{good}{kind.closing}"
    if kind.args:
        whole = f'{kind.begin}weather{kind.args}{{"city":"Paris","days":3}}'
    twice = whole * 2 if kind.separator is None else whole.replace(good, f"{good}, {good}")
    for forced, several in ((False, True), (True, False)):
        grammar = tools_grammar(Tools(functions(), functions(), forced, several), kind, {})
        assert accepts(demo, grammar, whole)
        assert not accepts(demo, grammar, whole.replace("Paris", "Rome"))
        assert not accepts(demo, grammar, whole.replace("weather", "whether"))
        assert accepts(demo, grammar, "Hello there.") == (not forced)
        if kind.begin:
            assert accepts(demo, grammar, f"Let me see. {whole}") == (not forced)
            assert accepts(demo, grammar, twice) == several


def test_arguments_are_those_that_a_function_names(demo: Session) -> None:
    """A function that allows further arguments says so."""
    form, parameters = TOOL_FORMATS["hermes"], {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    for more, others in (({}, False), ({"additionalProperties": True}, True), ({"$ref": "#/$defs/a"}, True)):
        defs = {"$defs": {"a": {"type": "object"}}}
        function = Function(name="f", parameters={**parameters, **more, **defs})
        grammar = tools_grammar(Tools((function,), (function,), True, False), form, {})
        assert accepts(demo, grammar, call % '{"n":3}')
        assert accepts(demo, grammar, call % '{"n":3,"more":4}') == others
    grammar = tools_grammar(Tools(functions(), functions(), False, False), form, {}, parameters)
    assert accepts(demo, grammar, '{"n":3}')  # an answer of a schema, or a call
    assert not accepts(demo, grammar, "Hello")
    assert accepts(demo, grammar, '<tool_call>\n{"name": "clock", "arguments": {"zone":"UTC"}}\n</tool_call>')


def test_a_mark_that_is_a_special_token(tmp_path: pathlib.Path) -> None:
    """The grammar and the answer know the mark by its id, since no text can spell it."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["</s>", "[TOOL_CALLS]"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    source = "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[TOOL_CALLS]' if tools }}{{ messages[-1].content }}"
    prompts = RequestEncoder(ChatTemplate(source, tokenizer), tokenizer, 4096, tokenizer.vocab_size)
    assert prompts.form is TOOL_FORMATS["mistral"]
    assert prompts.marks == {257: "[TOOL_CALLS]"}
    for forced in (False, True):
        tools = Tools(functions(), functions(), forced, several=True)
        grammar = Grammar(tools_grammar(tools, prompts.form, prompts.marks), tokenizer, tokenizer.vocab_size)
        call = '[{"name": "clock", "arguments": {"zone":"UTC"}}]'
        for token in [257, *tokenizer.encode(call, bos=False)]:
            assert np.isfinite(grammar.allowed(np.zeros(258, np.float32))[token])
            grammar.accept(token)
        assert np.isfinite(grammar.allowed(np.zeros(258, np.float32))[list(tokenizer.eos_ids)]).all()


def test_a_template_that_knows_no_tools_has_them_in_words(demo: Session) -> None:
    tokenizer = demo.require_tokenizer()
    call = {"id": "c", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "noon"}]
    prompts = RequestEncoder(ChatTemplate.plain(tokenizer), tokenizer, 4096, tokenizer.vocab_size)
    (prompt,) = prompts.encode(
        parse_request({"model": "m", "messages": [*USER, *messages], "tools": [CLOCK]}, ChatRequest)
    )
    text = tokenizer.decode(prompt.ids)
    assert '"name": "clock"' in text.partition("How is the weather?")[0]
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "<tool_response>\nnoon\n</tool_response>" in text


def test_a_template_renders_the_latest_answers_alone(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes a rendering of all before it, minutes of a core for thousands."""
    tokenizer, render, rendered = demo.require_tokenizer(), ChatTemplate.render, list[None]()

    def counted(*args: Any, **options: Any) -> str:
        rendered.append(None)
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    prompts = RequestEncoder(ChatTemplate.plain(tokenizer), tokenizer, 4096, tokenizer.vocab_size)
    prompts.remember("x", tokenizer.encode("x", bos=False))
    messages = [*USER, {"role": "assistant", "content": "x"}] * 200 + USER
    (prompt,) = prompts.encode(parse_request({"model": "m", "messages": messages}, ChatRequest))
    assert tokenizer.decode(prompt.ids).count("How is the weather?") == 201
    assert len(rendered) <= MAX_REUSED + 2
