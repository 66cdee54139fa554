"""Sessions on the command line: load a model or take up a saved conversation, and save it again."""

from __future__ import annotations

import argparse
import os
import sys

from edgekv.chat.template import ChatTemplate
from edgekv.cli.bars import Bars
from edgekv.cli.gate import warn_ungated
from edgekv.cli.options import model_path
from edgekv.cli.output import output_file
from edgekv.errors import ConfigError, SessionError
from edgekv.files import user_path
from edgekv.session.context_shift import CONTEXT_SHIFTS
from edgekv.session.options import LoadOptions
from edgekv.session.session import Session


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Where a conversation is kept, and what happens when it outgrows the context."""
    parser.add_argument(
        "--session",
        type=output_file,
        metavar="FILE",
        help="keep the conversation and its compressed cache in FILE: taken up if it exists, written at the end",
    )
    parser.add_argument(
        "--overflow",
        default="stop",
        metavar="WAY",
        help=f"when the conversation outgrows --ctx: {', '.join(CONTEXT_SHIFTS)} (default stop)",
    )
    parser.add_argument(
        "--session-compress", action="store_true", help="Huffman-code the session file: smaller, slower"
    )


def add_draft_option(parser: argparse.ArgumentParser, default: str) -> None:
    """--draft, with a command's own default."""
    parser.add_argument(
        "--draft",
        default=default,
        metavar="SOURCE",
        help="guess the next tokens and check several in one pass, for the same text: none, ngram (from prompt "
        "and text), auto (ngram on a CPU), or a smaller model of the same vocabulary (default %(default)s)",
    )


def is_saved(arguments: argparse.Namespace) -> bool:
    """Whether --session names a conversation to take up."""
    return arguments.session is not None and os.path.exists(user_path(arguments.session))


def load_session(arguments: argparse.Namespace, options: LoadOptions, bars: Bars) -> Session:
    """An empty conversation as the options say."""
    with bars:
        session = Session.load(model_path(arguments), options, progress=bars.update)
    warn_ungated(session.model, session.plan.kv)
    return session


def open_session(arguments: argparse.Namespace, options: LoadOptions, bars: Bars) -> Session:
    """The conversation of --session, or an empty one; with the LoRA beside the weights that is given."""
    if len(options.loras) > 1:
        raise ConfigError(
            f"--lora: a conversation has one, not {', '.join(options.loras)}; `edgekv serve` has several"
        )
    if not is_saved(arguments):
        session = load_session(arguments, options, bars)
        for name in options.loras:
            session.use_lora(name)
        return session
    with bars:
        session = Session.restore(arguments.session, model_path(arguments), options, progress=bars.update)
    if options.loras and session.lora is None:
        raise SessionError(
            f"{arguments.session}: was held without a LoRA beside the weights; leave `lora` out, or start a new "
            "session",
            field="lora",
        )
    warn_ungated(session.model, session.plan.kv)
    return session


def save_session(arguments: argparse.Namespace, session: Session) -> None:
    """Writes --session, where it is given."""
    if arguments.session is not None:
        session.save(arguments.session, compress=arguments.session_compress)


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """--chat-template."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja chat template (default: the model's own, else a plain transcript)",
    )


def open_template(arguments: argparse.Namespace, session: Session) -> ChatTemplate:
    """--chat-template, else the model's own, else the plain transcript, which is said."""
    place = session.model.tokenizer_path
    template = ChatTemplate.open(session.require_tokenizer(), place, given=arguments.chat_template)
    if template.is_plain:
        print("this model brings no chat template: a plain User/Assistant transcript is used", file=sys.stderr)
    return template
