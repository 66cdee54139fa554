"""Streams tokens in an asyncio program, from a task that can be cancelled.

usage: python examples/async_stream.py [--model PATH] [--seconds S]

The model computes in a thread of its own, one token at a time, so that the event loop stays free; cancelling ends
the text after the token that is being made, and the session can go on.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edgekv import Session, Step


class AsyncSession:
    """A session for coroutines, whose calls all run in one thread, in order."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgekv-session")

    async def generate(self, prompt: str, **options: Any) -> AsyncIterator[Step]:
        """Yields the steps of `Session.generate`."""
        loop = asyncio.get_running_loop()
        steps = await loop.run_in_executor(self._thread, lambda: self.session.generate(prompt, **options))
        try:
            while (step := await loop.run_in_executor(self._thread, next, steps, None)) is not None:
                yield step
        finally:  # also when the task is cancelled: the session takes no other prompt before
            self._thread.submit(steps.close)

    def close(self) -> None:
        self._thread.shutdown()


async def tell(session: AsyncSession, prompt: str) -> None:
    async for step in session.generate(prompt, max_new_tokens=2000, temperature=0.8, seed=1):
        print(step.text, end="", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    session = AsyncSession(Session.load(arguments.model, ctx=4096))
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(tell(session, "It was a dark night"), arguments.seconds)
        print(f"\n(cancelled after {len(session.session.tokens)} tokens)")
        async for step in session.generate(" The end", max_new_tokens=8):
            print(step.text, end="", flush=True)
        print()
    finally:
        session.close()


if __name__ == "__main__":
    asyncio.run(main())
