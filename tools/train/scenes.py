"""Draws the scenes that models/scenes describes: 1 to 10 coloured shapes and numbers in a grid of 4 x 4.

    python tools/train/scenes.py --seed 7 --out scene.png

draws one and prints what is in it. Everything follows from the numpy generator that is given. `parse` reads a
caption back. Needs `.[vision]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import re

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Rng = np.random.Generator
Points = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]

SIDE, CELL = 128, 32  # pixels of a picture and of a cell
ROWS = ("top", "upper", "lower", "bottom")
COLUMNS = ("far left", "left", "right", "far right")
MAX_THINGS = 10

NUMBER, NUMBER_SHARE = "number", 0.25
SIZES = {"small": (10, 9), "medium": (17, 13), "large": (26, 17)}  # extent in pixels of shapes, height of digits
COLOURS = {
    "red": (222, 38, 38),
    "orange": (245, 140, 20),
    "yellow": (238, 222, 40),
    "green": (40, 160, 60),
    "cyan": (40, 205, 215),
    "blue": (40, 70, 225),
    "purple": (130, 40, 180),
    "pink": (245, 110, 190),
}
BACKGROUNDS = ((15, 70), (190, 240))  # grey levels: dark or light
GRADIENT, COLOUR_JITTER, NOISE = 24, 16, 8  # grey levels across the picture, per channel, per pixel
SIZE_JITTER, PLACE_JITTER, TURN = 1.0, 4.0, 8.0  # pixels, pixels, degrees
SCALE = 4  # shapes are drawn this much larger and averaged down


def _regular(n: int, turn: float = 0.0, radii: tuple[float, ...] = (1.0,)) -> Points:
    """Returns points (n, 2) around the centre, the first one up, at distances that repeat."""
    angles = np.radians(turn) + 2 * np.pi * np.arange(n) / n
    reach = np.resize(radii, n)
    return np.stack([reach * np.sin(angles), -reach * np.cos(angles)], 1)


def _cross(arm: float) -> Points:
    quarter = np.array([(-arm, -1), (arm, -1), (arm, -arm)])
    turn = np.array([(0, 1), (-1, 0)])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, i) for i in range(4)])


SHAPES: dict[str, tuple[Points, ...]] = {  # outlines within -1..1; later ones are holes
    "circle": (_regular(40),),
    "ring": (_regular(40), 0.55 * _regular(40)),
    "square": (_regular(4, 45) * 1.25,),
    "diamond": (_regular(4) * (0.7, 1.0),),
    "triangle": (_regular(3) * 1.1,),
    "star": (_regular(10, radii=(1.1, 0.45)),),
    "cross": (_cross(0.33),),
}
KINDS = (*SHAPES, NUMBER)

PROMPT = "<image>\nDescribe the picture.\n"
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
THING = re.compile(rf"({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(KINDS)})(?: (\d+))?")
PLACE = re.compile(rf"({'|'.join(ROWS)}) ({'|'.join(sorted(COLUMNS, key=len, reverse=True))})")
COUNT = re.compile(rf"\b({'|'.join(COUNTS)}) objects?\b")


@dataclasses.dataclass(frozen=True)
class Thing:
    """An object: its kind (a shape, or a printed ``number``), and the cell that it lies in."""

    kind: str
    colour: str
    size: str
    row: str
    column: str
    number: int | None = None

    @property
    def place(self) -> str:
        return f"{self.row} {self.column}"

    @property
    def name(self) -> str:
        """Its name, as ``small red circle`` or ``large blue number 47``."""
        digits = "" if self.number is None else f" {self.number}"
        return f"{self.size} {self.colour} {self.kind}{digits}"


Scene = tuple[Thing, ...]


def draw_scene(rng: Rng, n: int | None = None) -> Scene:
    """Draws ``n`` things (default: 1 to 10) in reading order: rows from the top, in each from the left."""
    n = int(rng.integers(1, MAX_THINGS + 1)) if n is None else n
    cells = np.sort(rng.choice(len(ROWS) * len(COLUMNS), size=n, replace=False))
    return tuple(_draw_thing(rng, *divmod(int(cell), len(COLUMNS))) for cell in cells)


def _draw_thing(rng: Rng, row: int, column: int) -> Thing:
    names = list(SHAPES), list(COLOURS), list(SIZES)
    kind, colour, size = (options[rng.integers(len(options))] for options in names)
    if rng.random() > NUMBER_SHARE:
        return Thing(kind, colour, size, ROWS[row], COLUMNS[column])
    return Thing(NUMBER, colour, size, ROWS[row], COLUMNS[column], int(rng.integers(10 ** rng.integers(1, 3))))


def render(scene: Scene, rng: Rng) -> Pixels:
    """Renders the scene (128, 128, 3) uint8 on a grey gradient; places, sizes, angles, colours, pixels vary."""
    low, high = BACKGROUNDS[rng.integers(len(BACKGROUNDS))]
    slope = rng.uniform(-GRADIENT / 2, GRADIENT / 2, size=2)
    ramp = np.linspace(-0.5, 0.5, SIDE)
    picture = np.repeat((rng.uniform(low, high) + np.add.outer(slope[0] * ramp, slope[1] * ramp))[..., None], 3, 2)
    for thing in scene:
        row, column = ROWS.index(thing.row) * CELL, COLUMNS.index(thing.column) * CELL
        cell = picture[row : row + CELL, column : column + CELL]
        mask = (_number_mask if thing.kind == NUMBER else _shape_mask)(thing, rng)[..., None] / 255
        colour = np.array(COLOURS[thing.colour]) + rng.uniform(-COLOUR_JITTER, COLOUR_JITTER, 3)
        cell += mask * (colour - cell)
    noise = rng.integers(-NOISE, NOISE + 1, size=picture.shape, dtype=np.int8)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def _centre(extent: tuple[float, float], rng: Rng) -> Points:
    """Returns where in its cell a thing of that width and height lies, in pixels."""
    room = np.clip(CELL / 2 - 1 - np.array(extent) / 2, 0, PLACE_JITTER)
    return CELL / 2 + rng.uniform(-room, room)


def _shape_mask(thing: Thing, rng: Rng) -> Pixels:
    """Returns the coverage (32, 32) of the cell's pixels, 0 to 255."""
    extent = SIZES[thing.size][0] + rng.uniform(-SIZE_JITTER, SIZE_JITTER)
    centre = _centre((extent, extent), rng)
    angle = np.radians(rng.uniform(-TURN, TURN))
    turn = np.array([(np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))])
    tile = Image.new("L", (CELL * SCALE, CELL * SCALE))
    for i, outline in enumerate(SHAPES[thing.kind]):
        points = (centre + extent / 2 * outline @ turn) * SCALE
        ImageDraw.Draw(tile).polygon([*points.ravel()], fill=0 if i else 255)
    return np.asarray(tile.reduce(SCALE))


def _number_mask(thing: Thing, rng: Rng) -> Pixels:
    """Returns the coverage of digits as `_shape_mask` does."""
    font = _font(SIZES[thing.size][1])
    left, top, right, bottom = font.getbbox(str(thing.number), anchor="mm")
    centre = _centre(((right - left) / SCALE, (bottom - top) / SCALE), rng)
    tile = Image.new("L", (CELL * SCALE, CELL * SCALE))
    ImageDraw.Draw(tile).text(tuple(centre * SCALE), str(thing.number), fill=255, font=font, anchor="mm")
    return np.asarray(tile.reduce(SCALE))


@functools.cache
def _font(height: float) -> ImageFont.FreeTypeFont:
    """Returns Pillow's own font with digits of that height in pixels."""
    return ImageFont.load_default(size=round(height * SCALE / 0.71))


def parse(caption: str) -> tuple[int | None, list[Thing]]:
    """Returns the count that a caption gives (None: none), and the things that it names, those with a place."""
    text = caption.lower()
    count, things = COUNT.search(text), []
    for clause in re.split(r"[.,;:\n]", text):
        thing, place = THING.search(clause), PLACE.search(clause)
        if thing and place:
            kind, colour, size = thing[3], thing[2], thing[1]
            things.append(Thing(kind, colour, size, place[1], place[2], int(thing[4]) if thing[4] else None))
    return COUNTS.index(count[1]) if count else None, things


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--things", type=int, choices=range(1, MAX_THINGS + 1), metavar="1..10")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("scene.png"))
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    scene = draw_scene(rng, args.things)
    Image.fromarray(render(scene, rng)).save(args.out)
    for thing in scene:
        print(f"{thing.place}: {thing.name}")


if __name__ == "__main__":
    main()
