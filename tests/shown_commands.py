"""Finds the command lines that a document shows, and checks them against the commands themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from edgekv.cli import COMMANDS, parser

FENCE = re.compile(r"^```(?:sh|bash)\n(.*?)^```|^    (edgekv .*)$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(edgekv [^`]+)`")
OPTION = re.compile(r"(?<![-\w])--[a-z][-a-z]*[a-z]")


def shown(text: str) -> Iterator[list[str]]:
    """The words of every `edgekv COMMAND ...` in the text's code, up to what ends a command of a shell."""
    code = [first or second for first, second in FENCE.findall(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    code += [" ".join(inline.split()) for inline in INLINE.findall(prose)]
    for part in code:
        for line in re.sub(r"\\\n", " ", part).splitlines():
            for command in re.split(r"&&|\||;|#", line):
                found = re.search(r"(?:^|\s)edgekv ([a-z]+.*)", command)
                if found:
                    yield found[1].split()


def unknown(words: list[str]) -> list[str]:
    """What of a command line is no command, or no option of it."""
    if words[0] not in (*COMMANDS, "completion"):
        return [words[0]]
    sub = _choices(parser())[words[0]]
    for word in words[1:]:
        if word == "--":
            break
        sub = _choices(sub).get(word, sub)
    own = words[: words.index("--")] if "--" in words else words
    known = {option for action in sub._actions for option in action.option_strings}
    return [option for option in OPTION.findall(" ".join(own)) if option not in known]


def _choices(sub: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in sub._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
