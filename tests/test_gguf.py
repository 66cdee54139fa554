"""GGUF files: the same numbers as the checkpoint they were made from, blocks taken over, llama.cpp's own text."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import gguf_cases
import gguf_golden
import gguf_writer
import golden_cases
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from cuda_cases import OnDevice, require_same_logits
from helpers import raises
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.chat.template import find_template
from edgekv.checkpoint.gguf_file import GgufFile
from edgekv.checkpoint.gguf_import import imported
from edgekv.checkpoint.gguf_layout import FAMILIES, Facts, make_config
from edgekv.cli import main
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, TokenizerError
from edgekv.linear.store import WeightStore
from edgekv.models import architecture
from edgekv.session.model import Model
from edgekv.tokenizer import load_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = json.loads((ROOT / "tests" / "golden" / "llama_cpp_demo.json").read_text())
CONVERTED = json.loads((ROOT / "tests" / "golden" / "gguf.json").read_text())
CASES = [
    "llama1",
    "llama2-gqa",
    "llama31",
    "llama-tied-smollm",
    "llama-head-dim",
    "llama-biases",
    "rope-linear",
    "rope-yarn",
    "qwen2",
    "qwen3",
    "gpt2",
]
QUANTISED = {"Q4_0": "int4-32", "Q8_0": "int8-32", "Q4_1": "int4-32-offsets"}
ROUNDING = {"Q4_0": 0, "Q8_0": 0, "Q4_1": 3e-7}  # of the sums
K_BLOCK = 256


def written_case(name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[pathlib.Path, ...]:
    """A case of gguf_cases as a checkpoint, and as GGUF in float32."""
    monkeypatch.setitem(golden_cases.CASES, name, gguf_cases.CASES[name])
    checkpoint = golden_cases.write_checkpoint(name, folder / name)
    return checkpoint, gguf_writer.write_gguf(checkpoint, folder / f"{name}.gguf")


@pytest.mark.parametrize("name", gguf_cases.CASES)
def test_the_files_of_these_tests_are_the_converters(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and tensors: what llama.cpp's own converter wrote of the same checkpoint."""
    _, path = written_case(name, tmp_path, monkeypatch)
    assert gguf_golden.contents(path) == CONVERTED[name]


@pytest.mark.parametrize("name", gguf_cases.CASES)
def test_every_architecture_is_read(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the checkpoint: but for numbers that a key has in float32, to the bit."""
    checkpoint, path = written_case(name, tmp_path, monkeypatch)
    tokens = golden_cases.tokens(name)
    kv = "dense:dtype=f32"
    ours, expected = (Session.load(each, kv=kv, device="numpy").logits(tokens) for each in (path, checkpoint))
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=0)
    assert {FAMILIES[each["architecture"]].model_type for each in CONVERTED.values()} == {
        family.model_type for family in FAMILIES.values() if family.model_type != "gpt2"
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers_are_the_checkpoints(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint(name, tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    tokens = golden_cases.tokens(name)
    ours = Session.load(path, kv="dense:dtype=f32").logits(tokens)
    if kind != "F32":
        rounded = {n: _rounded(a, kind) for n, a in golden_cases.tensors(name).items()}
        kept = {n: a for n, a in golden_cases.tensors(name).items() if n.endswith("wpe.weight")}
        save_file(rounded | kept, folder / "model.safetensors")
    np.testing.assert_array_equal(ours, Session.load(folder, kv="dense:dtype=f32").logits(tokens))


def _rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """What is left of a matrix in the type; vectors stay float32."""
    chosen = gguf_writer.TYPES[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(array, chosen), chosen) if array.ndim > 1 else array


@pytest.mark.parametrize("name", ["llama2-gqa", "qwen2", "wide-gpt2"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_equal_blocks_are_taken_over(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    """Every weight of the store is the file's own, to the bit."""
    folder = golden_cases.write_checkpoint(name.removeprefix("wide-"), tmp_path / "folder")
    if name == "wide-gpt2":
        widened(folder)
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    model = Model.open(path)
    form = model.weight_format("auto")
    assert form.name == "gguf"
    assert model.weights_note(form) is None
    store = model.store(form)
    for linear in model.arch.linears():
        assert form.of(linear).name == QUANTISED[kind]
        np.testing.assert_array_equal(store.matrix(linear), model.weights.matrix(linear))
    if kind != "Q4_1":
        wider = model.store(model.weight_format("int8-32"))  # 4 bits fit into 8
        np.testing.assert_array_equal(wider.matrix("0.up"), store.matrix("0.up"))
    expected = gguf.quants.quantize(reference(folder, "0.up"), gguf_writer.TYPES[kind])
    theirs = gguf.quants.dequantize(expected, gguf_writer.TYPES[kind])
    np.testing.assert_allclose(store.matrix("0.up"), theirs, rtol=0, atol=ROUNDING[kind] * np.abs(theirs).max())


def widened(folder: pathlib.Path) -> None:
    """GPT-2 with channels that are whole blocks of 32."""
    config = golden_cases.GPT2 | {"n_embd": 96, "n_head": 3}
    (folder / "config.json").write_text(json.dumps(config))
    from edgekv.models import architecture

    shapes = architecture(config).tensors()
    save_file({n: golden_cases._draw("wide", n, s) for n, s in shapes.items()}, folder / "model.safetensors")


def reference(folder: pathlib.Path, linear: str) -> np.ndarray:
    return np.ascontiguousarray(Model.open(folder).weights.matrix(linear))


@pytest.mark.parametrize("device", ["cpu", "numpy"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_logits_of_quantized_files(kind: str, device: str, tmp_path: pathlib.Path) -> None:
    """Against the checkpoint with the file's weights; the products also round the activations."""
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    rounded = {n: _rounded(a, kind) for n, a in golden_cases.tensors("llama2-gqa").items()}
    save_file(rounded, folder / "model.safetensors")
    tokens = golden_cases.tokens("llama2-gqa")
    ours = Session.load(path, kv="dense:dtype=f32", device=device).logits(tokens)
    expected = Session.load(folder, kv="dense:dtype=f32", device="numpy", weights="f32").logits(tokens)
    error = np.sqrt(np.mean(np.square(ours - expected)))
    assert error < (0.05 if device == "cpu" else 2e-3) * expected.std()  # the table is rounded to float16


@pytest.mark.parametrize(("kind", "form"), [("Q5_0", "int8-32"), ("Q5_1", "int8-32")])
def test_other_blocks_are_quantized_again_and_it_is_said(kind: str, form: str, tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    session = Session.load(path)
    assert session.plan.notes == (f"weights of type {kind} were quantized a second time, to {form}",)
    exact, ours = session.model.weights, session.model.store(session.model.weight_format("auto"))
    for linear in ("0.qkv", "1.down", "head"):
        x, y = exact.matrix(linear), ours.matrix(linear)
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(x)


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_k_quants_of_more_bits_are_quantized_again(kind: str, tmp_path: pathlib.Path) -> None:
    path, expected = write_k_quants(tmp_path, kind)
    session = Session.load(path, kv="dense:dtype=f32")
    assert session.plan.notes == (f"weights of type {kind} were quantized a second time, to int8-32",)
    np.testing.assert_array_equal(session.model.weights.matrix("0.down"), expected)
    store = session.model.store(session.model.weight_format("auto"))
    assert np.linalg.norm(store.matrix("0.down") - expected) < 0.01 * np.linalg.norm(expected)
    assert np.isfinite(session.logits([1, 2, 3])).all()


def test_q4_k_is_taken_over(device: OnDevice, tmp_path: pathlib.Path) -> None:
    """The library's values up to the rounding of a sum; products on every path, of a prompt and of a token."""
    path, expected = write_k_quants(tmp_path, "Q4_K")
    model, near = Model.open(path), 1e-6 * np.abs(expected).max()
    form = model.weight_format("auto")
    assert {form.of(name).name for name in model.arch.linears()} == {"int4-32-offsets"}
    assert model.weights_note(form) is None
    assert "int8-32" in str(model.weights_note(model.weight_format("int8-32")))
    np.testing.assert_allclose(model.weights.matrix("0.down"), expected, atol=near, rtol=0)
    store = model.store(form)
    np.testing.assert_allclose(store.matrix("0.down"), expected, atol=near, rtol=0)
    assert WeightStore(store.folder).form == form
    require_same_logits(model, range(41), device)


def test_parts_of_several_types(tmp_path: pathlib.Path) -> None:
    """Fused projections of which one has more bits, as llama.cpp mixes them."""
    path, _ = write_k_quants(tmp_path, "Q4_K", {"v_proj": "Q6_K", "gate_proj": "Q4_0"})
    model = Model.open(path)
    form = model.weight_format("auto")
    names = {name: form.of(name).name for name in ("0.qkv", "0.out", "0.up")}
    assert names == {"0.qkv": "int8-32", "0.out": "int4-32-offsets", "0.up": "int4-32-offsets"}
    assert model.weights_note(form) is not None
    store = model.store(form)
    for name, error in (("0.qkv", 0.01), ("0.up", 1e-6)):
        expected = model.weights.matrix(name)
        assert np.linalg.norm(store.matrix(name) - expected) < error * np.linalg.norm(expected)


HALVES = {"Q4_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [-2]}  # where scale and least are


def write_k_quants(
    folder: pathlib.Path, kind: str, others: Mapping[str, str] | None = None
) -> tuple[pathlib.Path, np.ndarray]:
    """A model of one layer with random blocks: gguf can read K-quants, not make them. Also 0.down's weights.

    others: types of other projections, by the end of their names.
    """
    config = golden_cases.LLAMA | {"hidden_size": K_BLOCK, "intermediate_size": K_BLOCK, "num_hidden_layers": 1}
    from edgekv.models import architecture

    writer, rng = gguf.GGUFWriter(str(folder / "k.gguf"), "llama"), np.random.default_rng(0)
    gguf_writer._write_config(writer, config)
    names = gguf_writer.gguf_names(config)
    for tensor, shape in architecture(config).tensors().items():
        if len(shape) == 1:
            writer.add_tensor(names[tensor], np.ones(shape, np.float32))
            continue
        own = next((other for end, other in (others or {}).items() if f"{end}.weight" in tensor), kind)
        chosen = gguf.GGMLQuantizationType[own]
        block, size = gguf.GGML_QUANT_SIZES[chosen]
        raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
        for start in HALVES[own]:
            scale = np.full((*raw.shape[:2], 1), 1e-4 if own == "Q6_K" else 2e-3, np.float16)
            raw[..., start % size : start % size + 2] = scale.view(np.uint8)
        raw = raw.reshape(shape[0], -1)
        writer.add_tensor(names[tensor], raw, raw_dtype=chosen)
        if tensor.endswith("down_proj.weight"):
            down = gguf.quants.dequantize(raw, chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "k.gguf", down


def test_each_linear_layer_has_its_own_format(tmp_path: pathlib.Path) -> None:
    """As llama.cpp mixes them: the output projection with more bits."""
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", "Q4_0", head="Q8_0")
    model = Model.open(path)
    form = model.weight_format("auto")
    assert (form.of("0.qkv").name, form.of("head").name) == ("int4-32", "int8-32")
    assert model.weights_note(form) is None
    again = WeightStore(model.store(form).folder)  # the manifest remembers
    assert again.form == form
    np.testing.assert_array_equal(again.matrix("head"), model.weights.matrix("head"))
    assert model.weights_note(model.weight_format("int4")) is not None


@pytest.mark.parametrize("kind", GOLDEN["tokens"])
def test_greedy_text_is_llama_cpps(kind: str, tmp_path: pathlib.Path) -> None:
    """Both round the activations of quantized layers, each in its way: where two tokens are near, texts part."""
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", kind)
    session = Session.load(path, kv="dense", ctx=256)
    tokens = [step.token for step in session.generate(GOLDEN["prompt"], max_new_tokens=64)]
    assert session.tokens[: len(GOLDEN["prompt_ids"])] == GOLDEN["prompt_ids"]
    expected = GOLDEN["tokens"][kind]
    same = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
    if same is not None and kind != "F16":  # processors round differently, too
        logits = logits_after(session, [*GOLDEN["prompt_ids"], *expected[:same]])
        assert logits[tokens[same]] - logits[expected[same]] < 0.1
        return
    assert tokens == expected


def logits_after(session: Session, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Of the token behind these."""
    session.reset()
    return session.runner.append(tokens, [])[0]


TEXTS = ["Hello world", "  two  spaces ", "naïve 🦙 中文\n\ttab", "12345 don't I'LL", "<s> a </s>", ""]


def test_a_sentencepiece_tokenizer(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = shared / "tokenizers" / "llama2"
    folder = imported(tokenizer_only(source, tmp_path))[0]
    ours, theirs = load_tokenizer(folder), load_tokenizer(source)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    cases = (source / "cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    for text in [*cases, *TEXTS]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_byte_pair_tokenizer(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = shared / "models" / "gpt2-60m"
    folder = imported(tokenizer_only(source, tmp_path))[0]
    ours, theirs = load_tokenizer(folder), load_tokenizer(source)
    assert ours.eos_ids == theirs.eos_ids
    cases = (shared / "tokenizers" / "gpt2" / "cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    for text in [*cases, *TEXTS, "a<|endoftext|>b"]:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("split", "cuts"),
    [
        ("gpt-4o", ["camel", "Case's", " x", "123", "45", "//\n", " Ünï"]),
        ("dbrx", ["camelCase", "'s", " x", "123", "45", "//\n", " Ünï"]),
        ("refact", ["camelCase", "'s", " x", "1", "2", "3", "4", "5", "//", "\n", " Ünï"]),
        ("olmo", ["camelCase", "'s", " x", "12345", "//", "\n", " Ünï"]),
        ("default", ["camelCase", "'", "s", " x", "123", "45", "//", "\n", " Ünï"]),
    ],
)
def test_how_texts_are_cut(split: str, cuts: list[str], tmp_path: pathlib.Path) -> None:
    """Before byte pairs are merged. llama.cpp's tokens of 50 texts were the same for every entry of SPLITS."""
    tokens = [*(chr(i) for i in (*range(33, 127), *range(161, 324))), "ab"]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])

    folder, _ = imported(written(tmp_path, fill))
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(
        "".join(cuts)
    )
    ends = list(itertools.accumulate(map(len, cuts)))
    assert [span for _, span in found] == list(zip([0, *ends], ends, strict=False))


def tokenizer_only(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A GGUF file with a tokenizer and next to no model."""
    return written(folder, lambda writer: gguf_writer.write_tokenizer(writer, source))


def vocabulary_only(folder: pathlib.Path, strings: dict[str, str]) -> pathlib.Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        for key, value in strings.items():
            writer.add_string(key, value)

    return written(folder, fill)


def written(folder: pathlib.Path, fill: Callable[[gguf.GGUFWriter], None]) -> pathlib.Path:
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    gguf_writer._write_config(writer, golden_cases.LLAMA)
    fill(writer)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_special_tokens_and_the_chat_template(tmp_path: pathlib.Path) -> None:
    """Control tokens but begin and end can be written in a text, and end an answer if their name says so."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "<|im_start|>",
        "<|im_end|>",
    ]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 3, 3])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")

    path = written(tmp_path, fill)
    folder, _ = imported(path)
    tokenizer = load_tokenizer(folder)
    n = len(tokens)
    assert tokenizer.eos_ids == (2, n - 1)
    assert tokenizer.encode("a<|im_end|>", bos=False)[-2:] == [n - 3, n - 1]
    assert find_template(folder) == "{{ messages }}"


def test_the_second_start_does_not_need_the_library(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its walk through the header takes seconds for a large vocabulary; the cache folder has what it found."""
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", "F16")
    first = Model.open(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    second = Model.open(path)
    assert second.identity == first.identity
    assert Session.load(path, ctx=64).encode("Once") == Session.load(ROOT / "models" / "demo", ctx=64).encode(
        "Once"
    )
    os.utime(path, ns=(1, 1))  # another file as far as we know
    with pytest.raises(EdgeKVError, match=r"pip install 'edgekv\[gguf\]'"):
        Model.open(path)


def test_run_info_and_a_store_that_travels(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", "Q8_0")
    assert main(["info", "--model", str(path)]) == 0
    assert "gguf" in capsys.readouterr().out
    run = ["run", "--greedy", "--prompt", GOLDEN["prompt"], "--max-new-tokens", "20", "--ctx", "256"]
    assert main([*run, "--model", str(path)]) == 0
    text = capsys.readouterr().out
    assert main(["quantize", "--model", str(path), "--output", str(tmp_path / "store")]) == 0
    path.unlink()
    shutil.rmtree(pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "edgekv" / "gguf")
    capsys.readouterr()
    assert main([*run, "--model", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    checkpoint = golden_cases.write_checkpoint("llama2-gqa", folder / "folder")
    return gguf_writer.write_gguf(checkpoint, folder / "model.gguf", "Q8_0").read_bytes()


def refused(path: pathlib.Path, data: bytes, match: str, kind: type[EdgeKVError] = CheckpointError) -> None:
    path.write_bytes(data)
    with pytest.raises(kind, match=match) as error:
        Model.open(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the library computes sizes from what it finds
def test_damaged_files(whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "damaged.gguf"
    for size in (4, 20, 300, len(whole) // 2, len(whole) - 1):
        refused(path, whole[:size], "download it again")
    refused(path, b"PK\x03\x04" + whole[4:], "no GGUF file")
    refused(path, b"", "no GGUF file")
    refused(path, whole[:4] + b"\x63" + whole[5:], "correct GGUF file")
    with raises(CheckpointError, field="model"):
        Model.open(tmp_path / "absent.gguf")
    rng = np.random.default_rng(0)
    for _ in range(60):  # whatever it is, it is one of ours
        data = bytearray(whole)
        for position in rng.integers(0, 1500, 3):
            data[position] = rng.integers(256)
        path.write_bytes(data)
        with contextlib.suppress(EdgeKVError):
            Model.open(path)


def test_unsupported_files(shared: pathlib.Path, whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.gguf"
    refused(path, whole.replace(b"llama", b"mamba"), "'mamba' is not supported; supported: llama", ConfigError)
    for key, value, match in (
        ("tokenizer.ggml.pre", "tekken", "cuts texts like 'tekken'"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert' is not supported"),
    ):
        strange = vocabulary_only(tmp_path, {"tokenizer.ggml.model": "gpt2"} | {key: value})
        refused(path, strange.read_bytes(), match, TokenizerError)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"give its GGUF file: .*a\.gguf"):
        Model.open(folder)


def test_a_shorter_file_than_its_index(whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    _, index = imported(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cut off inside tensor"):
        GgufFile(path, index)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("olmo2", {"attention.sliding_window": 16}, "OLMo 3"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotations"),
        ("gemma3", {"block_count": 1 << 60}, "num_hidden_layers"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "layer_types has 1 entries"),
        ("phi3", {"rope.dimension_count": 32}, "partial_rotary_factor"),
        ("phi3-longrope", {"rope.scaling.attn_factor": -1.0}, "attention_factor"),
    ],
)
def test_what_a_file_may_not_say(name: str, values: dict[str, Any], match: str) -> None:
    case = CONVERTED[name]
    own = case["architecture"]
    metadata = {"general.architecture": own, **case["metadata"]}
    metadata |= {f"{own}.{key}": value for key, value in values.items()}
    shapes = {tensor: tuple(shape) for tensor, (shape, _) in case["tensors"].items()}
    factors = {tensor: [1.0] * shapes[tensor][0] for tensor in shapes if tensor.startswith("rope_factors")}
    with pytest.raises(ConfigError, match=match):
        architecture(make_config(Facts(metadata, shapes, factors)))


def test_longrope_needs_both_sets() -> None:
    metadata = {"general.architecture": "phi3", **CONVERTED["phi3-longrope"]["metadata"]}
    shapes = {"token_embd.weight": (96, 64)}
    with pytest.raises(ConfigError, match="no tensor rope_factors_short"):
        make_config(Facts(metadata, shapes, {"rope_factors_long.weight": [1.0] * 8}))
