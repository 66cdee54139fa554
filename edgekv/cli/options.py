"""Options that several commands share, and the progress bars."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from edgekv.checkpoint.shipped import shipped_model
from edgekv.errors import ConfigError
from edgekv.kvcache import CACHES, CacheSpec
from edgekv.linear.formats import WEIGHTS
from edgekv.machine import format_bytes, parse_bytes


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: its one-line help, its options, and what it does (returns the exit status)."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder, a .safetensors or .gguf file, a store made by `edgekv quantize`, "
        "or demo or scenes, which ship with edgekv (default: demo)",
    )
    parser.add_argument("--config", metavar="FILE", help="config.json for a bare .safetensors file")


def model_path(arguments: argparse.Namespace) -> str:
    """--model, which may name a model that ships with edgekv; without it the demo model."""
    path = arguments.model
    if path is None or not pathlib.Path(path).exists():
        path = shipped_model(path or "demo") or path
    if path is None:
        raise ConfigError(
            "no model: give --model PATH, a Hugging Face folder, a .safetensors or .gguf file or a store"
        )
    return str(path)


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="FILE", help="an adapter.safetensors trained for this model and --kv")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    accepted = ", ".join(("auto", *WEIGHTS))
    parser.add_argument("--weights", default="auto", metavar="FORMAT", help=f"{accepted} (default auto: by size)")


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        metavar="NAME[:knob=value,...]",
        help="KV cache scheme, or auto (default dense); `--kv list` prints them all",
    )
    parser.add_argument(
        "--kv-budget",
        metavar="BYTES",
        help="bytes that the cache never exceeds, such as 300M: as it fills, the oldest tokens get fewer bits; "
        "with --kv auto, the best scheme that fits the whole context",
    )
    parser.add_argument(
        "--tau", type=float, metavar="T", help="softmax temperature of h1b and loki1 (default: fit on the prompt)"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Everything that loads a session."""
    add_source_options(parser)
    add_weights_option(parser)
    add_kv_options(parser)
    parser.add_argument(
        "--ctx", type=positive_int, metavar="N", help="context in tokens (default 8192 or the model's)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer file or folder, if not beside the model")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")


def cache_spec(arguments: argparse.Namespace) -> CacheSpec | str | None:
    """The scheme asked for, "auto", "steps" for a budget alone, or None after `--kv list` printed them."""
    name = arguments.kv or ("dense" if arguments.kv_budget is None else "steps")
    if name == "list":
        print(schemes_text())
        return None
    if name in ("auto", "steps"):
        return str(name)
    overrides = {} if arguments.tau is None else {"tau": arguments.tau}
    return CacheSpec.parse(name, **overrides)


def kv_budget(arguments: argparse.Namespace) -> int | None:
    """--kv-budget in bytes."""
    return None if arguments.kv_budget is None else parse_bytes(arguments.kv_budget)


def schemes_text() -> str:
    """One line per scheme: name, what it keeps, where it is from."""
    return "\n".join(f"{name:<12}{scheme.summary}  [{scheme.paper}]" for name, scheme in CACHES.items())


class Bars:
    """Progress bars on a terminal's standard error, one stage at a time; nothing when it is piped."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def update(self, stage: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if stage != self._stage:
            self._close()
            bytes_like = stage in ("quantising", "converting")
            unit = "B" if bytes_like else "layer"
            self._bar = tqdm(total=total, desc=stage, unit=unit, unit_scale=bytes_like, leave=False)
            self._stage = stage
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage = None, ""


def bytes_text(n: int) -> str:
    """Rounded for people, exact for checking."""
    return f"{format_bytes(n)} ({n} bytes)"
