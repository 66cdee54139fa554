"""Streams an answer in an asyncio program, from a task that is cancelled; the chat then goes on.

usage: python examples/async_stream.py [--model PATH] [--seconds S]
"""

import argparse
import asyncio
import contextlib

from edgekv import Chat, Session


async def tell(chat: Chat, question: str, max_new_tokens: int) -> None:
    async for step in chat.aask(question, max_new_tokens=max_new_tokens):
        print(step.text, end="", flush=True)
    print()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    with Session.load(arguments.model, ctx=4096) as session:
        chat = Chat(session)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(tell(chat, "Tell of a dark night.", 2000), arguments.seconds)
        print(f"\n(stopped after {len(session.tokens)} tokens)")
        await tell(chat, "And the morning?", 8)


if __name__ == "__main__":
    asyncio.run(main())
