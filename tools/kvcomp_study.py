"""KVComp's compression ratios on a model's own keys and values, with KIVI at equal quality beside them.

    python tools/kvcomp_study.py --model FOLDER --text book.txt --ctx 8192 --json out.json

prints, as Markdown: bits per element of quantised keys and values (fixed-length codes, entropy, Huffman codes,
metadata), histograms with code lengths, and the quality of every pair of relative steps beside `kivi2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import lzma
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgekv.decoder.decoder import Decoder
from edgekv.kernels.aligned import zeros
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.papers.codec_huffman import HuffmanCodec, HuffmanKeys, HuffmanValues
from edgekv.machine import machine_info
from edgekv.quality.evaluate import FIT_TOKENS, Quality, evaluate
from edgekv.session.devices import find_device
from edgekv.session.model import Model
from edgekv.tokenizer import load_tokenizer

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
BLOCK = 64
CODE_STEPS = (0.067, 0.1, 0.12, 0.15, 0.2, 0.25, 0.333, 0.5)
GRID_STEPS = (0.15, 0.2, 0.25, 0.333, 0.5)
KIVI_GROUPS = (32, 64)
SHOWN = (("K", 0.25), ("V", 0.2))
CODECS = {"K": HuffmanKeys, "V": HuffmanValues}


@dataclasses.dataclass(frozen=True)
class Coding:
    """Keys or values of all layers at one relative step; all figures are bits per element.

    ``fixed``, ``entropy``, ``huffman``: of the codes alone, with each layer's own histogram; ``prompt``: Huffman
    codes with the histogram of the first FIT_TOKENS tokens. ``scales``: low and step; ``index``: bit counts and
    offsets. ``lengths``: per layer and level; ``shares``: of each level in all layers.
    """

    side: str
    step: float
    levels: int
    fixed: float
    entropy: float
    huffman: float
    prompt: float
    scales: float
    index: float
    lengths: list[list[int]]
    shares: list[float]

    @property
    def total(self) -> float:
        return self.prompt + self.scales + self.index

    @property
    def gain(self) -> float:
        """The same levels in fixed-length codes, which need no index, over this."""
        return (self.fixed + self.scales) / self.total


def layer_tensors(decoder: Decoder, tokens: Sequence[int]) -> Iterator[dict[str, F32]]:
    """Keys and values (n_kv_heads, n, head_dim) of each layer, rounded to float16."""
    caches = CacheSpec.parse("dense").layers(decoder.config, len(tokens))
    for cache in caches:
        cache.allocate(decoder.kernels, decoder.workspace)
    decoder.prefill(decoder.embed(tokens, 0), caches)
    for cache in caches:
        halves = {"K": cache.arrays["key.half"], "V": cache.arrays["value.half"]}
        yield {side: half.view(np.float16).astype(np.float32) for side, half in halves.items()}


def code(decoder: Decoder, x: F32, side: str, step: float, fit_tokens: int) -> HuffmanCodec:
    """A codec that has packed x with the codebook of its first ``fit_tokens`` tokens."""
    codec: HuffmanCodec = CODECS[side](len(x), x.shape[1], x.shape[2], BLOCK, step)
    codec.bind({name: zeros(shape, dtype) for name, (shape, dtype) in codec.layout().items()}, decoder.kernels)
    codec.fit(x[:, :fit_tokens])
    codec.encode(x, 0)
    return codec


def coding(decoder: Decoder, layers: Sequence[dict[str, F32]], side: str, step: float) -> Coding:
    counts, huffman, prompt, lengths = [], [], [], []
    for layer in layers:
        x = layer[side]
        own, fitted = (code(decoder, x, side, step, n) for n in (x.shape[1], FIT_TOKENS))
        huffman.append(own.arrays["bits"].sum(dtype=np.int64) / x.size)
        prompt.append(fitted.arrays["bits"].sum(dtype=np.int64) / x.size)
        lengths.append(own.arrays["lengths"].tolist())
        counts.append(np.bincount(own.quantise(x, 0).ravel(), minlength=own.levels))
    pooled = np.sum(counts, axis=0)
    return Coding(
        side=side,
        step=step,
        levels=own.levels,
        fixed=float(own.plain.lengths[0]),
        entropy=float(np.mean([entropy(layer_counts) for layer_counts in counts])),
        huffman=float(np.mean(huffman)),
        prompt=float(np.mean(prompt)),
        scales=sum(8 * own.arrays[name].nbytes / x.size for name in ("low", "step")),
        index=sum(8 * own.arrays[name].nbytes / x.size for name in ("bits", "offsets")),
        lengths=lengths,
        shares=(pooled / pooled.sum()).tolist(),
    )


def entropy(counts: I64) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def codings_table(codings: Sequence[Coding]) -> str:
    head = ["", "step", "levels", "fixed-length", "entropy", "Huffman", "Huffman of the prompt", "scales", "index"]
    rows = []
    for c in codings:
        bits = (c.entropy, c.huffman, c.prompt, c.scales, c.index, c.total)
        cells = [f"{x:.2f}" for x in bits]
        rows.append([c.side, f"{c.step:g}", str(c.levels), f"{c.fixed:.0f}", *cells, f"x{c.gain:.2f}"])
    return markdown([*head, "total", "against fixed-length"], rows)


def histogram_table(c: Coding) -> str:
    """Share of each level, and its shortest and longest code word over the layers."""
    words = [f"{min(n)}" if min(n) == max(n) else f"{min(n)} to {max(n)}" for n in zip(*c.lengths, strict=True)]
    shares = [f"{100 * share:.1f}" for share in c.shares]
    head = [f"{c.side}, step {c.step:g}: level", *(str(level) for level in range(c.levels))]
    return markdown(head, [["share, %", *shares], ["code word, bits", *words]])


@dataclasses.dataclass(frozen=True)
class Point:
    """A scheme's quality and its bits per element of packed tokens, all metadata counted."""

    kv: str
    bits_k: float
    bits_v: float
    quality: Quality

    @property
    def ratio(self) -> float:
        """Against float16."""
        return 32 / (self.bits_k + self.bits_v)


def points(
    decoder: Decoder, tokens: Sequence[int], codings: Sequence[Coding], steps: Sequence[float]
) -> list[Point]:
    """`kivi2` first, then every pair of relative steps."""
    total = {(c.side, c.step): c.total for c in codings}
    found = {f"kivi2:group={n}": (2 + 32 / n, 2 + 32 / decoder.config.head_dim) for n in KIVI_GROUPS}
    for k, v in itertools.product(steps, steps):
        found[f"kvcomp:krel={k:g},vrel={v:g}"] = total["K", k], total["V", v]
    results = evaluate(decoder, tokens, len(tokens), [CacheSpec.parse(name) for name in found])
    return [Point(name, *bits, result) for (name, bits), result in zip(found.items(), results, strict=True)]


def points_table(found: Sequence[Point]) -> str:
    rows = []
    for p in found:
        q = p.quality
        sizes = [f"{x:.2f}" for x in (p.bits_k, p.bits_v, p.ratio)]
        rows.append([f"`{p.kv}`", *sizes, f"{q.perplexity_ratio:.4f}", f"{q.kl:.4f}", f"{q.top1:.3f}"])
    return markdown(["`--kv`", "bits K", "bits V", "f16 / this", "PPL x", "KL", "top-1"], rows)


def at_equal_quality(found: Sequence[Point]) -> str:
    """For each kivi2 the smallest kvcomp that is no worse."""
    lines = []
    for kivi, what in itertools.product(found[: len(KIVI_GROUPS)], ("perplexity_ratio", "kl")):
        bound = getattr(kivi.quality, what)
        good = [p for p in found[len(KIVI_GROUPS) :] if getattr(p.quality, what) <= bound]
        answer = "none"
        if good:
            best = max(good, key=lambda p: p.ratio)
            change = 100 * (best.ratio / kivi.ratio - 1)
            answer = f"`{best.kv}`, {best.bits_k + best.bits_v:.2f} bits, {change:+.0f}%"
        lines.append(f"- `{kivi.kv}` ({kivi.bits_k + kivi.bits_v:.2f} bits a pair), equal {what}: {answer}")
    return "\n".join(lines)


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text, plain or .xz."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with weights and a tokenizer")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="text to predict (.txt or .xz)")
    parser.add_argument("--ctx", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--no-quality", action="store_true", help="leave out the evaluation of the pairs")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures as JSON")
    args = parser.parse_args()

    model = Model.open(args.model)
    if model.tokenizer_path is None:
        parser.error(f"{args.model} has no tokenizer: copy one beside the weights")
    ids = load_tokenizer(model.tokenizer_path, config=model.raw_config).encode(read_text(args.text))
    tokens = ids[: args.ctx]
    if len(tokens) < args.ctx:
        parser.error(f"the text has {len(tokens)} tokens, --ctx {args.ctx} needs more")
    threads = len(os.sched_getaffinity(0))
    decoder = find_device("cpu").decoder(model, model.weight_format("f32"), args.ctx, threads, None)
    layers = list(layer_tensors(decoder, tokens))
    codings = [coding(decoder, layers, side, step) for side in CODECS for step in CODE_STEPS]
    print(codings_table(codings))
    for c in codings:
        if (c.side, c.step) in SHOWN:
            print("\n" + histogram_table(c))
    found: list[Point] = []
    if not args.no_quality:
        found = points(decoder, tokens, codings, GRID_STEPS)
        print("\n" + points_table(found) + "\n\n" + at_equal_quality(found))
    if args.json:
        facts = {
            "model": model.path.name,
            "text": args.text.name,
            "ctx": args.ctx,
            "codings": [dataclasses.asdict(c) for c in codings],
            "points": [dataclasses.asdict(p) for p in found],
            "machine": machine_info(),
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
