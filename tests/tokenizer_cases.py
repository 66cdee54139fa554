"""Small tokenizers of every format, made by the libraries, for the tests of tokenizers."""

import json
import pathlib
from collections.abc import Callable

import pytest
import sentencepiece
import tokenizers

from edgekv.text import StreamDecoder, Tokenizer

FORMATS = ("sentencepiece", "spaced json", "byte-level json", "gpt2")
SENTENCES = ["Once upon a time, there was a little girl named Lily.", "the cat sat on the mat", "été à Ωmega"]
LETTERS = sorted({letter for letter in "".join(SENTENCES) if letter != " "})
BPE = tokenizers.models.BPE


def write_json(folder: pathlib.Path, **files: object) -> pathlib.Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def make_sentencepiece(folder: pathlib.Path, *, remove_extra_whitespaces: bool = False) -> None:
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_writer=file,
            model_type="bpe",
            vocab_size=320,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=remove_extra_whitespaces,
            minloglevel=2,
        )


def make_spaced_json(folder: pathlib.Path) -> None:
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *octets, "▁", *LETTERS, "he", "▁t", "▁the"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    library = tokenizers.Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>"])
    normal, back = tokenizers.normalizers, tokenizers.decoders
    library.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    steps = [back.Replace("▁", " "), back.ByteFallback(), back.Fuse(), back.Strip(" ", 1, 0)]
    library.decoder = back.Sequence(steps)
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))


def train_byte_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    return library


def make_byte_level_json(folder: pathlib.Path) -> None:
    library = train_byte_level()
    library.add_tokens(["<tool call>"])
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(folder / "tokenizer.json"))


def make_gpt2(folder: pathlib.Path) -> None:
    train_byte_level().model.save(str(folder))


MAKE: dict[str, Callable[[pathlib.Path], None]] = {
    "sentencepiece": make_sentencepiece,
    "spaced json": make_spaced_json,
    "byte-level json": make_byte_level_json,
    "gpt2": make_gpt2,
}


def make_folders(factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Writes a folder of each of FORMATS."""
    made = {name: factory.mktemp(name.replace(" ", "_")) for name in FORMATS}
    for name, folder in made.items():
        MAKE[name](folder)
    return made


def stream(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = True) -> list[str]:
    """Returns what has been printed after each token, and after the flush."""
    decoder = StreamDecoder(tokenizer, at_start=at_start)
    parts = [decoder.push(token_id) for token_id in ids] + [decoder.flush()]
    return ["".join(parts[: i + 1]) for i in range(len(parts))]
