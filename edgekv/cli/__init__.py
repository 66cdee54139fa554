"""The command line: parses the arguments, runs one command, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import NoReturn

from edgekv.cli.options import CHOICES, error_text, take_words
from edgekv.cli.terminal import one_line, visible_terminals
from edgekv.errors import EdgeKVError
from edgekv.machine import __version__

COMMANDS = {
    "run": ("run", "generate text: tokens go to standard output, a short report to standard error"),
    "demo": ("demo", "see what packed caches keep and save, on the model that ships, in half a minute"),
    "chat": ("chat", "talk with a model in turns; /help lists what can be done on the way"),
    "serve": ("serve", "serve a model through OpenAI's API, with a page to chat on"),
    "pull": ("models", "download a model of the Hugging Face Hub: only what is needed, resumable"),
    "list": ("models", "list what is on the disk: models, their quantized weights, kernels; bytes and last use"),
    "rm": ("models", "remove what `edgekv list` shows, at once, and say how many bytes that freed"),
    "info": ("models", "print a model's shapes, the bytes of its weights and their hash, without loading them"),
    "budget": ("models", "say whether weights and KV cache fit, before anything is downloaded"),
    "schemes": ("eval", "list the KV schemes: bytes, measured quality and speed, and which to take"),
    "quantize": ("models", "write a model's weights as a store that the next start maps (run does it by itself)"),
    "warm": ("models", "compile kernels, and quantize the model's weights, so that the first run need not"),
    "eval": ("eval", "measure the quality of KV schemes on a text against the dense cache"),
    "bench": ("eval", "time decoding at a depth, part by part, on a model or a shape"),
    "board": ("board", "measure this machine in ten minutes, for a page that others can compare"),
    "power": ("power", "show what this machine draws; meter any command; say what can be measured"),
}
"""A command's module, with its functions NAME_arguments and NAME_command, and its help."""
SHELLS = ("bash", "zsh", "tcsh", "fish")
HINT = (
    'to use it at once: eval "$(edgekv completion bash)", or in fish: edgekv completion fish | source; '
    "or write it where your shell looks for them"
)
PATHS = ("FILE", "PATH", "FOLDER", "MODEL")  # how help calls what is a file, or may be one
FISH = """\
complete -c edgekv -f
function __edgekv_is_at
    set -l words (commandline -opc)
    test "$words[2]" = $argv[1]; or return
    test (count $argv) = 1; or contains -- $argv[2] $words
end
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises an EdgeKVError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise EdgeKVError(message, advice=f"see `{self.prog} --help`")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser with a subcommand for each of COMMANDS, or for ``only`` one of them."""
    help_text = "Run language models with long contexts on small machines."
    main_parser = Parser(prog="edgekv", description=help_text)
    main_parser.add_argument("--version", action="version", version=f"edgekv {__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS if only is None else (only,):
        module, help_text = COMMANDS[name]
        sub = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        functions = import_module(f"edgekv.cli.{module}")
        getattr(functions, f"{name}_arguments")(sub)
        sub.set_defaults(execute=getattr(functions, f"{name}_command"), options=sub._option_string_actions)
    help_text = "print a script for your shell's TAB key"
    sub = commands.add_parser("completion", help=help_text, description=help_text, epilog=HINT)
    sub.add_argument("shell", choices=SHELLS)
    sub.set_defaults(execute=lambda arguments: _print_completion(main_parser, arguments.shell))
    return main_parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. Raises EdgeKVError for one that no command accepts."""
    command, known = words[0], [*COMMANDS, "completion"]
    if not command.startswith("-") and command not in known:
        meant = {"ls": "list", "show": "info", "version": "--version"}.get(command)
        advice = f"did you mean edgekv {meant}?" if meant else ""
        raise EdgeKVError(f"{command!r} is no command", value=command, accepted=known, advice=advice)
    arguments, others = build_parser(command if command in COMMANDS else None).parse_known_args(words)
    take_words(arguments, others)
    return arguments


def _print_completion(root: argparse.ArgumentParser, shell: str) -> int:
    import shtab

    lines, parsers = [FISH], [(root, "")]
    for parser, place in parsers:  # which grows on the way
        for action in parser._actions:
            action.choices = CHOICES.get(action.dest, action.choices)
            if action.metavar in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if isinstance(action, argparse._SubParsersAction):
                parsers += [(sub, f"{place} {name}") for name, sub in action.choices.items()]
        lines += _fish_lines(parser, place)
    print("".join(lines) if shell == "fish" else shtab.complete(root, shell))
    return 0


def _fish_lines(parser: argparse.ArgumentParser, place: str) -> Iterator[str]:
    """Yields a `complete` of fish for each option, command and choice. place: the commands before, as words."""

    def quoted(text: str) -> str:
        return "'" + re.sub(r"([\\'])", r"\\\1", text) + "'"

    at = f"complete -c edgekv -n {quoted(f'__edgekv_is_at{place}' if place else '__fish_use_subcommand')}"
    formatter = parser._get_formatter()
    for action in parser._actions:
        about = f" -d {quoted(formatter._expand_help(action))}" if action.help else ""
        if isinstance(action, argparse._SubParsersAction):
            for sub in action._choices_actions:
                yield f"{at} -a {sub.dest} -d {quoted(sub.help or '')}\n"
            continue
        names = "".join(f" -{'l' if name[1] == '-' else 's'} {name.lstrip('-')}" for name in action.option_strings)
        files = " -F" if action.metavar in PATHS else ""
        choices = f" -a {quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
        value = f" -r{files or ' -f'}" if names and action.nargs not in (0, "?") else files
        if names or files or choices:
            yield f"{at}{names}{value}{choices}{about}\n"


def main(argv: Sequence[str] | None = None, on_import: Callable[[], object] = lambda: None) -> int:
    """Runs a command and returns its exit status: 0, 2 for bad input (one line on stderr), 130 after Ctrl-C.

    on_import: called once the modules that the command needs are loaded.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = None
    try:
        arguments = parse([*words[1:2], "--help"] if words[:1] in ([], ["help"]) else words)
        if getattr(arguments, "kv", None) == "list":
            arguments = build_parser("schemes").parse_args(["schemes"])
        with visible_terminals():
            on_import()
            status: int = arguments.execute(arguments)
            sys.stdout.flush()
    except EdgeKVError as error:
        message = error_text(error, getattr(arguments, "options", None))
        print(f"edgekv: error: {one_line(message)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again when it ends, and complains
        if isinstance(error, BrokenPipeError):  # the reader of our output went away
            return 141
        message = f"standard output can't be written ({error.strerror}): make room, or redirect it"
        print(f"edgekv: error: {message}", file=sys.stderr)
        return 2
    return status
