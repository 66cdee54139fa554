"""Table III of the H1B-KV paper (7B model, 8,192 tokens), and what physics says of it."""

import dataclasses

from edgekv.power.boards import boards

PAPER_BOARD = "raspberry-pi-5"


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """Milliseconds and millijoules per token; load and attention are given for the Pi and two methods only."""

    name: str
    pi_ms: float
    pi_mj: float
    nano_ms: float
    nano_mj: float
    load_ms: float | None = None
    attention_ms: float | None = None


ROWS = {
    "dense": PaperRow("FP16", 112, 151, 45, 320, load_ms=25, attention_ms=41),
    "int4": PaperRow("MiniCache", 65, 95, 31, 225),
    "h1b": PaperRow("H1B-KV", 40, 61, 21, 165, load_ms=3, attention_ms=11),
}


def verdict() -> str:
    """One sentence on the difference between the paper's figures and any machine's."""
    board = boards()[PAPER_BOARD]
    fp16, dense = board.lower_bounds[0], ROWS["dense"]
    needed_gb_s = fp16["bytes"] / dense.pi_ms / 1e6
    watts = dense.pi_mj / dense.pi_ms
    return (
        f"One FP16 token of a 7B model at 8,192 tokens reads {fp16['bytes'] / 1e9:.1f} GB, so the paper's "
        f"{dense.pi_ms:g} ms on a {board.name} would take {needed_gb_s:.0f} GB/s from a memory of "
        f"{board.peak_gb_s:g} GB/s (bound: {fp16['peak_ms']:.0f} ms), and its {dense.pi_mj:g} mJ in that time are "
        f"{watts:.2f} W where the board at rest draws {board.idle_w:g} W: no program can reach these figures, and "
        f"the rows above are what this machine does."
    )
