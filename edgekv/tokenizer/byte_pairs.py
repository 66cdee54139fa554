"""Llama 3's original tokenizer.model: lines of a base64 token and its rank."""

import base64
import pathlib
import re
from collections.abc import Iterator

import tiktoken

from edgekv.errors import TokenizerError
from edgekv.tokenizer.base import Tokenizer
from edgekv.tokenizer.declared import Declared
from edgekv.tokenizer.native import library_errors

# Source of both: meta-llama/llama3 llama/tokenizer.py.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_RUN = 25_000  # characters without, or of nothing but, spaces: more overflow the regex engine's stack

# Llama 3.1's names, which keep the ids that Llama 3 gave to its own.
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
END_TOKENS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


class TiktokenTokenizer(Tokenizer):
    """Llama 3's vocabulary, by the tiktoken library: the 256 special tokens follow the file's own.

    BOS is prepended unless tokenizer_config.json says `"add_bos_token": false`.
    """

    drops_first_space = False
    special_texts = SPECIAL_TOKENS

    def __init__(self, path: pathlib.Path, data: bytes, declared: Declared) -> None:
        ranks = _read_ranks(path, data)
        special_ids = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self._tokens = sorted(ranks, key=ranks.__getitem__)
        with library_errors(f"{path} can't be used", "copy it again"):
            self._library = tiktoken.Encoding(
                "llama3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
            )
        self.vocab_size = len(ranks) + len(SPECIAL_TOKENS)
        own_bos = special_ids["<|begin_of_text|>"]
        if declared.bos_id not in (None, own_bos):
            raise TokenizerError(
                f"{path} holds {len(ranks)} tokens, so that BOS is {own_bos}, but the model's config says "
                f"bos_token_id {declared.bos_id}; copy the whole tokenizer.model of this model"
            )
        self.bos_id, self.eos_ids = declared.resolve(
            special_ids.get, self.vocab_size, own_bos, tuple(special_ids[t] for t in END_TOKENS)
        )
        self._start = [] if self.bos_id is None or declared.add_bos is False else [self.bos_id]

    def piece(self, token_id: int) -> str:
        special = token_id - len(self._tokens)
        return SPECIAL_TOKENS[special] if special >= 0 else self._tokens[token_id].decode(errors="replace")

    def _encode(self, text: str, bos: bool) -> list[int]:
        ids = list(self._start) if bos else []
        for part in _parts(text):
            ids += self._library.encode(part, allowed_special="all")
        return ids

    def _token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""


def _read_ranks(path: pathlib.Path, data: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise TokenizerError(
                f"{path}: line {number} is {line[:40]!r}, not a base64 token and its rank; copy the file again"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: ranks don't run from 0 to {len(ranks) - 1} once each; copy the file again")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"{path} has no token for byte {missing[0]}; copy the file again")
    return ranks


def _parts(text: str) -> Iterator[str]:
    """`text` in parts, cut only inside runs of more than MAX_RUN characters."""
    start = 0
    for run in re.finditer(rf"\s{{{MAX_RUN},}}|\S{{{MAX_RUN},}}", text):
        for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]
