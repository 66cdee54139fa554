"""Features over families: each kind of model through the server, chat, files, slots, drafts, LoRAs and commands.

Of all pairs of a feature and a family those in which one is most likely to break the other, each feature with two
families or more and each family with four features or more. What other tests do of a pair is not repeated here.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import golden_cases
import lora_cases
import numpy as np
import pytest
import vision_cases
from helpers import text, text_of
from PIL import Image
from slot_cases import SLOTS, at_once
from starlette.testclient import TestClient
from tiny_models import tiny_model

from edgekv import SamplingParams, Session
from edgekv.engine.chat import Chat
from edgekv.server.app import build_app
from edgekv.server.engine import Engine
from edgekv.server.limits import ServerLimits
from edgekv.text.template import ChatTemplate, find_template

KV = "planes:residual_length=16"  # so that much of a short text is packed
EXACT = "dense:dtype=f32"  # where a text that is read again has to be the same
PIXELS = vision_cases.pixels(*vision_cases.SIZES[0])
LONG = "The ship went out to sea, and the rain fell on the road; nobody had seen the boat. " * 3
GREEDY = SamplingParams(temperature=0.0)
Folder = Callable[[str], pathlib.Path]
Loaded = Callable[..., Session]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return functools.partial(tiny_model, factory=tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Iterator[Loaded]:
    """A family's name and options -> a session on the model, the same for equal options: to be forked."""
    with contextlib.ExitStack() as held:

        @functools.cache
        def load(name: str, **options: Any) -> Session:
            return held.enter_context(Session.load(folder(name), **{"kv": KV} | options))

        yield load


def template_of(session: Session) -> ChatTemplate:
    source = find_template(session.model.path)
    assert source is not None
    return ChatTemplate(source, session.require_tokenizer())


@contextlib.contextmanager
def served(session: Session) -> Iterator[TestClient]:
    """Opens the server's endpoints, without a socket."""
    engine = Engine(session.fork(), template_of(session), queue_limit=4, pool_bytes=0, max_new_tokens=12)
    app = build_app(engine, "m", api_key=None, hosts=None, limits=ServerLimits())
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(f"/v1/{path}", json={"model": "m"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, path: str, **body: Any) -> list[Any]:
    """Returns the events of a stream."""
    answer = client.post(f"/v1/{path}", json={"model": "m", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def picture() -> str:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "llava"])
def test_a_streamed_chat_with_timings(name: str, loaded: Loaded) -> None:
    """The page asks so; the text is a chat's, and all counts of tokens agree."""
    session = loaded(name)
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": picture()}}] if name == "llava" else []
    parts.append({"type": "text", "text": LONG})
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0,
        "return_progress": True, "timings_per_token": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    alone, words = session.fork(), ("<image>\n" if name == "llava" else "") + LONG
    rendered = template_of(session).render([{"role": "user", "content": words}])
    prompt = alone.encode_prompt(rendered.removeprefix("<s>"), [Image.fromarray(PIXELS)] * (name == "llava"))
    expected = text_of(alone.generate(prompt, max_new_tokens=12, temperature=0.0))
    with served(session) as client:
        first, second = (streamed(client, "chat/completions", **body) for _ in range(2))
    deltas = [chunk["choices"][0]["delta"] for chunk in first if chunk.get("choices")]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected
    told = [chunk["prompt_progress"] for chunk in first if "prompt_progress" in chunk][-1]
    n_prompt = len(alone.tokens) - 12
    assert (told["total"], told["processed"], told["cache"]) == (n_prompt, n_prompt, 0)
    for chunks, cached in ((first, 0), (second, n_prompt - 1)):
        timings = [chunk["timings"] for chunk in chunks if "timings" in chunk][-1]
        usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
        assert timings["predicted_n"] == usage["completion_tokens"] == 12
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"] == n_prompt
        assert cached - 64 - 2 * 16 <= timings["cache_n"] <= cached  # a block, and two exact windows of KV
        assert 0 < timings["kv_cache_bytes"] < timings["kv_cache_f16_bytes"]


@pytest.mark.parametrize("name", ["lfm2", "mixtral", "llava"])
def test_the_next_turn_reads_only_what_is_new(name: str, loaded: Loaded) -> None:
    """A stream brings the text of the whole answer."""
    image = [{"type": "image_url", "image_url": {"url": picture()}}] if name == "llava" else []
    talk: list[Any] = [{"role": "user", "content": [*image, {"type": "text", "text": LONG}]}]
    options = {"temperature": 0, "max_tokens": 12}
    with served(loaded(name, kv=EXACT)) as client:
        whole = ask(client, "chat/completions", messages=talk, **options)
        answer = whole["choices"][0]["message"]
        chunks = streamed(client, "chat/completions", messages=talk, **options)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == answer["content"]
        talk += [answer, {"role": "user", "content": "So?"}]
        second = ask(client, "chat/completions", messages=talk, **options)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > whole["usage"]["prompt_tokens"] - 20


@pytest.mark.parametrize("name", ["gemma2", "llava"])
def test_embeddings(name: str, loaded: Loaded) -> None:
    """A text's vector is the same in a list and alone, and costs no conversation its cache."""
    session = loaded(name, kv=EXACT)
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4, "temperature": 0}
    with served(session) as client:
        before = ask(client, "chat/completions", **chat)
        several = ask(client, "embeddings", input=["The sea", "A road, and rain"])["data"]
        alone = ask(client, "embeddings", input="A road, and rain")["data"][0]["embedding"]
        np.testing.assert_allclose(several[1]["embedding"], alone, atol=1e-6)
        np.testing.assert_allclose(alone, session.embed("A road, and rain"), atol=1e-6)
        assert abs(np.dot(several[0]["embedding"], alone)) < 0.999
        after = ask(client, "chat/completions", **chat)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 200


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "llava"])
def test_a_chat(name: str, loaded: Loaded, tmp_path: pathlib.Path) -> None:
    """Another answer to the same question is the same; a full context loses the oldest turns and nothing else."""
    session = loaded(name, kv=EXACT, overflow="slide").fork(ctx=200)
    image = tmp_path / "picture.png"
    Image.fromarray(PIXELS).save(image)
    shown: dict[str, Any] = {"images": [str(image)]} if name == "llava" else {}
    talk = Chat(session, template_of(session), "Tell of the sea.")
    beginning = session.encode("system: Tell of the sea.\nuser: ")
    for i in range(5):
        steps = talk.ask(f"What of ship {i}, and of its road?", max_new_tokens=60, sampling=GREEDY, **shown)
        said = next(steps).text
        assert session.tokens[: len(beginning)] == beginning
        if shown:
            n_shown = sum(len(m.get("images", ())) for m in talk.messages if not m.get("dropped"))
            assert session.tokens.count(vision_cases.IMAGE_TOKEN) == n_shown * vision_cases.N_TOKENS > 0
        said += text_of(steps)
        assert text_of(talk.retry(max_new_tokens=60, sampling=GREEDY)) == said
    assert any(message.get("dropped") for message in talk.messages)
    assert not talk.messages[0].get("dropped")
    talk.set_system("")
    text_of(talk.ask("And then?", max_new_tokens=4, sampling=GREEDY))
    assert session.tokens[: len(beginning)] != beginning


@pytest.mark.parametrize(("name", "kv"), [("gemma3", KV), ("lfm2", EXACT), ("mixtral", "onebit"), ("llava", KV)])
def test_the_oldest_turns_leave_in_an_answer(name: str, kv: str, loaded: Loaded, tmp_path: pathlib.Path) -> None:
    """It goes on as a new conversation of the turns that stayed would."""
    session = loaded(name, kv=kv, overflow="slide").fork(ctx=300)
    Image.fromarray(PIXELS).save(tmp_path / "picture.png")
    talk = Chat(session, template_of(session), "Tell of the sea.")
    images = [tmp_path / "picture.png"] if name == "llava" else []
    list(talk.ask("What of ship 0, and of its road?", images=images, max_new_tokens=60, sampling=GREEDY))
    list(talk.ask("And so?", max_new_tokens=30, sampling=GREEDY))
    taken, n_left = [], None
    for step in talk.ask("Then?", max_new_tokens=150, sampling=GREEDY):
        taken.append(step.token)
        if n_left is None and any(message.get("dropped") for message in talk.messages):
            n_left = len(taken) - 1
    assert n_left is not None
    assert not session.n_dropped
    dropped = [bool(message.get("dropped")) for message in talk.messages]
    assert dropped[:3] == [False, True, True]
    assert dropped[-2:] == [False, False]
    new = Chat(session.fork(), talk.template)
    prompt = new._prompt(talk.messages[:-1])
    assert text(new.session, [*prompt, *taken[:n_left]], len(taken) - n_left) == taken[n_left:]
    assert new.session.tokens[: len(session.tokens)] == session.tokens


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "mixtral"])
def test_a_saved_session(name: str, loaded: Loaded, tmp_path: pathlib.Path) -> None:
    """Goes on as the one that was saved, sampled, and back to before it was saved."""
    session = loaded(name).fork()
    text(session, LONG, sampling=SamplingParams(temperature=1.0, seed=1))
    session.save(tmp_path / "session")
    restored, other = Session.restore(tmp_path / "session", loaded(name)), loaded(name).fork()
    other.load_state(tmp_path / "session")
    for each in (session, restored, other):
        each.rewind(200)
    expected = text(session, "Then", sampling=SamplingParams(temperature=1.0, seed=2))
    for each in (restored, other):
        assert text(each, "Then", sampling=SamplingParams(temperature=1.0, seed=2)) == expected


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "mixtral"])
def test_conversations_beside_each_other(name: str, loaded: Loaded) -> None:
    """Each has its own text, sampled, so that it is no repetition."""
    session = loaded(name, weights="int8", slots=SLOTS)

    def sampled(n: int, seed: int) -> list[int]:
        return text(session.fork(), LONG[:n], 100, sampling=SamplingParams(temperature=1.0, seed=seed))

    for seed in range(3):
        works = [functools.partial(sampled, n, seed) for n in (31, 120, 200)]
        assert at_once(works) == [work() for work in works]


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "llava"])
def test_drafts(name: str, loaded: Loaded, folder: Folder) -> None:
    """The text is what it is without."""
    images = [Image.fromarray(PIXELS)] if name == "llava" else []
    prompt = "<image>" * len(images) + "ab" * 40
    expected = text(loaded(name, weights="q4").fork(), prompt, 40, images=images)
    with Session.load(folder(name), kv=KV, weights="q4", draft="ngram") as session:
        assert text(session, prompt, 40, images=images) == expected
        counts = session.report().drafts
        assert counts is not None
        assert counts.proposed > 0


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_lora_beside(name: str, folder: Folder, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of the merged weights, and without it those of the model."""
    case = lora_cases.LoraCase(name, ("proj", "w1", "w2", "w3"), {"r": 4, "lora_alpha": 8})
    monkeypatch.setitem(lora_cases.CASES, "own", case)
    lora = lora_cases.write("own", tmp_path / "lora")
    options: dict[str, Any] = {"kv": "dense:dtype=f32", "weights": "f32"}
    prompt = golden_cases.tokens(name)
    with Session.load(folder(name), loras={"own": lora}, **options) as beside:
        plain = beside.logits(prompt)
        beside.use_lora("own")
        changed = beside.logits(prompt)
    with Session.load(folder(name), lora=lora, **options) as merged:
        np.testing.assert_allclose(changed, merged.logits(prompt), atol=1e-3)
    with Session.load(folder(name), **options) as base:
        np.testing.assert_array_equal(plain, base.logits(prompt))
    assert np.abs(changed - plain).max() > 0.1
