"""`edgekv chat`: turns with a model on the terminal, answers streamed to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import sys

from edgekv.chat.conversation import MAX_NEW_TOKENS, Chat
from edgekv.checkpoint.shipped import shipped_model
from edgekv.cli.bars import Bars
from edgekv.cli.caches import wants_list
from edgekv.cli.chat_input import lines
from edgekv.cli.chat_terminal import Terminal, say
from edgekv.cli.conversation import (
    add_draft_option,
    add_session_options,
    add_template_option,
    is_saved,
    open_session,
    open_template,
    save_session,
)
from edgekv.cli.options import (
    Command,
    add_adapter_option,
    add_device_option,
    add_loras_option,
    add_model_options,
    load_options,
)
from edgekv.cli.sampling_options import add_sampling_options, sampling_params
from edgekv.machine import format_bytes
from edgekv.session.sampling_defaults import sampling_defaults
from edgekv.session.session import Session

NO_ANSWERS = {
    "demo": "the demo model writes in the manner of old novels and can't answer; a model that can: "
    "edgekv chat --model Qwen/Qwen3-0.6B",
    "scenes": "this model describes drawn shapes and printed numbers, and nothing else: /image FILE, then ask",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_loras_option(parser, "one for this conversation")
    add_adapter_option(parser)
    add_session_options(parser)
    add_template_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message of a new conversation")
    add_sampling_options(parser, max_new_tokens=str(MAX_NEW_TOKENS))
    parser.add_argument("--no-history", action="store_true", help="keep no file of the lines that were typed")
    add_device_option(parser)
    add_draft_option(parser, "auto")


def _execute(arguments: argparse.Namespace) -> int:
    if wants_list(arguments):
        return 0
    options = load_options(arguments)
    sampling_params(arguments)  # a bad value is said before anything is loaded
    taken_up = is_saved(arguments)
    session = open_session(arguments, options, Bars())
    sampling = sampling_params(arguments, sampling_defaults(session.model))
    chat = Chat(session, open_template(arguments, session), arguments.system)
    for line in banner(session):
        say(line)
    if taken_up:
        say(f"{arguments.session}: {len(chat.messages)} messages, {len(session.tokens)} tokens")
    Terminal(chat, arguments, sampling).run(lines(history=not arguments.no_history))
    save_session(arguments, session)
    return 0


def banner(session: Session) -> list[str]:
    """What one talks with, and how to go on; of a model that can't answer, that."""
    model, plan = session.model, session.plan
    said = [
        f"{model.name}, {model.n_parameters / 1e6:,.1f} M parameters, kv {plan.kv.short} "
        f"({format_bytes(plan.cache_bytes)}), context {plan.ctx} tokens; /help lists commands, Ctrl-D ends"
    ]
    said += [text for name, text in NO_ANSWERS.items() if model.path == shipped_model(name)]
    if not sys.stdin.isatty():
        return said[1:]
    return said


CHAT = Command("talk with a model in turns; /help lists what can be done on the way", _arguments, _execute)
