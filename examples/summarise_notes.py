"""Summarise voice notes: one line per transcript, by a model that stays on the device.

usage: python examples/summarise_notes.py FOLDER [--model PATH] [--kv NAME] [--words N]

Reads every transcript FOLDER/*.txt that has no FOLDER/*.summary yet, and writes that. The instruction is read
once; for each note the session is rewound to it.
"""

import argparse
import pathlib

from edgekv import Session

INSTRUCTION = "Summarise each note in one short sentence.\n"
NOTE = "\nNote: {text}\nSummary:"


def summarise(session: Session, text: str, max_new_tokens: int) -> str:
    """Returns the first line of the answer, and rewinds the session to the instruction."""
    before = len(session.tokens)
    note = NOTE.format(text=text.strip())
    steps = session.generate(note, max_new_tokens=max_new_tokens, stop=["\n"], temperature=0.0)
    summary = "".join(step.text for step in steps).strip()
    session.rewind(before)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--words", type=int, default=30)
    arguments = parser.parse_args()
    session = Session.load(arguments.model, kv=arguments.kv, ctx=4096)
    session.logits(session.encode(INSTRUCTION))
    for note in sorted(arguments.folder.glob("*.txt")):
        target = note.with_suffix(".summary")
        if not target.exists():
            summary = summarise(session, note.read_text(), 2 * arguments.words)
            target.write_text(summary + "\n")
            print(f"{note.name}: {summary}")


if __name__ == "__main__":
    main()
