"""What is said about a scene of visual_scenes.py: captions, questions, whole conversations, and the exact score.

A caption names the count and then every thing with its size, colour, kind and place, in reading order and in one
of five phrasings. `parse` reads any of them back, so that a model's caption is scored attribute by attribute.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from visual_scenes import COLOURS, COLUMNS, KINDS, MAX_THINGS, NUMBER, ROWS, SIZES, Rng, Scene, Thing

IMAGE = "<image>"
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDINALS = ("first", "second", "third", "fourth")
DESCRIBE = ("Describe", "What is in", "What do you see in", "Caption")


@dataclasses.dataclass(frozen=True)
class Phrasing:
    """``opening`` has {count}, ``thing`` has {name} and {place}; things are joined by ``join``, a stop ends."""

    opening: str
    thing: str
    join: str = ". "

    def write(self, scene: Scene) -> str:
        count = f"{COUNTS[len(scene)]} object{'' if len(scene) == 1 else 's'}"
        things = (self.thing.format(name=f"a {thing.name}", place=thing.place) for thing in scene)
        parts = [self.opening.format(count=count, be="is" if len(scene) == 1 else "are"), self.join.join(things)]
        return re.sub(r"(^|\. )(\w)", lambda match: match[1] + match[2].upper(), "".join(parts)) + "."


PHRASINGS = (
    Phrasing("there {be} {count}. ", "{name} at the {place}"),
    Phrasing("{count} {be} in the picture. ", "at the {place} is {name}"),
    Phrasing("the picture shows {count}: ", "{name} at the {place}", ", "),
    Phrasing("I see {count}. ", "the {place} holds {name}"),
    Phrasing("a picture of {count}: ", "at the {place} {name}", "; "),
)


def captions(scene: Scene) -> list[str]:
    """One per phrasing: the references of the metrics that compare texts."""
    return [phrasing.write(scene) for phrasing in PHRASINGS]


THING = re.compile(rf"({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(KINDS)})(?: (\d+))?")
PLACE = re.compile(rf"({'|'.join(ROWS)}) ({'|'.join(sorted(COLUMNS, key=len, reverse=True))})")
COUNT = re.compile(rf"\b({'|'.join(COUNTS)}) objects?\b")
UNPLACED = ("", "")


def parse(caption: str) -> tuple[int | None, list[Thing]]:
    """The count that a caption gives (None: none), and the things that it names; a place left out is empty."""
    text = caption.lower()
    count, things = COUNT.search(text), []
    for clause in re.split(r"[.,;:\n]", text):
        thing, place = THING.search(clause), PLACE.search(clause)
        if thing:
            size, colour, kind, digits = thing.groups()
            row, column = place.groups() if place else UNPLACED
            things.append(Thing(kind, colour, size, row, column, int(digits) if digits else None))
    return COUNTS.index(count[1]) if count else None, things


ATTRIBUTES = ("count", "shape", "colour", "size", "position", "digits", "whole")


def agreement(said: Thing, true: Thing) -> dict[str, bool]:
    """Which attributes of a thing are right; ``whole``: all of them."""
    right = {
        "shape": said.kind == true.kind,
        "colour": said.colour == true.colour,
        "size": said.size == true.size,
        "position": said.place == true.place,
        "digits": said.number == true.number,
    }
    return right | {"whole": all(right.values())}


Tally = dict[str, tuple[int, int]]  # attribute: how many are right, of how many


def score(caption: str, scene: Scene) -> Tally:
    """Right attributes of a caption's things and how many there are to get right.

    Each thing of the scene is compared with one thing of the caption: pairs that agree in most attributes first,
    earlier ones among equals. A thing that is left out, and one that is invented, is wrong in every attribute.
    Digits count on numbers alone.
    """
    count, said = parse(caption)
    pairs = sorted(
        ((-sum(agreement(a, b).values()), i, j) for i, a in enumerate(said) for j, b in enumerate(scene))
    )
    tally = dict.fromkeys(ATTRIBUTES, 0)
    seen_said: set[int] = set()
    seen_true: set[int] = set()
    for _, i, j in pairs:
        if i in seen_said or j in seen_true:
            continue
        seen_said.add(i)
        seen_true.add(j)
        for name, right in agreement(said[i], scene[j]).items():
            tally[name] += right and (name != "digits" or scene[j].kind == NUMBER)
    tally["count"] = int(count == len(scene))
    of = dict.fromkeys(ATTRIBUTES, max(len(scene), len(said)))
    of["count"] = 1
    of["digits"] = max(_numbers(scene), _numbers(said))
    return {name: (tally[name], of[name]) for name in ATTRIBUTES}


def _numbers(things: Sequence[Thing]) -> int:
    return sum(thing.kind == NUMBER for thing in things)


def accuracies(tallies: Sequence[Tally]) -> dict[str, float | None]:
    """Share of each attribute that is right over many captions; None where there was nothing to get right."""
    sums = {name: np.sum([tally[name] for tally in tallies], axis=0) for name in ATTRIBUTES}
    return {name: float(right / of) if of else None for name, (right, of) in sums.items()}


def pictures(n: int, ordinals: bool = True) -> str:
    """The beginning of a prompt with ``n`` pictures: told apart by ordinals, where there are several, or bare."""
    if n == 1 or not ordinals:
        return f"{IMAGE}\n" * n
    return "".join(f"{ordinal.capitalize()} picture: {IMAGE}\n" for ordinal in ORDINALS[:n])


def describe(which: int | None = None) -> str:
    """The request that the measurements use: for the only picture, or for one of several."""
    return f"Describe the {f'{ORDINALS[which]} ' if which is not None else ''}picture.\n"


def turn(rng: Rng, scenes: Sequence[Scene], describe_share: float) -> tuple[str, str]:
    """A random request about one or all of the pictures, ending in a line break, and its answer."""
    i = int(rng.integers(len(scenes)))
    picture = f"{ORDINALS[i]} picture" if len(scenes) > 1 else "picture"
    if rng.random() >= describe_share:
        question, answer = QUESTIONS[rng.integers(len(QUESTIONS))](rng, scenes[i])
        return question.format(picture=picture) + "\n", answer
    verb = DESCRIBE[rng.integers(len(DESCRIBE))]
    stop = "?" if verb.startswith("What") else "."
    if len(scenes) > 1 and sum(map(len, scenes)) <= MAX_THINGS:
        said = [
            f"{ordinal.capitalize()} picture: {PHRASINGS[rng.integers(len(PHRASINGS))].write(scene)}"
            for ordinal, scene in zip(ORDINALS, scenes, strict=False)
        ]
        return f"{verb} every picture{stop}\n", " ".join(said)
    return f"{verb} the {picture}{stop}\n", PHRASINGS[rng.integers(len(PHRASINGS))].write(scenes[i])


def ask_count(rng: Rng, scene: Scene) -> tuple[str, str]:
    return "How many objects are in the {picture}?", f"{COUNTS[len(scene)].capitalize()}."


def ask_thing(rng: Rng, scene: Scene) -> tuple[str, str]:
    """What lies in a cell, most often in one that isn't empty."""
    place = f"{ROWS[rng.integers(len(ROWS))]} {COLUMNS[rng.integers(len(COLUMNS))]}"
    if rng.random() < 0.7:
        place = scene[rng.integers(len(scene))].place
    found = [thing.name for thing in scene if thing.place == place]
    return f"What is at the {place} of the {{picture}}?", f"A {found[0]}." if found else "Nothing."


def ask_place(rng: Rng, scene: Scene) -> tuple[str, str]:
    """Where the first thing of a random thing's name lies."""
    name = scene[rng.integers(len(scene))].name
    place = next(thing.place for thing in scene if thing.name == name)
    return f"Where is the {name} in the {{picture}}?", f"At the {place}."


def ask_numbers(rng: Rng, scene: Scene) -> tuple[str, str]:
    numbers = [str(thing.number) for thing in scene if thing.kind == NUMBER]
    return "Which numbers are in the {picture}?", f"{', '.join(numbers) or 'None'}."


QUESTIONS = (ask_count, ask_thing, ask_place, ask_numbers)
