"""Chats: conversations of turns, of which only the tokens that are new since the last turn are computed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edgekv.checks import Count, Natural, checked, checked_value, refusal
from edgekv.engine.grammar import Grammar
from edgekv.engine.runner import require_room
from edgekv.engine.sampling import SamplingParams, Settings
from edgekv.engine.session import Session, Step, StepIterator, Stops
from edgekv.engine.tools import (
    AnswerParser,
    Tool,
    Tools,
    find_format,
    json_value,
    special_marks,
    tool_definitions,
    tools_as_text,
    tools_grammar,
)
from edgekv.errors import ConfigError, ContextError, SessionError
from edgekv.text import StreamDecoder, Tokenizer
from edgekv.text.template import PLACEHOLDER, ChatEncoder, ChatTemplate
from edgekv.types import LayerProgress, Path
from edgekv.vision.model import Embeddings, ImagesReport, Prompt, place_images, require_places, require_vision

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_NEW_TOKENS = 1024  # of an answer, where half of the context is not less
RESULT = "{'role': 'tool', 'tool_call_id': ID, 'content': TEXT}"
T = TypeVar("T")


def answer_tokens(ctx: int) -> int:
    """Returns how many tokens an answer has at most by default: half of the context is for what was said."""
    return min(MAX_NEW_TOKENS, max(1, ctx // 2))


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function


class _Turn(msgspec.Struct):
    role: str
    content: str
    ids: list[Natural] = []
    images: list[str] = []
    tool_calls: list[_ToolCall] = []
    tool_call_id: str = ""
    dropped: bool = False


class Chat:
    """A chat with a session's model.

    template: the chat template; None: the model's own, or a plain transcript for a model without one. system: the
    system message of a new chat. tools: functions that answers may call, as OpenAI's API has them: dicts of type
    "function" and function, with its name, description and parameters (a JSON schema). schema: the JSON schema of
    answers, which may be set anew between two. Tools and schemas need the llguidance library.
    The history is in the session's memo: a saved session brings it back, and `Session.reset` forgets it. Methods
    that change it raise SessionError while a text is being generated.
    Where the session's `can_slide`, the oldest questions and answers leave a full context, each as a whole.
    """

    @checked()
    def __init__(
        self,
        session: Session,
        template: ChatTemplate | None = None,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.session, self._tokenizer = session, session.require_tokenizer()
        self.template = template or ChatTemplate.open(self._tokenizer, session.model.tokenizer_path)
        self._encoder = ChatEncoder(self.template, self._tokenizer)
        what = "a list of {'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}"
        functions = tuple(tool.function for tool in _convert(tools, list[Tool], "tools", what))
        self._tools = Tools(functions, functions, forced=False, several=True) if functions else None
        self._form, self.schema = find_format(self.template.source), schema
        self._marks = special_marks(self._tokenizer) if functions else {}
        self._checked: object = None  # the history that was found valid
        self._images: dict[str, Embeddings] = {}  # the images of the history, by their files
        if system and not self.messages:
            self.messages.append({"role": "system", "content": system})

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, oldest first: dicts of role, content, images, an answer's ids or tool_calls, and dropped.

        Raises SessionError where a session file's is damaged.
        """
        messages: list[dict[str, Any]] = self.session.memo.setdefault("messages", [])
        if messages is not self._checked:
            try:
                msgspec.convert(messages, list[_Turn])
            except msgspec.ValidationError as error:
                raise SessionError(f"the session's history is damaged ({error}): start a new session") from None
            self._checked = messages
        return messages

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of the last answer: dicts of id, type, and function, which has name and arguments (a dict)."""
        return list(self.messages[-1].get("tool_calls", ())) if self.messages else []

    @checked()
    def set_system(self, text: str) -> None:
        """Replaces the system message, from the next question on; "" removes it. The chat is then read again."""
        self.session.require_idle()
        self.messages[:] = [message for message in self.messages if message["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    @checked()
    def ask(
        self,
        text: str | Sequence[Mapping[str, Any]],
        *,
        images: Sequence[Path] = (),
        max_new_tokens: Count | None = None,
        sampling: SamplingParams | None = None,
        stop: Stops = (),
        tool_choice: str = "auto",
        progress: LayerProgress | None = None,
        **settings: Unpack[Settings],
    ) -> StepIterator:
        """Asks something; returns an iterator of the answer's tokens. Where the caller stops, the answer ends.

        text: the question, or results of `tool_calls`: dicts of role "tool", tool_call_id and content, a text. The
        steps' texts are without calls. images: files that the message shows, before its text where that has no
        `<image>` for each. max_new_tokens: None, `answer_tokens` of the context. tool_choice: whether the answer
        calls tools: "auto", "none", "required", or a name of one. The other arguments are those of
        `Session.generate`. Raises ContextError for a message that does not fit, ImageError for a model that takes
        no images.
        """
        how: dict[str, Any] = {"sampling": sampling, "progress": progress, "tool_choice": tool_choice, **settings}
        if not isinstance(text, str):
            added = self._results(text)
            return self._answer([*self.messages, *added], max_new_tokens, stop, **how)
        message: dict[str, Any] = {"role": "user", "content": text}
        if images:
            require_vision(self.session.model)
            if PLACEHOLDER not in text:
                message["content"] = f"{PLACEHOLDER}\n" * len(images) + text
            message["images"] = list(map(str, images))
        return self._answer([*self.messages, message], max_new_tokens, stop, **how)

    def aask(self, text: str | Sequence[Mapping[str, Any]], **options: Any) -> AsyncSteps:
        """Asks as `ask` does, with the same options, in a thread; yields the tokens, while the event loop goes on.

        Where the task is cancelled, or the loop over the tokens left, the answer ends.
        """
        progress = checked_value("progress", options.pop("progress", None), LayerProgress | None)
        ended = threading.Event()

        def report(done: int, total: int) -> None:
            if ended.is_set():
                raise SessionError("the answer was cancelled")
            if progress is not None:
                progress(done, total)

        def steps() -> StepIterator:
            yield from self.ask(text, progress=report, **options)

        return AsyncSteps(steps(), ended)

    @checked()
    def retry(
        self,
        *,
        max_new_tokens: Count | None = None,
        sampling: SamplingParams | None = None,
        stop: Stops = (),
        tool_choice: str = "auto",
        progress: LayerProgress | None = None,
        **settings: Unpack[Settings],
    ) -> StepIterator:
        """Answers the last question again; returns an iterator, whose first token replaces the answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SessionError("there is no answer to try again: ask something first")
        how: dict[str, Any] = {"sampling": sampling, "progress": progress, "tool_choice": tool_choice, **settings}
        return self._answer(self.messages[:-1], max_new_tokens, stop, **how)

    def undo(self) -> str:
        """Takes back the last question with its answer; returns the question. Raises SessionError for none."""
        self.session.require_idle()
        begin = _last_question(self.messages)
        if begin is None:
            raise SessionError("there is no question to take back: ask something first")
        *kept, question = self.messages[: begin + 1]
        before = self._prompt([*kept, {"role": "user", "content": ""}])
        self.session.rewind(self.session.shared_prefix(before))
        self.messages[:] = kept
        return str(question["content"])

    def clear(self) -> None:
        """Forgets all but the system message."""
        system = _system(self.messages)
        self.session.reset()
        self.messages[:] = system

    def _answer(
        self,
        history: Sequence[dict[str, Any]],
        max_new_tokens: int | None,
        stop: Stops,
        tool_choice: str,
        **how: Any,
    ) -> StepIterator:
        self.session.require_idle()
        max_new_tokens = max_new_tokens or answer_tokens(self.session.plan.ctx)
        tools = self._tools_for(tool_choice)
        messages = [dict(message) for message in history]  # the chat's from the first step on
        images = self._read_images(messages)
        prompt, room = self._fit(messages, max_new_tokens)
        stops = *self.template.stops, *((stop,) if isinstance(stop, str) else stop)
        how |= {"stop": stops, "max_new_tokens": min(room, max_new_tokens)}
        if tools:
            grammar = tools_grammar(tools, self._form, self._marks, self.schema)
            how["constraint"] = Grammar(grammar, self._tokenizer, self.session.config.vocab_size)
        else:
            how["json_schema"] = self.schema
        steps = self.session.generate(self.session.align(prompt), **how)
        self.session.report().images = images
        return self._collect(messages, steps, tools, ends_full=room < max_new_tokens)

    def _tools_for(self, choice: str) -> Tools | None:
        """Returns the tools that an answer may call. Raises ConfigError for an unknown ``choice``."""
        choices: dict[str, Tools | None] = {"auto": self._tools, "none": None}
        if self._tools:
            all_of_them = self._tools.functions
            for name, can in (("required", all_of_them), *((f.name, (f,)) for f in all_of_them)):
                choices[name] = Tools(all_of_them, can, forced=True, several=False)
        if choice not in choices:
            raise refusal("tool_choice", choice, ", ".join(choices))
        return choices[choice]

    def _results(self, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages of results. Raises ConfigError for other than those of the last answer's calls."""
        ids = [call["id"] for call in self.tool_calls]
        accepted = "a text; a list only for results of `tool_calls`, and the last answer has none"
        if ids:
            accepted = f"a text, or a list of {RESULT}, where ID is {' or '.join(ids)}"
        turns = _convert(results, list[_Turn], "text", accepted)
        if not turns or any(turn.role != "tool" or turn.tool_call_id not in ids for turn in turns):
            raise ConfigError(field="text", value=results, accepted=[accepted])
        return [{"role": "tool", "tool_call_id": turn.tool_call_id, "content": turn.content} for turn in turns]

    def _fit(self, messages: list[dict[str, Any]], max_new_tokens: int) -> tuple[Prompt, int]:
        """Returns the whole prompt, and how many tokens of an answer have room beside the question.

        Drops the oldest turns where prompt and answer are too long together, if they may leave. Raises
        ContextError for a question that does not fit.
        """
        prompt, session, ctx = self._prompt(messages), self.session, self.session.plan.ctx
        if not session.can_slide:
            require_room(_length(prompt), ctx, session.config.max_positions)
        if not session.can_slide or _length(prompt) + max_new_tokens <= ctx:
            return prompt, max_new_tokens
        alone = _length(self._prompt([*_system(messages), *messages[_last_question(messages) or 0 :]]))
        if alone > ctx:
            with_system = " with the system message" if _system(messages) else ""
            problem, most = f"the message has {alone} tokens{with_system}", session.config.max_positions
            accepted = [f"{min(2 * alone, most)} to {most}"] if alone <= most else []  # with room for an answer
            raise ContextError(problem, field="ctx", value=ctx, accepted=accepted, advice="shorten the message")
        if _length(prompt) + min(max_new_tokens, ctx // 4) > ctx:
            prompt = self._trim(messages)
        return prompt, ctx - alone + 1

    def _trim(self, messages: list[dict[str, Any]], answer: Sequence[int] = ()) -> Prompt:
        """Drops the oldest turns until half of the context is free, or one is left; returns prompt and answer."""
        prompt = self._prompt(messages)
        while _length(prompt) + len(answer) > self.session.plan.ctx // 2 and _drop_oldest(messages):
            prompt = self._prompt(messages)
        return [*prompt, *answer]

    def _prompt(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """Returns the prompt with its images. Raises ImageError where it lacks a place for each."""
        ids, files = self._ids(messages), _files(messages)
        if not files:
            return ids
        _, token = require_vision(self.session.model)
        require_places(ids, token, len(files))
        return place_images(ids, token, [self._images[file] for file in files], 0)

    def _read_images(self, messages: Sequence[dict[str, Any]]) -> ImagesReport | None:
        """Reads the images that were not read before; returns a report on them, or None."""
        files = dict.fromkeys(_files(messages))
        self._images = {file: rows for file, rows in self._images.items() if file in files}
        new = [file for file in files if file not in self._images]
        if not new:
            return None
        _, token = require_vision(self.session.model)
        with self.session.exclusive():
            rows, report = self.session.vision.place_images([token] * len(new), new, None)
        self._images |= {file: row for file, row in zip(new, rows, strict=True) if isinstance(row, Embeddings)}
        return report

    def _ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        shown = [message for message in messages if not message.get("dropped")]
        names = None
        if not self.template.knows_tools:
            shown = tools_as_text(shown, self._tools, self._form)
        elif self._tools:
            names = {"tools": tool_definitions(self._tools.functions)}
        return self._encoder.ids(shown, lambda i: shown[i].get("ids"), names)

    def _collect(
        self, messages: list[dict[str, Any]], steps: StepIterator, tools: Tools | None, *, ends_full: bool
    ) -> StepIterator:
        """Passes the steps on, then writes question and answer to the history, if there were any.

        ends_full: whether max_new_tokens is what the context had room for.
        """
        history, ctx, forced = list(self.messages), self.session.plan.ctx, bool(tools and tools.forced)
        plain = bool(self._form.begin) and not forced
        parser = AnswerParser(form=self._form if tools else None, forced=forced, plain=plain)
        taken: list[Step] = []
        self.messages[:] = messages
        try:
            with contextlib.closing(steps):
                for step in steps:
                    taken.append(step)
                    if ends_full and step.finish_message == "max_new_tokens":
                        self.session.report().finish_message = full = f"context full ({ctx} tokens)"
                        step = dataclasses.replace(step, finish_message=full)
                    if tools:
                        text = step.text + self._marks.get(step.token, "")
                        deltas = parser.push(text, last=step.finish_reason is not None)
                        text = "".join(delta.get("content", "") for delta in deltas)
                        step = dataclasses.replace(step, text=text)
                    yield step
                    if self.session.can_slide and not step.finish_reason and len(self.session.tokens) > ctx:
                        self.session.replace(self._trim(messages, [step.token for step in taken]))
        finally:
            with contextlib.suppress(SessionError):  # the session was closed meanwhile
                try:
                    history = [*messages, self._answer_message(taken, parser)] if taken else history
                finally:
                    self.messages[:] = history

    def _answer_message(self, steps: Sequence[Step], parser: AnswerParser) -> dict[str, Any]:
        """Returns the message of an answer, after a rewind to the end of its text; a call that was cut is text."""
        text, tokens = "".join(step.text for step in steps), [step.token for step in steps]
        ids = answer_ids(self._tokenizer, tokens, text)
        self.session.rewind(len(self.session.tokens) - len(tokens) + len(ids))
        calls = [
            {**call, "function": {"name": function["name"], "arguments": arguments}}
            for call in parser.calls
            if (arguments := json_value((function := call["function"])["arguments"])) is not None
        ]
        if calls:  # whose tokens a template writes in its own way
            return {"role": "assistant", "content": parser.content.strip(), "tool_calls": calls}
        return {"role": "assistant", "content": text.strip(), "ids": ids}


class AsyncSteps:
    """An answer's tokens for `async for`, computed in a thread. ended: is set where it is closed or dropped."""

    def __init__(self, steps: StepIterator, ended: threading.Event) -> None:
        self._steps, self._ended, self._pool = steps, ended, ThreadPoolExecutor(1, "edgekv-chat")

    def __aiter__(self) -> AsyncSteps:
        return self

    async def __anext__(self) -> Step:
        import asyncio  # which takes time that programs without coroutines need not spend

        try:
            step = await asyncio.get_running_loop().run_in_executor(self._pool, next, self._steps, None)
            if step is None:
                raise StopAsyncIteration
        except BaseException:
            await self.aclose()
            raise
        return step

    def __del__(self) -> None:
        self._ended.set()
        with contextlib.suppress(ValueError):  # it is computing, and is dropped then
            self._steps.close()

    async def aclose(self) -> None:
        """Ends the answer."""
        import asyncio

        self._ended.set()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._pool, self._steps.close))


def _convert(value: Any, kind: type[T], field: str, accepted: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(field=field, value=value, accepted=[accepted]) from None


def _system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] == "system"]


def _last_question(messages: Sequence[dict[str, Any]]) -> int | None:
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)


def _files(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [file for message in messages if not message.get("dropped") for file in message.get("images", ())]


def _length(prompt: Prompt) -> int:
    return sum(len(piece.rows) if isinstance(piece, Embeddings) else 1 for piece in prompt)


def _drop_oldest(messages: Sequence[dict[str, Any]]) -> bool:
    """Drops the oldest question and its answer; returns False where it is the last one."""
    turns = [i for i, m in enumerate(messages) if m["role"] != "system" and not m.get("dropped")]
    later = [i for i in turns[1:] if messages[i]["role"] == "user"]
    for i in turns:
        if later and i < later[0]:
            messages[i]["dropped"] = True
    return bool(later)


def answer_ids(tokenizer: Tokenizer, generated: Sequence[int], text: str) -> list[int]:
    """Returns the generated tokens that an answer's ``text`` consists of, without its end or a stop string."""
    stream, length = StreamDecoder(tokenizer, at_start=False), 0
    for n, token in enumerate(generated):
        length += len(stream.push(token))
        if token in tokenizer.eos_ids or length > len(text):
            return list(generated[:n])
    return list(generated)
