"""GGUF files: each architecture as the checkpoint that it was made from, weights of each type, llama.cpp text."""

import json
import os
import pathlib
import sys

import gguf
import gguf_files
import golden_cases
import numpy as np
import pytest
from cuda_cases import OnDevice, require_same_logits
from gguf_writer import TYPES, own_metadata, write_gguf, write_k_quants
from kernel_cases import pairs
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.checkpoint.gguf import KEPT, GgufTensor
from edgekv.checkpoint.tensors import MappedFile
from edgekv.cli import main
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.kernels.cpu.blocks import BLOCKS
from edgekv.models import gguf_families
from edgekv.types import F32
from edgekv.weights.formats import FORMATS
from edgekv.weights.integers import pack_numbers
from edgekv.weights.store import WeightStore

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = json.loads((ROOT / "tests" / "golden" / "llama_cpp_demo.json").read_text())
CONVERTED = json.loads((ROOT / "tests" / "golden" / "gguf.json").read_text())
PLAIN = ["llama-tied-smollm", "llama-head-dim", "llama-biases", "rope-yarn", "gpt2"]
QUANTIZED = {"Q4_0": "int4-32", "Q8_0": "int8-32", "Q4_1": "int4-32-offsets"}


@pytest.mark.parametrize("name", golden_cases.GGUF_CASES)
def test_every_architecture_is_read(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the metadata of llama.cpp's own converter. Logits are those of the checkpoint: but for numbers that a
    key has in float32, to the bit. The tensors of these tests' files are the converter's.
    """
    monkeypatch.setitem(golden_cases.CASES, name, golden_cases.GGUF_CASES[name])
    checkpoint = golden_cases.write_checkpoint(name, tmp_path / name)
    path = write_gguf(checkpoint, tmp_path / f"{name}.gguf", metadata=CONVERTED[name]["metadata"])
    assert gguf_files.contents(path) == CONVERTED[name]
    tokens, kv = golden_cases.tokens(name), "dense:dtype=f32"
    ours, expected = (Session.load(each, kv=kv, device="numpy").logits(tokens) for each in (path, checkpoint))
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=0)
    known = {family.architecture for family in gguf_families().values()}
    assert {each["architecture"] for each in CONVERTED.values()} == known - {"gpt2", "qwen3moe"}


@pytest.mark.parametrize("kind", GOLDEN["tokens"])
def test_greedy_text_is_llama_cpps(kind: str, tmp_path: pathlib.Path) -> None:
    """Both round the activations of quantized layers, each in its way: where two tokens are near, texts part."""
    path = write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", kind)
    session = Session.load(path, kv="dense", ctx=256)
    tokens = [step.token for step in session.generate(GOLDEN["prompt"], max_new_tokens=64, temperature=0.0)]
    assert session.tokens[: len(GOLDEN["prompt_ids"])] == GOLDEN["prompt_ids"]
    expected = GOLDEN["tokens"][kind]
    same = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
    if same is not None and kind != "F16":  # processors round differently, too
        session.reset()
        logits = session.prefill([*GOLDEN["prompt_ids"], *expected[:same]])
        assert logits[tokens[same]] - logits[expected[same]] < 0.1
        return
    assert tokens == expected


def test_the_second_start_needs_no_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's walk through the header takes seconds; the cache folder has its result."""
    path = write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", "F16")
    first = Model.open(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    second = Model.open(path)
    assert second.identity == first.identity
    assert Session.load(path, ctx=64).encode("Once") == Session.load("demo", ctx=64).encode("Once")
    os.utime(path, ns=(1, 1))  # another file as far as we know
    with pytest.raises(EdgeKVError, match=r"pip install gguf protobuf"):
        Model.open(path)


@pytest.mark.parametrize(("name", "kind"), pairs(name=PLAIN, kind=["F32", "F16", "BF16"]))
def test_plain_numbers_are_the_checkpoints(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    """The type rounds matrices; vectors and positions stay float32."""
    folder = golden_cases.write_checkpoint(name, tmp_path / "folder")
    path, tensors = write_gguf(folder, tmp_path / "model.gguf", kind), golden_cases.tensors(name)
    for key, array in tensors.items():
        if array.ndim > 1 and not key.endswith("wpe.weight"):
            tensors[key] = gguf.quants.dequantize(gguf.quants.quantize(array, TYPES[kind]), TYPES[kind])
    save_file(tensors, folder / "model.safetensors")
    tokens = golden_cases.tokens(name)
    logits = [Session.load(each, kv="dense:dtype=f32").logits(tokens) for each in (path, folder)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(("name", "kind"), pairs(name=["llama2-gqa", "qwen2", "wide-gpt2"], kind=list(QUANTIZED)))
def test_equal_blocks_are_taken_over(
    name: str, kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight of the store is the file's own, to the bit."""
    monkeypatch.setitem(golden_cases.CASES, "wide-gpt2", golden_cases.GPT2 | {"n_embd": 96})  # whole blocks of 32
    folder = golden_cases.write_checkpoint(name, tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    model = Model.open(path)
    form = model.weight_format("auto")
    assert form.name == "gguf"
    assert model.weights_note(form) is None
    note = f"weights of type {kind} were quantized a second time, to q2; int8-32 loses least"
    assert model.weights_note(model.weight_format("auto,head=q2")) == note
    store = model.store(form)
    for linear in model.arch.linears():
        assert form.of(linear).name == QUANTIZED[kind]
        np.testing.assert_array_equal(store.matrix(linear), model.weights.matrix(linear))
    if kind != "Q4_1":
        wider = model.store(model.weight_format("int8-32"))  # 4 bits fit into 8
        np.testing.assert_array_equal(wider.matrix("0.up"), store.matrix("0.up"))
    whole = np.ascontiguousarray(Model.open(folder).weights.matrix("0.up"))
    theirs = gguf.quants.dequantize(gguf.quants.quantize(whole, TYPES[kind]), TYPES[kind])
    np.testing.assert_array_equal(store.matrix("0.up"), theirs)


def from_llama_cpp(kind: str, block: list[int], d: F32, low: F32) -> list[np.float32]:
    """Returns a block's weights as dequantize_row_q4_1 and dequantize_row_q4_K of ggml-quants.c have them."""
    if kind == "Q4_1":
        return [*(d * (q & 15) + low for q in block[4:]), *(d * (q >> 4) + low for q in block[4:])]
    weights, q, scale_min = list[np.float32](), block[16:], block[4:16]
    for j in range(8):
        scale, least = scale_min[j] & 63, scale_min[(j + 4) % 12] & 63
        if j >= 4:
            scale = scale_min[j + 4] & 15 | scale_min[j - 4] >> 6 << 4
            least = scale_min[j + 4] >> 4 | scale_min[j] >> 6 << 4
        d1, m1 = d * np.float32(scale), low * np.float32(least)
        weights += [d1 * np.float32(byte >> 4 * (j % 2) & 15) - m1 for byte in q[32 * (j // 2) :][:32]]
    return weights


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_weights_with_offsets_are_llama_cpps(kind: str, tmp_path: pathlib.Path) -> None:
    """To the bit, as they are read and as a store has them, of random blocks."""
    rng, (weights, size) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[TYPES[kind]]
    raw, halves = rng.integers(0, 256, (400, size), np.uint8), rng.uniform(-1, 1, (400, 2)).astype(np.float16)
    raw[:, :4] = halves.view(np.uint8)
    raw.tofile(tmp_path / "blocks")
    entry = dict.fromkeys(("table", "transposed", "interleaved_heads", "offset", "start"), 0)
    entry |= {"kind": kind, "shape": (400, weights), "rows": 400, "nbytes": raw.nbytes}
    tensor = GgufTensor(MappedFile(tmp_path / "blocks"), kind, entry)
    blocks = zip(raw.tolist(), *halves.astype(np.float32).T, strict=True)
    expected = np.array([from_llama_cpp(kind, *block) for block in blocks])
    (codes, scales, offsets), form = tensor.blocks(0, 400), FORMATS["int4-32-offsets"]
    arrays = {"codes": pack_numbers(codes, form.bits), "scales": scales, "offsets": offsets}
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(tensor.read(), expected)
    np.testing.assert_array_equal(form.dequantize(arrays, weights), expected)


def test_q4_k_is_taken_over(device: OnDevice, tmp_path: pathlib.Path) -> None:
    """The library's values to the bit; products on every path, of a prompt and of a token."""
    path, expected = write_k_quants(tmp_path, "Q4_K")
    model = Model.open(path)
    form = model.weight_format("auto")
    assert {form.of(name).name for name in model.arch.linears()} == {"int4-32-offsets"}
    assert model.weights_note(form) is None
    assert "int8-32" in str(model.weights_note(model.weight_format("int8-32")))
    store = model.store(form)
    for weights in (model.weights, store):
        np.testing.assert_array_equal(weights.matrix("0.down"), expected)
    assert WeightStore(store.folder).form == form
    require_same_logits(model, range(41), device)
    manifest = json.loads((store.folder / "store.json").read_text()) | {"format": 1}  # its offsets meant others
    (store.folder / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"store format 1, this edgekv reads format 2; quantize the model"):
        WeightStore(store.folder)
    assert WeightStore(model.store(form).folder).form == form  # made again


def test_parts_of_several_types(tmp_path: pathlib.Path) -> None:
    """Fused projections of which one has more bits, as llama.cpp mixes them, keep both."""
    path, _ = write_k_quants(tmp_path, "Q4_K", {"v_proj": "Q6_K", "gate_proj": "Q4_0"})
    model = Model.open(path)
    form = model.weight_format("auto")
    names = {name: form.of(name).name for name in ("0.qkv", "0.out", "0.up")}
    of_four = "int4-32-offsets"
    assert names == {"0.qkv": f"{of_four}*256+{of_four}*256+Q6_K*256", "0.out": of_four, "0.up": of_four}
    assert model.weights_note(form) is None
    store = model.store(form)
    assert WeightStore(store.folder).form == form
    for name in ("0.qkv", "0.up"):
        np.testing.assert_array_equal(store.matrix(name), model.weights.matrix(name))
    kv, tokens = "dense:dtype=f32", list(range(41))
    ours, exact = (Session.load(path, kv=kv, device=device).logits(tokens) for device in ("cpu", "numpy"))
    assert np.median(np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)) < 0.06
    manifest = json.loads((store.folder / "store.json").read_text())
    others = "Q9_K*256", "Q6_K", "f32*256"
    for wrong in (*others, *(f"Q6_K*{n}" for n in ("0", "128", "255", "1000000", "2_56", " 256", "0256", "٢٥٦"))):
        manifest["linears"]["0.qkv"] = f"Q6_K*256+{wrong}"
        (store.folder / "store.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="its linears are not those"):
            WeightStore(store.folder)


def test_a_part_that_is_quantized_again_beside_offsets(tmp_path: pathlib.Path) -> None:
    """All of a fused projection is then, and its codes of 8 stand for 0 as they do without offsets."""
    model = Model.open(write_k_quants(tmp_path, "Q4_K", {"gate_proj": "IQ4_NL"})[0])
    form = model.weight_format("auto")
    assert form.of("0.up").name == "int4-32-offsets"
    assert "IQ4_NL" in str(model.weights_note(form))
    store, expected = model.store(form), model.weights.matrix("0.up")
    arrays = store.arrays("0.up")
    np.testing.assert_array_equal(arrays["offsets"], -8 * arrays["scales"])
    assert np.linalg.norm(store.matrix("0.up") - expected) < 0.1 * np.linalg.norm(expected)


def test_a_lora_of_one_part(tmp_path: pathlib.Path) -> None:
    """A fused projection is stored in float32 where one of its parts is, beside others in blocks."""
    path, _ = write_k_quants(tmp_path, "Q6_K", {"v_proj": "F16"})
    config, lora = Model.open(path).config, tmp_path / "lora"
    rng, name = np.random.default_rng(0), "base_model.model.model.layers.0.self_attn.v_proj.lora_"
    shapes = {"A": (2, config.hidden_size), "B": (config.kv_size, 2)}
    lora.mkdir()
    tensors = {f"{name}{side}.weight": rng.standard_normal(shape, np.float32) for side, shape in shapes.items()}
    save_file(tensors, lora / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["v_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    model = Model.open(path, lora=lora)
    form = model.weight_format("auto")
    assert {each: form.of(each).name for each in ("0.qkv", "0.out")} == {"0.qkv": "f32", "0.out": "Q6_K"}
    np.testing.assert_array_equal(model.store(form).matrix("0.qkv"), model.weights.matrix("0.qkv"))


@pytest.mark.parametrize("kind", KEPT)
def test_blocks_are_kept(kind: str, device: OnDevice, tmp_path: pathlib.Path) -> None:
    """The store has the file's bytes, which the CPU multiplies with; a GPU has them in 8 bits."""
    path, expected = write_k_quants(tmp_path, kind)
    model = Model.open(path)
    form = model.weight_format("auto")
    assert {form.of(name).name for name in model.arch.linears()} == {kind}
    assert model.weights_note(form) is None
    assert kind in str(model.weights_note(model.weight_format("int8-32")))
    store = model.store(form)
    assert WeightStore(store.folder).form == form
    np.testing.assert_array_equal(store.matrix("0.down"), expected)
    np.testing.assert_array_equal(store.matrix("0.qkv"), model.weights.matrix("0.qkv"))
    linears = model.arch.linears().values()
    nbytes = sum(linear.n_elements for linear in linears) // 256 * BLOCKS[kind].n_bytes
    assert sum(store.raw(f"{name}.blocks").nbytes for name in model.arch.linears()) == nbytes
    require_same_logits(model, range(41), device, of_device=5e-2)


@pytest.mark.parametrize(("kind", "place"), [("Q4_0", 0), ("Q4_K", 2), ("Q6_K", 208), ("IQ3_S", 0)])
def test_a_scale_that_is_not_finite_is_named(kind: str, place: int, tmp_path: pathlib.Path) -> None:
    """place: of a float16 scale in a block, which is taken over or kept, or of the embedding table."""
    path, _ = write_k_quants(tmp_path, kind)
    offsets = {str(each.name): int(each.data_offset) for each in gguf.GGUFReader(path).tensors}
    whole = path.read_bytes()
    for name, scale, ours in (
        ("blk.0.ffn_down", np.inf, "down_proj"),
        ("token_embd", np.nan, "embed_tokens"),
        ("token_embd", 6e4, "embed_tokens"),  # too large for the half floats of tables
    ):
        data, at = bytearray(whole), offsets[f"{name}.weight"] + place
        data[at : at + 2] = np.float16(scale).tobytes()
        path.write_bytes(data)
        for weights in ("auto", "q4"):
            model = Model.open(path)
            with pytest.raises(CheckpointError, match=f"{ours}.* not finite"):
                model.store(model.weight_format(weights))


def test_experts_are_read(tmp_path: pathlib.Path) -> None:
    """A tensor has all experts of a layer; ``ffn_gate_inp``, the router, stays exact."""
    folder = golden_cases.write_checkpoint("qwen3-moe", tmp_path / "folder")
    path, kv = write_gguf(folder, tmp_path / "model.gguf"), "dense:dtype=f32"
    tokens = golden_cases.tokens("qwen3-moe")
    logits = [Session.load(each, kv=kv, device="numpy").logits(tokens) for each in (path, folder)]
    np.testing.assert_allclose(*logits, atol=2e-5, rtol=0)

    wide = golden_cases.QWEN3_MOE | {"moe_intermediate_size": 256, "head_dim": 64}
    path, down = write_k_quants(tmp_path, "IQ3_S", {"gate_proj": "Q2_K"}, wide)
    model = Model.open(path)
    form = model.weight_format("auto")
    names = {name: form.of(name).name for name in model.arch.linears()}
    assert names == dict.fromkeys(names, "IQ3_S") | {"0.router": "f32", "0.experts_up": "Q2_K*256+IQ3_S*256"}
    assert model.weights_note(form) is None
    store = model.store(form)
    np.testing.assert_array_equal(store.matrix("0.experts_down")[-256:], down)
    np.testing.assert_array_equal(store.matrix("0.experts_up"), model.weights.matrix("0.experts_up"))
    ours, exact = (Session.load(path, kv=kv, device=device).logits(tokens) for device in ("cpu", "numpy"))
    assert np.median(np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)) < 0.06


def test_experts_of_other_architectures_are_refused(tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    metadata = own_metadata(golden_cases.CASES["llama2-gqa"]) | {"llama.expert_count": 8}
    with pytest.raises(ConfigError, match="'llama' with experts are not supported"):
        Model.open(write_gguf(folder, tmp_path / "model.gguf", metadata=metadata))


def test_other_blocks_are_quantized_again(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, expected = write_k_quants(tmp_path, "Q5_1")
    session = Session.load(path, kv="dense:dtype=f32")
    assert session.plan.notes == ("weights of type Q5_1 were quantized a second time, to int8-32",)
    assert session.model.weights_note(session.model.weight_format("f32")) is None  # which loses nothing
    exact, store = session.model.weights, session.model.store(session.model.weight_format("auto"))
    np.testing.assert_array_equal(exact.matrix("0.down"), expected)
    for linear in ("0.qkv", "0.down", "head"):
        x, y = exact.matrix(linear), store.matrix(linear)
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(x)
    assert np.isfinite(session.logits([1, 2, 3])).all()
    for weights, is_said in (("f32", False), ("auto", True)):
        assert main(["quantize", str(path), "--weights", weights, "--output", str(tmp_path / weights)]) == 0
        assert (f"edgekv: {session.plan.notes[0]}\n" in capsys.readouterr().err) == is_said
