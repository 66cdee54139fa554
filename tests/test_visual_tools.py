"""The scenes model's tools: pictures follow from their seed, captions score exactly, the page is its data's."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'edgekv[vision]'")

ROOT = pathlib.Path(__file__).resolve().parent.parent

import visual_captions  # noqa: E402
import visual_eval  # noqa: E402
import visual_page  # noqa: E402
import visual_schemes  # noqa: E402
from visual_scenes import COLOURS, KINDS, NUMBER, SIZES, Scene, Thing, draw_scene, render  # noqa: E402

from edgekv.kernels import numpy_kernels  # noqa: E402
from edgekv.kvcache.geometry import Geometry, Workspace  # noqa: E402

CIRCLE = Thing("circle", "red", "small", "top", "left")
SEVEN = Thing(NUMBER, "blue", "large", "lower", "far right", 7)
SCENE: Scene = (CIRCLE, SEVEN)


def scenes(n: int) -> list[Scene]:
    return [draw_scene(np.random.default_rng(i)) for i in range(n)]


def test_a_picture_follows_from_its_seed() -> None:
    first, again, other = (np.random.default_rng(seed) for seed in (1, 1, 2))
    pixels = render(SCENE, first)
    assert pixels.shape == (128, 128, 3)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, render(SCENE, again))
    assert (pixels != render(SCENE, other)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thing_is_drawn_in_its_cell_alone_and_in_its_colour(kind: str) -> None:
    thing = Thing(kind, "green", "large", "upper", "right", 8 if kind == NUMBER else None)
    with_it, without = (render(scene, np.random.default_rng(3)).astype(int) for scene in ((thing,), ()))
    coloured = (np.ptp(with_it, axis=2) > 40) & (np.ptp(without, axis=2) <= 40)
    rows, columns = np.nonzero(coloured)
    assert coloured.sum() > 30
    assert 32 <= rows.min() <= rows.max() < 64 <= columns.min() <= columns.max() < 96
    assert np.abs(np.median(with_it[coloured], axis=0) - COLOURS["green"]).max() < 40


def test_larger_sizes_cover_more() -> None:
    def covered(size: str) -> int:
        pixels = render((dataclasses.replace(CIRCLE, size=size),), np.random.default_rng(4)).astype(int)
        return int((np.ptp(pixels, axis=2) > 60).sum())

    assert covered("small") < covered("medium") < covered("large")
    assert list(SIZES) == ["small", "medium", "large"]


def test_scenes_have_1_to_10_things_in_reading_order() -> None:
    drawn = scenes(300)
    assert {len(scene) for scene in drawn} == set(range(1, 11))
    assert all(len({thing.place for thing in scene}) == len(scene) for scene in drawn)
    assert {thing.kind for scene in drawn for thing in scene} == set(KINDS)
    assert all((thing.number is None) == (thing.kind != NUMBER) for scene in drawn for thing in scene)


def test_every_phrasing_reads_back_as_the_scene() -> None:
    for scene in scenes(60):
        for caption in visual_captions.captions(scene):
            assert visual_captions.parse(caption) == (len(scene), list(scene))
            assert all(right == of for right, of in visual_captions.score(caption, scene).values())


FIRST, SECOND = "A small red circle at the top left", "a large blue number 7 at the lower far right"


@pytest.mark.parametrize(
    ("said", "instead", "wrong"),
    [
        ("two", "three", {"count": (0, 1)}),
        ("circle", "ring", {"shape": (1, 2), "whole": (1, 2)}),
        ("blue", "pink", {"colour": (1, 2), "whole": (1, 2)}),
        ("small", "large", {"size": (1, 2), "whole": (1, 2)}),
        ("far right", "far left", {"position": (1, 2), "whole": (1, 2)}),
        ("number 7", "number 71", {"digits": (0, 1), "whole": (1, 2)}),
        (" at the top left", "", {"position": (1, 2), "whole": (1, 2)}),
    ],
)
def test_one_mistake_costs_its_attribute(said: str, instead: str, wrong: dict[str, tuple[int, int]]) -> None:
    caption = f"The picture shows two objects: {FIRST}, {SECOND}."
    assert caption.count(said) == 1
    right = dict.fromkeys(visual_captions.ATTRIBUTES, (2, 2)) | {"count": (1, 1), "digits": (1, 1)}
    assert visual_captions.score(caption, SCENE) == right
    assert visual_captions.score(caption.replace(said, instead), SCENE) == right | wrong


def test_things_left_out_or_invented_are_wrong() -> None:
    left_out = visual_captions.score(f"There is one object. {FIRST}.", SCENE)
    assert left_out["whole"] == (1, 2)
    assert left_out["digits"] == (0, 1)
    caption = f"There are two objects. {FIRST}. {SECOND}. A small red ring at the top right."
    invented = visual_captions.score(caption, SCENE)
    assert invented["whole"] == invented["shape"] == (2, 3)
    assert visual_captions.score("", SCENE)["whole"] == (0, 2)
    assert visual_captions.score("two two objects objects at the", SCENE)["count"] == (1, 1)


def test_accuracies_weigh_things_not_captions() -> None:
    tallies = [dict.fromkeys(visual_captions.ATTRIBUTES, tally) for tally in ((1, 1), (0, 3))]
    assert visual_captions.accuracies(tallies)["whole"] == 0.25
    assert visual_captions.accuracies([{**tallies[0], "digits": (0, 0)}])["digits"] is None


def test_answers_are_true() -> None:
    rng = np.random.default_rng(0)
    assert visual_captions.ask_count(rng, SCENE)[1] == "Two."
    assert visual_captions.ask_numbers(rng, SCENE)[1] == "7."
    assert visual_captions.ask_numbers(rng, (CIRCLE,))[1] == "None."
    for scene in scenes(20):
        question, answer = visual_captions.ask_thing(rng, scene)
        found = next((thing for thing in scene if f"at the {thing.place} of" in question), None)
        assert answer == (f"A {found.name}." if found else "Nothing.")
        question, answer = visual_captions.ask_place(rng, scene)
        assert any(answer == f"At the {thing.place}." and thing.name in question for thing in scene)


def test_prompts_place_each_picture() -> None:
    assert visual_captions.pictures(1) + visual_captions.describe() == "<image>\nDescribe the picture.\n"
    several = visual_captions.pictures(2) + visual_captions.describe(1)
    assert several == "First picture: <image>\nSecond picture: <image>\nDescribe the second picture.\n"
    assert visual_captions.pictures(4, ordinals=False).count("<image>") == 4


MODEL = str(ROOT / "models" / "scenes")
EXACT = ("dense:dtype=f16", "split:8,8", "visual=planes", "coded:bitplane")


@pytest.mark.parametrize("kv", EXACT)
def test_the_shipped_model_describes_fresh_scenes(kv: str) -> None:
    done = visual_eval.caption(MODEL, visual_eval.Row(kv), 0, 2)
    assert done["visual"] < done["bytes"]
    for i, text in enumerate(done["captions"]):
        assert visual_captions.parse(text) == (i + 1, list(visual_eval.Sample.draw(i, 1).scenes[0]))


def test_rounding_down_takes_more_elements_to_the_lower_level() -> None:
    keys = np.random.default_rng(0).standard_normal((2, 64, 32), np.float32)
    ones = {}
    for name in ("visual1:quantile=0.1", "floored:0.1"):
        scheme = visual_schemes.spec(name)
        cache = scheme.scheme(Geometry(n_heads=2, n_kv_heads=2, head_dim=32, capacity=64), scheme.knobs)
        cache.allocate(numpy_kernels(), Workspace())
        cache.mark_images([(0, 64)])
        cache.prefill(keys, keys, keys)
        ones[name] = np.unpackbits(cache.spans[0].packed[0].arrays["planes"]).mean()
    assert ones["visual1:quantile=0.1"] == pytest.approx(0.5, abs=0.05)
    assert ones["floored:0.1"] == pytest.approx(0.1, abs=0.01)


def test_dropping_schemes_get_no_more_bytes_than_one_bit() -> None:
    base = visual_eval.base_session(MODEL)
    spec = visual_eval.row_spec(visual_eval.Row("h2o", 2), base)
    more = visual_schemes.spec(f"h2o:budget={int(spec.knobs.budget) + 1}")
    layers = (each.layers(base.config, visual_eval.context(2)) for each in (spec, more))
    fits, too_many = (sum(cache.planned_bytes() for cache in caches) for caches in layers)
    one_bit = visual_eval.caption(MODEL, visual_eval.Row(visual_eval.ONE_BIT, 2), 0, 1)
    assert fits <= one_bit["bytes"] < too_many


def test_the_page_is_that_of_the_data() -> None:
    command = [sys.executable, ROOT / "tools" / "visual_page.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0
    blocks = visual_page.BLOCK.findall(visual_page.PAGE.read_text())
    assert [block[1] for block in blocks] == list(visual_page.TABLES)


@pytest.mark.parametrize("name", visual_page.TABLES)
def test_the_data_have_every_row_and_bytes_of_both_parts(name: str) -> None:
    facts = json.loads((visual_page.DATA / f"visual-{name}.json").read_text())
    rows = [(row.kv, row.pictures) for row in visual_eval.TABLES[name]]
    assert [(result["kv"], result["pictures"]) for result in facts["results"]] == rows
    assert all(0 < result["visual"] < result["bytes"] for result in facts["results"])


def test_a_table_shows_its_results() -> None:
    facts = json.loads((visual_page.DATA / "visual-captions.json").read_text())
    facts["results"][0]["CIDEr"] = 1.23456
    assert "| 1.235 |" in visual_page.table("captions", facts)


def test_the_model_fits_in_a_wheel() -> None:
    files = list((ROOT / "models" / "scenes").iterdir())
    assert sum(path.stat().st_size for path in files) < 15e6
    log = [json.loads(line) for line in (ROOT / "models" / "scenes" / "train_log.jsonl").read_text().splitlines()]
    card = (ROOT / "models" / "scenes" / "README.md").read_text()
    steps = max(record.get("step", 0) for record in log)
    assert re.search(rf"\b{steps:,} steps", card)


@pytest.fixture
def train() -> ModuleType:
    for name in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'edgekv[visual-train]'")
    import visual_train

    return visual_train


TOKENIZER = ROOT / "models" / "scenes" / "tokenizer.model"


def test_only_answers_are_to_be_predicted(train: ModuleType) -> None:
    import sentencepiece
    import visual_data

    library = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))
    ids, labels = visual_data.conversation(np.random.default_rng(0), library, [SCENE], 448, 256)
    assert (ids == visual_data.IMAGE_TOKEN).sum() == 256
    ends = np.flatnonzero(ids == library.eos_id())
    assert labels[ends].all()
    assert not labels[ids == visual_data.IMAGE_TOKEN].any()
    first = library.decode([int(i) for i in ids[: ends[0]][labels[: ends[0]]]])
    assert first.startswith("\n")
    assert first.strip()[-1] == "."


def test_steps_lower_the_loss(train: ModuleType, monkeypatch) -> None:
    import torch
    import visual_data

    monkeypatch.setattr(train, "WARMUP_STEPS", 1)
    monkeypatch.setattr(train, "DEVICE", "cpu")
    torch.set_num_threads(1)
    trainer = train.Trainer(train.SMOKE_CONFIG, seed=0)
    tokens = train.n_tokens(train.SMOKE_CONFIG)
    batch = next(iter(visual_data.Batches(TOKENIZER.read_bytes(), 4, (1, 2), tokens)))
    losses = [trainer.update(batch, progress=0.0)[0].item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.onnx uses its own outdated functions
def test_a_saved_model_opens_in_edgekv(train: ModuleType, tmp_path: pathlib.Path) -> None:
    from visual_model import SceneModel, rounded, save

    from edgekv import Session

    save(rounded(SceneModel(train.SMOKE_CONFIG)), TOKENIZER.read_bytes(), tmp_path)
    session = Session.load(tmp_path, ctx=256)
    sample = visual_eval.Sample.draw(0, 1)
    session.prefill(sample.prompt, sample.images)
    assert len(session.tokens) > train.n_tokens(train.SMOKE_CONFIG)
