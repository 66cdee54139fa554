"""Kinds of damaged input that are files: models, saved sessions, the cache folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import golden_cases
import lora_cases
import numpy as np
import packed_cases
from PIL import Image
from safetensors.numpy import load_file, save_file
from session_parts import joined, parts

from edgekv import SamplingParams, Session
from edgekv.checkpoint.quantized import unpack_tensors
from edgekv.checkpoint.tensors import Tensors
from edgekv.cli import main
from edgekv.engine.loading import SessionPlan
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts
from edgekv.kvcache import CacheSpec
from edgekv.text import load_tokenizer
from edgekv.text.template import find_template
from edgekv.vision.images import Preprocess, open_image
from edgekv.weights import cpu as threads

from .material import CTX, DEMO, MORE, N_PROMPT, Material, Saved
from .mutate import ODD, as_json, damaged, kind, mutated, poisoned, poisoned_tensors

HEAD = 4096  # bytes in which most of the damage is done: the data behind them are only numbers


def used(folder: pathlib.Path, **options: Any) -> None:
    """Opens, plans, loads and runs the model for a few tokens, as far as it goes."""
    chosen = {"weights": "f32", "device": "numpy"} | options
    SessionPlan.make(Model.open(folder), kv=chosen.get("kv", "onebit"), ctx=None, weights=chosen["weights"])
    session = Session.load(folder, ctx=16, **chosen)
    session.prefill([1, 2, 3])


@kind
def config(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice((m.llama, m.gpt2, m.llava))
    shutil.copy(source / "model.safetensors", folder)
    raw = json.loads((source / "config.json").read_text())
    if rng.random() < 0.5 and "n_embd" not in raw:
        scalings = golden_cases.LLAMA3, golden_cases.LONGROPE, {"type": "yarn", "factor": 2}
        raw["rope_scaling"] = rng.choice(scalings)
    (folder / "config.json").write_bytes(as_json(mutated(raw, rng), rng))
    used(folder)


@kind
def family(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice(m.families)
    shutil.copy(source / "model.safetensors", folder)
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_bytes(as_json(mutated(raw, rng), rng))
    used(folder, kv="dense")


@kind
def weights(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Puts NaN, infinities and huge numbers into a model's weights, through every format and scheme."""
    source = rng.choice(m.lasting)
    shutil.copy(source / "config.json", folder)
    tensors = (source / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(poisoned_tensors(tensors, rng))
    options = {"kv": rng.choice(m.schemes), "weights": rng.choice((*m.weights, "f32")), "ctx": CTX, "threads": 1}
    with Session.load(folder, device=rng.choice(("cpu", "cpu", "numpy")), **options) as session:
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=1)
        list(session.generate([i % 90 for i in range(N_PROMPT)], max_new_tokens=3, sampling=sampling))


@kind
def packed(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Damages what config.json says of the packing, the header of the tensors, or the numbers in them."""
    source = rng.choice(m.packed)
    raw, tensors = json.loads((source / "config.json").read_text()), (source / "model.safetensors").read_bytes()
    what = rng.randrange(3)
    if what == 0:
        raw["quantization_config"] = mutated(raw["quantization_config"], rng)
    elif what == 1:
        tensors = damaged(tensors, rng, HEAD)
    else:
        tensors = poisoned_tensors(tensors, rng)
    (folder / "config.json").write_bytes(as_json(raw, rng))
    (folder / "model.safetensors").write_bytes(tensors)
    used(folder, weights="auto")


@kind
def unpack(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Damages parts of a tensor that a library packed, gives them other types and shapes, or removes them."""
    name = rng.choice(sorted(packed_cases.LIBRARIES))
    settings, _, _ = packed_cases.LIBRARIES[name]
    parts = packed_cases.library_tensors(name)
    for key in rng.sample(sorted(parts), rng.choice((1, 1, 2))):
        if key not in parts:
            continue
        part, what = parts[key], rng.randrange(6)
        if what == 0:
            del parts[key]
        elif what == 1:
            parts[key] = part[: rng.randrange(max(1, len(part)))] if part.ndim else part.reshape(1)
        elif what == 2:
            parts[key] = part.reshape(-1) if rng.random() < 0.5 else part[None]
        elif what == 3:
            parts[key] = part.astype(rng.choice(("f4", "f2", "i4", "u1", "i8")))
        elif part.dtype != packed_cases.F8:
            data = (poisoned if what == 4 else damaged)(part.tobytes(), rng)[: part.nbytes]
            parts[key] = np.frombuffer(data.ljust(part.nbytes, b"x"), part.dtype).reshape(part.shape)
    file = packed_cases.save(folder, {f"m.{key}": part for key, part in parts.items()}) / "model.safetensors"
    if rng.random() < 0.3:
        settings = {key: mutated(value, rng) for key, value in settings.items()}
    tensors = unpack_tensors(Tensors.open(file), settings)
    for each in tensors.values():
        each.read()
        each.rows(0, min(3, each.shape[0]))


@kind
def safetensors(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = rng.choice((m.llama, m.gpt2))
    shutil.copy(source / "config.json", folder)
    (folder / "model.safetensors").write_bytes(damaged((source / "model.safetensors").read_bytes(), rng, HEAD))
    used(folder)


@kind
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


@kind
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


@kind
def gguf(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Damages a file's header, or the blocks behind it."""
    data = rng.choice(m.gguf).read_bytes()
    data = damaged(data, rng, HEAD) if rng.random() < 0.6 else poisoned(data, rng, HEAD)
    (folder / "model.gguf").write_bytes(data)
    used(folder / "model.gguf", weights="auto", device=rng.choice(("cpu", "numpy")), threads=1)


@kind
def adapter(m: Material, folder: pathlib.Path, rng: Random) -> None:
    metadata = {"format": "edgekv-adapter", "version": "1", "base": m.loaded.model.identity, "scheme": "h1b"}
    if rng.random() < 0.5:
        metadata[rng.choice(list(metadata))] = rng.choice(("", "2", "x" * 10_000, m.loaded.model.identity))
    name, shapes = rng.choice(("tau", "key_scale", "x")), ((), (3,), (3, 4), (1 << 20,), (0,), (1, 1, 1, 1))
    array = np.full(rng.choice(shapes), rng.choice((1, 0, np.nan)), np.float32)
    save_file({name: array}, folder / "adapter", metadata=metadata)
    if rng.random() < 0.7:
        (folder / "adapter").write_bytes(damaged((folder / "adapter").read_bytes(), rng))
    loaded = Session.load(m.llama, kv="h1b", adapter=folder / "adapter", weights="f32", device="numpy", ctx=16)
    loaded.prefill([1, 2, 3])


@kind
def lora(m: Material, folder: pathlib.Path, rng: Random) -> None:
    place = lora_cases.write("llama", folder / "lora")
    config, weights = place / "adapter_config.json", place / "adapter_model.safetensors"
    if rng.random() < 0.7:
        config.write_bytes(as_json(mutated(json.loads(config.read_text()), rng), rng))
    if rng.random() < 0.3:
        whole = load_file(weights).items()
        save_file({n: np.full(a.shape, rng.choice((1, np.nan, 3e38)), np.float32) for n, a in whole}, weights)
    if rng.random() < 0.5:
        weights.write_bytes(damaged(weights.read_bytes(), rng))
    given = f"{place}:{rng.choice((1, 0.5, -1, 1e300, 'nan', 'x'))}"
    if rng.random() < 0.5:
        Model.open(m.llama, loras={"a": given}).lora_deltas("a")
    else:
        Model.open(m.llama, lora=given).weights.matrix("1.qkv")


@kind
def image(m: Material, folder: pathlib.Path, rng: Random) -> None:
    (folder / "image").write_bytes(damaged(rng.choice(m.images), rng, 200))
    Preprocess.read(m.llava / "preprocessor_config.json")(open_image(folder / "image"))


@kind
def processor(m: Material, folder: pathlib.Path, rng: Random) -> None:
    raw = json.loads((m.llava / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_bytes(as_json(mutated(raw, rng), rng))
    Preprocess.read(folder / "preprocessor_config.json")(open_image(Image.new("RGB", (30, 20))))


@kind
def store(m: Material, folder: pathlib.Path, rng: Random) -> None:
    place = folder / "store"
    shutil.copytree(rng.choice(m.stores), place)
    if rng.randrange(3) == 0:
        manifest = json.loads((place / "store.json").read_text())
        (place / "store.json").write_bytes(as_json(mutated(manifest, rng), rng))
    else:
        name = rng.choice([path.name for path in sorted(place.iterdir()) if path.suffix == ".safetensors"])
        data = (place / name).read_bytes()
        if rng.random() < 0.5:
            (place / name).write_bytes(poisoned_tensors(data, rng))
        else:
            (place / name).write_bytes(damaged(data, rng, HEAD))
    used(place, weights="auto", device="cpu", threads=1)


# Saved sessions


@kind
def session(m: Material, folder: pathlib.Path, rng: Random) -> Session:
    """Restores a file with honest checksums and lying content."""
    return _lying(m.sessions, folder, rng)


def _lying(sessions: list[Saved], folder: pathlib.Path, rng: Random) -> Session:
    data, models = rng.choice(sessions)
    content, entries, arrays = parts(data)
    what = rng.randrange(4)
    if what < 2:
        arrays = _changed(rng.choice(list(entries.values())), arrays, damaged, rng)
    elif what == 2:
        content = as_json(mutated(content, rng), rng)
    else:
        entries = mutated(entries, rng)
    return _restored(folder, joined(content, entries, arrays), rng.choice(models))


def _changed(entry: dict[str, Any], arrays: bytes, change: Callable[[bytes, Random], bytes], rng: Random) -> bytes:
    """Returns the arrays with one of them changed, as many bytes as before."""
    a, b = entry["data_offsets"]
    changed = change(arrays[a:b], rng)[: b - a]
    return arrays[:a] + changed.ljust(b - a, b"\0") + arrays[b:]


def _restored(folder: pathlib.Path, data: bytes, model: Session) -> Session:
    (folder / "session").write_bytes(data)
    return Session.restore(folder / "session", model)


@kind
def resume(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Goes on with a lying session that was accepted."""
    _resume(session(m, folder, rng), rng)


def _resume(restored: Session, rng: Random) -> None:
    restored.prefill(MORE)
    restored.rewind(rng.randrange(len(restored.tokens)))
    restored.prefill([1])


@kind
def recurrent(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Restores a lying session of a model with layers that do not attend."""
    _resume(_lying(m.recurrent_sessions, folder, rng), rng)


@kind
def numbers(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Puts NaN, infinities and huge numbers into what is saved, of every scheme and family."""
    data, models = rng.choice([*m.sessions[::2], *m.recurrent_sessions, *m.family_sessions])
    content, entries, arrays = parts(data)
    for entry in rng.sample(list(entries.values()), min(len(entries), rng.choice((1, 1, 2, 100)))):
        arrays = _changed(entry, arrays, poisoned, rng)
    restored = _restored(folder, joined(content, entries, arrays), rng.choice((*models, models[1])))
    list(restored.generate(MORE, max_new_tokens=3, temperature=rng.choice((0.0, 1.0)), seed=1))
    _resume(restored, rng)


# Places that edgekv looks into


@kind
def remembered(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Puts anything into a file of the cache; all that it was remembered for must go on, as it is made again."""
    shutil.copytree(m.cache, folder / "cache")
    files = [file for file in sorted((folder / "cache").rglob("*")) if file.is_file()]
    for file in rng.sample(files, rng.choice((1, 1, 2))):
        data = file.read_bytes()
        if file.suffix == ".json":
            value = json.loads(data)
            data = as_json(rng.choice(ODD) if rng.random() < 0.3 else mutated(value, rng), rng)
        file.write_bytes(damaged(data, rng) if file.suffix != ".json" or rng.random() < 0.2 else data)
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
        mock.patch.object(threads, "FEW_CORES", 0),
    ):
        use_remembered(m)


def use_remembered(m: Material) -> None:
    """Uses what makes, or reads, each kind of file in the cache."""
    for path, kv in ((m.talker, "planes"), (m.gguf[0], "onebit")):
        with Session.load(path, kv=kv, weights="int4" if path == m.talker else "auto") as session:
            session.prefill([1, 2, 3])
            spec = CacheSpec.parse("kivi2")
            verdicts = Verdicts(session.model)
            verdicts.warning(spec)
            verdicts.warn_once(spec)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["info", "--model", str(m.talker)]) == 0
