"""Adapt a checkpoint to a KV scheme (H1B-KV, IV-C): train its temperature and the values' projection, no more.

    python tools/adapt.py --model models/demo --text novels.txt.xz --kv h1b --out adapter.safetensors
    edgekv run --model models/demo --kv h1b --adapter adapter.safetensors

The student attends to what the scheme stores of every token, its own included; its teacher is the same checkpoint
with exact attention, and the loss the KL between their next-token distributions, on windows of the text (UTF-8,
books separated by NUL). The adapter is the student with the least KL on windows held back from training. h1b and
sign_keys learn tau, and with --projection also R and a centre of each head's keys; onebit learns key_scale. Needs
`.[torch]`, and a GPU for all but small models.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import lzma
import pathlib
import sys

import numpy as np
import safetensors.torch
import torch
from adapt_model import TRAINED
from adapt_schemes import SCHEMES, SCOPES
from adapt_training import SCHEDULES, Result, Settings, Trainer
from torch import Tensor

from edgekv import EdgeKVError, __version__
from edgekv.checkpoint.adapter import FORMAT, VERSION
from edgekv.checkpoint.source import open_source
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.tokenizer import load_tokenizer
from edgekv.tokenizer.base import Tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text, plain or .xz."""
    try:
        return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise EdgeKVError(f"--text {path}: can't be read ({error}); give UTF-8 text, plain or .xz") from None


def read_windows(text: str, tokenizer: Tokenizer, ctx: int, limit: int, seed: int) -> Tensor:
    """(windows, ctx) ids of the books in a random order, at most ``limit`` tokens of them; 0: all."""
    books = [book for book in text.split("\0") if book.strip()]
    ids: list[int] = []
    for i in np.random.default_rng(seed).permutation(len(books)):
        ids += tokenizer.encode(books[i])
        if limit and len(ids) >= limit:
            del ids[limit:]
            break
    n = len(ids) // ctx
    return torch.tensor(ids[: n * ctx]).reshape(n, ctx)


def write_adapter(path: pathlib.Path, base: str, spec: CacheSpec, best: Result, facts: dict[str, str]) -> None:
    """In the format that `edgekv.checkpoint.adapter` reads, whole or not at all."""
    metadata = {"format": FORMAT, "version": VERSION, "base": base, "scheme": spec.scheme.name, "kv": str(spec)}
    tensors = {name: tensor.contiguous() for name, tensor in best.tensors.items()}
    atomic_write(path, safetensors.torch.save(tensors, metadata | facts))


def provenance(trainer: Trainer, best: Result, text: str, name: str) -> dict[str, str]:
    """How the adapter came to be, as text."""
    facts = {
        "settings": dataclasses.asdict(trainer.settings),
        "step": best.step,
        "steps": trainer.step,
        "windows": list(trainer.windows.shape),
        "text": name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "held_back": dataclasses.asdict(best.quality),
        "held_back_untrained": dataclasses.asdict(trainer.untrained.quality),
        "versions": {"edgekv": __version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}


def adapt(args: argparse.Namespace, settings: Settings) -> None:
    spec = CacheSpec.parse(args.kv)
    if spec.scheme.name not in SCHEMES:
        raise EdgeKVError(f"--kv {args.kv}: has nothing to train; accepted: {', '.join(SCHEMES)}")
    source = open_source(args.model)
    if source.tokenizer_folder is None:
        raise EdgeKVError(f"{args.model} has no tokenizer: copy one beside the weights")
    text = read_text(args.text)
    tokenizer = load_tokenizer(source.tokenizer_folder, config=source.config)
    windows = read_windows(text, tokenizer, args.ctx, args.tokens, settings.seed)
    print(f"{windows.shape[0]} windows of {windows.shape[1]} tokens", flush=True)
    trainer = Trainer(source, spec, windows, settings, DEVICE)
    best = trainer.train(lambda line: print(line, flush=True))
    write_adapter(args.out, source.identity, spec, best, provenance(trainer, best, text, args.text.name))
    print(f"{args.out}: step {best.step}; held back: {best.quality}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="checkpoint folder with a tokenizer")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="what to train on (.txt or .xz)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the adapter to write")
    parser.add_argument("--kv", default="h1b", help=f"scheme and knobs: {', '.join(SCHEMES)} (default: h1b)")
    parser.add_argument("--ctx", type=int, default=8192, help="tokens per window (default: 8192)")
    parser.add_argument("--tokens", type=int, default=0, help="use so many of the text (default: all)")
    parser.add_argument(
        "--scope", choices=SCOPES, default="global", help="what has a tau, or key_scale, of its own"
    )
    parser.add_argument("--train", choices=TRAINED, default="v", help="and which projections (default: v)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="windows per step (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate (default: 1e-4)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="cosine")
    parser.add_argument("--projection", action="store_true", help="train h1b's R too, one for each layer")
    parser.add_argument("--anneal", type=float, default=0.0, help="share of the training with soft signs (h1b)")
    parser.add_argument(
        "--attention", type=float, default=0.0, help="weight of the heads' own KL to the exact ones (h1b)"
    )
    parser.add_argument("--hidden", type=float, default=0.0, help="weight of the layers' states in the loss")
    parser.add_argument("--held-back", type=int, default=4, help="windows for validation (default: 4)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training at most (default: no limit)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in vars(args).items() if name in names})
    try:
        adapt(args, settings)
    except (EdgeKVError, OSError) as error:
        print(f"adapt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.set_float32_matmul_precision("high")
    sys.exit(main())
