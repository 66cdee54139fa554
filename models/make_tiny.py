"""Write a checkpoint of random, seeded weights: an ordinary Hugging Face folder of any shape in this folder.

    python models/make_tiny.py OUT                                  the 2.5M-parameter demo, shape `tiny`
    python models/make_tiny.py OUT --shape llama2-7b --dtype f16    13.5 GB, streamed through little memory

The weights know no language. The same seed, shape and type give the same files on one machine. The tokenizer is
byte-level: any text encodes to one token a byte, and ids above the bytes decode to made-up words.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import string
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from shapes import Tensor, tensor_list
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm

from edgekv.checkpoint.shapes import Config, load_shape, number
from edgekv.checkpoint.source import INDEX, SINGLE
from edgekv.checkpoint.tensors import DTYPES
from edgekv.checkpoint.writer import TensorWriter
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.files import atomic_write

TORCH_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
OUR_FILES = {"config.json", INDEX, "tokenizer.json", "tokenizer_config.json"}
BLOCK = 1 << 20  # weights drawn at once by a thread


def draw(tensor: Tensor, start: int, stop: int, seed: int, dtype: str) -> np.ndarray:
    """Rows `start` to `stop` of a tensor; they depend on nothing but the arguments."""
    shape = (stop - start, *tensor.shape[1:])
    if not tensor.std:
        return np.full(shape, tensor.mean, DTYPES[dtype])
    key = np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode()), start])
    values = np.random.Generator(np.random.SFC64(key)).standard_normal(shape, np.float32)
    values *= np.float32(tensor.std)
    return values.astype(DTYPES[dtype])


def blocks(tensors: Iterable[Tensor], seed: int, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors' rows in order, drawn by several threads a few blocks ahead of the writer."""
    workers = min(8, os.cpu_count() or 1)
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for tensor in tensors:
            rows = max(1, BLOCK // math.prod(tensor.shape[1:]))
            for start in range(0, tensor.shape[0], rows):
                stop = min(start + rows, tensor.shape[0])
                waiting.append((tensor.name, pool.submit(draw, tensor, start, stop, seed, dtype)))
                if len(waiting) > 2 * workers:
                    name, block = waiting.popleft()
                    yield name, block.result()
        for name, block in waiting:
            yield name, block.result()


def split(tensors: Sequence[Tensor], item_bytes: int, shard_bytes: float) -> list[list[Tensor]]:
    """Tensors in order, in groups of at most `shard_bytes`, or of one tensor that is bigger."""
    shards: list[list[Tensor]] = []
    room = -1.0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * item_bytes
        if nbytes > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= nbytes
    return shards


def write_weights(folder: Path, tensors: Sequence[Tensor], seed: int, dtype: str, shard_bytes: float) -> int:
    """Write the safetensors file or the shards and their index; returns the number of files."""
    item_bytes = DTYPES[dtype].itemsize
    shards = split(tensors, item_bytes, shard_bytes)
    total_bytes = sum(math.prod(tensor.shape) for tensor in tensors) * item_bytes
    homes: dict[str, str] = {}
    with tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None) as bar:
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
            homes |= {tensor.name: name for tensor in shard}
            specs = {tensor.name: (dtype, tensor.shape) for tensor in shard}
            with TensorWriter(folder / name, specs, {"format": "pt"}) as writer:
                for tensor_name, block in blocks(shard, seed, dtype):
                    writer.write(tensor_name, block)
                    bar.update(block.nbytes)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": homes})
    return len(shards)


def special_tokens(config: Config) -> dict[int, str]:
    """The begin and end tokens at the ids where the config has them."""
    begin, end = config.get("bos_token_id"), config.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    names = {} if begin is None else {begin: "<s>"}
    for i, token in enumerate(token for token in ends if token is not None):
        names[token] = "</s>" if i == 0 else f"</s{i}>"
    vocab_size = number(config, "vocab_size")
    for token in names:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(
                f"a token id is {token!r} in the shape; accepted are 0 to vocab_size - 1 = {vocab_size - 1}"
            )
    if vocab_size < 256 + len(names):
        raise ConfigError(
            f"vocab_size is {vocab_size} in the shape; at least {256 + len(names)} ids are needed for bytes"
        )
    return names


def made_up_words() -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "\u0120" + "".join(letters)  # the byte-level alphabet's space


def byte_tokenizer(config: Config) -> Tokenizer:
    """One token for each of the 256 bytes, the special tokens at their ids, made-up words for the other ids."""
    special = special_tokens(config)
    contents = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), made_up_words())
    vocab = {special.get(i) or next(contents): i for i in range(number(config, "vocab_size"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in special.values()])
    begin = config.get("bos_token_id")
    if begin is not None and special[begin] == "<s>":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def tokenizer_settings(config: Config) -> dict[str, str]:
    special = special_tokens(config)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if config.get("bos_token_id") in special:
        settings["bos_token"] = special[config["bos_token_id"]]
    if "</s>" in special.values():
        settings["eos_token"] = "</s>"
    return settings


def write_json(path: Path, values: object) -> None:
    atomic_write(path, (json.dumps(values, indent=2) + "\n").encode())


def is_ours(path: Path) -> bool:
    """Whether a file is one that a checkpoint folder of this script holds."""
    return path.is_file() and (path.name in OUR_FILES or path.suffix == ".safetensors")


def check_folder(out: Path, needed_bytes: int, force: bool) -> None:
    """Refuse a folder that holds more than an old checkpoint to replace, and a disk that is too small."""
    if out.exists():
        if not out.is_dir():
            raise CheckpointError(f"{out}: is a file; give a new folder")
        old = list(out.iterdir())
        if old and not force:
            raise CheckpointError(
                f"{out}: is not empty; give a new folder, or --force to replace the checkpoint in it"
            )
        other = [path.name for path in old if not is_ours(path)]
        if other:
            raise CheckpointError(f"{out}: holds {other[0]}, which is no part of a checkpoint; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed_bytes > free:
        raise CheckpointError(
            f"{out}: needs {needed_bytes:,} bytes, {free:,} are free; free some space or use --layers"
        )


def write_checkpoint(out: Path, config: Config, seed: int, dtype: str, shard_bytes: float, force: bool) -> str:
    """Write the folder beside `out` under another name, then move it there; returns a line about it."""
    code = dtype.upper()
    tensors = tensor_list(config)
    n_weights = sum(math.prod(tensor.shape) for tensor in tensors)
    tokenizer = byte_tokenizer(config)
    check_folder(out, n_weights * DTYPES[code].itemsize, force)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise CheckpointError(f"{partial}: another run is writing it, or was killed; remove it") from None
    try:
        n_files = write_weights(partial, tensors, seed, code, shard_bytes)
        write_json(partial / "config.json", config)
        write_json(partial / "tokenizer_config.json", tokenizer_settings(config))
        atomic_write(partial / "tokenizer.json", tokenizer.to_str().encode())
        if out.exists():
            for path in out.iterdir():
                path.unlink()
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return f"{out}: {n_weights:,} weights in {n_files} file{'s' * (n_files > 1)}, {dtype}, seed {seed}"


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def seed_number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make_tiny.py", description="Write a checkpoint of random, seeded weights."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument(
        "--shape", default="tiny", help="name of a shape in models/, or a config.json (default: tiny)"
    )
    parser.add_argument("--layers", type=positive(int), metavar="N", help="another number of layers")
    parser.add_argument(
        "--positions",
        type=positive(int),
        metavar="N",
        help="another context length (default: the shape's, with rotary positions at least 8192)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--dtype", choices=TORCH_DTYPES, default="bf16", help="type of the weights (default: bf16)"
    )
    parser.add_argument(
        "--shard-gb",
        type=positive(float),
        default=4.0,
        metavar="GB",
        help="size of a weights file, in 10^9 bytes (default: 4)",
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint in OUT")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        config = load_shape(args.shape, args.layers, args.positions)
        config["torch_dtype"] = TORCH_DTYPES[args.dtype]
        print(write_checkpoint(args.out.resolve(), config, args.seed, args.dtype, args.shard_gb * 1e9, args.force))
    except (EdgeKVError, OSError) as error:
        print(f"make_tiny.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_tiny.py: stopped, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
