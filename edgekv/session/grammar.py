"""Text that follows a JSON schema or a grammar, by the llguidance library: tokens that can't come next go."""

from __future__ import annotations

import functools
import json
import pathlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from edgekv.errors import ConfigError, EdgeKVError
from edgekv.tokenizer import Tokenizer
from edgekv.types import F32

COMPACT = {"whitespace_flexible": False}  # small models else go on and on with blanks
BARRIER = "\x02"  # merges with no letter
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


class Constraint(Protocol):
    """Follows a text token by token."""

    def allowed(self, logits: F32) -> F32:
        """logits (vocab,) with -inf where a token can't come next; the argument stays as it is."""

    def accept(self, token: int) -> bool:
        """Takes the chosen token; True when the text is complete and nothing can follow."""


class Grammar(Constraint):
    """`Constraint` of one text to Lark as llguidance reads it. Raises ConfigError for what it can't follow."""

    def __init__(self, grammar: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._matcher = _library().LLMatcher(_vocabulary(tokenizer, vocab_size), grammar, log_level=0)
        self._eos = tokenizer.eos_ids
        self._check()

    def allowed(self, logits: F32) -> F32:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        masked: F32 = np.full(logits.shape, -np.inf, np.float32)
        n = len(allowed)  # logits of padding rows have no token
        masked[:n] = np.where(allowed, logits[:n], np.float32(-np.inf))
        return masked

    def accept(self, token: int) -> bool:
        if token not in self._eos:
            self._matcher.consume_token(token)
            self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


class JsonSchema(Grammar):
    """`Constraint` of one text to JSON. Raises ConfigError for a schema that llguidance can't follow."""

    def __init__(self, schema: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            grammar = _library().LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)
        except ValueError as error:
            raise _refused(error) from None
        super().__init__(grammar, tokenizer, vocab_size)


def json_constraint(schema: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> Constraint:
    """A constraint to a JSON text of the schema. Raises ConfigError, and EdgeKVError without llguidance."""
    return JsonSchema(schema, tokenizer, vocab_size)


def find_constraint(
    schema: Mapping[str, Any] | None,
    constraint: Constraint | None,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int,
) -> Constraint | None:
    """The constraint that a schema or a caller gives; None: neither. Raises ConfigError for both, and as above."""
    if schema is None:
        return constraint
    if constraint is not None:
        raise ConfigError(
            "`json_schema` beside `constraint`: give one of them, as a schema is a constraint", field="json_schema"
        )
    return json_constraint(schema, tokenizer(), vocab_size)


def read_schema(path: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError."""
    try:
        schema = json.loads(pathlib.Path(path).expanduser().read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"json_schema={path!r}: can't be read ({error}); give a JSON file", field="json_schema", value=path
        ) from None
    if not isinstance(schema, dict):
        raise ConfigError(
            f"json_schema={path!r}: holds a JSON {type(schema).__name__}; give an object",
            field="json_schema",
            value=path,
        )
    return schema


def _refused(reason: object) -> ConfigError:
    first = str(reason).strip().splitlines()[0] if str(reason).strip() else "unknown"
    return ConfigError(f"the JSON schema can't be followed: {first[:200]}; correct or simplify it")


@functools.cache
def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise EdgeKVError("a JSON schema needs llguidance: pip install 'edgekv[grammar]'") from None
    return llguidance


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """llguidance's view of the tokenizer; made once, it takes a second for a large vocabulary."""
    if tokenizer not in _vocabularies:
        library = _library()
        wrapper = library.TokenizerWrapper(_Bytes(tokenizer))
        _vocabularies[tokenizer] = library.LLTokenizer(
            wrapper, n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=list(tokenizer.eos_ids)
        )
    return _vocabularies[tokenizer]


class _Bytes:
    """What llguidance asks of a tokenizer: every token's bytes, and which are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_ids:
            raise EdgeKVError("a JSON schema needs a tokenizer with an end-of-text token")
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text or tokenizer.piece(i).encode() for i, text in enumerate(texts)]

        self._before = tokenizer.encode(BARRIER, bos=False)

    def __call__(self, text: str) -> list[int]:
        """In the middle of a text: no space is put before it."""
        return self._tokenizer.encode(BARRIER + text, bos=False)[len(self._before) :]
