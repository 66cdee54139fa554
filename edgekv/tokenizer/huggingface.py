"""tokenizer.json, and GPT-2's vocab.json with merges.txt, by the tokenizers library."""

import base64
import json
import pathlib
from typing import Any

import msgspec
import tokenizers

from edgekv.errors import TokenizerError
from edgekv.tokenizer.base import Tokenizer
from edgekv.tokenizer.declared import Declared
from edgekv.tokenizer.native import library_errors, require_vocabulary
from edgekv.tokenizer.pieces import ByteLevelPieces, SpacedPieces, read_pieces

GPT2_END = "<|endoftext|>"
MAX_GROWTH = 64  # of a text, by what stands for parts of it


class HuggingFaceTokenizer(Tokenizer):
    """A pipeline of the tokenizers library, whose post-processor decides what `encode(bos=True)` adds.

    Args:
        path: the file it was read from, for messages.
        library: the pipeline; truncation and padding are turned off in it.
        declared: what the files beside it say.
        own_end: the token that is both BOS and EOS unless something else is declared.

    Raises:
        TokenizerError: the decoder is neither byte-level nor of sentencepiece's kind.
    """

    def __init__(
        self,
        path: pathlib.Path,
        library: tokenizers.Tokenizer,
        declared: Declared,
        own_end: int | None = None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._pieces = _pieces(path, library)
        self.drops_first_space = self._pieces.drops_first_space
        self.vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        require_vocabulary(str(path), self.vocab_size)
        self.bos_id, self.eos_ids = declared.resolve(
            library.token_to_id, self.vocab_size, own_end, () if own_end is None else (own_end,)
        )
        ends = {self.bos_id, *self.eos_ids}
        self._added = {
            token_id: b"" if token.special or token_id in ends else token.content.encode()
            for token_id, token in library.get_added_tokens_decoder().items()
        }
        self.special_texts = tuple(self.piece(token_id) for token_id, data in self._added.items() if not data)

    def piece(self, token_id: int) -> str:
        return self._library.id_to_token(token_id) or ""

    def _encode(self, text: str, bos: bool) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=bos).ids
        return ids

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._library.id_to_token(token_id)
        return b"" if piece is None else self._pieces.to_bytes(piece)


class _Pipeline(msgspec.Struct):
    """What of a tokenizer.json changes a text's length."""

    normalizer: Any = None
    post_processor: Any = None


def _require_bounded(path: pathlib.Path, data: bytes) -> None:
    """Raises TokenizerError for a pipeline that makes so much of little that the library ends the process."""
    try:
        pipeline = msgspec.json.decode(data, type=_Pipeline)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a tokenizer.json ({error}); copy it again") from None
    growth, todo = 1, [pipeline.normalizer, pipeline.post_processor]
    while todo:
        part = todo.pop()
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if not isinstance(part, dict):
            continue
        if isinstance(content := part.get("content"), str):
            growth *= max(1, len(content))
        if isinstance(single := part.get("single"), list):
            growth *= max(1, sum("Sequence" in each for each in single if isinstance(each, dict)))
        if isinstance(table := part.get("precompiled_charsmap"), str):
            start = base64.b64decode(table[:8])
            if not 4 <= int.from_bytes(start[:4], "little") <= 3 * len(table) // 4 - 4:
                raise TokenizerError(f"{path}: its precompiled_charsmap is damaged; copy it again")
    if growth > MAX_GROWTH:
        raise TokenizerError(
            f"{path}: makes a text up to {growth:,} times longer; accepted: {MAX_GROWTH:,}; copy the model's own"
        )


def open_tokenizer_json(path: pathlib.Path, data: bytes, declared: Declared) -> HuggingFaceTokenizer:
    """Reads a tokenizer.json with the content ``data``.

    Raises:
        TokenizerError: the file is damaged, or of a kind that can't be streamed.
    """
    with library_errors(f"{path} is not a tokenizer.json", "copy it again"):
        _require_bounded(path, data)
        library = tokenizers.Tokenizer.from_buffer(data)
        return HuggingFaceTokenizer(path, library, declared)


def open_gpt2(vocab: pathlib.Path, merges: pathlib.Path, declared: Declared) -> HuggingFaceTokenizer:
    """Reads GPT-2's vocab.json and merges.txt. No BOS is added unless tokenizer_config.json asks for one.

    Raises:
        TokenizerError: a file is missing or damaged, or the vocabulary is not GPT-2's.
    """
    if not merges.is_file():
        raise TokenizerError(f"{vocab} needs its merges.txt, which is not beside it; copy it there")
    with library_errors(f"{vocab} and merges.txt don't fit", "copy both again"):
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    library = tokenizers.Tokenizer(model)
    end = library.token_to_id(GPT2_END)
    if end is None:
        raise TokenizerError(
            f"{vocab} has no {GPT2_END}, so it is not GPT-2's; copy the model's tokenizer.json beside it"
        )
    library.add_special_tokens([GPT2_END])
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    if declared.add_bos:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{GPT2_END} $A", special_tokens=[(GPT2_END, end)]
        )
    with library_errors(f"{vocab} can't be used", "copy it again"):
        return HuggingFaceTokenizer(vocab, library, declared, own_end=end)


def _pieces(path: pathlib.Path, library: tokenizers.Tokenizer) -> ByteLevelPieces | SpacedPieces:
    decoder = {"type": "none"} if library.decoder is None else json.loads(library.decoder.__getstate__())
    pieces = read_pieces(decoder)
    if pieces is None:
        raise TokenizerError(
            f"{path} has a decoder of type {decoder['type']}; supported are ByteLevel, Metaspace and "
            "sentencepiece's Replace: use the tokenizer.model or vocab.json of this model instead"
        )
    return pieces
