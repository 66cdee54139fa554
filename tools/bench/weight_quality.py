"""Measures the perplexity of weight formats beside f32 by llama-perplexity's method, so that both compare.

    python tools/bench/weight_quality.py MODEL TEXT --weights int8/int4-32 [--stores FOLDER ...] [--chunks 128]

Windows of 512 tokens, of which the first is the begin token; the later half counts. KL and top-1 agreement compare
the next-token distribution with that of f32.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

from edgekv.engine.calibration import embedded, log_softmax
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device, open_tokenizer
from edgekv.engine.model import Model
from edgekv.types import F64
from edgekv.weights.formats import WEIGHTS

WINDOW, TOGETHER = 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--weights", default="/".join(WEIGHTS), help="formats, separated by /")
    parser.add_argument("--stores", nargs="*", default=[], help="weight stores, or other files of the model")
    parser.add_argument("--chunks", type=int, default=64)
    arguments = parser.parse_args()
    model = Model.open(arguments.model)
    tokenizer = open_tokenizer(model)
    tokens = np.array(tokenizer.encode(arguments.text.read_text()), np.int64)
    count = min(arguments.chunks, len(tokens) // WINDOW)
    windows = tokens[: count * WINDOW].reshape(count, WINDOW)
    if tokenizer.bos_id is not None:
        windows[:, 0] = tokenizer.bos_id
    decoders = {"f32": opened(model, "f32")}
    decoders |= {name: opened(model, name) for name in arguments.weights.split("/") if name and name != "f32"}
    decoders |= {pathlib.Path(path).name: opened(Model.open(path), "auto") for path in arguments.stores}
    parts: dict[str, list[F64]] = {name: [] for name in decoders}
    for a in range(0, count, TOGETHER):
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
            for name, own in logp.items():
                loss = -np.take_along_axis(own, following[:, None], 1)[:, 0]
                kl = np.einsum("ij,ij->i", p, exact - own)
                same = exact.argmax(1) == own.argmax(1)
                parts[name].append(np.stack([loss.astype(np.float64), kl, same.astype(np.float64)]))
    base = float(np.exp(np.concatenate(parts["f32"], 1)[0].mean()))
    print(f"{count} windows of {WINDOW}, f32: perplexity {base:.4f}")
    print(f"{'weights':<34}{'bytes':>12}{'bits':>7}{'ratio':>9}{'KL':>9}{'top1':>7}")
    for name, decoder in decoders.items():
        loss, kl, same = np.concatenate(parts[name], 1).mean(1)
        nbytes = decoder.weights.token_bytes
        elements = sum(linear.n_elements for linear in decoder.weights.arch.linears().values())
        print(
            f"{name:<34}{nbytes:>12}{8 * nbytes / elements:>7.2f}{np.exp(loss) / base:>9.4f}{kl:>9.5f}{same:>7.3f}"
        )


def opened(model: Model, weights: str) -> Decoder:
    return find_device("cpu").decoder(model, model.weight_format(weights), WINDOW, None, None)


if __name__ == "__main__":
    main()
