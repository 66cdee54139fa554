"""What is the server's own fault is told to the client as such, and to the log."""

import contextlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import DEMO, TEMPLATE
from starlette.testclient import TestClient

from edgekv import Session
from edgekv.chat.template import ChatTemplate
from edgekv.errors import ContextError, EdgeKVError, MemoryBudgetError, SessionError
from edgekv.server.app import build_app
from edgekv.server.energy import ServerEnergy
from edgekv.server.engine import Engine
from edgekv.server.limits import ServerLimits
from edgekv.server.responder import Responder

ANSWER = {"model": "m", "prompt": "It was", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Session]:
    with Session.load(DEMO, ctx=64) as session:
        yield session


@contextlib.contextmanager
def asked(loaded: Session) -> Iterator[TestClient]:
    """The server's endpoints, without a socket."""
    engine = Engine(
        loaded,
        ChatTemplate(TEMPLATE, loaded.require_tokenizer()),
        queue_limit=4,
        pool_bytes=0,
        max_new_tokens=4,
        energy=ServerEnergy(None),
    )
    app = build_app(engine, "m", api_key=None, hosts=None, limits=ServerLimits())
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
    """The next ``times`` answers raise it."""
    left, answer = [error] * times, Responder.answer

    def answer_or_fail(self: Responder, job: Any) -> Any:
        if left:
            raise left.pop()
        return answer(self, job)

    monkeypatch.setattr(Responder, "answer", answer_or_fail)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MemoryBudgetError("out of memory while reading 3 tokens"), 503, "overloaded"),
        (SessionError("the pass was interrupted"), 503, "interrupted"),
        (ContextError("64 positions", field="prompt"), 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_whose_fault_it_is(
    error: EdgeKVError, status: int, code: str, path: str, loaded: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's thread and, of a prompt's ids, in the endpoint."""

    def fail(*_: object) -> None:
        raise error

    with asked(loaded) as client:
        if path == "/v1/completions":
            monkeypatch.setattr(Responder, "answer", fail)
            answer = client.post(path, json=ANSWER)
        else:
            monkeypatch.setattr("edgekv.server.request_encoder.RequestEncoder.ids", fail)
            answer = client.post(path, json={"model": "m", "input": "It was"})
    told = answer.json()["error"]
    kind = "server_error" if status == 503 else "invalid_request_error"
    assert (answer.status_code, told["type"], told["code"]) == (status, kind, code)
    assert (told["message"], told["param"]) == (str(error), error.field)
    assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_openais_client_asks_again(loaded: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, MemoryBudgetError("out of memory"), times=1)
    with asked(loaded) as http:
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="x", max_retries=1, http_client=http)
        assert client.completions.create(**ANSWER).choices[0].text  # type: ignore[call-overload]
        failing(monkeypatch, MemoryBudgetError("out of memory"), times=2)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            client.completions.create(**ANSWER)  # type: ignore[call-overload]
