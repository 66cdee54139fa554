"""Retrieval data: rows are what they claim, prompts hold their answers, the score counts right."""

import pathlib
import re

import needles
import numpy as np
import pytest

from edgekv.eval.needles import Prose, make_haystack
from edgekv.text import load_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent


SENTENCES = (
    "He went to the town.",
    '"Who is there?" she said.',
    "It was late, and the rain fell!",
    "I am here.\n",
)
LENGTHS = (129, 513, 2049)


@pytest.fixture(scope="module")
def prose() -> Prose:
    tokenizer = load_tokenizer(ROOT / "models" / "demo")
    order = np.random.default_rng(0).integers(len(SENTENCES), size=2000)
    text = " ".join(SENTENCES[i] for i in order)
    return Prose(np.array(tokenizer.encode(text, bos=False), np.uint16), tokenizer)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def text_of(prose: Prose, ids: np.ndarray | list[int]) -> str:
    return str(prose.tokenizer.decode([int(i) for i in ids]))


def test_breaks_are_where_sentences_begin(prose: Prose) -> None:
    for i in prose.breaks[:200]:
        assert text_of(prose, prose.tokens[:i]).rstrip('"')[-1] in ".?!"
        assert text_of(prose, prose.tokens[i - 1 : i + 1])[1:] != ""


def test_continuing_text_is_tokenised_as_inside_a_longer_text(prose: Prose) -> None:
    before, after = "It was late.", "\n\nThe pass key is 48213."
    ids = prose.tokenizer.encode(before, bos=False) + prose.continuing(after)
    assert ids == prose.tokenizer.encode(before + after, bos=False)
    assert len(prose.continuing(" 48213")) == len(prose.continuing(" 90000")) == 6  # a space, then digit by digit


@pytest.mark.parametrize("length", LENGTHS)
def test_every_answer_of_a_recall_row_stands_earlier_in_the_row(length: int, prose: Prose, rng) -> None:
    n_answers = 0
    for _ in range(30):
        ids, labels = needles.recall_row(rng, prose, length)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], labels == needles.ANSWER, [0]])))
        for start, stop in edges.reshape(-1, 2):
            answer = text_of(prose, ids[start:stop]).strip()
            assert re.fullmatch(r"\d{5}\.", answer)
            assert answer[:5] in text_of(prose, ids[:start])
            n_answers += 1
    assert n_answers >= 30


@pytest.mark.parametrize("task", needles.TASKS)
@pytest.mark.parametrize("depth", [0.05, 0.5, 0.95])
def test_a_prompt_holds_its_answer_at_its_depth(task: str, depth: float, prose: Prose, rng) -> None:
    prompt = needles.make_prompt(rng, prose, task, 1024, depth)
    text, answer = text_of(prose, prompt.ids), text_of(prose, prompt.answer).strip()
    assert len(prompt.ids) + len(prompt.answer) == 1024
    assert text.count(answer) == 1
    assert text.find(answer) / len(text) == pytest.approx(depth, abs=0.08)
    asked = re.search(r"What is the (.*)\? The \1 is$", text)
    assert asked is not None
    assert f"The {asked[1]} is {answer}." in text


def test_four_codes_differ_and_any_of_them_is_asked_for(prose: Prose) -> None:
    prompts = needles.make_prompts(prose, "four-codes", 512, n=40)
    questions = {text_of(prose, prompt.ids).rsplit("\n", 1)[-1] for prompt in prompts}
    assert len(questions) == 4
    assert all(text_of(prose, prompt.ids).count(" door is ") == 4 for prompt in prompts)


def test_a_text_too_short_is_refused(prose: Prose, rng) -> None:
    with pytest.raises(ValueError, match="too few for a row of"):
        needles.prose_row(rng, prose, len(prose.tokens) + 2)


TOKENIZERS = ("tokenizers/llama2", "tokenizers/llama2_hf", "models/gpt2-60m", "models/stories260K")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_facts_hide_in_any_tokenizers_text(name: str, shared: pathlib.Path, rng) -> None:
    tokenizer = load_tokenizer(shared / name)
    text = " ".join(SENTENCES * 200)
    prose = Prose(np.array(tokenizer.encode(text, bos=False)), tokenizer)
    haystack = make_haystack(rng, prose, 1000, 8)
    written = tokenizer.decode(haystack.ids)
    assert len(haystack.ids) + max(len(q.ids) + q.n_answer for q in haystack.questions) == 1000
    assert haystack.ids[: len(prose.start)] == tokenizer.encode("")
    for question in haystack.questions:
        asked = b"".join(map(tokenizer.token_bytes, question.ids)).decode()
        named = re.fullmatch(r"\n\nWhat is the (.*)\? The \1 is", asked)
        assert named is not None
        assert re.search(rf'[.?!]["\n]* The {named[1]} is {question.value}\.', written)
    depths = sorted(question.depth for question in haystack.questions)
    assert depths == [(i + 0.5) / 8 for i in range(8)]


@pytest.mark.parametrize("text", ["word " * 900, "x" * 4000])
def test_a_text_without_sentences_has_places_too(text: str, prose: Prose, rng) -> None:
    tokenizer = prose.tokenizer
    other = Prose(np.array(tokenizer.encode(text, bos=False)), tokenizer)
    ids, owners = other.weave(rng, [(0.5, [7, 7, 7])], 400)
    assert ids[owners == 0].tolist() == [7, 7, 7]
    assert np.flatnonzero(owners == 0)[0] == pytest.approx(200, abs=20)
