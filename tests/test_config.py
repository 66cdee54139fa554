"""Files such as config.json are read as transformers reads them; what no model can be is refused in one line."""

import math
import pathlib
import sys
from typing import Any

import golden_cases
import numpy as np
import pytest
from golden_cases import GEMMA3, GPT2, LLAMA, LLAMA3, LONGROPE, PHI3, SMOLLM3, YARN
from helpers import raises

from edgekv import Session, models
from edgekv.checkpoint.checkpoint import read_config
from edgekv.checkpoint.hub import load_shape
from edgekv.errors import ConfigError
from edgekv.models import architecture, register_family
from edgekv.models.rope import frequencies

LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": LLAMA, "image_token_index": 3}
LINEAR = {"type": "linear", "factor": 2.0}


def rope(**changes: Any) -> np.ndarray:
    found = architecture(LLAMA | changes).config.ropes
    values, factor = frequencies(found[0], 48)
    return np.append(values, factor)


def test_an_added_rope_scaling_wins() -> None:
    """Beside the rope_parameters that transformers 5 writes, whose theta stays."""
    for scaling in (YARN, LINEAR, LLAMA3, LONGROPE):
        both = rope(rope_parameters={"rope_type": "default"}, rope_scaling=scaling)
        np.testing.assert_array_equal(both, rope(rope_scaling=scaling))
        assert not np.array_equal(both, rope())
    both = rope(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rope_scaling=LINEAR)
    np.testing.assert_array_equal(both, rope(rope_theta=5000.0, rope_scaling=LINEAR))


def test_what_transformers_reads_from_a_config() -> None:
    """Llama rotates whole heads; yarn's null factor is the ratio of lengths; Mistral slides, but for null."""
    for scaling in (None, LINEAR):
        whole = rope(rope_scaling=scaling)
        np.testing.assert_array_equal(rope(rope_scaling=scaling, partial_rotary_factor=0.5), whole)
    np.testing.assert_array_equal(rope(rope_scaling=YARN | {"factor": None}), rope(rope_scaling=YARN))
    for change, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 12}, 12)):
        assert architecture(LLAMA | {"model_type": "mistral"} | change).config.layer_windows == (window,) * 3
    assert architecture(LLAMA).config.layer_windows == (None,) * 3
    assert architecture(LLAMA | {"hidden_size": 64.0}).config == architecture(LLAMA).config


NUMBERS = [math.nan, math.inf, -math.inf, 10**400, -1, 0, 1e-300, 1 << 62, 0.5]
ODD: list[Any] = [*NUMBERS, "", "many", [], [1, "x"], {}, {"a": []}, True]
VARIED = """gemma3-options gemma3-v5-parameters phi3-longrope-partial smollm3-options olmo2 granite ministral3
mistral qwen2-sliding qwen3 qwen3-moe-options mixtral gpt-oss lfm2-options qwen3_5-options"""
BASES = [
    LLAMA | {"rope_scaling": LLAMA3},
    LLAMA | {"rope_scaling": LONGROPE},
    GPT2,
    LLAVA,
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}},
    *map(golden_cases.CASES.__getitem__, VARIED.split()),
]


@pytest.mark.parametrize("base", BASES)
def test_any_field_may_be_anything(base: dict[str, Any]) -> None:
    """Accepted or a ConfigError in one line; the numbers that come of what is accepted are finite."""
    fields = [
        *(*base, "layer_types", "sliding_window", "max_window_layers", "head_dim", "n_inner", "rope_parameters"),
        *("num_key_value_heads", "n_ctx", "architectures", "hidden_act", "rope_theta", "use_sliding_window"),
    ]
    cases = [base | {field: value} for field in fields for value in ODD]
    for part in ("rope_scaling", "rope_parameters", "text_config"):
        inner = base.get(part, {})
        cases += [base | {part: inner | {field: value}} for field in (*inner, "factor", "type") for value in ODD]
    kinds = ("linear", "yarn", "longrope", "llama3", "default")
    inner = {**LLAMA3, **LONGROPE, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
    for kind in kinds:
        for field in inner:
            cases += [base | {"rope_scaling": inner | {"rope_type": kind, field: value}} for value in ODD]
    messages = []
    for case in cases:
        try:
            config = architecture(case).config
        except ConfigError as error:
            messages.append(str(error))
            continue
        for each in config.ropes:
            values, factor = frequencies(each, 100)
            assert np.isfinite(values).all()
            assert math.isfinite(factor)
    assert max(map(len, messages)) < 400
    assert not any("\n" in message for message in messages)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000; accepted: a whole number <= 1024"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": None}}, "needs 'factor'"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor is nan"),
    (LLAMA, {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "1 entries in long_factor"),
    (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
    (GEMMA3, {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
    (GEMMA3, {"use_bidirectional_attention": True}, "is an encoder"),
    (PHI3, {"rope_scaling": {"type": "llama3"}}, "'llama3' is not supported in phi3"),
    (PHI3, {"partial_rotary_factor": 0.01}, "0 channels of a head can't be rotated"),
    ({"model_type": "gemma3"}, {"text_config": {"model_type": "llama"}}, "supported: gemma3_text"),
    (GPT2, {"n_head": 100}, "100 heads leave no head_dim"),
    (golden_cases.QWEN3_MOE, {"num_experts_per_tok": 9}, "9 experts per token are more than there are, 8"),
    (golden_cases.QWEN3_MOE, {"num_experts": 16384, "num_hidden_layers": 9}, "16384 experts in each of 9 layers"),
    (LLAVA, {"text_config": None}, "needs a text_config object"),
]


def test_what_is_wrong_is_named() -> None:
    for base, change, part in WRONG:
        with raises(ConfigError, part):
            architecture(base | change)


# Tensors and published shapes

PUBLISHED_PARAMETERS = """
gemma2-2b 2_614_341_888  gemma3-1b 999_885_952  gemma3-270m 268_098_176  gemma3-4b 3_880_263_168
gpt-oss-20b 20_914_757_184  gpt2 124_439_808  gpt2-large 774_030_080  gpt2-medium 354_823_168
gpt2-xl 1_557_611_200  granite3.3-2b 2_533_539_840  granite3.3-8b 8_170_864_640  h1b-60m 67_755_520
lfm2-1.2b 1_170_340_608  lfm2-350m 354_483_968  llama2-7b 6_738_415_616  llama3.1-8b 8_030_261_248
llama3.2-1b 1_235_814_400  llama3.2-3b 3_212_749_824  ministral3-3b 3_429_006_336
ministral3-8b 8_489_553_920  mixtral-8x7b 46_702_792_704  olmo2-1b 1_484_916_736  olmo2-7b 7_298_617_344
phi3-mini-4k 3_821_079_552  qwen2.5-1.5b 1_543_714_304  qwen2.5-7b 7_615_616_512  qwen3-0.6b 596_049_920
qwen3-1.7b 1_720_574_976  qwen3-30b-a3b 30_532_122_624  qwen3-4b 4_022_468_096  qwen3-8b 8_190_735_360
qwen3.5-0.8b 752_393_024  qwen3.5-2b 1_881_825_088  qwen3.5-4b 4_205_751_296  smollm3-3b 3_075_098_624
tiny 2_492_672  tinyllama 1_100_048_384
"""
"""By shape; of qwen3.5 the decoder's. The paper has 60M for h1b: its layers, width and vocabulary give this."""


def test_every_shape_has_its_published_size() -> None:
    files = (pathlib.Path(__file__).resolve().parent.parent / "models").glob("*.json")
    shapes = {path.stem: architecture(read_config(path)).tensors().values() for path in files}
    words = PUBLISHED_PARAMETERS.split()
    assert {name: sum(map(math.prod, each)) for name, each in shapes.items()} == {
        name: int(n) for name, n in zip(words[::2], words[1::2], strict=True)
    }
    with raises(ConfigError, field="shape", match="llama9.*gpt2-xl.*tinyllama"):
        load_shape("llama9")


FAMILY = """
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Factor


class ShoutConfigSchema(LlamaConfigSchema):
    loudness: Factor = 1.0


class Shout(Llama):
    schema = ShoutConfigSchema

    @classmethod
    def model_config(cls, file, raw):
        return llama_config("shout", file, logit_scale=file.loudness)
"""


def test_a_family_of_another_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of one file and an entry point is not imported before it is asked for."""
    (tmp_path / "shout.py").write_text(FAMILY)
    info = tmp_path / "shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[edgekv.families]\nshout = shout:Shout\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(models, "FAMILIES", dict(models.FAMILIES))
    assert "shout" not in sys.modules
    shouting = {"model_type": "shout", "loudness": 2.0}
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model")
    expected = Session.load(folder, kv="dense", device="numpy").logits([1, 2, 3])
    golden_cases.write_checkpoint("llama2-gqa", folder, **shouting)
    found = Session.load(folder, kv="dense", device="numpy").logits([1, 2, 3])
    np.testing.assert_array_equal(found, 2 * expected)
    with pytest.raises(ConfigError, match="loudness is 'very'; accepted: a number"):
        architecture(golden_cases.LLAMA | shouting | {"loudness": "very"})
    with pytest.raises(ConfigError, match="accepted: a subclass of"):
        register_family("mine", dict)  # type: ignore[arg-type]
