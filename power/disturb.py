"""What sampling costs a decode: none, a sampling thread (the product's), a sampling process, interleaved.

    python power/disturb.py --model MODEL --threads N

Both sample a made-up Jetson monitor in a temporary folder, so that it runs on any machine; files under /sys take
as long to read or longer. Prints ms per token and its ratio to the run without sampling beside it.
"""

import argparse
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from edgekv.cli.options import add_source_options, model_path, positive_int
from edgekv.errors import EdgeKVError
from edgekv.power import PowerSampler
from edgekv.power.ina3221 import Ina3221
from edgekv.session.session import Session

RAILS = ("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")


def make_monitor(root: pathlib.Path) -> None:
    folder = root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    folder.mkdir(parents=True)
    for channel, rail in enumerate(RAILS, start=1):
        (folder / f"in{channel}_label").write_text(rail)
        (folder / f"in{channel}_input").write_text("5000\n")
        (folder / f"curr{channel}_input").write_text("800\n")


class Nothing:
    """The run to compare with."""

    n_samples, cpu_share = 0, 0.0

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        return


class Thread(Nothing):
    def __enter__(self) -> "Thread":
        self.sampler = PowerSampler(Ina3221.probe(self.root))
        self.sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.sampler.stop()
        trace = self.sampler.trace()
        self.n_samples, self.cpu_share = len(trace.times_s), trace.cpu_share


def sample_until_told(root: pathlib.Path, pipe: Connection) -> None:
    with Thread(root) as sampling:
        pipe.send("ready")
        pipe.recv()
    pipe.send((sampling.n_samples, sampling.cpu_share))


class Process(Nothing):
    def __enter__(self) -> "Process":
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=sample_until_told, args=(self.root, theirs))
        self.process.start()
        self.pipe.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self.pipe.send("stop")
        self.n_samples, self.cpu_share = self.pipe.recv()
        self.process.join()


WAYS: dict[str, type[Nothing]] = {"none": Nothing, "thread": Thread, "process": Process}


def measure(session: Session, root: pathlib.Path, rounds: int, tokens: int) -> None:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, Any] = {}
    for turn in range(rounds):
        ways = list(WAYS)
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            session.reset()
            steps = session.generate([1] * 200, max_new_tokens=tokens + 1, stop=())
            next(steps)
            with WAYS[way](root) as sampling:
                begun = time.perf_counter()
                n = sum(1 for _ in steps)
                times[way].append(1e3 * (time.perf_counter() - begun) / n)
            last[way] = sampling
    print(f"{'':<10}{'ms/token':>10}{'ratio to none':>15}{'range':>16}{'samples':>9}{'of one core':>13}")
    for way in WAYS:
        ratios = [mine / none for mine, none in zip(times[way], times["none"], strict=True)]
        span = f"{min(ratios):.3f}-{max(ratios):.3f}"
        print(
            f"{way:<10}{statistics.median(times[way]):>10.3f}{statistics.median(ratios):>15.4f}{span:>16}"
            f"{last[way].n_samples:>9}{100 * last[way].cpu_share:>12.2f}%"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="What sampling costs a decode.")
    add_source_options(parser)
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--rounds", type=positive_int, default=9, metavar="N", help="default %(default)s")
    parser.add_argument("--tokens", type=positive_int, default=600, metavar="N", help="default %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_monitor(pathlib.Path(folder))
        try:
            session = Session.load(model_path(args), ctx=args.tokens + 201, threads=args.threads)
            measure(session, pathlib.Path(folder), args.rounds, args.tokens)
        except EdgeKVError as error:
            print(f"disturb.py: error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
