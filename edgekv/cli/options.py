"""Options that several commands share, and parameters as the command line calls them: `ctx` is --ctx."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import typing
from collections.abc import Callable, Container, Mapping
from typing import Any

from edgekv import files
from edgekv.checkpoint.hub import hub_name, locate
from edgekv.cli.terminal import say
from edgekv.engine.loading import AUTO
from edgekv.engine.options import LORA_NAME, Options
from edgekv.engine.sampling import SamplingParams
from edgekv.errors import CacheError, ConfigError, EdgeKVError
from edgekv.files import user_path
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.spec import schemes_with
from edgekv.machine import format_bytes, parse_bytes
from edgekv.weights.formats import WEIGHTS

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


def number(what: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """For argparse: a number that is accepted; ``what``: it, in words."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


positive_seconds = number("a number of seconds above 0", lambda value: 0 < value < math.inf)


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
        help="cpu (Numba), cuda (CuPy), numpy (the slow reference), or auto: "
        "cuda where CuPy, a GPU and the scheme's kernels are, else cpu (default %(default)s)",
    )


def load_options(arguments: argparse.Namespace) -> Options:
    """The options that the command has, as the library takes them. Raises an EdgeKVError for a bad value."""
    names = (field.name for field in dataclasses.fields(Options))
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if isinstance(given.get("lora"), list):
        given |= _loras(given["lora"])
    if isinstance(given.get("kv_budget"), str):
        given["kv_budget"] = parse_bytes(given["kv_budget"], "kv_budget")
    if getattr(arguments, "tau", None) is not None:
        given["kv"] = _with_tau(given["kv"] or DEFAULT, arguments.tau)
    return Options(**given)


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


def read_text(source: str, option: str) -> str:
    """UTF-8 text of a file, or of standard input for ``-``; an EdgeKVError names the option."""
    try:
        return sys.stdin.buffer.read().decode() if source == "-" else files.read_text(user_path(source))
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start})"
    except ValueError as error:
        reason = str(error)
    raise EdgeKVError(f"{option} {source!r} {reason}; give a readable UTF-8 text file")


# Sampling

SAMPLING = {
    "temperature": (
        "T",
        "0 is greedy (default, as of the following: what the model's generation_config.json says, else 0.7)",
    ),
    "top_k": ("K", "keep the K likeliest tokens; 0 is off"),
    "top_p": ("P", "keep the likeliest tokens that have P of the probability; 1 is off"),
    "min_p": ("P", "keep tokens at least P times as likely as the likeliest; 0 is off"),
    "repetition_penalty": ("R", "divides the logits of tokens in prompt and text; 1 is off"),
    "repetition_window": ("N", "how many of the last tokens that counts; 0: all"),
    "frequency_penalty": ("F", "subtracted for each time that a token was written, -2 to 2; 0 is off"),
    "presence_penalty": ("F", "subtracted once from tokens that were written, -2 to 2; 0 is off"),
    "seed": ("SEED", "of the sampler (default: drawn, and reported)"),
}
"""An option's metavar and help, by the field of `SamplingParams`, which has its type and bounds."""


def add_options(parser: Any, cls: type, told: Mapping[str, tuple[str, str]]) -> None:
    """Add an option for each field of a dataclass that ``told`` has a metavar and help for."""
    hints = typing.get_type_hints(cls)
    for name, (metavar, text) in told.items():
        kind = int if hints[name] is int or int in typing.get_args(hints[name]) else float
        parser.add_argument(_flag(name), type=kind, metavar=metavar, help=text)


def token_bias(text: str) -> tuple[int, float]:
    """ID=BIAS. Raises ConfigError (field logit_bias)."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        accepted = "ID=BIAS, a token's id and a number from -100 to 100"
        raise ConfigError(
            f"logit_bias={text!r}: give {accepted}", field="logit_bias", value=text, accepted=[accepted]
        ) from None


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: str) -> None:
    """Add how tokens are chosen and when a text ends. max_new_tokens: what its help says of the default."""
    parser.add_argument(
        "--max-new-tokens", type=positive_int, metavar="N", help=f"stop after N tokens (default: {max_new_tokens})"
    )
    (first, told), *others, seed = SAMPLING.items()
    how = parser.add_mutually_exclusive_group()
    add_options(how, SamplingParams, {first: told})
    how.add_argument("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add_options(parser, SamplingParams, dict(others))
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to the logit of the token with this id, -100 to 100 (repeatable)",
    )
    add_options(parser, SamplingParams, dict([seed]))
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """Read the options; what is not given is of ``defaults``. Raises ConfigError for a value out of its range."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in SAMPLING}
    if arguments.greedy:
        given["temperature"] = 0.0
    if arguments.logit_bias:
        given["logit_bias"] = dict(map(token_bias, arguments.logit_bias))
    known = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults or SamplingParams(), **known)


# Parameters in messages

QUOTES = "'\""
HIDDEN = "\0"  # stands in a message for what a user gave
OTHER_NAMES = {
    "images": "--image",
    "loras": "--lora",
    "model": "--model",
    "shape": "--shape",
    "layers": "--layers",
    "hz": "--hz",
    "meter": "--meter",
}
SHARED_NAMES = (
    "max_new_tokens",
    "stop",
    "prompt",
    "chat_template",
    "json_schema",
    "session",
    "output",
    "calibrate",
    "max_request",
    "prefix_cache",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FLAGS = {
    **{field.name: _flag(field.name) for field in dataclasses.fields(Options)},
    **{field.name: _flag(field.name) for field in dataclasses.fields(SamplingParams)},
    **{name: _flag(name) for name in SHARED_NAMES},
    **OTHER_NAMES,
}
"""The option of a parameter, the `field` of an `EdgeKVError`."""

OTHERWISE = {"meter": "--power"}
"""The option that some commands have in place of the usual one."""

_NAMES = "|".join(sorted(FLAGS, key=len, reverse=True))
_QUOTED = r"'[^']*'|\"[^\"]*\""
_MENTION = re.compile(rf"`({_NAMES})`|(?<![-\w.:,=/])({_NAMES})=({_QUOTED}|[^\s,;:)]+)|(?<!\w)(?:{_QUOTED})")


def in_flags(said: EdgeKVError | str, options: Container[str] | None = None) -> str:
    """An error, or a note of the library, with every `name` and ``name=value`` of a parameter as its option.

    options: those of the command; what it lacks stays as it is. None: all. What an error was given as ``value``
    and what stands in quotes is somebody's text and stays as well.
    """
    text, value = str(said), said.value if isinstance(said, EdgeKVError) else None
    if isinstance(value, str) and value:
        text = text.replace(value, HIDDEN)

    def flag(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        known = (FLAGS.get(name), OTHERWISE.get(name))
        option = next((each for each in known if each and (not options or each in options)), None)
        if option is None:
            return found[0]
        return option if found[1] else f"{option} {found[3].strip(QUOTES) or found[3]}"

    shown = _MENTION.sub(flag, text)
    return shown.replace(HIDDEN, value) if isinstance(value, str) else shown
