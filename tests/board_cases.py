"""Boards for tests: one that was never measured, and one with figures that nothing measured."""

from __future__ import annotations

import time

import msgspec

from edgekv.power.board import (
    QUICK,
    Bandwidth,
    Board,
    Decode,
    Idle,
    Measured,
    Plan,
    Prompt,
    Shape,
    Span,
    ThreadsRow,
)

FASTER = msgspec.structs.replace(QUICK, depths=(0, 70), seconds=0.01, idle_s=0.02)


def new_board(plan: Plan = FASTER) -> Board:
    return Board.new(plan, "a test", "none")


def made_up() -> Board:
    """A finished board, each of its measurements half a second after the one before and as long."""
    board, started = new_board(), time.time() - 60
    board.idle = Idle(started, 0.4, None, 0.0)
    span = Span(started, 0.4, 0.5, 51.5, 2400.0, (), 0.02)
    decoded = [
        Decode("tiny", kv, depth, 8, 12.5, 12.0, 14.0, 8.0, 3.0, 1000, 5000, 10000, span)
        for depth in FASTER.depths
        for kv in FASTER.schemes
    ]
    rows: list[Measured] = [
        *(Bandwidth(1, 9.5, span), Bandwidth(2, 12.25, span), ThreadsRow("tiny", 1, 2.5, 99.5, span)),
        *(*decoded, Prompt("tiny", "dense", 64, 2, 640.0, 0.11, 10000, span)),
    ]
    spans = [msgspec.structs.replace(span, started=started + 0.5 * (i + 1)) for i in range(len(rows))]
    board.measured = [msgspec.structs.replace(row, span=own) for row, own in zip(rows, spans, strict=True)]
    board.shapes = [Shape("tiny", 5000, 2, 2, 2, 0.5)]
    board.finished = True
    return board
