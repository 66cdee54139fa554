"""--kv-budget takes the most bits whose caches hold a bound in bytes, at every moment of a text."""

import dataclasses
import json
import pathlib

import golden_cases
import numpy as np
import pytest
from helpers import raises
from safetensors.numpy import save_file

from edgekv import SamplingParams, Session
from edgekv.checkpoint.hub import load_shape
from edgekv.errors import CacheError, ConfigError, ContextError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import FINEST_FIRST, resolve
from edgekv.kvcache.mixed_bits import HeadNoise
from edgekv.kvcache.planes import PlanesConfig
from edgekv.machine import parse_bytes
from edgekv.models import architecture
from edgekv.models.config import ModelConfig

SHAPES = ("llama3.2-1b", "gemma3-1b")  # of the last all but four layers slide
CTX = 8192


def chosen(shape: ModelConfig, budget: int, noise: HeadNoise | None = None) -> CacheSpec:
    """Returns what a budget takes for CTX tokens, where heads lose what ``noise`` says."""

    def fit(spec: CacheSpec) -> CacheSpec:
        if noise is None or not (isinstance(spec.config, PlanesConfig) and spec.config.needs_fit):
            return spec
        windows = [shape.layer_windows[i] for i in shape.attending]
        return dataclasses.replace(spec, config=spec.config.with_head_bits(noise, windows, shape.head_dim))

    return resolve(None, shape, CTX, budget, 0, list, fit)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_the_finest_that_holds_the_bound_is_taken(name: str) -> None:
    """The bound holds whatever bits heads need, also where sliding layers keep their window alone."""
    shape = architecture(load_shape(name)).config
    sizes = [CacheSpec.parse(kv).planned_bytes(shape, CTX) for kv in FINEST_FIRST]
    assert len(sizes) > 20
    rng, heads = np.random.default_rng(0), (len(shape.attending), shape.n_kv_heads)
    noise = HeadNoise(*(np.exp(rng.normal(0, 3, heads)) for _ in range(2)), np.full((*heads, 8), 4))
    for budget in sizes[1::4]:
        spec = chosen(shape, budget)
        size = spec.planned_bytes(shape, CTX)
        assert size <= budget
        assert size == max(each for each in sizes if each <= budget) or any(shape.layer_windows)
        fitted = chosen(shape, budget, noise)
        assert fitted.planned_bytes(shape, CTX) <= budget
        assert not (isinstance(fitted.config, PlanesConfig) and fitted.config.needs_fit)
    with raises(CacheError, field="kv_budget", match=r"accepted: [\d.]+M or more") as raised:
        chosen(shape, min(sizes) - 1)
    accepted = parse_bytes(raised.value.accepted[0].removesuffix(" or more"))
    assert min(sizes) <= accepted < min(sizes) + (1 << 20) / 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model with heads as wide as a word, and no tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = golden_cases.LLAMA | {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    shapes = architecture(config).tensors()
    save_file({n: golden_cases.draw("budget", n, s) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BUDGET = 400_000  # f16 takes 786,432 bytes for the model's 512 tokens
SAMPLING = SamplingParams(temperature=1.0, seed=5)


def test_a_conversation_up_to_the_last_token(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Session.load(model, kv_budget=BUDGET) as session:
        for _ in session.generate([1, 2, 3] * 60, max_new_tokens=5000, sampling=SAMPLING):
            assert sum(cache.nbytes for cache in session.caches) <= BUDGET
        report = session.report()
        assert "context full" in str(report.finish_message)
        assert report.settings["kv"].startswith("planes:k_bits=")
        (note,) = [note for note in report.notes if note.startswith("kv budget")]
        assert session.plan.kv.short in note
        with raises(CacheError, field="kv_budget"):
            session.fork(kv="f16")
        session.rewind(100)
        session.save(tmp_path / "session")
        for source in (session, model):
            with Session.restore(tmp_path / "session", source, kv_budget=BUDGET) as restored:
                assert restored.plan.kv == session.plan.kv
            with raises(CacheError, field="kv_budget"):
                Session.restore(tmp_path / "session", source, kv_budget=BUDGET // 2)


@pytest.mark.parametrize(
    "options", [{"kv_budget": 0}, {"kv_budget": 9}, {"kv": "f16", "kv_budget": BUDGET}], ids=str
)
def test_what_cannot_hold_is_refused(model: pathlib.Path, options: dict[str, object]) -> None:
    with raises(CacheError, field="kv_budget"):
        Session.load(model, **options)


def test_a_bound_is_also_taken_as_a_text(model: pathlib.Path) -> None:
    with Session.load(model, kv_budget="0.5M") as session:
        assert session.plan == Session.load(model, kv_budget=1 << 19).plan
    with raises(ConfigError, field="kv_budget", match="a number with K, M, G or T"):
        Session.load(model, kv_budget="much")
    with Session.load(model, ctx="512", prefix_cache="1M") as session:
        assert (session.plan.ctx, session.fork(ctx="64").plan.ctx) == (512, 64)
        with raises(ContextError, field="ctx", match="such as 8192 or 8k"):
            session.fork(ctx="many")
