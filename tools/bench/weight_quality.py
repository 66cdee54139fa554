"""Measures the perplexity of weight formats beside f32 by llama-perplexity's method, so that both compare.

    python tools/bench/weight_quality.py MODEL TEXT --weights int8/int4-32 [--stores FOLDER ...] [--chunks 128]

Windows of 512 tokens, of which the first is the begin token; the later half counts. KL and top-1 agreement compare
the next-token distribution with that of f32.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import BinaryIO, NamedTuple

import numpy as np

from edgekv.engine.calibration import embedded, log_softmax
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device, open_tokenizer
from edgekv.engine.model import Model
from edgekv.types import F32, F64, I64
from edgekv.weights.formats import WEIGHTS

WINDOW, TOGETHER = 512, 8


class Quality(NamedTuple):
    bits: float  # of a weight, scales and norms included
    perplexity: float
    kl: float  # to f32, in nats
    top1: float  # how often the likeliest token is f32's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--weights", default="/".join(WEIGHTS), help="formats, separated by /")
    parser.add_argument("--stores", nargs="*", default=[], help="weight stores, or other files of the model")
    parser.add_argument("--chunks", type=int, default=64)
    arguments = parser.parse_args()
    model = Model.open(arguments.model)
    decoders = {name: opened(model, name) for name in arguments.weights.split("/") if name}
    decoders |= {pathlib.Path(path).name: opened(Model.open(path), "auto") for path in arguments.stores}
    tokens = windows(model, arguments.text.read_text(), arguments.chunks)
    print(table(measured(model, decoders, tokens)))


def table(rows: dict[str, Quality]) -> str:
    """Returns the rows as text, with the ratio of each perplexity to f32's."""
    lines = [f"{'weights':<34}{'bits':>7}{'ratio':>9}{'KL':>9}{'top1':>7}"]
    for name, row in rows.items():
        ratio = row.perplexity / rows["f32"].perplexity
        lines.append(f"{name:<34}{row.bits:>7.2f}{ratio:>9.4f}{row.kl:>9.5f}{row.top1:>7.3f}")
    return "\n".join(lines)


def windows(model: Model, text: str, chunks: int) -> I64:
    """Returns the ids (m, WINDOW) of the text's first windows, ``chunks`` at most."""
    tokenizer = open_tokenizer(model)
    tokens = np.array(tokenizer.encode(text), np.int64)
    count = min(chunks, len(tokens) // WINDOW)
    found = tokens[: count * WINDOW].reshape(count, WINDOW)
    if tokenizer.bos_id is not None:
        found[:, 0] = tokenizer.bos_id
    return found


def measured(
    model: Model, decoders: dict[str, Decoder], windows: I64, base: BinaryIO | None = None
) -> dict[str, Quality]:
    """Returns what each decoder loses beside f32.

    base: a file to which the windows and f32's distributions go as llama-perplexity --kl-divergence reads them.
    """
    decoders = {"f32": opened(model, "f32"), **decoders}
    parts: dict[str, list[F64]] = {name: [] for name in decoders}
    if base:
        numbers = WINDOW, model.config.vocab_size, len(windows), *windows.flat
        base.write(b"_logits_" + np.array(numbers, np.int32).tobytes())
    for a in range(0, len(windows), TOGETHER):
        part = windows[a : a + TOGETHER]
        hidden = {
            name: decoder.read_together(embedded(decoder, part), WINDOW) for name, decoder in decoders.items()
        }
        for b in range(len(part)):
            rows = slice(b * WINDOW + WINDOW // 2, (b + 1) * WINDOW - 1)
            following = part[b, WINDOW // 2 + 1 :]
            logp = {name: log_softmax(decoder.head(hidden[name][rows])) for name, decoder in decoders.items()}
            exact = logp["f32"]
            p = np.exp(exact)
            if base:
                base.write(in_16_bits(exact))
            for name, own in logp.items():
                loss = -np.take_along_axis(own, following[:, None], 1)[:, 0]
                kl = np.einsum("ij,ij->i", p, exact - own)
                same = exact.argmax(1) == own.argmax(1)
                parts[name].append(np.stack([loss.astype(np.float64), kl, same.astype(np.float64)]))
    means = {name: np.concatenate(parts[name], 1).mean(1) for name in decoders}
    return {
        name: Quality(bits(decoder.weights.token_bytes, model), float(np.exp(loss)), float(kl), float(same))
        for (name, decoder), (loss, kl, same) in zip(decoders.items(), means.values(), strict=True)
    }


def in_16_bits(logp: F32) -> bytes:
    """Returns log-probabilities (n, vocab) as llama-perplexity keeps them: scale, least, 16 bits."""
    top = logp.max(1, keepdims=True)
    least = np.maximum(logp.min(1, keepdims=True), top - 16)
    scale = (top - least) / 65535
    codes = np.rint(np.maximum(logp - least, 0) / scale).astype(np.uint16)
    numbers = np.concatenate([scale, least], axis=1).view(np.uint16)
    return np.concatenate([numbers, np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))], axis=1).tobytes()


def bits(nbytes: int, model: Model) -> float:
    """Returns the bits of a weight of the linear layers that take so many bytes."""
    return 8 * nbytes / sum(linear.n_elements for linear in model.arch.linears().values())


def opened(model: Model, weights: str) -> Decoder:
    return find_device("cpu").decoder(model, model.weight_format(weights), WINDOW, None, None)


if __name__ == "__main__":
    main()
