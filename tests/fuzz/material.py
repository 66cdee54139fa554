"""The whole inputs that are damaged: models of every layout, saved sessions, images."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import shutil
from unittest import mock

import gguf_writer
import golden_cases
import packed_cases
import tiny_models
import tokenizers
import vision_cases
from PIL import Image

from edgekv import Session
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts
from edgekv.eval.evaluate import Quality
from edgekv.eval.gate import Verdict
from edgekv.kvcache import CacheSpec
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.weights import cpu as threads
from edgekv.weights.formats import WEIGHTS
from edgekv.weights.store import build

DEMO = pathlib.Path(__file__).resolve().parent.parent.parent / "models" / "demo"
SCHEMES = (
    "dense", "onebit:residual_length=16", "planes:k_bits=4,v_bits=4",
    "planes:k_bits=2.5,v_bits=1.5,residual_length=16", "int4", "quest:k=32", "tova:budget=100", "h2o:budget=100",
    "streaming:budget=100", "kivi2:residual_length=16", "kvcomp:residual_length=16,block=16", "h1b",
    "mikv:budget=60", "fier:k=32", "snapkv:budget=100", "visual1", "visual_planes",
)  # fmt: skip
FEW_SCHEMES = "dense", "onebit:residual_length=16", "planes:k_bits=4,v_bits=4", "kivi2", "h1b"
CTX, N_PROMPT = 320, 200  # of sessions: enough for packed blocks
MORE = [1, 2] * 20
FAMILIES = (
    *("gemma2", "gemma3-v5-parameters", "phi3-longrope", "smollm3-options", "olmo2", "granite", "ministral3"),
    *("lfm2-options", "qwen3_5", "qwen3-moe-options", "mixtral", "gpt-oss"),
)
Saved = tuple[bytes, tuple[Session, Session]]  # a file, and models that read it


class Material:
    """Whole inputs, made once in ``folder``; all of them, or few of a kind, which are soon made."""

    def __init__(self, folder: pathlib.Path, of_all: bool = True) -> None:
        self.of_all, self.schemes = of_all, SCHEMES if of_all else FEW_SCHEMES
        self.weights = WEIGHTS if of_all else ("f32", "int4")
        self.tokenizer: Tokenizer = load_tokenizer(DEMO)
        self._checkpoints(folder)
        self._sessions(folder)
        self._images(folder)
        self._uses(folder)

    def _checkpoints(self, folder: pathlib.Path) -> None:
        """Writes models of every layout, tokenizers among them, and a store of quantized weights."""
        self.llama = golden_cases.write_checkpoint("llama31", folder / "llama31")
        self.gpt2 = golden_cases.write_checkpoint("gpt2", folder / "gpt2")
        self.llava = vision_cases.write_model(folder / "llava")
        self.words = folder / "llava" / "tokenizer.json"
        self.families = [golden_cases.write_checkpoint(name, folder / name) for name in FAMILIES]
        (folder / "packed").mkdir()
        self.packed = [packed_cases.write(name, folder / "packed" / name)[0] for name in packed_cases.MODELS]
        self.packed.append(packed_cases.write_mxfp4(folder / "mxfp4")[0])
        self.talker = tiny_models.write("mixtral", folder / "talker")
        sources = self.llama, self.gpt2, *self.families
        self.lasting = [_with_positions(source, folder / "lasting" / source.name) for source in sources]
        write = functools.partial(gguf_writer.write_gguf, tokenizer=False)
        kinds = "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"
        self.gguf = [write(self.llama, folder / f"{kind}.gguf", kind) for kind in kinds]
        for kind in ("Q4_K", "Q5_K", "Q6_K"):
            self.gguf.append(gguf_writer.write_k_quants(folder, kind)[0].rename(folder / f"{kind}.gguf"))
        for name in ("gemma3", "phi3-longrope", "olmo2", "granite"):
            checkpoint = golden_cases.write_checkpoint(name, folder / "gguf" / name)
            self.gguf.append(write(checkpoint, folder / f"{name}.gguf", "Q8_0"))
        self.byte_pairs = folder / "byte-pairs"
        self.byte_pairs.mkdir()
        library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")]))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        library.decoder = tokenizers.decoders.ByteLevel()
        library.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC()])
        library.save(str(self.byte_pairs / "tokenizer.json"))
        self.stores = []
        for source, model in (("llama", Model.open(self.llama)), ("mixtral", Model.open(self.talker))):
            for weights in self.weights:
                self.stores.append(folder / f"store-{source}-{weights}")
                build(model.weights, model.weight_format(weights), self.stores[-1], None)

    def _sessions(self, folder: pathlib.Path) -> None:
        """Saves texts, each with two loaded models that read it.

        Of each scheme, and of models with layers that do not attend.
        """
        self.loaded, self.compiled = self._longer(self.llama, folder / "longer")

        def saved(name: str, kv: str) -> Saved:
            return _saved(self._longer(folder / name, folder / f"{name}-longer"), kv, folder / "session")

        llamas = self.loaded, self.compiled
        self.sessions = [_saved(llamas, kv, folder / "session") for kv in self.schemes]
        recurrent = ("lfm2-options", "qwen3_5")[: 1 + self.of_all]
        self.recurrent_sessions = [saved(name, "onebit") for name in recurrent]
        cases = (("gemma2", "kivi2"), ("gemma3-v5-parameters", "planes"), ("gpt-oss", "onebit"))
        cases = cases if self.of_all else cases[:1]
        self.family_sessions = [saved(name, f"{kv}:residual_length=16") for name, kv in cases]

    def _uses(self, folder: pathlib.Path) -> None:
        """Fills a cache folder with all that is remembered, and compiles what cases use."""
        for source, weights in itertools.product((self.llama, self.talker), self.weights):
            with Session.load(source, weights=weights, threads=1) as session:
                list(session.generate([1, 2, 3], max_new_tokens=2, temperature=0.0))
        self.cache = folder / "cache"
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.cache)):
            with mock.patch.object(threads, "FEW_CORES", 0):
                Session.load(self.talker, kv="planes", weights="int4").close()
            Session.load(self.gguf[0], ctx=16).close()
            verdict = Verdict(Quality("kivi2", 1, *[1.0] * 6, 1, 1, 1.0, ()), None, ("KL 1, more than 0.05",))
            Verdicts(Model.open(self.talker)).remember(CacheSpec.parse("kivi2"), verdict, {"text": "x"})

    def _longer(self, source: pathlib.Path, folder: pathlib.Path) -> tuple[Session, Session]:
        """Opens a model with CTX positions, on the reference and on the CPU."""
        load = functools.partial(Session.load, _with_positions(source, folder), weights="f32", threads=1)
        return load(device="numpy"), load(device="cpu")

    def _images(self, folder: pathlib.Path) -> None:
        """Encodes a picture in every format that is read."""
        self.images = []
        whole = Image.fromarray(vision_cases.pixels(20, 30))
        for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
            whole.save(folder / "image", format=name)
            self.images.append((folder / "image").read_bytes())


def _with_positions(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copies the model with CTX positions, where they are no weights."""
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": CTX}))
    return folder


def _saved(models: tuple[Session, Session], kv: str, path: pathlib.Path) -> Saved:
    session = models[0].fork(kv=kv)
    list(session.generate([i % 90 for i in range(N_PROMPT)], max_new_tokens=2, temperature=1.0, seed=1))
    session.save(path)
    Session.restore(path, models[1]).prefill(MORE)  # kernels are compiled here, not in a case
    return path.read_bytes(), models
