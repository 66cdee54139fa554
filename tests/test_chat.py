"""Chat: templates in a sandbox, turns that reuse the cache on every scheme, the terminal with a real Ctrl-C."""

import asyncio
import contextlib
import copy
import functools
import io
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
from helpers import SESSION_KV, Cli, n_cached, raises, text_of
from serving import TOOL_TEMPLATE

from edgekv import SamplingParams, Session
from edgekv.engine.chat import Chat, answer_ids
from edgekv.errors import ConfigError, ContextError, SessionError
from edgekv.text import load_tokenizer
from edgekv.text.template import ChatEncoder, ChatTemplate, find_template

TAGGED = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('the system message comes first') }}
    {%- endif %}
{{- '<|' + message.role + '|>\n' + message.content | trim + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
BRACKETS = """\
{{ bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
REASONED = TAGGED.replace("message.content | trim", "message.content.split('</think>')[-1]")
TEMPLATES = {"tagged": TAGGED, "brackets": BRACKETS}


@pytest.fixture(scope="module")
def folder(stories: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose answers end: every full stop is its end-of-text token."""
    folder = pathlib.Path(shutil.copytree(stories, tmp_path_factory.mktemp("chat") / "m"))
    stop = load_tokenizer(stories).encode("park.", bos=False)[-1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop], "do_sample": False}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TAGGED}))
    return folder


@pytest.fixture(scope="module")
def loaded(folder: pathlib.Path) -> Session:
    return Session.load(folder, ctx=512)


def chat(session: Session, template: str | None = None, system: str | None = None) -> Chat:
    return Chat(session, template and ChatTemplate(template, session.require_tokenizer()), system)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_computes_only_what_is_new(loaded: Session, template: str) -> None:
    session = loaded.fork(kv="dense:dtype=f32")
    talk, fed = chat(session, TEMPLATES[template]), []
    for question in ("Once upon a time", "Who was there", "And then"):
        before = n_cached(session)
        steps, report = list(talk.ask(question, max_new_tokens=80)), session.report()
        fed.append(report.prefill_tokens)
        assert steps[-1].finish_message in ("end of text", "max_new_tokens")
        assert n_cached(session) == before + report.prefill_tokens + len(report.decode_latencies_s)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 3
    fresh, tokens, answer = loaded.fork(kv="dense:dtype=f32"), session.tokens, talk.messages[-1]["ids"]
    question = tokens[: len(tokens) - len(answer)]
    assert [s.token for s in fresh.generate(question, max_new_tokens=80, temperature=0.0)][: len(answer)] == answer
    assert max(fed) < 60


def test_the_cache_holds_what_the_template_writes(loaded: Session) -> None:
    """The tokens that were fed, decoded, are the rendered conversation."""
    session = loaded.fork()
    talk = chat(session, system="Be brief.")
    for question in ("Tom went", "Lily saw"):
        list(talk.ask(question, max_new_tokens=60))
    rendered = talk.template.render(talk.messages, add_generation_prompt=False)
    text = session.require_tokenizer().decode(session.tokens)
    assert text.split() == rendered.replace("</s>", "").split()


@pytest.mark.parametrize("kv", [kv for kv in SESSION_KV if kv != "h1b"])
def test_retry_and_rewind_on_every_scheme(loaded: Session, kv: str) -> None:
    session = loaded.fork(kv=kv)
    talk = chat(session)
    first = text_of(talk.ask("One day, a little girl named Lily", max_new_tokens=30))
    second = text_of(talk.ask("She had a friend", max_new_tokens=30))
    again = text_of(talk.retry(max_new_tokens=30))
    assert session.report().prefill_tokens == 1
    assert again == second
    other = text_of(talk.retry(max_new_tokens=30, sampling=SamplingParams(temperature=1.5, seed=1)))
    assert other != second
    assert [m["content"] for m in talk.messages][1::2] == [first.strip(), other.strip()]


def test_stopping_an_answer_keeps_what_was_said(loaded: Session) -> None:
    session = loaded.fork()
    talk = chat(session)
    steps = talk.ask("Once upon a time", max_new_tokens=50)
    text = text_of(next(steps) for _ in range(7))
    steps.close()
    assert talk.messages[-1]["content"] == text.strip()
    assert len(talk.messages[-1]["ids"]) == 7
    list(talk.ask("Go on", max_new_tokens=5))
    assert session.report().prefill_tokens < 40


def test_a_question_is_taken_back(loaded: Session) -> None:
    """As if it had never been asked, with its answer's tokens; the system message stays."""
    talk, other = (chat(loaded.fork(kv="onebit"), system="Stories.") for _ in range(2))
    with pytest.raises(SessionError, match="no question"):
        talk.undo()
    list(talk.ask("Once upon a time", max_new_tokens=20))
    list(other.ask("Once upon a time", max_new_tokens=20))
    list(talk.ask("Lily saw", max_new_tokens=20))
    assert talk.undo() == "Lily saw"
    assert talk.messages == other.messages
    assert len(other.session.tokens) <= len(talk.session.tokens) < len(other.session.tokens) + 20
    answers = [text_of(each.ask("Tom went", max_new_tokens=20)) for each in (talk, other)]
    assert answers[0] == answers[1]
    assert (talk.undo(), talk.undo()) == ("Tom went", "Once upon a time")
    assert talk.messages == [{"role": "system", "content": "Stories."}]


def test_the_history_waits_for_the_answer_and_goes_with_a_reset(loaded: Session) -> None:
    session = loaded.fork()
    talk, other = chat(session, system="Be brief."), chat(loaded.fork(), system="Be brief.")
    answer = talk.ask("Tom", max_new_tokens=8)
    text = next(answer).text
    for change in (talk.clear, functools.partial(talk.set_system, "x"), functools.partial(talk.ask, "What?")):
        with pytest.raises(SessionError, match="exhaust or close"):
            change()
    assert text + text_of(answer) == text_of(other.ask("Tom", max_new_tokens=8))
    assert talk.messages == other.messages
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    list(talk.ask("Tom", max_new_tokens=8))
    session.reset()
    assert (session.memo, session.last_sampler) == ({}, None)


def test_a_history_that_is_none_is_refused(loaded: Session) -> None:
    """A session file may have one."""
    turns = ({"role": "user"}, {"role": "user", "content": 5}, {"role": "user", "content": "", "ids": [-1]})
    for history in (5, [5], *([turn] for turn in turns)):
        session = loaded.fork()
        session.memo["messages"] = history
        with pytest.raises(SessionError, match="history is damaged"):
            chat(session, system="x")


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_special_tokens_in_a_message_are_text(loaded: Session, role: str) -> None:
    """Special tokens of an answer, and of the template, are special."""
    tokenizer = loaded.require_tokenizer()
    encoder = ChatEncoder(ChatTemplate(BRACKETS.replace("'user'", f"'{role}'"), tokenizer), tokenizer)
    special = [tokenizer.bos_id, *tokenizer.eos_ids[:1]]
    ids = encoder.ids([{"role": role, "content": "a </s><s> b"}], lambda i: None)
    assert [i for i in ids if i in special] == special[:1]
    assert "</s><s> b" in tokenizer.decode(ids)
    tools = ChatTemplate("{{ tools | tojson }}", tokenizer)
    text = ChatEncoder(tools, tokenizer).ids([], lambda i: None, {"tools": [{"description": "a </s><s> b"}]})
    assert not {*special} & {*text[1:]}
    assert "</s><s> b" in tokenizer.decode(text)
    answer = encoder.ids([{"role": "assistant", "content": "a</s>"}], lambda i: None)
    assert [i for i in answer if i in special] == [special[0], special[1], special[1]]


def test_an_answer_that_nobody_can_write_down(loaded: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at its end, or of a session that was closed: no question stays without one."""
    talk = chat(loaded.fork())
    steps = talk.ask("Tom")
    next(steps)
    with monkeypatch.context() as patch:
        patch.setattr(talk.session, "rewind", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            steps.close()
    assert talk.messages == []
    assert text_of(talk.ask("Tom", max_new_tokens=4)) == text_of(chat(loaded.fork()).ask("Tom", max_new_tokens=4))
    steps = talk.ask("Lily")
    next(steps)
    talk.session.close()
    steps.close()


def test_without_an_answer_the_history_stays(loaded: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is too long, or it or a retry is refused, interrupted in its prompt, or never begun."""
    talk = chat(loaded.fork(ctx=128), system="Stories.")
    first = text_of(talk.ask("Tom", max_new_tokens=8))
    before = copy.deepcopy(talk.messages)
    with raises(ContextError, field="ctx"):
        talk.ask("word " * 60)
    assert talk.messages == before
    for answer in (talk.retry, functools.partial(talk.ask, "Lily")):
        with raises(ConfigError, field="max_new_tokens"):
            answer(max_new_tokens=0)
        assert talk.messages == before
        with monkeypatch.context() as patch:
            patch.setattr(talk.session.caches[0], "attend", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(answer())
        assert talk.messages == before
        answer().close()
        assert talk.messages == before
    assert text_of(talk.retry(max_new_tokens=8)) == first
    assert talk.messages == before


def test_the_history_is_saved_and_taken_up(loaded: Session, tmp_path: pathlib.Path) -> None:
    session = loaded.fork(kv="onebit")
    talk = chat(session, system="Stories.")
    list(talk.ask("Once upon a time", max_new_tokens=30))
    session.save(tmp_path / "chat")
    again = chat(Session.restore(tmp_path / "chat", loaded), system="ignored: there is a history")
    assert again.messages == talk.messages
    assert text_of(again.ask("And then", max_new_tokens=30)) == text_of(talk.ask("And then", max_new_tokens=30))
    assert again.session.report().prefill_tokens < 40
    talk.clear()
    assert [m["role"] for m in talk.messages] == ["system"]
    assert n_cached(session) == 0


CLOCK = {"name": "clock", "parameters": {"properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}}
TOOLS = [{"type": "function", "function": CLOCK}]


def calls(session: Session) -> SamplingParams:
    """Returns settings of answers that call: where schemas hold for what is none, it begins with a brace."""
    tokenizer = session.require_tokenizer()
    braces = [i for i in range(tokenizer.vocab_size) if b"{" in tokenizer.token_bytes(i)]
    return SamplingParams(0.0, logit_bias=dict.fromkeys(braces, -100))


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TAGGED.replace("eos_token", "''")])
def test_a_function_is_called(demo: Session, template: str, tmp_path: pathlib.Path) -> None:
    """By templates with and without tools: the call is data, its result is read, and a session file has both."""
    written = ChatTemplate(template, demo.require_tokenizer())
    talk = Chat(demo.fork(), written, "A clerk.", tools=TOOLS, schema={"type": "object"})
    assert text_of(talk.ask("How late is it?", max_new_tokens=100, sampling=calls(demo))) == ""
    (call,) = talk.tool_calls
    assert call["function"]["name"] == "clock"
    assert call["function"]["arguments"]["zone"] in ("UTC", "CET")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is noon."}
    user = {"role": "user", "content": ""}
    for bad in ([], [result | {"tool_call_id": "x"}], [result | {"content": 12}], [user]):
        with raises(ConfigError, field="text", match=call["id"]):
            talk.ask(bad)
    talk.schema = None
    assert text_of(talk.ask([result], max_new_tokens=8, tool_choice="none"))
    assert talk.session.report().prefill_tokens < 90  # all but the tools' declarations, at most
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "tool", "assistant"]
    text = demo.require_tokenizer().decode(talk.session.tokens)
    places = [text.index(part) for part in ('"zone": {"enum"', "How late is it?", '"zone": "', "noon")]
    assert places == sorted(places)
    assert talk.tool_calls == []
    talk.session.save(tmp_path / "talk")
    again = Chat(Session.restore(tmp_path / "talk", demo), talk.template)
    assert again.messages == talk.messages
    assert again.undo() == "How late is it?"
    assert [m["role"] for m in again.messages] == ["system"]


def test_a_function_must_be_called(demo: Session) -> None:
    """The named one of two, without a bias towards calls and with no text before; or any."""
    tools = [{"type": "function", "function": {**CLOCK, "name": name}} for name in ("bell", "clock")]
    talk = Chat(demo.fork(), tools=tools)
    for choice in ("clock", "required"):
        assert text_of(talk.ask("How late is it?", max_new_tokens=100, tool_choice=choice)) == ""
        (call,) = talk.tool_calls
        assert call["function"]["name"] in (("clock",) if choice == "clock" else ("bell", "clock"))
        talk.undo()
    for chat, accepted in ((talk, "required, bell, clock"), (Chat(demo.fork()), "auto, none$")):
        with raises(ConfigError, field="tool_choice", match=accepted):
            chat.ask("How late is it?", tool_choice="watch")


def test_a_call_that_is_cut_off_is_none(demo: Session) -> None:
    talk = Chat(demo.fork(), tools=TOOLS, schema={"type": "object"})
    steps = list(talk.ask("How late is it?", max_new_tokens=14, sampling=calls(demo)))
    assert steps[-1].finish_reason == "length"
    assert talk.tool_calls == []
    assert talk.messages[-1]["content"].startswith("<tool_call>")


def test_tools_and_schemas_are_refused_before_work(demo: Session) -> None:
    for tools in ("x", [5], [CLOCK], [{"type": "function", "function": {"name": "a b"}}]):
        with raises(ConfigError, field="tools"):
            Chat(demo.fork(), tools=tools)
    talk = Chat(demo.fork(), schema={"type": "nothing"})
    with pytest.raises(ConfigError, match="schema can't be followed"):
        talk.ask("What?")
    assert (talk.messages, talk.session.tokens) == ([], [])
    fields = {"properties": {"a": {"const": 1}}, "required": ["a"]}
    talk.schema = {"type": "object", "additionalProperties": False, **fields}
    assert json.loads(text_of(talk.ask("Is it?"))).keys() == {"a"}


@pytest.mark.parametrize("n_layers", [1, 10**9])
def test_answers_for_coroutines(demo: Session, n_layers: int) -> None:
    """Cancelled within its prompt, or after three tokens, an answer leaves a chat to go on with."""
    greedy = SamplingParams(0.0)

    async def main() -> None:
        talk, other, reached = Chat(demo.fork()), Chat(demo.fork()), asyncio.Event()
        text = "".join([step.text async for step in talk.aask("Who?", max_new_tokens=12, sampling=greedy)])
        assert text == text_of(other.ask("Who?", max_new_tokens=12, sampling=greedy))
        with raises(ConfigError, field="max_new_tokens"):
            await anext(talk.aask("x", max_new_tokens=0))
        loop, go_on, seen = asyncio.get_running_loop(), threading.Event(), list[str]()

        def progress(done: int, total: int) -> None:
            if done >= n_layers:
                loop.call_soon_threadsafe(reached.set)
                assert go_on.wait(60)

        async def ask() -> None:
            async for step in talk.aask("And who came then, over the sea?", progress=progress):
                seen.append(step.text)
                if len(seen) == 3:
                    reached.set()

        task = asyncio.ensure_future(ask())
        await reached.wait()
        task.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(talk.messages), len(seen) >= 3) == ((2, False) if n_layers == 1 else (4, True))
        async with contextlib.aclosing(talk.aask("And then?")) as steps:
            await anext(steps)
        talk.session.require_idle()
        async for _ in talk.aask("And who?"):
            break
        assert talk.messages[-2]["content"] == "And who?"
        talk.session.require_idle()

    asyncio.run(main())


def test_answer_ids_end_where_the_text_ends(loaded: Session) -> None:
    tokenizer = loaded.require_tokenizer()
    ids, more = (tokenizer.encode(text, bos=False) for text in ("a big park", " and more"))
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
    for made in (ids, [*ids, 2, 5], ids + more):
        assert answer_ids(tokenizer, made, whole) == ids


def test_a_template_that_changes_answers_is_obeyed(loaded: Session) -> None:
    """Reasoning that the template drops from earlier answers leaves the cache too."""
    tokenizer = loaded.require_tokenizer()
    encoder = ChatEncoder(ChatTemplate(REASONED, tokenizer), tokenizer)
    talk = ("user", "Tom"), ("assistant", "hmm</think>Lily"), ("user", "Who")
    messages = [{"role": role, "content": content} for role, content in talk]
    ids = encoder.ids(messages, lambda i: [5, 6, 7] if i == 1 else None)
    assert "hmm" not in tokenizer.decode(ids)
    assert ids == encoder.ids(messages, lambda i: None)


def test_where_templates_are_found(tmp_path: pathlib.Path) -> None:
    assert find_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    (tmp_path / "tokenizer.model").touch()
    assert find_template(tmp_path) == find_template(tmp_path / "tokenizer.model") == "one"
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert find_template(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert find_template(tmp_path) == "four"
    (tmp_path / "chat_template.jinja").unlink()
    for declared in ("", '[{"template": "x"}]', "[3]", '[{"name": [], "template": 1}]', "[" * 9000):
        config.write_text(f'{{"chat_template": {declared}}}')
        with pytest.raises(ConfigError, match="chat template can't be read"):
            find_template(tmp_path)


USED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ {'é': [1]} | tojson }}{{ strftime_now('%Y') | length }}{{ bos_token }}"
)


def test_functions_that_templates_use(loaded: Session) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(USED, loaded.require_tokenizer()).render(messages) == 'b{"é": [1]}4<s>'


def edgekv(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "edgekv", "chat", *map(str, arguments)]


def typed(lines: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(edgekv(*arguments), input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_the_terminal(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    lines = f"Once upon a time\n/retry\n/save {tmp_path / 'a'}\nAnd then\n/load {tmp_path / 'a'}\n/history\n"
    lines += f"/load {tmp_path}/none\n/clear\n/retry\n\n/exit\nnever read\n"
    done = typed(lines, "--model", folder, "--ctx", 512, "--kv", "onebit", "--greedy", "--system", "Stories.")
    answers = done.stdout.splitlines()
    assert answers[0] == answers[1] != ""
    history = done.stderr[done.stderr.index("system: Stories.") :].splitlines()
    assert history[1:3] == ["user: Once upon a time", f"assistant: {answers[0].strip()}"]
    assert "there is no such file" in history[3]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ctx", [256, 64])
def test_load_takes_the_files_scheme_and_context(ctx: int, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "talk.kv"
    with Session.load(folder, ctx=128, kv="onebit") as session:
        list(Chat(session).ask("Once", max_new_tokens=4))
        session.save(path)
    lines = f"/load {path}\nAnd then\n/save {tmp_path / 'again'}\n/exit\n"
    done = typed(lines, "--model", folder, "--ctx", ctx, "--kv", "q4", "--greedy", "--max-new-tokens", 4)
    if ctx < 128:
        assert f"{path}: has a context of 128, more than this chat; open it in a chat" in done.stderr
        assert f"edgekv chat {folder} --session {path}" in done.stderr
        return
    assert f"{path}: 2 messages" in done.stderr
    assert "of 128 tokens, kv onebit" in done.stderr
    with Session.restore(tmp_path / "again", folder) as session:
        assert (len(Chat(session).messages), session.plan.ctx, session.plan.kv.short) == (4, 128, "onebit")


def test_ctrl_c_stops_an_answer_and_keeps_the_session(stories: pathlib.Path, tmp_path: pathlib.Path) -> None:
    session, pipe = ["--session", tmp_path / "session"], subprocess.PIPE
    command = edgekv("--model", stories, "--device", "numpy", *session, "--max-new-tokens", 400)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Once upon a time\n")
        process.stdin.flush()
        process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        process.stdout.readline()
        _, errors = process.communicate(b"/history\n/exit\n", timeout=60)
    assert process.returncode == 0
    assert errors.count(b"(stopped") == 1
    assert b"\n(stopped)\n" in errors
    assert b"plain User/Assistant transcript" in errors
    assert b"user: Once upon a time\nassistant: " in errors
    session = Session.restore(tmp_path / "session", stories)
    assert len(session.memo["messages"]) == 2


def test_an_answer_leaves_half_of_the_context(folder: pathlib.Path) -> None:
    """Unless its length is said; the turn before is then still there."""
    with Session.load(folder, ctx=256, overflow="slide") as session:
        said = chat(session, TAGGED)
        bias = dict.fromkeys(session.require_tokenizer().eos_ids, -100.0)
        assert len(list(said.ask("Once", seed=1, logit_bias=bias))) == 128
        next(said.ask("More", max_new_tokens=1))
        assert not any(message.get("dropped") for message in said.messages)


def test_no_other_file_is_overwritten(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A text of `run` would be lost in a chat, and notes under a session."""
    text, notes = tmp_path / "text.kv", tmp_path / "notes.txt"
    cli("run", "demo", "It was", "--session", text, "-n", "2", "--ctx", "64")
    notes.write_text("notes")
    before = text.read_bytes()
    assert f"edgekv run --session {text}" in cli("chat", "demo", "--session", text, status=2, notes=2).err
    talk = tmp_path / "talk.kv"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/save {notes}\nhello\n"))
    said = cli("chat", "demo", "--ctx", "64", "-n", "2", "--session", talk)
    assert "holds something else than a session" in said.err
    assert (text.read_bytes(), notes.read_text()) == (before, "notes")
    assert f"edgekv chat --session {talk}" in cli("run", "demo", "x", "--session", talk, status=2).err
