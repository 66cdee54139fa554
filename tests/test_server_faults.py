"""The server's own faults are told to the client as such, and to the log."""

import asyncio
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from serving import engine_of, open_endpoints, samples

from edgekv import Session
from edgekv.errors import ContextError, MemoryBudgetError, SessionError
from edgekv.server import limits
from edgekv.server.answers import CompletionFormat
from edgekv.server.engine import AnswerEnd, Channel, Engine
from edgekv.server.limits import ServerLimits
from edgekv.server.prompts import EncodedPrompt
from edgekv.server.requests import FAILED, CompletionRequest, RequestError

ANSWER = {"model": "m", "prompt": "It was", "max_tokens": 2, "temperature": 0}
WHOSE = [
    (MemoryBudgetError("out of memory while reading 3 tokens"), 503, "overloaded"),
    (SessionError("the pass was interrupted"), 503, "interrupted"),
    (ContextError("64 positions", field="prompt"), 400, "context_length_exceeded"),
]


@pytest.mark.parametrize("place", ["engine.Engine.answer", "prompts.RequestEncoder.ids"])
def test_whose_fault_it_is(place: str, demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors arise in the engine's thread and, for a prompt's ids, in the endpoint."""
    monkeypatch.setattr(f"edgekv.server.{place}", mock.Mock(side_effect=[error for error, _, _ in WHOSE]))
    with open_endpoints(demo, raising=True) as client:
        for error, status, code in WHOSE:
            answer = client.post("/v1/completions", json=ANSWER)
            refusal = answer.json()["error"]
            kind = "server_error" if status == 503 else "invalid_request_error"
            assert (answer.status_code, refusal["type"], refusal["code"]) == (status, kind, code)
            assert (refusal["message"], refusal["param"]) == (str(error), error.field)
            assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_a_panic_keeps_the_slot(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Rust library's panic is no Exception."""
    with open_endpoints(demo) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "answer", mock.Mock(side_effect=BaseException("a panic")))
            answer = client.post("/v1/completions", json=ANSWER)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, FAILED)
        assert samples(client.get("/metrics").text)["edgekv_active"] == 0
        assert client.post("/v1/completions", json=ANSWER).status_code == 200


def test_requests_that_wait_have_a_place_in_memory(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is held for them until they are answered, and not after."""
    goes_on, answer = threading.Event(), Engine.answer

    def answer_later(self: Engine, *job: Any) -> Any:
        goes_on.wait(30)
        return answer(self, *job)

    monkeypatch.setattr(Engine, "answer", answer_later)
    large = {**ANSWER, "logit_bias": {str(i): 0 for i in range(2000)}}
    limits = ServerLimits(max_bodies=500_000)
    with open_endpoints(demo, raising=True, limits=limits) as client, ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.post, "/v1/completions", json=large)
        while "edgekv_active 1.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        second = client.post("/v1/completions", json=large)
        small = threads.submit(client.post, "/v1/completions", json=ANSWER)
        goes_on.set()
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert [each.result().status_code for each in (first, small)] == [200, 200]
        assert client.post("/v1/completions", json=large).status_code == 200
        assert client.post("/v1/completions", json={**large, "user": [0] * 6000}).status_code == 413


def test_requests_take_turns(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many answers of one request shut no other out, and take one place of those that wait."""
    began: list[str] = []

    def answer(self: Engine, job: Any, share: Any) -> AnswerEnd:
        began.append(names[job.channel])
        return AnswerEnd(job.index, "stop", {})

    async def run() -> None:
        engine = engine_of(demo)
        for name, n in {"a": 100, "b": 1, "c": 2, "d": 1}.items():
            channel = Channel()
            names[channel] = name
            engine.submit(channel, CompletionRequest(model="m", prompt="x", n=n), [EncodedPrompt([1])])
        with pytest.raises(RequestError, match="4 requests wait already"):
            engine.submit(Channel(), CompletionRequest(model="m", prompt="x"), [EncodedPrompt([1])])
        engine.start()
        while len(began) < 104:
            await asyncio.sleep(0.01)
        engine.stop()
        engine.join(30)
        with pytest.raises(RequestError, match="shutting down"):
            engine.submit(Channel(), CompletionRequest(model="m", prompt="x"), [])

    names: dict[Channel, str] = {}
    monkeypatch.setattr(Engine, "answer", answer)
    asyncio.run(run())
    assert "".join(began).startswith("abcdaca")
    assert Counter(began) == {"a": 100, "b": 1, "c": 2, "d": 1}


def test_an_answer_that_cannot_be_built_says_so(
    demo: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = mock.Mock(side_effect=KeyError("a bug"))
    monkeypatch.setattr(limits, "LOG_INTERVAL_S", 0)  # another test may just have logged the same
    fault = {"message": FAILED, "type": "server_error", "param": None, "code": "internal_error"}
    with open_endpoints(demo) as client:
        for method in ("__init__", "take", "whole"):
            with monkeypatch.context() as patch:
                patch.setattr(CompletionFormat, method, fail)
                answer = client.post("/v1/completions", json=ANSWER)
            assert (answer.status_code, answer.json()) == (500, {"error": fault})
        for method in ("take", "closing"):
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setattr(CompletionFormat, method, fail)
                lines = client.post("/v1/completions", json={**ANSWER, "stream": True}).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert (events[-1]["error"]["type"], lines[-2]) == ("server_error", "data: [DONE]")
            assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
