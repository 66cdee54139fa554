"""What H1B-KV and FIER print, and what their own method gives for the same shape."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """A method: its name in the paper, ``kv`` here, cache in MB, (perplexity, quality per byte) by text."""

    name: str
    kv: str
    mb: float
    figures: tuple[tuple[float, float], ...]


TEXTS = ("WikiText-2", "PTB")
MODEL = "gpt2-60m"  # ours of the shape in Tables I and V
SHAPE1, SHAPE2 = "h1b-60m", "llama2-7b"  # models/*.json
TABLE1 = (
    Row("FP16", "dense:dtype=f16", 67.1, ((9.20, 1.63), (5.98, 2.50))),
    Row("MiniCache 4-b", "int4", 16.8, ((9.42, 6.30), (6.10, 10.15))),
    Row("KIVI 2-b", "kivi2", 8.4, ((9.65, 12.28), (6.25, 19.04))),
    Row("SparseLLM", "h2o", 8.4, ((9.58, 12.44), (6.20, 19.22))),
    Row("Loki (1-bit K)", "sign_keys", 33.7, ((9.24, 3.23), (6.01, 5.51))),
    Row("H1B-KV", "h1b", 5.3, ((9.28, 20.35), (6.02, 31.37))),
)
TABLE2 = (
    Row("FP16", "dense:dtype=f16", 4300.2, ((5.05, 0.05), (4.12, 0.06))),
    Row("KIVI 2-b", "kivi2", 537.5, ((5.30, 0.35), (4.38, 0.43))),
    Row("SparseLLM", "h2o", 537.5, ((5.25, 0.36), (4.31, 0.44))),
    Row("Loki (1-bit K)", "sign_keys", 2150.1, ((5.08, 0.09), (4.15, 0.11))),
    Row("H1B-KV", "h1b", 58.7, ((5.15, 3.31), (4.20, 4.06))),
)
TABLE5 = (
    Row("b = 256, full", "h1b", 5.3, ((9.28, 20.35),)),
    Row("1-bit keys only, FP16 values", "h1b:keys_only=true", 33.8, ((9.25, 3.22),)),
    Row("no temperature", "h1b:tau=1", 5.3, ((12.51, 15.01),)),
    Row("b = 512", "h1b:sketch_bits=512", 5.5, ((9.22, 19.68),)),
    Row("b = 128", "h1b:sketch_bits=128", 5.2, ((9.55, 20.21),)),
    Row("b = 64", "h1b:sketch_bits=64", 5.1, ((10.82, 18.12),)),
)

# FIER, Table 3: pass key at 10k tokens with LongChat-7B, percent right with 32, 64, 128, 256 and 512 tokens.
FIER_TABLE3 = {
    "H2O": (0, 1, 1, 1, 3),
    "StreamingLLM": (1, 1, 1, 3, 5),
    "TOVA": (0, 1, 1, 3, 8),
    "Quest": (65, 99, 99, 99, 100),
    "Fier": (87, 99, 99, 100, 100),
}
