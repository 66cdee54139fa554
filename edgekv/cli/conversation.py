"""Sessions on the command line: load a model or take up a saved conversation, and save it again."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from edgekv.chat.template import ChatTemplate, find_template, read_template
from edgekv.cli.gate import warn_ungated
from edgekv.cli.options import Bars, kv_budget, model_path
from edgekv.kvcache import CacheSpec
from edgekv.session.context_shift import OVERFLOWS
from edgekv.session.sampling import Sampler, SamplingParams
from edgekv.session.session import Session


def add_session_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--session",
        metavar="FILE",
        help="keep the conversation and its compressed cache in FILE: taken up if it exists, written at the end",
    )
    parser.add_argument(
        "--overflow",
        default="stop",
        metavar="WAY",
        help=f"when the conversation outgrows --ctx: {', '.join(OVERFLOWS)} (default stop)",
    )
    parser.add_argument(
        "--session-compress", action="store_true", help="Huffman-code the session file: smaller, slower"
    )


def is_saved(arguments: argparse.Namespace) -> bool:
    """Whether --session names a conversation to take up."""
    return arguments.session is not None and pathlib.Path(arguments.session).expanduser().exists()


def load_session(arguments: argparse.Namespace, spec: CacheSpec | str, bars: Bars) -> Session:
    """An empty conversation as the options say."""
    with bars:
        session = Session.load(
            model_path(arguments), kv=spec, kv_budget=kv_budget(arguments), **_options(arguments, bars)
        )
    warn_ungated(session.model, session.plan.kv)
    return session


def open_session(arguments: argparse.Namespace, spec: CacheSpec | str, bars: Bars) -> Session:
    """The conversation of --session, or an empty one."""
    if not is_saved(arguments):
        return load_session(arguments, spec, bars)
    asked = None if arguments.kv in (None, "auto") else spec
    with bars:
        session = Session.restore(arguments.session, model_path(arguments), kv=asked, **_options(arguments, bars))
    warn_ungated(session.model, session.plan.kv)
    return session


def _options(arguments: argparse.Namespace, bars: Bars) -> dict[str, Any]:
    names = ("weights", "ctx", "overflow", "device", "threads", "config", "tokenizer", "adapter")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return given | {"progress": bars.update}


def save_session(arguments: argparse.Namespace, session: Session) -> None:
    """Writes --session, where it is given."""
    if arguments.session is not None:
        session.save(arguments.session, compress=arguments.session_compress)


def continued(session: Session, params: SamplingParams) -> SamplingParams | Sampler:
    """The sampler of the last text if it had the same settings, so that its random numbers go on."""
    sampler = session.sampler
    return sampler if sampler is not None and sampler.params == params else params


def add_template_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja chat template (default: the model's own, else a plain transcript)",
    )


def open_template(arguments: argparse.Namespace, session: Session) -> ChatTemplate:
    """--chat-template, else the model's own, else the plain transcript, which is said."""
    tokenizer, given, place = session.require_tokenizer(), arguments.chat_template, session.model.tokenizer_path
    source = read_template(given) if given else place and find_template(place)
    if source:
        return ChatTemplate(source, tokenizer)
    print("this model brings no chat template: a plain User/Assistant transcript is used", file=sys.stderr)
    return ChatTemplate.plain(tokenizer)
