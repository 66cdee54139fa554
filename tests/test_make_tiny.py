"""The seeded checkpoints: published shapes, repeatable weights, a tokenizer for any text, nothing half-written."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_tiny
import numpy as np
import pytest
import shapes
from tokenizers import Tokenizer

from edgekv.checkpoint.shapes import load_shape
from edgekv.checkpoint.source import Source, open_source, read_config
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError

MODELS = Path(__file__).resolve().parent.parent / "models"


PUBLISHED_PARAMETERS = {
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "gemma3-270m": 268_098_176,
    "gemma3-4b": 3_880_263_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "h1b-60m": 67_755_520,  # the paper says 60M; its layers, width, vocabulary and 8k learned positions give this
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-350m": 354_483_968,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "mixtral-8x7b": 46_702_792_704,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "phi3-mini-4k": 3_821_079_552,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-0.8b": 752_393_024,  # of the decoder, as are the next two
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "smollm3-3b": 3_075_098_624,
    "tiny": 2_492_672,
    "tinyllama": 1_100_048_384,
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 299,
    "eos_token_id": 299,
}


def make(folder: Path, config: dict[str, Any] | None = None, *options: str) -> int:
    """Run the script on `folder` with a shape of its own or, without one, `tiny`."""
    if config is not None:
        shape = folder.with_name(f"{folder.name}-shape.json")
        shape.write_text(json.dumps(config))
        options = ("--shape", str(shape), *options)
    return make_tiny.main([str(folder), *options])


def opened(folder: Path, config: dict[str, Any] | None = None, *options: str) -> Source:
    assert make(folder, config, *options) == 0
    return open_source(folder)


def weights(source: Source) -> dict[str, np.ndarray]:
    return {name: source.tensors.array(name) for name in source.tensors.names()}


def test_every_shape_has_its_published_size() -> None:
    found = {
        path.stem: sum(int(np.prod(tensor.shape)) for tensor in shapes.tensor_list(read_config(path)))
        for path in MODELS.glob("*.json")
    }
    assert found == PUBLISHED_PARAMETERS


QKV_BIAS = ["q_proj.bias (32,)", "k_proj.bias (16,)", "v_proj.bias (16,)"]


@pytest.mark.parametrize(
    ("changes", "added", "removed"),
    [
        ({}, [], []),
        ({"tie_word_embeddings": True}, [], ["lm_head.weight"]),
        ({"model_type": "mistral"}, [], []),
        ({"model_type": "qwen2"}, QKV_BIAS, []),
        ({"model_type": "qwen3", "head_dim": 8}, ["q_norm.weight (8,)", "k_norm.weight (8,)"], []),
        ({"attention_bias": True}, [*QKV_BIAS, "o_proj.bias (32,)"], []),
    ],
)
def test_llama_tensors(changes: dict[str, Any], added: list[str], removed: list[str]) -> None:
    plain = {
        "model.embed_tokens.weight (300, 32)",
        "model.norm.weight (32,)",
        "lm_head.weight (300, 32)",
    }
    layer = {
        "input_layernorm.weight (32,)",
        "self_attn.q_proj.weight (32, 32)",
        "self_attn.k_proj.weight (16, 32)",
        "self_attn.v_proj.weight (16, 32)",
        "self_attn.o_proj.weight (32, 32)",
        "post_attention_layernorm.weight (32,)",
        "mlp.gate_proj.weight (48, 32)",
        "mlp.up_proj.weight (48, 32)",
        "mlp.down_proj.weight (32, 48)",
    } | {f"self_attn.{row}" for row in added}
    expected = plain | {f"model.layers.{i}.{row}" for i in (0, 1) for row in layer}
    found = {f"{tensor.name} {tensor.shape}" for tensor in shapes.tensor_list(LLAMA | changes)}
    assert found == {row for row in expected if row.split()[0] not in removed}


def test_explicit_head_dim_and_mlp_bias() -> None:
    found = {
        tensor.name: tensor.shape for tensor in shapes.tensor_list(LLAMA | {"head_dim": 16, "mlp_bias": True})
    }
    assert found["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert found["model.layers.1.self_attn.o_proj.weight"] == (32, 64)
    assert found["model.layers.1.mlp.up_proj.bias"] == (48,)


def test_gpt2_tensors_have_the_conv1d_layout() -> None:
    found = {tensor.name: tensor.shape for tensor in shapes.tensor_list(GPT2)}
    assert len(found) == 2 + 2 * 12 + 2
    assert found["transformer.wpe.weight"] == (64, 32)
    assert found["transformer.h.1.attn.c_attn.weight"] == (32, 96)
    assert found["transformer.h.1.mlp.c_fc.weight"] == (32, 128)
    assert found["transformer.h.1.mlp.c_proj.weight"] == (128, 32)
    assert "lm_head.weight" not in found


def test_weights_follow_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        opened(tmp_path / name, None, "--seed", seed) for name, seed in zip("abc", "112", strict=True)
    )
    assert first.identity == again.identity != other.identity
    for name in os.listdir(tmp_path / "a"):
        same_seed = (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        same_weights = (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
        assert same_seed
        assert same_weights == (name != "model.safetensors")


def test_values_have_the_usual_scales(tmp_path: Path) -> None:
    source = opened(tmp_path / "m")
    tensors = {name: to_float32(array) for name, array in weights(source).items()}
    assert source.config["num_hidden_layers"] == 4
    assert (tensors["model.norm.weight"] == 1).all()
    assert (tensors["model.layers.3.input_layernorm.weight"] == 1).all()
    for name, std in (("self_attn.q_proj", 0.02), ("mlp.up_proj", 0.02), ("mlp.down_proj", 0.02 / 8**0.5)):
        values = tensors[f"model.layers.2.{name}.weight"]
        assert values.std() == pytest.approx(std, rel=0.05)
        assert abs(values.mean()) < std / 20
    projections = [tensors[f"model.layers.{i}.mlp.up_proj.weight"].ravel() for i in range(4)]
    assert abs(np.corrcoef(projections) - np.eye(4)).max() < 0.05
    assert np.linalg.matrix_rank(projections[0].reshape(512, 256)) == 256


def test_gpt2_norms_and_biases(tmp_path: Path) -> None:
    tensors = weights(opened(tmp_path / "m", GPT2, "--dtype", "f32"))
    assert (tensors["transformer.ln_f.weight"] == 1).all()
    assert (tensors["transformer.ln_f.bias"] == 0).all()
    assert tensors["transformer.h.0.attn.c_attn.bias"].std() > 0


@pytest.mark.parametrize(("option", "torch_dtype"), [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")])
def test_types(tmp_path: Path, option: str, torch_dtype: str) -> None:
    source = opened(tmp_path / "m", LLAMA, "--dtype", option)
    assert {source.tensors.info(name).dtype for name in source.tensors.names()} == {option.upper()}
    assert source.config["torch_dtype"] == torch_dtype


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    whole, sharded = opened(tmp_path / "a", LLAMA), opened(tmp_path / "b", LLAMA, "--shard-gb", "2e-5")
    assert len(sharded.tensors.files) > 3
    assert max(file.nbytes - file.data_start for file in sharded.tensors.files) <= 20_000
    assert sharded.tensors.nbytes_total == whole.tensors.nbytes_total
    expected, found = weights(whole), weights(sharded)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_tensors_of_several_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny, "BLOCK", 100)  # 3 rows of 32
    source = opened(tmp_path / "m", LLAMA)
    rows = to_float32(source.tensors.require("lm_head.weight", (300, 32)))
    assert len(np.unique(rows, axis=0)) == 300
    assert rows[-3:].std() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("config", [None, LLAMA, GPT2], ids=["tiny", "llama", "gpt2"])
def test_tokenizer_covers_every_text(tmp_path: Path, config: dict[str, Any] | None) -> None:
    source = opened(tmp_path / "m", config)
    assert source.tokenizer_folder == tmp_path / "m"
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == source.config["vocab_size"]
    text = "".join(map(chr, range(0x250))) + " Ünï 漢字 🙂\r\n\t<p>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(collections.Counter(tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))) > 100
    begin = [] if config is GPT2 else [1]
    assert tokenizer.encode("a").ids[:-1] == begin
    assert tokenizer.decode([source.config["eos_token_id"]]) == ""


def test_ids_above_the_bytes_decode_to_words(tmp_path: Path) -> None:
    opened(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    words = [tokenizer.decode([i]) for i in range(258, 512)]
    assert len(set(words)) == 254
    assert all(word.strip().isalpha() for word in words)


def test_several_end_tokens(tmp_path: Path) -> None:
    opened(tmp_path / "m", LLAMA | {"eos_token_id": [2, 290]})
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in (1, 2, 290)] == ["<s>", "</s>", "</s1>"]


@pytest.mark.parametrize(
    ("config", "options", "key", "expected"),
    [
        (LLAMA, [], "max_position_embeddings", 8192),
        (LLAMA | {"max_position_embeddings": 9000}, [], "max_position_embeddings", 9000),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, [], "max_position_embeddings", 2048),
        (LLAMA, ["--positions", "100"], "max_position_embeddings", 100),
        (GPT2, [], "n_positions", 64),
        (GPT2, ["--positions", "100"], "n_positions", 100),
        (LLAMA, ["--layers", "1"], "num_hidden_layers", 1),
        (GPT2, ["--layers", "1"], "n_layer", 1),
    ],
)
def test_config_says_what_was_made(
    tmp_path: Path, config: dict[str, Any], options: list[str], key: str, expected: int
) -> None:
    source = opened(tmp_path / "m", config, *options)
    assert source.config[key] == expected
    assert source.tensors.names() == [tensor.name for tensor in shapes.tensor_list(source.config)]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "mamba"}, ["mamba", "llama", "gpt2"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_attention_heads": 64}, ["head_dim", "64"]),
        ({"vocab_size": 257}, ["vocab_size", "257", "258"]),
        ({"eos_token_id": 300}, ["300", "299"]),
        ({"initializer_range": "big"}, ["initializer_range", "big"]),
    ],
)
def test_wrong_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], parts: list[str]
) -> None:
    assert make(tmp_path / "m", LLAMA | changes) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in parts:
        assert part in message
    assert not (tmp_path / "m").exists()


def test_unknown_shape_lists_the_known() -> None:
    with pytest.raises(ConfigError) as error:
        load_shape("llama9")
    for part in ("llama9", "tinyllama", "gpt2-xl"):
        assert part in str(error.value)


def test_force_replaces_a_checkpoint_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    assert make(folder, LLAMA, "--shard-gb", "2e-5") == 0  # an empty folder is as good as none
    before = sorted(os.listdir(folder))
    assert make(folder, LLAMA) == 2
    assert "--force" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == before
    assert make(folder, LLAMA, "--force") == 0
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (folder / "diary.txt").write_text("x")
    assert make(folder, LLAMA, "--force") == 2
    assert "diary.txt" in capsys.readouterr().err
    assert make(folder / "diary.txt", LLAMA) == 2
    assert (folder / "diary.txt").read_text() == "x"


def test_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_tiny, "atomic_write", interrupt)
    assert make(tmp_path / "m", LLAMA) == 130
    assert os.listdir(tmp_path) == ["m-shape.json"]


def test_small_disk_is_told_before_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = {"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_hidden_layers": 1000}
    assert make(tmp_path / "m", LLAMA | huge) == 2
    message = capsys.readouterr().err
    assert "free" in message
    assert not (tmp_path / "m").exists()


def test_folder_of_another_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.partial").mkdir()
    assert make(tmp_path / "m", LLAMA) == 2
    assert "m.partial" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["m-shape.json", "m.partial"]


@pytest.mark.parametrize("option", ["--seed=-1", "--layers=0", "--shard-gb=0", "--positions=x", "--dtype=f8"])
def test_wrong_options(tmp_path: Path, option: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        make(tmp_path / "m", LLAMA, option)
    assert exit_.value.code == 2


def test_script_runs_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(MODELS / "make_tiny.py"), "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "2,492,672 weights in 1 file" in done.stdout
    assert done.stderr == ""
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("make_tiny.py: error: ")
    assert refused.stderr.count("\n") == 1
