"""The options of the command line, named after the parameters of the library: `kv_budget` is --kv-budget."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, get_type_hints

from edgekv import files
from edgekv.checkpoint.hub import (
    find_or_pull,
    hub_suggestion,
    no_such_model,
    parse_model_name,
    shape_names,
    shipped_model,
)
from edgekv.cli.terminal import PICTURES, say
from edgekv.engine.loading import LORA_NAME, OVERFLOWS, Options
from edgekv.engine.sampling import SamplingParams
from edgekv.errors import MAX_QUOTED, MAX_SHOWN, ConfigError, EdgeKVError, as_argument, nearest
from edgekv.files import require_writable, user_path
from edgekv.kvcache import schemes
from edgekv.kvcache.choice import AUTO, default_scheme
from edgekv.kvcache.registry import PRESETS
from edgekv.machine import all_cores, format_bytes, parse_bytes, parse_tokens
from edgekv.power import METERS
from edgekv.power.energy import IDLE_S
from edgekv.text.template import ChatTemplate
from edgekv.weights.formats import OFFERED

# Types for argparse


def number(description: str, accepts: Callable[[Any], bool], kind: Callable[[str], Any] = float) -> Any:
    """Returns a type for argparse: a number for which ``accepts`` is true. description: such numbers in words."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError, EdgeKVError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")

    return convert


positive_int = number("a whole number of 1 or more", lambda value: value >= 1, parse_tokens)
n_tokens = number("a whole number of 1 or more, such as 8192 or 8k", lambda value: value >= 1, parse_tokens)
natural_int = number("a whole number of 0 or more", lambda value: value >= 0, int)
positive_seconds = number("a number of seconds above 0", lambda value: 0 < value < math.inf)


def token_counts(least: int) -> Any:
    """Returns a type for argparse: numbers of tokens from ``least`` on, separated by commas."""
    description = f"a list of numbers from {least} on, separated by commas"

    def read(text: str) -> list[int]:
        return [parse_tokens(item) for item in text.split(",") if item]

    return number(description, lambda numbers: min(numbers, default=least) >= least, read)


def output_file(path: str) -> str:
    """Returns the path of a file that can be written, else raises CheckpointError before any work is done."""
    require_writable(path)
    return path


def template_file(path: str) -> str:
    """Returns the path of a chat template that can be read, else raises ConfigError before anything is loaded."""
    ChatTemplate.read(path)
    return path


def picture_file(path: str) -> str:
    """Returns the path of a picture that can be written. Raises ConfigError for another kind of file."""
    if os.path.splitext(path)[1].lower() not in PICTURES:
        raise ConfigError(f"{path}: is no picture; accepted: names that end in {', '.join(PICTURES)}")
    return output_file(path)


def sampling_value(name: str, text: str) -> Any:
    """Returns the number in a text; for logit_bias a pair (token, bias). Raises ConfigError (field ``name``)."""
    token, _, bias = text.partition("=")
    try:
        if name == "logit_bias":
            return int(token), float(bias)
        return int(text) if re.fullmatch(r"\s*[-+]?\d+\s*", text) else float(text)
    except ValueError:
        accepted = "ID=BIAS, a token's id and a number from -100 to 100" if name == "logit_bias" else "a number"
        raise ConfigError(field=name, value=text, accepted=[accepted]) from None


# Options

LORA = "a LoRA as PEFT saves it, merged into the weights before they are quantized (default scale 1)"
METER = ", ".join(METERS)
REPEATED = {"action": "append", "default": []}


def option(metavar: str | None, text: str = "", **others: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for an option with a value."""
    return {"metavar": metavar, "help": text, **others}


def count(text: str = "", **more: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a whole number of 1 or more."""
    return option("N", text, type=positive_int, **more)


class Size(int):
    """A number of bytes, which errors show as it was given."""

    given = ""

    def __str__(self) -> str:
        return self.given


def size(field: str, text: str, default: str | None = None, off: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for bytes, which errors call ``field``; ``off`` is None."""
    usual = "G" if field == "memory" else "M"

    def read(given: str) -> int | None:
        if given == off:
            return None
        if given.strip().isdecimal() and 0 < int(given) < 1 << 20:
            accepted, advice = [f"{given}{unit}" for unit in "GMKB"], f"did you mean {given}{usual}?"
            raise ConfigError("has no unit", field=field, value=given, accepted=accepted, advice=advice)
        if not (value := Size(parse_bytes(given, field))):
            raise ConfigError(field=field, value=given, accepted=["more than 0 bytes", *(off or "").split()])
        value.given = given.strip()
        return value

    return option("BYTES", text, type=read, default=default)


SYNONYMS = {"q8_0": "q8", "q4_0": "q4", "fp16": "f16", "bf16": "f16"}
"""What llama.cpp and others call caches of as many bits."""


def kv_names(text: str) -> str:
    """Returns schemes, comma-separated or one, under the names that they have here, and says which had others."""
    items = text.split(",")
    for i, item in enumerate(items):
        name, colon, rest = item.partition(":")
        if (taken := SYNONYMS.get(name.lower())) and name not in schemes():  # of another package
            say(f"--kv {name}: taken for {taken}, the cache of as many bits here")
            items[i] = f"{taken}{colon}{rest}"
    return ",".join(items)


OPTIONS: dict[str, dict[str, Any]] = {
    "model": option(
        "PATH",
        "a Hugging Face folder, a .safetensors or .gguf file, a store of `edgekv quantize`, a name on the Hugging "
        "Face Hub (org/name[@revision], org/name:Q4_K_M, org/name:file.gguf), downloaded once, or demo or scenes "
        "(default: demo)",
    ),
    "config": option("FILE", "config.json for a bare .safetensors file"),
    "shape": option("NAME", f"a known shape, without weights, in place of --model: {', '.join(shape_names())}"),
    "weights": option(
        "FORMAT",
        f"{', '.join(('auto', *OFFERED))} (default auto: by size); with ,head=FORMAT the head has another",
        default="auto",
    ),
    "kv": option(
        "NAME[:option=value,...]",
        f"bits of the KV cache: {', '.join(PRESETS)}, one of `edgekv schemes`, or auto (default): the "
        f"smallest that passed the gate on this model, else {default_scheme()}; f16 if that saves little",
        type=kv_names,
    ),
    "kv_budget": size(
        "kv_budget",
        "bytes that the cache never exceeds, such as 300M: auto takes the most bits that fit",
    ),
    "ctx": option("N", "context in tokens, such as 8192 or 8k (default 8192 or the model's)", type=n_tokens),
    "tokenizer": option("PATH", "a tokenizer file or folder, if not beside the model"),
    "threads": count("cores to use (default: all, or fewer for weight products if that is faster)"),
    "lora": option("FOLDER[:scale]", LORA),
    "loras": option(
        "[NAME=]FOLDER[:scale]",
        f"{LORA}; with a name it is applied at run time beside unchanged weights, and requests to a server choose "
        "it as `model`",
        **REPEATED,
    ),
    "adapter": option("FILE", "an adapter.safetensors trained for this model and --kv"),
    "device": option(
        None,
        "cpu (Numba), cuda (CuPy), numpy (the slow reference), or auto: cuda where CuPy, a GPU and the scheme's "
        "kernels are, else cpu (default %(default)s)",
        default=Options.device,
    ),
    "session": option(
        "FILE",
        "continue the conversation in FILE if it exists, and save it there with its cache at the end",
        type=output_file,
    ),
    "prefix_cache": size(
        "prefix_cache",
        "of the disk for what was read: a prompt that begins alike goes on from there, also after a restart; "
        "or off (default %(default)s, at most a tenth of what is free)",
        default="2G",
        off="off",
    ),
    "overflow": option(
        "WAY",
        f"when the conversation outgrows --ctx: {', '.join(OVERFLOWS)} (default %(default)s)",
        default=Options.overflow,
    ),
    "draft": option(
        "SOURCE",
        "guess the next tokens and check several in one pass: faster, and greedy text stays the same but for "
        "rounding; none, ngram (from prompt and text), or auto (ngram on a CPU) (default %(default)s)",
        default=Options.draft,
    ),
    "chat_template": option(
        "FILE", "a Jinja chat template (default: the model's own, else a plain transcript)", type=template_file
    ),
    "max_new_tokens": count(),
    "stop": option("TEXT", "end before this text (repeatable)", **REPEATED),
    "images": option("FILE", "an image, for the prompt's next <image> or else before it (repeatable)", **REPEATED),
    "json_schema": option("FILE", "answer with JSON of this schema (needs llguidance)"),
    "meter": option("NAME", f"auto (default), {METER}"),
    "power": option("METER", f"its energy's meter: auto, {METER}, or off (default: auto without time at rest)"),
    "power_csv": option("FILE", "energy from an external meter's log: time and watts per line"),
    "power_idle": option(
        "S", f"seconds at rest before the run, to subtract (default 0, {IDLE_S:g} with a named meter)", type=float
    ),
    "json": option("FILE", "write the results, with every setting, as JSON", type=output_file),
    "plot": option("FILE", type=picture_file),
}
"""The arguments of `add_argument` for each option, by parameter."""
WORDS = ("model", "prompt")
"""The parameters that a word alone gives, in this order."""
CONFLICTS = {"model": ("model", "shape"), "prompt": ("prompt", "prompt_file")}
FLAGS = {"images": "--image", "loras": "--lora"}
"""The option of a parameter that has another name."""
ALIASES = {
    "max_new_tokens": ("-n", "--max-tokens"),
    "temperature": ("--temp",),
    "ctx": ("-c",),
    "prompt": ("-p",),
    "prompt_file": ("-f",),
    "model": ("-m",),
}
"""Names of options in llama.cpp and other programs, which mean the same here."""
CHOICES = {"kv": (AUTO, *PRESETS), "weights": ("auto", *OFFERED), "overflow": OVERFLOWS}
"""What a shell's TAB key offers for an option."""
SOURCE = "model config"
SESSION = "model config weights kv kv_budget ctx tokenizer threads loras adapter"
"""The options that name a model, and all that load a session."""


def field_names(declared: Any) -> list[str]:
    """Returns the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(declared)]


def add_options(parser: Any, names: str, **extra: Any) -> None:
    """Adds the named OPTIONS, and ``extra``: new options, or other arguments or help for one of OPTIONS.

    Those of WORDS can also be given as a word without an option.
    """
    for name in dict.fromkeys([*names.split(), *extra]):
        change = extra.get(name, {})
        settings = OPTIONS.get(name, {}) | ({"help": change} if isinstance(change, str) else change)
        parser.add_argument(option_name(name), *ALIASES.get(name, ()), **settings)
        if name in WORDS:
            help_text = f"in place of {option_name(name)}"
            words = getattr(parser, "_container", parser)  # not in a group: `take_words` says what is given twice
            words.add_argument(f"{name}_word", nargs="?", metavar=name.upper(), help=help_text)


def take_words(arguments: argparse.Namespace, others: Sequence[str]) -> None:
    """Gives the words of a command line to the options of WORDS: a single one is the model, if that is not given.

    others: words that the parser could not place, as options stood between. Raises EdgeKVError for an unknown
    option, for a word too many, for what is given twice and for what is no model.
    """
    names = [name for name in WORDS if hasattr(arguments, f"{name}_word")]
    words = [word for name in names if (word := getattr(arguments, f"{name}_word")) is not None]
    for other in others:
        if other.startswith("-") and other != "-" and " " not in other:
            name, options = other.partition("=")[0], getattr(arguments, "options", ())
            longer = " or ".join(option for option in options if len(name) > 3 and option.startswith(name))
            depth = "--depth" if name in ("--ctx", "-c") and "--depth" in options else ""  # of bench
            close = depth or longer or nearest(name, options)
            hint = f"did you mean {close}?" if close else f"see `edgekv {arguments.command} --help`"
            raise EdgeKVError(f"{other}: is no option of `edgekv {arguments.command}`; {hint}")
        words.append(other)
    shapes = shape_names() if hasattr(arguments, "shape") else []
    if arguments_given(arguments, CONFLICTS["model"]) and "prompt" in names and len(words) == 1:
        names = names if is_model(words[0]) else ["prompt"]
    if len(words) > len(names):
        quotes, see = "a text with blanks needs quotes", f"see `edgekv {arguments.command} --help`"
        raise EdgeKVError(f"{words[len(names)]!r} is one word too many; {quotes if 'prompt' in names else see}")
    for name, word in zip(names, words, strict=False):
        if earlier := arguments_given(arguments, CONFLICTS[name]):
            raise EdgeKVError(f"both {word!r} and {earlier[0]} are given; leave one of them out")
        is_known = name != "model" or is_model(word) or parse_model_name(word)
        if word in shapes:
            name, is_known = "shape", True
        if not is_known:
            shape = f"or of its shape: {close}" if (close := nearest(word, shapes)) else ""
            text = f"a text comes second: edgekv run demo {shlex.quote(word[:MAX_SHOWN])}"
            raise no_such_model(word, shape or hub_suggestion(word) or text * (len(names) > 1))
        setattr(arguments, name, word)


def arguments_given(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Returns the options of those parameters that have a value."""
    return [option_name(name) for name in names if getattr(arguments, name, None) is not None]


def is_model(word: str) -> bool:
    """Returns whether a word is a path that exists, or the name of a model that ships with edgekv."""
    return os.path.exists(user_path(word)) or shipped_model(word) is not None


def switch(text: str) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for an option without a value."""
    return {"action": "store_true", "help": text}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: str) -> None:
    """Adds the options of sampling and of the text's end. max_new_tokens: the default, for the help."""
    add_options(parser, "max_new_tokens", max_new_tokens=f"stop after N tokens (default: {max_new_tokens})")
    exclusive = parser.add_mutually_exclusive_group()
    add_options(exclusive, "", greedy=switch("always the likeliest token: --temperature 0"))
    later = " (default, as of the following: what the model's generation_config.json says, in demo 1.0; else 0.7)"
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        settings = hint.__metadata__[-1].extra | {"type": functools.partial(sampling_value, name)}
        if name == "temperature":
            settings["help"] += later
        if name == "logit_bias":
            settings |= REPEATED
        add_options(exclusive if name == "temperature" else parser, "", **{name: settings})
    add_options(parser, "stop")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """Returns the sampling options, else ``defaults``. Raises ConfigError for values out of range."""
    values: dict[str, Any] = {name: getattr(arguments, name) for name in field_names(SamplingParams)}
    values["logit_bias"] = dict(values["logit_bias"]) or None
    if arguments.greedy:
        values["temperature"] = 0.0
    present = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(defaults or SamplingParams(), **present)


# Values of options


def model_path(arguments: argparse.Namespace) -> str:
    """Returns --model, by default the demo model; downloads a model of the Hub that is not in the cache."""
    path = "demo" if arguments.model is None else str(arguments.model)
    name = parse_model_name(path)
    if name:
        find_or_pull(name, say)
    return path


def load_options(arguments: argparse.Namespace) -> Options:
    """Returns the command's options as the library takes them. Raises an EdgeKVError for a bad value."""
    values = {name: getattr(arguments, name) for name in field_names(Options) if hasattr(arguments, name)}
    if isinstance(values.get("lora"), list):
        values |= _split_loras(values["lora"])
    if (threads := values.get("threads") or 0) > all_cores():
        say(f"--threads {threads}: this process may use {all_cores()}, and no more will be")
    return Options(**values)


def _split_loras(values: list[str]) -> dict[str, Any]:
    """Splits --lora into the merged and the named ones. Raises ConfigError for two merged ones, or equal names."""
    merged, named = list[str](), list[tuple[str, str]]()
    for value in values:
        name, equals, folder = value.partition("=")
        if equals and LORA_NAME.fullmatch(name):
            named.append((name, folder))
        else:
            merged.append(value)
    if len(merged) > 1 or len(dict(named)) < len(named):
        problem = "one FOLDER at most is merged into the weights; others are NAME=FOLDER, each of another name"
        raise ConfigError(f"--lora {' --lora '.join(values)}: {problem}", field="lora")
    return {"lora": merged[0] if merged else None, "loras": dict(named)}


def bytes_text(n: int) -> str:
    """Returns a number of bytes as text, rounded and exact."""
    return f"{format_bytes(n)} ({n} bytes)"


def read_text_option(source: str, option: str, hint: str = "") -> str:
    """Returns the UTF-8 text of a file, or of standard input for ``-``. Raises EdgeKVError, ``hint`` behind it."""
    try:
        return sys.stdin.buffer.read().decode() if source == "-" else files.read_text(user_path(source))
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start})"
    except ValueError as error:
        reason = str(error)
    raise EdgeKVError(f"{option} {source!r} {reason}; give a readable UTF-8 text file{hint}")


# Errors


def option_name(name: str) -> str:
    """Returns the option of a parameter."""
    return FLAGS.get(name) or "--" + name.replace("_", "-")


def error_text(error: EdgeKVError, options: Container[str] | None = None) -> str:
    """Returns the text of an error, with options in place of the library's parameters.

    options: the options of the command, or None for all; other parameters keep their names.
    """

    def spell(name: str, value: object) -> str:
        option = option_name(name)
        if name == "meter" and options and option not in options:  # of commands that measure something else
            option = "--power"
        if options and option not in options:
            return str(value)[:MAX_QUOTED] if name == "model" and value is not None else as_argument(name, value)
        return option if value is None else f"{option} {str(value)[:MAX_QUOTED]}"

    return error.render(spell)
