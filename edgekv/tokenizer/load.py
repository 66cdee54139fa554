"""Choosing the tokenizer format by the files that are there."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from edgekv.errors import TokenizerError
from edgekv.files import read_regular
from edgekv.tokenizer.base import Tokenizer
from edgekv.tokenizer.declared import read_declared

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # in order of preference
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")  # a sentencepiece protobuf never begins so


def load_tokenizer(
    path: pathlib.Path,
    *,
    model_folder: pathlib.Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Opens the tokenizer of a model.

    Special tokens come from tokenizer_config.json and special_tokens_map.json beside the tokenizer, and
    from the model's generation_config.json and config.json; all four are optional.

    Args:
        path: a folder with tokenizer.json, tokenizer.model (sentencepiece's, or Llama 3's tiktoken file),
            or vocab.json and merges.txt; or one of these files.
        model_folder: where the model's two files lie, if not beside the tokenizer.
        config: the content of config.json, if it is not a file there.

    Raises:
        TokenizerError: no tokenizer, a damaged one, or one that contradicts the files around it.
    """
    file = _find_file(path)
    data = _read(file)
    declared = read_declared(file.parent, model_folder or file.parent, config)
    # Importing one of these libraries takes 50 ms or more: only the one in use is.
    if file.name == "vocab.json":
        from edgekv.tokenizer.huggingface import open_gpt2

        return open_gpt2(file, file.with_name("merges.txt"), declared)
    if file.suffix == ".json":
        from edgekv.tokenizer.huggingface import open_tokenizer_json

        return open_tokenizer_json(file, data, declared)
    if TIKTOKEN_LINE.match(data):
        try:
            from edgekv.tokenizer.byte_pairs import TiktokenTokenizer
        except ImportError:
            raise TokenizerError(
                f"{file}: Llama 3's own format needs the tiktoken package: pip install 'edgekv[tiktoken]', or "
                "take the tokenizer.json that lies beside it on the Hub"
            ) from None
        return TiktokenTokenizer(file, data, declared)
    from edgekv.tokenizer.sentence_pieces import SentencePieceTokenizer

    return SentencePieceTokenizer(file, data, declared)


def _find_file(path: pathlib.Path) -> pathlib.Path:
    if os.path.isfile(path):
        return path
    for name in FILES:
        if os.path.isfile(path / name):
            return path / name
    raise TokenizerError(
        f"{path} has no tokenizer: copy tokenizer.json, tokenizer.model, or vocab.json and merges.txt "
        "beside the weights, or pass tokenizer=PATH",
        field="tokenizer",
    )


def _read(path: pathlib.Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise TokenizerError(
            f"{path} can't be read: {error.strerror}; make it readable, or copy it again"
        ) from None
