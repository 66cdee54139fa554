"""Writes the prose of `edgekv demo`: the demo model's own, from one opening after another.

python tools/demo_prose.py > models/demo/prose.txt
"""

from edgekv import SamplingParams, Session

OPENINGS = (
    "It was a dark night when the old man",
    "The rain had fallen since the morning, and",
    "My uncle was a tall man, who",
    "In the spring of that year the ship",
    "Nobody in the village remembered",
    "She closed the door behind her and",
    "The lawyer put down his pen and",
    "They had walked along the river for an hour when",
    "There was once a clockmaker who",
    "At the end of the garden stood",
    "The train was late, and on the platform",
    "Before breakfast the doctor",
)
N_PASSAGES, N_TOKENS = 24, 380


def passage(session: Session, opening: str, seed: int) -> str:
    """About N_TOKENS tokens, up to the end of a sentence."""
    session.reset()
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.1, seed=seed)
    steps = session.generate(opening, max_new_tokens=N_TOKENS, sampling=sampling)
    text = opening + "".join(step.text for step in steps)
    end = max(text.rfind(mark) for mark in (". ", '." ', ".\n", "!", "?"))
    return text[: end + 1].strip()


def main() -> None:
    with Session.load("demo", ctx=1024) as session:
        print("\n\n".join(passage(session, OPENINGS[i % len(OPENINGS)], i) for i in range(N_PASSAGES)))


if __name__ == "__main__":
    main()
