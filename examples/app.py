"""An app on the device: a chat that streams its answers, and goes on where it was left.

usage: python examples/app.py [--model PATH] [--file FILE]

An empty line or Ctrl-D ends the app, Ctrl-C an answer.
"""

import argparse
import contextlib
import pathlib
import sys

from edgekv import Chat, EdgeKVError, Session, SessionError

SYSTEM = "You live on a small device. Answer in one or two sentences."


def open_chat(model: str, file: pathlib.Path) -> Chat:
    """Returns the saved conversation, or a new one where there is none, or it is damaged or another model's."""
    if file.exists():
        try:
            return Chat(Session.restore(file, model, overflow="slide"))
        except SessionError as error:
            print(f"a new conversation, since {error}", file=sys.stderr)
    return Chat(Session.load(model, ctx=4096, overflow="slide"), system=SYSTEM)


def answer(chat: Chat, question: str) -> None:
    """Prints an answer while it is written; stopped by Ctrl-C, it stays in the chat as far as it came."""
    try:
        with contextlib.closing(chat.ask(question, max_new_tokens=200)) as steps:
            for step in steps:
                print(step.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except EdgeKVError as error:  # such as a question that is too long
        print(error, file=sys.stderr)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--file", type=pathlib.Path, default=pathlib.Path("app.kv"))
    arguments = parser.parse_args()
    try:
        chat = open_chat(arguments.model, arguments.file)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while question := input("> "):
                answer(chat, question)
        chat.session.save(arguments.file)
    except EdgeKVError as error:  # no such model, too little memory, a full disk
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
