"""A language model with a KV cache of 1-bit keys and 2-bit values, in one file to read from top to bottom.

    python examples/minimal.py MODEL PROMPT [N] [--exact] [--temperature T]

MODEL is the folder of a Llama or a GPT-2: config.json, model.safetensors, and SentencePiece's tokenizer.model or
GPT-2's vocab.json and merges.txt. N is the number of new tokens. --exact keeps all keys and values in float16.

The parts in order: weight files, tokenizers, the packed cache, the two architectures, sampling. It needs NumPy
and Numba alone. edgekv does the same with threads, faster kernels, quantized weights and better codes.
"""

import argparse
import codecs
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir  # comes with Numba
from numba import njit, types
from numba.extending import intrinsic


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all tensors as float32. A file has the header's length in 8 bytes, the header in JSON, the data."""
    data, tensors = np.memmap(path, np.uint8, "r"), {}
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:start]))
    for name in header.keys() - {"__metadata__"}:
        entry = header[name]
        raw = data[start:][slice(*entry["data_offsets"])]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            x = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        tensors[name] = x.reshape(entry["shape"])
    return tensors


# ---- Tokenizers ----


def merge(parts: list[str], rank: Callable[[str, str], float]) -> list[str]:
    """Byte pair encoding: merges the two neighbours of the lowest rank until all ranks are infinite."""
    while len(parts) > 1:
        ranks = [rank(*pair) for pair in itertools.pairwise(parts)]
        i = int(np.argmin(ranks))
        if ranks[i] == np.inf:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


class SentencePiece:
    """The tokenizer of Llama 1 and 2: pieces of text with scores; characters without a piece become bytes."""

    def __init__(self, folder: pathlib.Path) -> None:
        data, at = (folder / "tokenizer.model").read_bytes(), 0
        self.texts, self.kinds, self.ranks = [], [], {}
        # The file is a protobuf whose field 1 is a piece: a message with a text, a score, and a kind.
        while data[at] == 10:
            size, n = data[at + 1], data[at + 3]  # bytes of the message and of its text, both below 128
            text, score, kind = np.split(np.frombuffer(data, np.uint8)[at + 4 : at + 2 + size], [n, n + 5])
            self.texts.append(text.tobytes().decode())
            self.ranks[self.texts[-1]] = -float(score[1:].view(np.float32)[0])
            self.kinds.append(int(kind[1]) if len(kind) else 1)  # 1: normal, 2: unknown, 3: control, 6: byte
            at += 2 + size
        self.ids = {text: i for i, text in enumerate(self.texts)}

    def encode(self, text: str) -> list[int]:
        ids = [1]  # the token that begins a text
        for word in re.findall("\u2581+[^\u2581]*", "\u2581" + text.replace(" ", "\u2581")):  # U+2581: a space
            for part in merge(list(word), lambda a, b: self.ranks.get(a + b, np.inf)):
                ids += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{x:02X}>"] for x in part.encode()]
        return ids

    def decode(self, token: int) -> bytes:
        text, kind = self.texts[token], self.kinds[token]
        return bytes([int(text[3:5], 16)]) if kind == 6 else text.replace("\u2581", " ").encode() * (kind == 1)


class BytePairs:
    """The tokenizer of GPT-2: bytes, written as printable letters, and pairs in the order of merging."""

    WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, folder: pathlib.Path) -> None:
        self.ids: dict[str, int] = json.loads((folder / "vocab.json").read_text("utf-8"))
        self.texts = {i: text for text, i in self.ids.items()}
        lines = (folder / "merges.txt").read_text("utf-8").splitlines()[1:]
        self.ranks = {tuple(line.split()): i for i, line in enumerate(lines)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = sorted(set(range(256)) - set(printable))
        self.letters = {byte: chr(byte) for byte in printable}
        self.letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
        self.bytes = {letter: byte for byte, letter in self.letters.items()}

    def encode(self, text: str) -> list[int]:
        words = [[self.letters[byte] for byte in word.encode()] for word in self.WORDS.findall(text)]
        parts = (merge(word, lambda *pair: self.ranks.get(pair, np.inf)) for word in words)
        return [self.ids[part] for part in itertools.chain(*parts)]

    def decode(self, token: int) -> bytes:
        return bytes(self.bytes[letter] for letter in self.texts[token] if letter in self.bytes)


# ---- The cache ----
#
# A layer keeps the first FIRST tokens and the latest 64 to 127 in float16. The others are packed in blocks of 64.
#
# A key k is stored as signs b and a scale s: with the block's mean key c and a random rotation R,
# b = sign(R (k - c)), and k is about c + s R'b. A query q is rounded to 8 bits: R q is about step * i, with
# integers i in -128..127. Then
#
#     q . k  =  q . c  +  s * step * (i . b)
#
# where i . b needs no multiplication: bit j of all channels of i is one bit string, b is another, and AND with
# popcount counts the channels where both are 1, 64 channels at a time (CNT on Arm).
#
# A value v is stored as R v: a scale per token, and per channel the nearest of the four levels that are optimal
# for a Gaussian. The weighted sum is computed of rotated values, and rotated back once.

BLOCK, FIRST = 64, 4
BITS = 8  # of a query's channel
LEVELS = np.array([-1.510, -0.4528, 0.4528, 1.510], np.float32)  # by Lloyd and Max


@intrinsic
def popcount(context: Any, x: Any) -> Any:
    """Returns the number of ones in a uint64, in one instruction."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@njit
def score_packed(planes, step, total, signs, scales, out):  # type: ignore[no-untyped-def]
    """Computes out[t] = scales[t] * step * (i . b[t]).

    planes: (BITS, words), the bits of i; total: its sum. signs: (tokens, words), 1 for b = 1 and 0 for b = -1.
    """
    for t in range(len(out)):
        product = 0
        for j in range(BITS):
            ones = np.uint64(0)
            for w in range(signs.shape[1]):
                ones += popcount(planes[j, w] & signs[t, w])
            product += np.int64(ones) << j if j < BITS - 1 else -(np.int64(ones) << j)  # two's complement
        out[t] = scales[t] * step * (2 * product - total)  # as i . b = 2 (i . bits) - total


@njit
def add_packed(weights, codes, scales, out):  # type: ignore[no-untyped-def]
    """Adds all weights[t] * scales[t] * LEVELS[codes[t]] to out (head_dim,). codes: (tokens, head_dim / 4)."""
    for t in range(len(weights)):
        weight = weights[t] * scales[t]
        for d in range(len(out)):
            out[d] += weight * LEVELS[(codes[t, d >> 2] >> (2 * (d & 3))) & 3]


def bit_strings(bits: np.ndarray) -> np.ndarray:
    """Packs booleans (..., channels) into uint64 words (..., words)."""
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return np.pad(packed, [(0, 0)] * (bits.ndim - 1) + [(0, -packed.shape[-1] % 8)]).view(np.uint64)


class Cache:
    """The keys and values of one layer: the first and latest tokens exact, the others packed unless ``exact``."""

    def __init__(self, n_kv_heads: int, head_dim: int, capacity: int, exact: bool) -> None:
        self.exact, g, d, n = exact, n_kv_heads, head_dim, 0 if exact else capacity
        n_slots = capacity if exact else FIRST + 2 * BLOCK
        self.k, self.v = (np.zeros((g, n_slots, d), np.float16) for _ in range(2))
        self.n_exact = self.n_packed = 0
        self.rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0].astype(np.float32)
        self.centres = np.zeros((g, n // BLOCK + 1, d), np.float16)
        self.signs = np.zeros((g, n, -(-d // 64)), np.uint64)
        self.codes = np.zeros((g, n, -(-d // 4)), np.uint8)
        self.k_scales, self.v_scales = (np.zeros((g, n), np.float16) for _ in range(2))

    def nbytes(self) -> int:
        """Returns the bytes of all tokens so far."""
        packed = self.signs, self.codes, self.k_scales, self.v_scales
        used = [x[:, : self.n_packed] for x in packed] + [x[:, : self.n_exact] for x in (self.k, self.v)]
        return sum(x.nbytes for x in used) + self.centres[:, : self.n_packed // BLOCK].nbytes

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Appends keys and values (n, n_kv_heads, head_dim) of n tokens."""
        for k, v in zip(keys, values, strict=True):
            self.k[:, self.n_exact], self.v[:, self.n_exact] = k, v
            self.n_exact += 1
            if not self.exact and self.n_exact == self.k.shape[1]:
                self.pack_block()

    def pack_block(self) -> None:
        """Packs the 64 oldest tokens after the FIRST ones; later tokens move forward."""
        block, at = slice(FIRST, FIRST + BLOCK), slice(self.n_packed, self.n_packed + BLOCK)
        k, v = self.k[:, block].astype(np.float32), self.v[:, block].astype(np.float32)
        centre = self.centres[:, self.n_packed // BLOCK] = k.mean(axis=1)
        residual = (k - centre.astype(np.float32)[:, None]) @ self.rotation.T
        self.signs[:, at], self.k_scales[:, at] = bit_strings(residual >= 0), np.abs(residual).mean(axis=-1)
        v = v @ self.rotation.T
        normalized = v / (v.std(axis=-1, keepdims=True) + 1e-9)
        codes = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, normalized).astype(np.uint8)
        nearest = LEVELS[codes]
        self.v_scales[:, at] = (v * nearest).sum(axis=-1) / (nearest * nearest).sum(axis=-1)
        codes = np.pad(codes, [(0, 0), (0, 0), (0, -codes.shape[-1] % 4)])
        self.codes[:, at] = sum(codes[..., i::4] << 2 * i for i in range(4))
        for x in (self.k, self.v):
            x[:, FIRST : FIRST + BLOCK] = x[:, FIRST + BLOCK :]
        self.n_exact, self.n_packed = self.n_exact - BLOCK, self.n_packed + BLOCK

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns softmax(q k) v for one token's scaled queries (n_heads, head_dim)."""
        out, n = np.empty_like(q), self.n_packed
        group = len(q) // len(self.k)  # query heads that share a KV head
        k_scales, v_scales = (x[:, :n].astype(np.float32) for x in (self.k_scales, self.v_scales))
        for h, query in enumerate(q):
            g = h // group
            scores = np.empty(n + self.n_exact, np.float32)
            scores[n:] = self.k[g, : self.n_exact].astype(np.float32) @ query
            if n:
                rotated = self.rotation @ query
                step = np.float32(max(float(np.abs(rotated).max()), 1e-9) / 127)
                i = np.rint(rotated / step).astype(np.int64)
                planes = bit_strings((i >> np.arange(BITS)[:, None] & 1).astype(bool))
                score_packed(planes, step, i.sum(), self.signs[g, :n], k_scales[g], scores[:n])
                scores[:n] += np.repeat(self.centres[g, : n // BLOCK].astype(np.float32) @ query, BLOCK)
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out[h] = p[n:] @ self.v[g, : self.n_exact].astype(np.float32)
            if n:
                total = np.zeros(q.shape[1], np.float32)
                add_packed(p[:n], self.codes[g, :n], v_scales[g], total)
                out[h] += total @ self.rotation
        return out


def prefill_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Computes exact causal attention: q (n, n_heads, head_dim), k and v (n, n_kv_heads, head_dim)."""
    out, group = np.empty_like(q), q.shape[1] // k.shape[1]
    for h, first in itertools.product(range(q.shape[1]), range(0, len(q), 256)):  # 256 queries at a time
        last = min(first + 256, len(q))
        scores = q[first:last, h] @ k[:last, h // group].T
        scores[np.arange(last) > np.arange(first, last)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[first:last, h] = p @ v[:last, h // group] / p.sum(axis=1, keepdims=True)
    return out


class Model:
    """The base of both architectures: x (n, hidden) passes layers of attention and MLP, then the head."""

    def __init__(self, folder: pathlib.Path, config: dict[str, Any], context: int, exact: bool) -> None:
        self.n_seen = 0
        weights = read_safetensors(folder / "model.safetensors")
        self.w = {re.sub(r"^(model|transformer)\.", "", name): x for name, x in weights.items()}
        self.set_shape(config)
        self.caches = [Cache(self.n_kv_heads, self.head_dim, context, exact) for _ in range(self.n_layers)]

    def forward(self, ids: list[int]) -> np.ndarray:
        """Returns the logits (vocab,) after the last id. The first call takes the prompt, others a token."""
        positions = np.arange(self.n_seen, self.n_seen + len(ids))
        x = self.embed(ids, positions)
        for i, cache in enumerate(self.caches):
            q, k, v = self.project_qkv(i, x, positions)
            q = q * np.float32(self.head_dim**-0.5)
            k, v = k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)
            cache.append(k, v)
            heads_out = cache.attend(q[0])[None] if self.n_seen else prefill_attention(q, k, v)
            x = self.finish_layer(i, x, heads_out.reshape(len(ids), -1))
        self.n_seen += len(ids)
        return self.head(x[-1])


class Llama(Model):
    """Llama 1 and 2, TinyLlama, SmolLM: RMS norms, rotary position embeddings, a gated MLP."""

    def set_shape(self, c: dict[str, Any]) -> None:
        if c.get("rope_scaling"):
            raise SystemExit(
                f"rope_scaling={c['rope_scaling']}: only unscaled rotary embeddings are supported here"
            )
        self.n_layers, self.n_heads = c["num_hidden_layers"], c["num_attention_heads"]
        self.n_kv_heads = c.get("num_key_value_heads", self.n_heads)
        self.head_dim = c.get("head_dim") or c["hidden_size"] // self.n_heads
        self.eos, self.eps = c.get("eos_token_id", 2), c.get("rms_norm_eps", 1e-6)
        self.frequencies = c.get("rope_theta", 10000.0) ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotates channels d and d + head_dim / 2 by the angle position * frequency[d]."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def embed(self, ids: list[int], positions: np.ndarray) -> np.ndarray:
        return self.w["embed_tokens.weight"][ids]

    def project_qkv(self, i: int, x: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        h = self.norm(x, f"layers.{i}.input_layernorm")
        qkv = (self.linear(h, f"layers.{i}.self_attn.{c}_proj") for c in "qkv")
        q, k, v = (part.reshape(len(x), -1, self.head_dim) for part in qkv)
        return [self.rotate(q, positions), self.rotate(k, positions), v]

    def finish_layer(self, i: int, x: np.ndarray, heads_out: np.ndarray) -> np.ndarray:
        x = x + self.linear(heads_out, f"layers.{i}.self_attn.o_proj")
        h = self.norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (self.linear(h, f"layers.{i}.mlp.{part}_proj") for part in ("gate", "up"))
        return x + self.linear(gate / (1 + np.exp(-gate)) * up, f"layers.{i}.mlp.down_proj")

    def head(self, x: np.ndarray) -> np.ndarray:
        return self.norm(x, "norm") @ self.w.get("lm_head.weight", self.w["embed_tokens.weight"]).T


class Gpt2(Model):
    """GPT-2: layer norms, learned positions, biases, a plain MLP; its matrices are (inputs, outputs)."""

    def set_shape(self, c: dict[str, Any]) -> None:
        self.n_layers, self.n_heads = c["n_layer"], c["n_head"]
        self.n_kv_heads, self.head_dim = self.n_heads, c["n_embd"] // self.n_heads
        self.eos, self.eps = c.get("eos_token_id", 50256), c.get("layer_norm_epsilon", 1e-5)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embed(self, ids: list[int], positions: np.ndarray) -> np.ndarray:
        return self.w["wte.weight"][ids] + self.w["wpe.weight"][positions]

    def project_qkv(self, i: int, x: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        qkv = self.linear(self.norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        return [part.reshape(len(x), -1, self.head_dim) for part in np.split(qkv, 3, axis=-1)]

    def finish_layer(self, i: int, x: np.ndarray, heads_out: np.ndarray) -> np.ndarray:
        x = x + self.linear(heads_out, f"h.{i}.attn.c_proj")
        h = self.linear(self.norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (h + 0.044715 * h**3)))
        return x + self.linear(h, f"h.{i}.mlp.c_proj")

    def head(self, x: np.ndarray) -> np.ndarray:
        return self.norm(x, "ln_f") @ self.w["wte.weight"].T


# ---- Sampling, and the program ----


def generate(model: Llama | Gpt2, ids: list[int], n: int, temperature: float) -> Iterator[int]:
    """Yields up to n token ids after the prompt: the likeliest ones, or with a temperature random ones."""
    rng, logits = np.random.default_rng(0), model.forward(ids)
    for _ in range(n):
        token = int(logits.argmax())
        if temperature > 0:
            p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
            token = int(rng.choice(len(p), p=p / p.sum()))
        if token == model.eos:
            return
        yield token
        logits = model.forward([token])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("prompt")
    parser.add_argument("n", type=int, nargs="?", default=128)
    parser.add_argument("--exact", action="store_true", help="keep keys and values in float16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest tokens")
    arguments = parser.parse_args()
    tokenizer = (SentencePiece if (arguments.model / "tokenizer.model").exists() else BytePairs)(arguments.model)
    ids = tokenizer.encode(arguments.prompt)
    config = json.loads((arguments.model / "config.json").read_text())
    architecture = {"llama": Llama, "gpt2": Gpt2}[config["model_type"]]
    model = architecture(arguments.model, config, len(ids) + arguments.n, arguments.exact)
    text = codecs.getincrementaldecoder("utf-8")("replace")
    for token in generate(model, ids, arguments.n, arguments.temperature):
        print(text.decode(tokenizer.decode(token)), end="", flush=True)
    used = sum(cache.nbytes() for cache in model.caches)
    f16 = sum(4 * model.n_seen * cache.k[:, 0].size for cache in model.caches)
    print(f"\n{model.n_seen} tokens: {used:,} bytes of cache, {f16:,} in float16")


if __name__ == "__main__":
    main()
