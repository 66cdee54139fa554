"""The kinds of input: each makes a damaged one from whole material and gives it to what reads it."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import expert_cases
import gguf_writer
import golden_cases
import lora_cases
import numpy as np
import packed_cases
import tokenizers
import vision_cases
from PIL import Image
from safetensors.numpy import load_file, save_file

from edgekv import Session
from edgekv.chat import renderer
from edgekv.chat.template import ChatTemplate, find_template
from edgekv.linear.store_builder import build
from edgekv.server.answer_parser import AnswerParser
from edgekv.server.body import parse_json
from edgekv.server.checked_request import CheckedRequest, check_chat, check_completion
from edgekv.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, listed, read
from edgekv.server.request_encoder import RequestEncoder
from edgekv.server.responses_request import chat_request
from edgekv.server.tools import TOOL_FORMATS, tools_grammar
from edgekv.session.file import MAGIC, PREFIX, VERSION
from edgekv.session.grammar import Grammar, JsonSchema
from edgekv.session.model import Model
from edgekv.session.plan import SessionPlan
from edgekv.tokenizer import Tokenizer, load_tokenizer
from edgekv.vision import picture
from edgekv.vision.preprocess import Preprocess

from .mutate import as_json, damaged, mutated

DEMO = pathlib.Path(__file__).resolve().parent.parent.parent / "models" / "demo"
SCHEMES = (
    "dense",
    "onebit:residual_length=16",
    "bitplane",
    "planes:k_bits=2.5,v_bits=1.5,residual_length=16",
    "int4",
    "quest",
    "tova:budget=100",
    "h2o:budget=100",
    "streaming:budget=100",
    "kivi2:residual_length=16",
    "kvcomp:residual_length=16,block=16",
    "h1b",
    "steps:budget=150000,residual_length=16",
    "mikv:budget=60",
    "fier",
    "snapkv:budget=100",
    "visual1",
    "visual=planes",
)
CTX, N_PROMPT = 320, 200  # of sessions: enough for packed blocks
MORE = [1, 2] * 20
FAMILIES = (
    *("gemma2", "gemma3-v5-parameters", "phi3-longrope", "smollm3-options", "olmo2", "granite", "ministral3"),
    *("lfm2-options", "qwen3_5", "qwen3-moe-options", "mixtral", "gpt-oss"),
)
Saved = tuple[bytes, tuple[Session, Session]]  # a file, and models that read it
HEAD = 4096  # bytes in which most of the damage is done: the data behind them are only numbers


class Material:
    """Whole inputs, made once in ``folder``."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(DEMO)
        self._checkpoints(folder)
        self._sessions(folder)
        self._images(folder)

    def _checkpoints(self, folder: pathlib.Path) -> None:
        """Models of every layout, tokenizers among them, and a store of quantized weights."""
        self.llama = golden_cases.write_checkpoint("llama31", folder / "llama31")
        self.gpt2 = golden_cases.write_checkpoint("gpt2", folder / "gpt2")
        self.llava = vision_cases.write_model(folder / "llava")
        self.words = folder / "llava" / "tokenizer.json"
        self.families = [golden_cases.write_checkpoint(name, folder / name) for name in FAMILIES]
        (folder / "packed").mkdir()
        self.packed = [packed_cases.write(name, folder / "packed" / name)[0] for name in packed_cases.MODELS]
        self.packed.append(expert_cases.write_mxfp4(folder / "mxfp4")[0])
        self.gguf = [gguf_writer.write_gguf(self.llama, folder / "model.gguf", "Q8_0", tokenizer=False)]
        for name in ("gemma3", "phi3-longrope", "olmo2", "granite"):
            checkpoint = golden_cases.write_checkpoint(name, folder / "gguf" / name)
            self.gguf.append(gguf_writer.write_gguf(checkpoint, folder / f"{name}.gguf", "Q8_0", tokenizer=False))
        self.byte_pairs = folder / "byte-pairs"
        self.byte_pairs.mkdir()
        library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")]))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        library.decoder = tokenizers.decoders.ByteLevel()
        library.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC()])
        library.save(str(self.byte_pairs / "tokenizer.json"))
        self.stores = [folder / f"store-{weights}" for weights in ("int8", "f32")]
        model = Model.open(self.llama)
        for place in self.stores:
            build(model.weights, model.weight_format(place.name.removeprefix("store-")), place, None)

    def _sessions(self, folder: pathlib.Path) -> None:
        """Saved texts, plain and compressed, each with two loaded models that read it.

        Of each of SCHEMES, and of models with layers that do not attend.
        """
        self.loaded, self.compiled = self._longer(self.llama, folder / "longer")
        self.sessions: list[Saved] = []
        self.recurrent_sessions: list[Saved] = []
        for kv in SCHEMES:
            for compress in (False, True):
                self.sessions.append(_saved((self.loaded, self.compiled), kv, compress, folder / "session"))
        for name in ("lfm2-options", "qwen3_5"):
            models = self._longer(folder / name, folder / f"{name}-longer")
            self.recurrent_sessions.append(_saved(models, "onebit", False, folder / "session"))

    def _longer(self, source: pathlib.Path, folder: pathlib.Path) -> tuple[Session, Session]:
        """A model with CTX positions, on the reference and on the CPU."""
        longer = shutil.copytree(source, folder)
        raw = json.loads((longer / "config.json").read_text())
        (longer / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": CTX}))
        loaded, compiled = (
            Session.load(longer, weights="f32", device=each, threads=1) for each in ("numpy", "cpu")
        )
        return loaded, compiled

    def _images(self, folder: pathlib.Path) -> None:
        """A picture in every format that is read."""
        self.images = []
        whole = Image.fromarray(vision_cases.pixels(20, 30))
        for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
            whole.save(folder / "image", format=name)
            self.images.append((folder / "image").read_bytes())


def _saved(models: tuple[Session, Session], kv: str, compress: bool, path: pathlib.Path) -> Saved:
    session = models[0].fork(kv=kv)
    list(session.generate([i % 90 for i in range(N_PROMPT)], max_new_tokens=2, temperature=1.0, seed=1))
    session.save(path, compress=compress)
    Session.restore(path, models[1]).prefill(MORE)  # kernels are compiled here, not in a case
    return path.read_bytes(), models


def used(folder: pathlib.Path, **options: Any) -> None:
    """The model is opened, planned, loaded and run for a few tokens, as far as it goes."""
    chosen = {"weights": "f32", "device": "numpy"} | options
    SessionPlan.make(Model.open(folder), kv=chosen.get("kv", "onebit"), ctx=None, weights=chosen["weights"])
    session = Session.load(folder, ctx=16, **chosen)
    session.prefill([1, 2, 3])


def config(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice((m.llama, m.gpt2, m.llava))
    shutil.copy(source / "model.safetensors", folder)
    raw = json.loads((source / "config.json").read_text())
    if rng.random() < 0.5 and "n_embd" not in raw:
        raw["rope_scaling"] = rng.choice(
            (golden_cases.LLAMA3, golden_cases.LONGROPE, {"type": "yarn", "factor": 2})
        )
    (folder / "config.json").write_bytes(as_json(mutated(raw, rng), rng))
    used(folder)


def family(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice(m.families)
    shutil.copy(source / "model.safetensors", folder)
    (folder / "config.json").write_bytes(
        as_json(mutated(json.loads((source / "config.json").read_text()), rng), rng)
    )
    used(folder, kv="dense")


def packed(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Either what config.json says of the packing is damaged, or the header of the tensors."""
    source = rng.choice(m.packed)
    raw, tensors = json.loads((source / "config.json").read_text()), (source / "model.safetensors").read_bytes()
    if rng.random() < 0.5:
        raw["quantization_config"] = mutated(raw["quantization_config"], rng)
    else:
        tensors = damaged(tensors, rng, HEAD)
    (folder / "config.json").write_bytes(as_json(raw, rng))
    (folder / "model.safetensors").write_bytes(tensors)
    used(folder, weights="auto")


def safetensors(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice((m.llama, m.gpt2))
    shutil.copy(source / "config.json", folder)
    (folder / "model.safetensors").write_bytes(damaged((source / "model.safetensors").read_bytes(), rng, HEAD))
    used(folder)


def index(m: Material, folder: pathlib.Path, rng: Random) -> None:
    shutil.copy(m.llama / "config.json", folder)
    tensors = golden_cases.tensors("llama31")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    homes = {name: file for file, held in halves.items() for name in held}
    whole = {"metadata": {"total_size": 1}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_bytes(as_json(mutated(whole, rng), rng))
    used(folder)


def tokenizer(m: Material, folder: pathlib.Path, rng: Random) -> None:
    what = rng.randrange(4)
    if what == 0:
        (folder / "tokenizer.model").write_bytes(damaged((DEMO / "tokenizer.model").read_bytes(), rng, HEAD))
    elif what == 1:
        vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
        (folder / "vocab.json").write_bytes(as_json(mutated(vocabulary, rng), rng))
        (folder / "merges.txt").write_bytes(damaged(b"#version: 0.2\na b\n", rng))
    else:
        source = rng.choice((m.words, m.byte_pairs / "tokenizer.json"))
        (folder / "tokenizer.json").write_bytes(as_json(mutated(json.loads(source.read_text()), rng), rng))
    if rng.random() < 0.5:
        declared = {"add_bos_token": True, "bos_token": {"content": "a"}, "eos_token": "b", "chat_template": "x"}
        (folder / "tokenizer_config.json").write_bytes(as_json(mutated(declared, rng), rng))
        (folder / "generation_config.json").write_bytes(as_json(mutated({"eos_token_id": [1, 2]}, rng), rng))
        find_template(folder)
    opened = load_tokenizer(folder, config={})
    ids = opened.encode("ab w3 <image> \N{GRINNING FACE}\0")
    opened.decode(ids)
    for token in range(min(opened.vocab_size, 300)):
        opened.token_bytes(token)
        opened.piece(token)


SNIPPETS = (
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{{ 'a'.ljust(10**11) }}",
    "{{ 'a' | center(10**11) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ lipsum(9**9) }}",
    "{{ cycler | list }}",
    "{{ [].__class__ }}",
    "{% set x = namespace(y=1) %}{% set x.y = x %}{{ x.y.y }}",
    "{{ messages | tojson(indent=10**10) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9**(9**9) }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now('%' * 1000) }}",
    "{% generation %}x{% endgeneration %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ messages | batch(10**9, 0) | list }}",
    "{{ undefined.x.y }}",
    "{% if true %}",
    "{% else %}",
    "{{",
    "(" * 300,
)


def template(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = "".join(rng.choice(SNIPPETS) for _ in range(rng.randrange(1, 5)))
    if rng.random() < 0.5:
        source = damaged(source.encode(), rng).decode(errors="replace")
    messages = mutated([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], rng)
    with mock.patch.object(renderer, "SECONDS", 2.0):  # a case may take 10
        ChatTemplate(source, m.tokenizer).render(messages if isinstance(messages, list) else [])


def gguf(m: Material, folder: pathlib.Path, rng: Random) -> None:
    (folder / "model.gguf").write_bytes(damaged(rng.choice(m.gguf).read_bytes(), rng, HEAD))
    used(folder / "model.gguf", weights="auto")


def session(m: Material, folder: pathlib.Path, rng: Random) -> Session:
    """Honest checksums, lying content."""
    return _lying(m.sessions, folder, rng)


def _lying(sessions: list[Saved], folder: pathlib.Path, rng: Random) -> Session:
    data, models = rng.choice(sessions)
    size = PREFIX.unpack_from(data)[3]
    header = json.loads(data[PREFIX.size : PREFIX.size + size])
    arrays = data[PREFIX.size + size :]
    if rng.random() < 0.5:
        blob, position = rng.choice(header["blobs"]), 0
        for each in header["blobs"]:
            if each is blob:
                break
            position += each["size"]
        changed = damaged(arrays[position : position + blob["size"]], rng)
        arrays = arrays[:position] + changed + arrays[position + blob["size"] :]
        blob |= {"size": len(changed), "crc": zlib.crc32(changed)}
        text = json.dumps(header).encode()
    else:
        part = rng.choice(("content", "blobs", None))
        header = header | {part: mutated(header[part], rng)} if part else mutated(header, rng)
        text = as_json(header, rng)
    prefix = PREFIX.pack(MAGIC, VERSION, zlib.crc32(text), len(text))
    (folder / "session").write_bytes(prefix + text + arrays)
    return Session.restore(folder / "session", rng.choice(models))


def resume(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """A lying session that was accepted goes on."""
    _resume(session(m, folder, rng), rng)


def recurrent(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Of a model with layers that do not attend."""
    _resume(_lying(m.recurrent_sessions, folder, rng), rng)


def _resume(restored: Session, rng: Random) -> None:
    restored.prefill(MORE)
    restored.rewind(rng.randrange(len(restored.tokens)))
    restored.prefill([1])


def adapter(m: Material, folder: pathlib.Path, rng: Random) -> None:
    metadata = {"format": "edgekv-adapter", "version": "1", "base": m.loaded.model.identity, "scheme": "h1b"}
    if rng.random() < 0.5:
        metadata[rng.choice(list(metadata))] = rng.choice(("", "2", "x" * 10_000, m.loaded.model.identity))
    shapes = ((), (3,), (3, 4), (1 << 20,), (0,), (1, 1, 1, 1))
    tensors = {
        rng.choice(("tau", "key_scale", "lam", "x")): np.full(
            rng.choice(shapes), rng.choice((1, 0, np.nan)), np.float32
        )
    }
    save_file(tensors, folder / "adapter", metadata=metadata)
    if rng.random() < 0.7:
        (folder / "adapter").write_bytes(damaged((folder / "adapter").read_bytes(), rng))
    loaded = Session.load(m.llama, kv="h1b", adapter=folder / "adapter", weights="f32", device="numpy", ctx=16)
    loaded.prefill([1, 2, 3])


def lora(m: Material, folder: pathlib.Path, rng: Random) -> None:
    place = lora_cases.write("llama", folder / "lora")
    config, weights = place / "adapter_config.json", place / "adapter_model.safetensors"
    if rng.random() < 0.7:
        config.write_bytes(as_json(mutated(json.loads(config.read_text()), rng), rng))
    if rng.random() < 0.3:
        tensors = {
            name: np.full(array.shape, rng.choice((1, np.nan, 3e38)), np.float32)
            for name, array in load_file(weights).items()
        }
        save_file(tensors, weights)
    if rng.random() < 0.5:
        weights.write_bytes(damaged(weights.read_bytes(), rng))
    given = f"{place}:{rng.choice((1, 0.5, -1, 1e300, 'nan', 'x'))}"
    if rng.random() < 0.5:
        Model.open(m.llama, loras={"a": given}).changes("a")
    else:
        Model.open(m.llama, lora=given).weights.matrix("1.qkv")


def image(m: Material, folder: pathlib.Path, rng: Random) -> None:
    (folder / "image").write_bytes(damaged(rng.choice(m.images), rng, 200))
    Preprocess.read(m.llava / "preprocessor_config.json")(picture(folder / "image"))


def processor(m: Material, folder: pathlib.Path, rng: Random) -> None:
    raw = json.loads((m.llava / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_bytes(as_json(mutated(raw, rng), rng))
    Preprocess.read(folder / "preprocessor_config.json")(picture(Image.new("RGB", (30, 20))))


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,5}$", "maxLength": 10},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"enum": ["x", 1]}, {"type": "number", "minimum": 0, "multipleOf": 0.5}]},
    },
    "required": ["a"],
    "$defs": {"n": {"type": "integer", "maximum": 100}},
}


def schema(m: Material, folder: pathlib.Path, rng: Random) -> None:
    vocabulary = m.tokenizer.vocab_size
    constraint = JsonSchema(mutated(SCHEMA, rng) or {}, m.tokenizer, vocabulary)
    for _ in range(3):
        allowed = constraint.allowed(np.zeros(vocabulary, np.float32))
        if constraint.accept(int(allowed.argmax())):
            break


def store(m: Material, folder: pathlib.Path, rng: Random) -> None:
    place = folder / "store"
    shutil.copytree(rng.choice(m.stores), place)
    if rng.randrange(3) == 0:
        manifest = json.loads((place / "store.json").read_text())
        (place / "store.json").write_bytes(as_json(mutated(manifest, rng), rng))
    else:
        name = rng.choice(
            [path.name for path in sorted(place.iterdir()) if path.suffix in (".onnx", ".safetensors")]
        )
        (place / name).write_bytes(damaged((place / name).read_bytes(), rng, HEAD))
    used(place, weights="auto", device="cpu", threads=1)


REQUEST: dict[str, Any] = {
    "model": "m",
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 3,
    "seed": 1,
    "stop": ["x"],
    "max_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "logit_bias": {"5": 1},
    "presence_penalty": 1,
    "n": 1,
}
CHAT: dict[str, Any] = {
    **REQUEST,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"b": 1}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "logprobs": True,
    "top_logprobs": 2,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "max_output_tokens": 3,
}
EMBEDDINGS: dict[str, Any] = {"model": "m", "input": ["x", "y"], "encoding_format": "base64", "dimensions": 3}


def request(m: Material, folder: pathlib.Path, rng: Random) -> None:
    kinds: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
        "chat": (CHAT, lambda body: check_chat(read(body, ChatRequest))),
        "completion": (
            {**REQUEST, "prompt": [1, 2], "logprobs": 2, "echo": True},
            lambda body: check_completion(read(body, CompletionRequest)),
        ),
        "responses": (RESPONSES, lambda body: check_chat(chat_request(body))),
        "embeddings": (EMBEDDINGS, lambda body: listed(read(body, EmbeddingRequest).input, "input")),
    }
    body, asked = kinds[rng.choice(sorted(kinds))]
    ask = asked(parse_json(as_json(mutated(body, rng), rng)))
    if isinstance(ask, CheckedRequest):
        prompts = RequestEncoder(ChatTemplate.plain(m.tokenizer), m.tokenizer, 256)
        prompts.encode(ask)
        if ask.tools is not None and ask.tools.callable:
            Grammar(tools_grammar(ask.tools, prompts.form, {}, ask.schema), m.tokenizer, m.tokenizer.vocab_size)


def answer(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """An answer of a model gone astray, in pieces of any length."""
    text = damaged(ANSWER.encode(), rng, len(ANSWER)).decode(errors="replace")
    reader = AnswerParser(thinks=rng.random() < 0.3, form=rng.choice(list(TOOL_FORMATS.values())))
    while text:
        n = rng.randint(1, 9)
        reader.push(text[:n])
        text = text[n:]
    reader.end()


ANSWER = """<think>
Which one?</think>

See: <tool_call>
{"name": "f", "arguments": {"a": "}\\"", "b": [1, {"c": null}]}}
</tool_call>
[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]"""


Kind = Callable[[Material, pathlib.Path, Random], object]
KINDS: dict[str, Kind] = {
    each.__name__: each
    for each in (
        config,
        family,
        packed,
        safetensors,
        index,
        tokenizer,
        template,
        gguf,
        session,
        resume,
        recurrent,
        adapter,
        lora,
        image,
        processor,
        schema,
        store,
        request,
        answer,
    )
}


def crash(m: Material, folder: pathlib.Path, rng: Random) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(m: Material, folder: pathlib.Path, rng: Random) -> None:
    time.sleep(60)


def hunger(m: Material, folder: pathlib.Path, rng: Random) -> None:
    bytearray(3 << 30)


if "EDGEKV_FUZZ_SELF_TEST" in os.environ:  # what the harness must notice
    KINDS |= {"crash": crash, "hang": hang, "hunger": hunger}
__all__ = ["KINDS", "Material"]
