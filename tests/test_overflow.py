"""Conversations that outgrow their context: which tokens stay, the report, and positions."""

import copy
from unittest import mock

import golden_cases
import numpy as np
import pytest
from helpers import SESSION_KV, n_cached, raises, text
from safetensors.numpy import save_file
from serving import DEMO, TEMPLATE

from edgekv import SamplingParams, Session
from edgekv.engine.chat import Chat
from edgekv.engine.runner import SINK_TOKENS
from edgekv.errors import ConfigError, ContextError, MemoryBudgetError
from edgekv.text.template import ChatTemplate

CTX = 400
PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, golden_cases.VOCAB, 330)]
KEPT = CTX - CTX // 2


@pytest.fixture(scope="module", params=["llama31", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A model with rotary or learned positions, for exactly as many tokens as the context."""
    name, longer = request.param, {"max_position_embeddings": CTX, "n_positions": CTX}
    folder = golden_cases.write_checkpoint(name, tmp_path_factory.mktemp(name), **longer)
    if name == "gpt2":
        positions = {"transformer.wpe.weight": golden_cases.draw(name, "wpe", (CTX, 48))}
        save_file(golden_cases.tensors(name) | positions, folder / "model.safetensors")
    return Session.load(folder, ctx=CTX, overflow="slide")


@pytest.mark.parametrize("kv", SESSION_KV)
def test_the_text_goes_on_as_from_what_was_kept(loaded: Session, kv: str) -> None:
    session = loaded.fork(kv=kv)
    got, before = text(session, PROMPT, 150), loaded.fork(kv=kv)
    first = text(before, PROMPT, CTX - len(PROMPT) + 1)
    everything = PROMPT + first
    kept = everything[:SINK_TOKENS] + everything[SINK_TOKENS - KEPT :]
    after = loaded.fork(kv=kv)
    assert got == first + text(after, kept, 150 - len(first))
    assert session.tokens == after.tokens
    assert n_cached(session) < CTX
    assert session.n_dropped == CTX + 1 - KEPT
    assert f"overflow: {session.n_dropped} tokens" in " ".join(session.report().notes)


def test_it_goes_on_for_ever(loaded: Session) -> None:
    session = loaded.fork(kv="onebit")
    got = text(session, PROMPT, 3 * CTX)
    assert len(got) == 3 * CTX
    assert len(session.tokens) <= CTX + 1
    assert session.tokens[:SINK_TOKENS] == PROMPT[:SINK_TOKENS]
    assert len(session.tokens) + session.n_dropped == len(PROMPT) + len(got)
    session.reset()
    assert session.n_dropped == 0


def test_a_prompt_longer_than_the_context(loaded: Session) -> None:
    session, long = loaded.fork(), PROMPT * 3
    kept = long[:SINK_TOKENS] + long[SINK_TOKENS - (CTX - CTX // 4) :]
    assert text(session, long, 20) == text(loaded.fork(), kept, 20)
    more = loaded.fork()
    text(more, PROMPT, 5)
    held = more.tokens + PROMPT
    kept = held[:SINK_TOKENS] + held[SINK_TOKENS - (CTX - CTX // 4) :]
    assert text(more, PROMPT, 20) == text(loaded.fork(), kept, 20)
    assert more.report().prefill_tokens == CTX - CTX // 4
    before = list(more.tokens), n_cached(more), more.n_dropped, more.last_sampler
    more.generate(PROMPT, temperature=1.0).close()
    assert (more.tokens, n_cached(more), more.n_dropped, more.last_sampler) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_long_prompt_that_is_interrupted_drops_nothing(loaded: Session, error: type[BaseException]) -> None:
    """The next time it is read as if nothing had been."""
    fail, session, other = mock.Mock(side_effect=error), loaded.fork(), loaded.fork()
    assert text(session, PROMPT, 20) == text(other, PROMPT, 20)
    tokens = list(session.tokens)
    for read in (lambda *ids, **how: next(session.generate(*ids, **how)), session.prefill):
        with pytest.raises((KeyboardInterrupt, MemoryBudgetError)):
            read(PROMPT, progress=fail)
        assert (session.tokens, session.n_dropped) == (tokens, 0)
    assert text(session, PROMPT, 20) == text(other, PROMPT, 20)
    assert session.tokens == other.tokens
    assert session.n_dropped == other.n_dropped > 0


def test_a_chat_drops_its_oldest_turns() -> None:
    session = Session.load(DEMO, ctx=300, overflow="slide")
    talk = Chat(session, ChatTemplate(TEMPLATE, session.require_tokenizer()), "You are a sailor.")
    greedy = SamplingParams(temperature=0.0)
    for i in range(8):
        list(talk.ask(f"Question {i}: what is a ship, and who sails it?", max_new_tokens=16, sampling=greedy))
        assert n_cached(session) <= 300
    n_dropped = sum(bool(message.get("dropped")) for message in talk.messages)
    assert n_dropped in range(4, len(talk.messages), 2)
    said = session.require_tokenizer().decode(session.tokens)
    assert said.startswith("system: You are a sailor.")
    assert ("Question 0" in said, "Question 7" in said) == (False, True)
    assert (len(talk.messages), session.n_dropped) == (17, 0)
    before = copy.deepcopy(talk.messages)
    with raises(ConfigError, field="max_new_tokens"):
        talk.ask("What? " * 60, max_new_tokens=0)
    assert talk.messages == before
    long = Chat(session.fork(), talk.template)
    answer = list(long.ask("Tell me everything.", max_new_tokens=320, sampling=greedy))
    assert answer[-1].finish_message == long.session.report().finish_message == "context full (300 tokens)"
    assert len(long.session.tokens) == 301
    list(long.ask("And then?", max_new_tokens=5, sampling=greedy))
    assert [bool(message.get("dropped")) for message in long.messages] == [True, True, False, False]
    with raises(ContextError, field="ctx", match="shorten the message"):
        long.ask("What? " * 200, max_new_tokens=5)
