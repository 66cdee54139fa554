"""Tokenizers and chat templates."""

from edgekv.text.formats import load_tokenizer
from edgekv.text.tokenizer import StreamDecoder, Tokenizer, as_text, possible_start

__all__ = ["StreamDecoder", "Tokenizer", "as_text", "load_tokenizer", "possible_start"]
