"""Options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

from edgekv.checkpoint.hub import locate
from edgekv.checkpoint.hub_name import hub_name
from edgekv.errors import CacheError, ConfigError
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.spec import schemes_with
from edgekv.linear.formats import WEIGHTS
from edgekv.machine import format_bytes, parse_bytes
from edgekv.session.devices import AUTO
from edgekv.session.options import LORA_NAME, LoadOptions

LORA_HELP = "a LoRA as PEFT saves it, merged into the weights before they are quantized (default scale 1)"


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: its one-line help, its options, and what it does (returns the exit status)."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


def positive_int(text: str) -> int:
    """For argparse: a whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def positive_seconds(text: str) -> float:
    """For argparse: seconds above 0, and an end to them."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder, a .safetensors or .gguf file, a store made by `edgekv quantize`, a name on "
        "the Hugging Face Hub (org/name[@revision], org/name:file.gguf), which is downloaded once, or demo or "
        "scenes, which ship with edgekv (default: demo)",
    )
    parser.add_argument("--config", metavar="FILE", help="config.json for a bare .safetensors file")


def model_path(arguments: argparse.Namespace) -> str:
    """--model; without it the demo model. One of the Hub is downloaded, and that is said, if it is not here."""
    path = "demo" if arguments.model is None else str(arguments.model)
    name = hub_name(path)
    if name:
        locate(name, say)
    return path


def say(text: str) -> None:
    """A line of our own on standard error."""
    print(f"edgekv: {text}", file=sys.stderr, flush=True)


def add_lora_option(parser: argparse.ArgumentParser) -> None:
    """--lora."""
    parser.add_argument(
        "--lora",
        metavar="FOLDER[:scale]",
        help=LORA_HELP,
    )


def add_loras_option(parser: argparse.ArgumentParser, use: str) -> None:
    """--lora of a command that can apply one at run time. use: what those with a name are for."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER[:scale]",
        help=f"{LORA_HELP}; with a name it is applied beside the weights, which stay as they are: {use}",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """--adapter: what takes the place of some of the model's weights."""
    parser.add_argument("--adapter", metavar="FILE", help="an adapter.safetensors trained for this model and --kv")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """--weights."""
    accepted = ", ".join(("auto", *WEIGHTS))
    parser.add_argument(
        "--weights",
        default="auto",
        metavar="FORMAT",
        help=f"{accepted} (default auto: by size); with ,head=FORMAT the language-model head has another one",
    )


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    """Which KV scheme, within how many bytes."""
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
        "--tau",
        type=float,
        metavar="T",
        help="softmax temperature of h1b and sign_keys (default: fit on the prompt)",
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
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="cores to use (default: all, or fewer for weight products where these are faster)",
    )


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "--device",
        default=AUTO,
        help="cpu (Numba; onnxruntime for float32 weights), cuda (CuPy), numpy (the slow reference), or auto: "
        "cuda where CuPy, a GPU and the scheme's kernels are, else cpu (default %(default)s)",
    )


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """The options that the command has, as the library takes them. Raises an EdgeKVError for a bad value."""
    names = (field.name for field in dataclasses.fields(LoadOptions))
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if isinstance(given.get("lora"), list):
        given |= _loras(given["lora"])
    if isinstance(given.get("kv_budget"), str):
        given["kv_budget"] = parse_bytes(given["kv_budget"], "kv_budget")
    if getattr(arguments, "tau", None) is not None:
        given["kv"] = _with_tau(given["kv"] or DEFAULT, arguments.tau)
    return LoadOptions(**given)


def _loras(values: list[str]) -> dict[str, Any]:
    """`lora` and `loras` of what was given. Raises ConfigError for two that would be merged, or of one name."""
    merged, named = [], {}
    for value in values:
        name, equals, folder = value.partition("=")
        if not equals or not LORA_NAME.fullmatch(name):
            merged.append(value)
        elif name in named:
            raise ConfigError(f"--lora {value}: the name {name!r} is taken; give each another", field="loras")
        else:
            named[name] = folder
    if len(merged) > 1:
        raise ConfigError(
            f"--lora {merged[1]}: {merged[0]} is merged into the weights already; one without a name at most, "
            "NAME=FOLDER is applied beside them",
            field="lora",
        )
    return {"lora": merged[0] if merged else None, "loras": named}


def _with_tau(kv: str, tau: float) -> str:
    """The scheme with a temperature. Raises CacheError where none is named that could have one."""
    if kv == "auto":
        names = schemes_with("tau")
        named = ", ".join(f"kv={name!r}" for name in names)
        raise CacheError(
            f"--tau {tau} needs a scheme that has it, not kv={kv!r}; accepted: {named}",
            field="kv",
            value=kv,
            accepted=names,
        )
    return f"{kv}{',' if ':' in kv else ':'}tau={tau}"


def bytes_text(n: int) -> str:
    """Rounded for people, exact for checking."""
    return f"{format_bytes(n)} ({n} bytes)"
