"""Decodes a token of a model at a depth with edgekv and marks its parts, for tools/arm_count.py.

    python tools/arm_count_token.py MODEL DEPTH KV,...       under qemu with tools/arm_count_plugin.c

Prints "scheme KV" before the counts of each scheme; the first counts are those of CALIBRATION empty marks. The
cache's contents are those of `edgekv bench`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from edgekv.kvcache import CacheSpec
from edgekv.machine import blas_threads
from edgekv.quality.bench import SchemeTimer
from edgekv.session.devices import find_device
from edgekv.session.model import Model

GETPRIORITY, MARK, PRINT = 141, 0x65646765, 255
REST, LINEAR, ATTENTION, ROPE = range(4)
CALIBRATION = 64
WARM_TOKENS = 6  # the first compiles, and after them at a depth of a power of two no block is packed for long
TOKENS = WARM_TOKENS + 2

T = TypeVar("T")
_syscall = ctypes.CDLL(None).syscall


def mark(part: int) -> None:
    _syscall(GETPRIORITY, MARK, part)


def marked(part: int, function: Callable[..., T]) -> Callable[..., T]:
    def call(*args: Any, **options: Any) -> T:
        mark(part)
        result = function(*args, **options)
        mark(REST)
        return result

    return call


class MarkedLinear:
    def __init__(self, linear: Any) -> None:
        self.attention_in = marked(LINEAR, linear.attention_in)
        self.attention_out = marked(LINEAR, linear.attention_out)
        self.head = marked(LINEAR, linear.head)


class MarkedKernels:
    def __init__(self, kernels: Any) -> None:
        self._kernels, self.split_rope = kernels, marked(ROPE, kernels.split_rope)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def count(decoder: Any, spec: CacheSpec, depth: int) -> None:
    """A token as it is run, then one with its parts marked."""
    linear, kernels = decoder.linear, decoder.kernels
    runner = SchemeTimer(decoder, linear, kernels, spec, depth, TOKENS)
    runner.fill()
    plain = [type(cache).attend.__get__(cache) for cache in runner.caches]
    for cache, attend in zip(runner.caches, plain, strict=True):
        cache.attend = attend

    def token() -> None:
        runner.token = runner.sampler.sample(decoder.step(runner.token, runner.caches))

    for _ in range(WARM_TOKENS):
        token()
    print(f"scheme {spec}", file=sys.stderr, flush=True)
    mark(PRINT)
    mark(REST)
    token()
    mark(PRINT)
    decoder.linear, decoder.kernels = MarkedLinear(linear), MarkedKernels(kernels)
    for cache, attend in zip(runner.caches, plain, strict=True):
        cache.attend = marked(ATTENTION, attend)
    mark(PRINT)
    mark(REST)
    token()
    mark(PRINT)
    decoder.linear, decoder.kernels = linear, kernels


def main() -> None:
    folder, depth, schemes = sys.argv[1], int(sys.argv[2]), CacheSpec.parse_list(sys.argv[3])
    model = Model.open(folder)
    decoder = find_device("cpu").decoder(model, model.weight_format("int4"), depth + TOKENS + 64, 1, None)
    mark(PRINT)
    for _ in range(CALIBRATION):
        mark(REST)
    mark(PRINT)
    with blas_threads(1):
        for spec in schemes:
            count(decoder, spec, depth)


if __name__ == "__main__":
    main()
