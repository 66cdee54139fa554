"""Text to token ids and back, for the four file formats that Llama- and GPT-2-style checkpoints come with."""

from edgekv.tokenizer.base import Tokenizer, as_text
from edgekv.tokenizer.load import load_tokenizer
from edgekv.tokenizer.stream import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer", "as_text", "load_tokenizer"]
