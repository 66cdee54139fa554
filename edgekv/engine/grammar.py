"""Text that follows a JSON schema or a grammar, by the llguidance library: tokens that can't come next go."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edgekv.child import START_SECONDS, BoundedChild, ChildError
from edgekv.engine.matcher import ENCODE, ERROR, STOPPED
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import read_object, user_path
from edgekv.text import Tokenizer
from edgekv.types import F32

MAX_QUESTIONS = 1000  # of the matcher, for one token
MAX_IDLE = 1  # processes that wait for the next text: each holds the vocabulary


@runtime_checkable
class Constraint(Protocol):
    """Follows a text token by token."""

    def allowed(self, logits: F32) -> F32:
        """logits (vocab,) with -inf where a token can't come next; the argument stays as it is."""

    def accept(self, token: int) -> bool:
        """Takes the chosen token; True when the text is complete and nothing can follow."""


class Grammar(Constraint):
    """`Constraint` of one text to Lark as llguidance reads it. Raises ConfigError for what it can't follow.

    llguidance works in a process of its own (`matcher`), which is this text's until the object is collected: a
    stranger's grammar can take all memory or time, or overflow a stack.
    """

    KIND = "lark"

    def __init__(self, grammar: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        children = _children_of(tokenizer, vocab_size)
        self._tokenizer, self._eos, self._child = tokenizer, tokenizer.eos_ids, children.take()
        weakref.finalize(self, children.give, self._child).atexit = False
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
        """Tells the process, and takes what may come next. It may ask how the tokenizer writes what must come."""
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
                raise _refused(error) from None
            raise
        if reply[:1] == ERROR:
            raise _refused(reply[1:].decode(errors="replace"))
        self._stopped, self._mask = reply[:1] == STOPPED, reply[1:]


class JsonSchema(Grammar):
    """`Constraint` of one text to JSON. Raises ConfigError for a schema that llguidance can't follow."""

    KIND = "schema"

    def __init__(self, schema: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(error) from None
        super().__init__(text, tokenizer, vocab_size)


def read_schema(path: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError."""
    try:
        return read_object(user_path(path))
    except ValueError as error:
        raise ConfigError(str(error), field="json_schema", value=path, accepted=["a JSON file"]) from None


def _refused(reason: object) -> ConfigError:
    said = str(reason).partition("\n<state>")[0]  # llguidance's own account of it
    return ConfigError(
        f"the JSON schema can't be followed: {' '.join(said.split())[:400] or 'unknown'}; correct or simplify it"
    )


def _children_of(tokenizer: Tokenizer, vocab_size: int) -> _Children:
    if importlib.util.find_spec("llguidance") is None:
        raise EdgeKVError("a JSON schema needs llguidance: pip install 'edgekv[grammar]'")
    if not tokenizer.eos_ids:
        raise EdgeKVError("a JSON schema needs a tokenizer with an end-of-text token")
    if tokenizer not in _children:
        _children[tokenizer] = _Children(tokenizer, vocab_size)
    return _children[tokenizer]


class _Children:
    """Processes that hold a tokenizer's vocabulary, which takes a second: each follows one text at a time."""

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
        """One for a text. Raises EdgeKVError where none can be started."""
        with contextlib.suppress(IndexError):
            while True:
                if (child := self._idle.pop()).is_alive:
                    return child
        child = BoundedChild("edgekv.engine.matcher")
        try:
            child.ask(self._vocabulary, START_SECONDS)
        except ChildError as error:
            raise EdgeKVError(f"the process that follows schemas can't hold the vocabulary: {error}") from None
        return child

    def give(self, child: BoundedChild) -> None:
        """Its text has ended. Called when an object is collected, in any thread: there is no lock to wait for."""
        if child.is_alive and len(self._idle) < MAX_IDLE:
            self._idle.append(child)
        else:
            child.close()


_children: weakref.WeakKeyDictionary[Tokenizer, _Children] = weakref.WeakKeyDictionary()
