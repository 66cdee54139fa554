"""Training data of the scenes model: its tokenizer, conversations about pictures, and batches of both."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import sentencepiece
import torch
from torch.utils.data import IterableDataset, get_worker_info
from visual_captions import IMAGE, pictures, turn
from visual_scenes import COLOURS, COLUMNS, KINDS, MAX_THINGS, NUMBER, ROWS, SIZES, Rng, Scene, draw_scene, render

Ids = npt.NDArray[np.int64]
Labels = npt.NDArray[np.bool_]
VOCABULARY = 576
IMAGE_TOKEN, PAD = 3, 0  # the first symbol of the tokenizer's own; padding carries no loss
LENGTHS = {1: 448, 2: 704, 4: 1216}  # tokens a row, by pictures in it: 256 each, and text
# a cell's kind, colour, size, tens and units; 0: none
CELL_CLASSES = (1 + len(KINDS), 1 + len(COLOURS), 1 + len(SIZES), 11, 11)


def train_tokenizer(n_turns: int = 20_000, seed: int = 0) -> bytes:
    """A sentencepiece model of requests and captions: most words a piece, digits one by one, bytes for others."""
    rng = np.random.default_rng([seed, 1])
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for _ in range(n_turns) for text in _sentences(rng)),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        split_digits=True,
        user_defined_symbols=[IMAGE, "\n"],
        add_dummy_prefix=False,  # text around a picture is tokenised as it is inside a sentence
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def _sentences(rng: Rng) -> Iterator[str]:
    scenes = draw_scenes(rng, int(rng.choice([1, 2, 4])))
    question, answer = turn(rng, scenes, describe_share=0.7)
    yield from (pictures(len(scenes)).replace(IMAGE, "").strip(), question.strip(), answer)


def draw_scenes(rng: Rng, n: int) -> list[Scene]:
    """As many pictures' contents; half the time few enough things that one answer can name them all."""
    if n == 1 or rng.random() < 0.5:
        return [draw_scene(rng) for _ in range(n)]
    return [draw_scene(rng, int(rng.integers(1, MAX_THINGS // n + 1))) for _ in range(n)]


def conversation(
    rng: Rng, tokenizer: sentencepiece.SentencePieceProcessor, scenes: list[Scene], length: int, n_tokens: int
) -> tuple[Ids, Labels]:
    """(length,) ids, each picture ``n_tokens`` image tokens, and whether each is to be predicted.

    Pictures, then requests with their answers for as long as they fit. What is to be predicted: answers, their
    end, and the line break before them.
    """
    start = pictures(len(scenes), ordinals=bool(rng.random() < 0.6))
    if rng.random() < 0.2:
        start = start.replace("\n", "")
    ids, labels = [tokenizer.bos_id()], [False]
    for token in tokenizer.encode(start):
        part = [token] * (n_tokens if token == IMAGE_TOKEN else 1)
        ids += part
        labels += [False] * len(part)
    describe_share = 0.75
    while True:
        question, answer = (tokenizer.encode(text) for text in turn(rng, scenes, describe_share))
        if len(ids) + len(question) + len(answer) + 1 > length:
            break
        ids += [*question, *answer, tokenizer.eos_id()]
        labels += [False] * (len(question) - 1) + [True] * (len(answer) + 2)
        describe_share = 0.3
    row = np.full((2, length), PAD)
    row[0, : len(ids)], row[1, : len(ids)] = ids, labels
    return row[0], row[1].astype(bool)


def cell_classes(scene: Scene) -> Ids:
    """(16, 5): what lies in each cell of the grid, as CELL_CLASSES counts it."""
    classes = np.zeros((len(ROWS) * len(COLUMNS), len(CELL_CLASSES)), np.int64)
    for thing in scene:
        cell = ROWS.index(thing.row) * len(COLUMNS) + COLUMNS.index(thing.column)
        names = ((KINDS, thing.kind), (list(COLOURS), thing.colour), (list(SIZES), thing.size))
        classes[cell, :3] = [1 + options.index(name) for options, name in names]
        if thing.kind == NUMBER:
            tens, units = divmod(thing.number, 10)
            classes[cell, 3:] = (1 + tens if tens else 0), 1 + units
    return classes


@dataclasses.dataclass(frozen=True)
class Batch:
    """pictures (n, 128, 128, 3) uint8 in the rows' order, cells (n, 16, 5), ids and labels (rows, length)."""

    pictures: torch.Tensor
    cells: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


class Batches(IterableDataset[Batch]):
    """Endless batches of ``n_pictures``; how many of them a row has is drawn from ``per_row`` for each batch."""

    def __init__(
        self, tokenizer: bytes, n_pictures: int, per_row: tuple[int, ...], n_tokens: int = 256, seed: int = 0
    ) -> None:
        self.tokenizer, self.n_pictures, self.per_row = tokenizer, n_pictures, per_row
        self.n_tokens, self.seed = n_tokens, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = np.random.default_rng([self.seed, sum(self.per_row), worker.id if worker else 0])
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=self.tokenizer)
        while True:
            yield self._batch(rng, tokenizer)

    def _batch(self, rng: Rng, tokenizer: sentencepiece.SentencePieceProcessor) -> Batch:
        n = self.per_row[rng.integers(len(self.per_row))]
        rows = [draw_scenes(rng, n) for _ in range(self.n_pictures // n)]
        length = LENGTHS[n] + 1 - n * (256 - self.n_tokens)
        talks = [conversation(rng, tokenizer, scenes, length, self.n_tokens) for scenes in rows]
        drawn = [render(scene, rng) for scenes in rows for scene in scenes]
        cells = [cell_classes(scene) for scenes in rows for scene in scenes]
        ids, labels = zip(*talks, strict=True)
        return Batch(*(torch.from_numpy(np.stack(part)) for part in (drawn, cells, ids, labels)))
