"""Constraints of a text to a JSON schema or a grammar, by the llguidance library."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edgekv.child import START_SECONDS, BoundedChild, ChildError
from edgekv.engine.grammar_child import ENCODE, ERROR, STOPPED
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import read_object, user_path
from edgekv.text import Tokenizer
from edgekv.types import F32

MAX_QUESTIONS = 1000  # of the matcher, for one token
MAX_IDLE = 1  # processes that wait for the next text: each holds the vocabulary


@runtime_checkable
class Constraint(Protocol):
    """A rule for which tokens may come next, which follows a text token by token."""

    def allowed(self, logits: F32) -> F32:
        """Returns logits (vocab,) with -inf for tokens that can't come next; the argument is not changed."""

    def accept(self, token: int) -> bool:
        """Takes the chosen token; returns whether the text is complete and nothing can follow."""


class Grammar(Constraint):
    """The constraint of one text to a grammar in llguidance's Lark. Raises ConfigError where it can't be followed.

    llguidance works in a process of its own (`matcher`), which belongs to this text until the object is collected:
    a stranger's grammar can take all memory or time, or overflow a stack.
    """

    KIND, NAME = "lark", "grammar"  # for llguidance, and in errors

    def __init__(self, grammar: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        pool = _pool_of(tokenizer, vocab_size, self.NAME)
        self._tokenizer, self._eos, self._child = tokenizer, tokenizer.eos_ids, pool.take()
        weakref.finalize(self, pool.give_back, self._child).atexit = False
        self._stopped, self._mask = False, b""
        self._follow({self.KIND: grammar})

    def allowed(self, logits: F32) -> F32:
        masked: F32 = np.full(logits.shape, -np.inf, np.float32)
        if self._stopped:
            masked[list(self._eos)] = logits[list(self._eos)]
            return masked
        allowed = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")[: len(logits)].astype(bool)
        n = len(allowed)  # logits of padding rows have no token
        masked[:n] = np.where(allowed, logits[:n], np.float32(-np.inf))
        return masked

    def accept(self, token: int) -> bool:
        if token not in self._eos:
            self._follow({"token": int(token)})
        return self._stopped

    def _follow(self, request: Mapping[str, Any]) -> None:
        """Sends a request to the process, answers its questions on the tokenizer, and takes its mask."""
        data = json.dumps(request).encode()
        try:
            reply = self._child.ask(data)
            for _ in range(MAX_QUESTIONS):
                if reply[:1] != ENCODE:
                    break
                ids = self._tokenizer.encode_inside(reply[1:].decode(errors="replace"))
                reply = self._child.ask(json.dumps(ids).encode())
            else:
                raise ChildError(f"it asks for more than {MAX_QUESTIONS} texts")
        except BaseException as error:
            self._child.close()  # it may wait for an answer that will not come
            if isinstance(error, ChildError):
                raise _refusal(self.NAME, error) from None
            raise
        if reply[:1] == ERROR:
            raise _refusal(self.NAME, reply[1:].decode(errors="replace"))
        self._stopped, self._mask = reply[:1] == STOPPED, reply[1:]


class JsonSchema(Grammar):
    """The constraint of one text to a JSON schema. Raises ConfigError for a schema that can't be followed."""

    KIND, NAME = "schema", "JSON schema"

    def __init__(self, schema: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(self.NAME, error) from None
        super().__init__(text, tokenizer, vocab_size)


def read_schema(path: str) -> dict[str, Any]:
    """Reads a JSON schema from a file. Raises ConfigError."""
    try:
        return read_object(user_path(path))
    except ValueError as error:
        raise ConfigError(str(error), field="json_schema", value=path, accepted=["a JSON file"]) from None


def _refusal(name: str, reason: object) -> ConfigError:
    message = " ".join(str(reason).partition("\n<state>")[0].split())  # without llguidance's internal state
    return ConfigError(f"the {name} can't be followed: {message[:400] or 'unknown'}; correct or simplify it")


def _pool_of(tokenizer: Tokenizer, vocab_size: int, name: str) -> _ChildPool:
    if importlib.util.find_spec("llguidance") is None:
        raise EdgeKVError(f"a {name} needs llguidance: pip install 'edgekv[grammar]'")
    if not tokenizer.eos_ids:
        raise EdgeKVError(f"a {name} needs a tokenizer with an end-of-text token")
    if tokenizer not in _pools:
        _pools[tokenizer] = _ChildPool(tokenizer, vocab_size)
    return _pools[tokenizer]


class _ChildPool:
    """Processes that hold a tokenizer's vocabulary, which takes a second; each follows one text at a time."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        about = {
            "n_vocab": max(vocab_size, tokenizer.vocab_size),
            "bos": tokenizer.bos_id,
            "eos": list(tokenizer.eos_ids),
            "special": [i for i, text in enumerate(texts) if not text],
            "tokens": [(text or tokenizer.piece(i).encode()).decode("latin-1") for i, text in enumerate(texts)],
        }
        self._vocabulary, self._idle = json.dumps(about).encode(), list[BoundedChild]()

    def take(self) -> BoundedChild:
        """Returns an idle or a new process for a text. Raises EdgeKVError where none can be started."""
        with contextlib.suppress(IndexError):
            while True:
                if (child := self._idle.pop()).is_alive:
                    return child
        child = BoundedChild("edgekv.engine.grammar_child")
        try:
            child.ask(self._vocabulary, START_SECONDS)
        except ChildError as error:
            raise EdgeKVError(f"the process that follows schemas can't hold the vocabulary: {error}") from None
        return child

    def give_back(self, child: BoundedChild) -> None:
        """Takes a process back; called when an object is collected, in any thread, so without a lock."""
        if child.is_alive and len(self._idle) < MAX_IDLE:
            self._idle.append(child)
        else:
            child.close()


_pools: weakref.WeakKeyDictionary[Tokenizer, _ChildPool] = weakref.WeakKeyDictionary()
