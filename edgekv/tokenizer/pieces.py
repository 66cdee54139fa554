"""How the pieces of a tokenizer.json stand for bytes: told from its decoder, in the library's JSON form."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else the next of U+0100, U+0101..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


class ByteLevelPieces:
    """GPT-2, Llama 3, Qwen: every letter of a piece is a byte."""

    drops_first_space: ClassVar[bool] = False

    def to_bytes(self, piece: str) -> bytes:
        """The bytes that a piece stands for; of one in other letters its UTF-8."""
        try:
            return bytes(BYTE_ALPHABET[letter] for letter in piece)
        except KeyError:
            return piece.encode()


@dataclasses.dataclass(frozen=True)
class SpacedPieces:
    """Sentencepiece's way, as in Llama 2: `space` stands for a blank and `<0x0A>`, if asked for, for a byte."""

    space: str
    byte_fallback: bool
    drops_first_space: bool

    def to_bytes(self, piece: str) -> bytes:
        """The bytes that a piece stands for."""
        byte = BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else piece.replace(self.space, " ").encode()


def read_pieces(decoder: Mapping[str, Any]) -> ByteLevelPieces | SpacedPieces | None:
    """The pieces of a decoder, or None if it is of neither kind."""
    steps = list(_steps(decoder))
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return ByteLevelPieces()
    spaces = [space for step in steps if (space := _space(step)) is not None]
    if not spaces:
        return None
    return SpacedPieces(spaces[0], "ByteFallback" in types, any(_drops_first_space(step) for step in steps))


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _space(step: Mapping[str, Any]) -> str | None:
    """What stands for a blank, if this step of a decoder says so."""
    space: str | None = None
    if step["type"] == "Metaspace":
        space = step["replacement"]
    elif step["type"] == "Replace" and step["content"] == " ":
        space = step["pattern"].get("String")
    return space


def _drops_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
