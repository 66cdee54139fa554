"""Trains the demo model of models/demo: a 12M-parameter Llama that writes English and retrieves at 8k tokens.

    python tools/train/demo.py --prepare --text novels.txt.xz --heldout heldout.txt.xz --data DATA
    python tools/train/demo.py --data DATA --out models/demo          (nine minutes on one H200)
    python tools/train/demo.py --data DATA --out OUT --smoke          (a tiny model on a CPU, to see that it runs)

--prepare trains the tokenizer and writes the token ids; texts are UTF-8, books separated by NUL. A small model
fed long prose with a few needles does not learn to retrieve, so training starts with short rows that are mostly
copying and questions (tools/train/needles.py) and lengthens them once answers are right. How many it finds at
last `edgekv eval --gate --model OUT --text TEXT` says. Needs `.[torch]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import pathlib
import re
import shutil
import time
from collections.abc import Iterator

import needles
import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import LlamaConfig, LlamaForCausalLM

from edgekv.text import load_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 9216,  # 8,192 tokens of prose and room for questions and answers
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_CONFIG = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of training: ``steps`` batches of ``rows`` x ``length`` tokens; the rest is plain prose."""

    name: str
    length: int
    rows: int
    steps: int
    copy: float
    recall: float


PHASES = [
    Phase("induction", 512, 128, 2200, copy=0.3, recall=0.5),
    Phase("short", 2048, 64, 2000, copy=0.0, recall=0.3),
    Phase("long", 9216, 16, 2100, copy=0.0, recall=0.4),
]
SMOKE_CONFIG = CONFIG | {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SMOKE_PHASES = [
    Phase("induction", 128, 16, 20, copy=0.3, recall=0.5),
    Phase("long", 512, 4, 10, copy=0.0, recall=0.4),
]

LEARNING_RATE, FINAL_RATE, WARMUP_STEPS = 2e-3, 0.05, 200
WEIGHT_DECAY, DROPOUT = 0.5, 0.1  # the text is read 29 times: without them it's learnt by heart
LOSS_WEIGHT = (0.0, 1.0, 1.0, 4.0)  # of needles.IGNORED, PROSE, COPY, ANSWER
TIDY = str.maketrans(
    {"\u00a0": " ", "\x0c": "\n", "‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "\ufeff": None, "\r": None}
)


def prepare(text: pathlib.Path, heldout: pathlib.Path, data: pathlib.Path) -> None:
    """Writes tokenizer.model, train.npy and heldout.npy (uint16 ids, books closed by EOS)."""
    data.mkdir(parents=True, exist_ok=True)
    books = needles.read_text(text).translate(TIDY).split("\0")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(s for book in books for s in re.split(r"\n+|(?<=[.!?]) ", book) if s),
        model_writer=model,
        model_type="bpe",
        vocab_size=CONFIG["vocab_size"],
        byte_fallback=True,
        split_digits=True,
        user_defined_symbols=["\n"],
        required_chars="".join(map(chr, range(33, 127))),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=1,
    )
    (data / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for name, parts in ("train", books), ("heldout", needles.read_text(heldout).translate(TIDY).split("\0")):
        ids = np.concatenate([tokenizer.encode(part, add_eos=True) for part in parts]).astype(np.uint16)
        np.save(data / f"{name}.npy", ids)
        print(f"{name}: {len(parts)} books, {ids.size} tokens")


def load_prose(data: pathlib.Path, name: str) -> needles.Prose:
    tokenizer = load_tokenizer(data / "tokenizer.model")
    return needles.Prose(np.load(data / f"{name}.npy"), tokenizer)


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless ids (rows, length + 1) and labels of one phase."""

    def __init__(self, prose: needles.Prose, phase: Phase, seed: int) -> None:
        self.prose, self.phase, self.seed = prose, phase, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        rng = np.random.default_rng([self.seed, self.phase.length, worker.id if worker else 0])
        kinds = (needles.copy_row, needles.recall_row, needles.prose_row)
        shares = (self.phase.copy, self.phase.recall, 1 - self.phase.copy - self.phase.recall)
        while True:
            chosen = rng.choice(3, size=self.phase.rows, p=shares)
            rows = [kinds[i](rng, self.prose, self.phase.length + 1) for i in chosen]
            ids, labels = (np.stack(part).astype(np.int64) for part in zip(*rows, strict=True))
            yield torch.from_numpy(ids), torch.from_numpy(labels)


def token_losses(hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns cross-entropy (n,) of each target, and whether it is the likeliest token."""
    logits = F.linear(hidden, embedding).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


def add_dropout(model: LlamaForCausalLM) -> None:
    """Adds dropout, which Llama itself lacks, to the embedding and to what each attention and MLP adds to it."""
    branches = [branch for layer in model.model.layers for branch in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for module in (model.model.embed_tokens, *branches):
        module.register_forward_hook(lambda module, args, out: F.dropout(out, DROPOUT, module.training))


def learning_rate(step: int, n_steps: int) -> float:
    """Returns the rate: linear warm-up, then cosine down to FINAL_RATE of the peak."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / n_steps)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


class Trainer:
    """A model with its optimizer, its phases and its log."""

    def __init__(self, config: dict[str, object], phases: list[Phase], args: argparse.Namespace) -> None:
        self.config, self.phases, self.args = config, phases, args
        torch.manual_seed(args.seed)
        self.model = LlamaForCausalLM(LlamaConfig(**config)).to(DEVICE)
        add_dropout(self.model)
        self.losses = token_losses
        if DEVICE == "cuda":
            torch.set_float32_matmul_precision("high")
            self.losses = torch.compile(token_losses, dynamic=False)
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)  # one graph serves all layers
        matrices = [p for name, p in self.model.named_parameters() if "proj" in name]
        others = [p for name, p in self.model.named_parameters() if "proj" not in name]  # embedding, norms
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=DEVICE == "cuda",
        )
        self.weights = torch.tensor(LOSS_WEIGHT, device=DEVICE)
        self.n_steps = sum(phase.steps for phase in phases)
        self.step = self.tokens = 0
        self.begin = time.perf_counter()

    def train(self, data: pathlib.Path) -> None:
        prose = load_prose(data, "train")
        for phase in self.phases:
            workers = 0 if DEVICE == "cpu" else self.args.workers
            batches = iter(DataLoader(Batches(prose, phase, self.args.seed), batch_size=None, num_workers=workers))
            for i in range(phase.steps):
                ids, labels = (t.to(DEVICE) for t in next(batches))
                sums = self.update(ids, labels)
                if (i + 1) % self.args.log_every == 0 or i + 1 == phase.steps:
                    self.log(phase=phase.name, **summary(sums))
            del batches
            self.save(data)
            self.log(phase=phase.name, **evaluate(self.args.out, data, phase.length, self.args.n_tests))

    def update(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Trains one step on ids (rows, length + 1); returns each label's loss, right answers, tokens (4, 3)."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.n_steps)
        labels = labels[:, 1:].flatten()
        with torch.autocast(DEVICE, torch.bfloat16):
            hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
            losses, right = self.losses(hidden.flatten(0, 1), self.model.lm_head.weight, ids[:, 1:].flatten())
        weights = self.weights[labels]
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + labels.numel()
        per_token = torch.stack([losses.detach(), right.float(), torch.ones_like(losses)], 1)
        return torch.zeros(4, 3, device=DEVICE).index_add_(0, labels, per_token)

    def log(self, **record: object) -> None:
        done = {"step": self.step, "tokens": self.tokens, "seconds": round(time.perf_counter() - self.begin, 1)}
        line = json.dumps(done | record)
        print(line, flush=True)
        with open(self.args.out / "train_log.jsonl", "a") as file:
            file.write(line + "\n")

    def save(self, data: pathlib.Path) -> None:
        """Writes the checkpoint in bf16 and its tokenizer, in Hugging Face's layout."""
        weights = {name: tensor.bfloat16().contiguous() for name, tensor in self.model.state_dict().items()}
        del weights["lm_head.weight"]  # tied
        save_file(weights, self.args.out / "model.safetensors", metadata={"format": "pt"})
        for name, content in ("config", self.config), ("tokenizer_config", TOKENIZER_CONFIG):
            (self.args.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        shutil.copy(data / "tokenizer.model", self.args.out)


def summary(sums: torch.Tensor) -> dict[str, float]:
    """Returns the loss of prose, and the share of copied and answered tokens that are right, in one batch."""
    losses, right, counts = sums.T.tolist()
    record = {"prose_loss": losses[needles.PROSE] / max(counts[needles.PROSE], 1)}
    for name, label in ("copy_right", needles.COPY), ("answer_right", needles.ANSWER):
        record[name] = right[label] / max(counts[label], 1)
    return {name: round(value, 4) for name, value in record.items()}


def perplexity(model: LlamaForCausalLM, prose: needles.Prose, length: int, n_rows: int) -> float:
    """Returns the perplexity of rows of ``length`` tokens that begin with BOS, evenly spread over the text."""
    total = 0.0
    for start in np.linspace(0, len(prose.tokens) - length, n_rows).astype(int):
        row = np.append(prose.start, prose.tokens[start : start + length - 1].astype(np.int64))
        ids = torch.from_numpy(row).to(DEVICE)
        hidden = model.model(ids[None, :-1]).last_hidden_state[0]
        total += token_losses(hidden, model.lm_head.weight, ids[1:])[0].mean().item()
    return round(math.exp(total / n_rows), 3)


@torch.no_grad()
def evaluate(folder: pathlib.Path, data: pathlib.Path, length: int, n: int = 100) -> dict[str, object]:
    """Returns perplexities of a saved checkpoint on ``n`` rows of ``length`` tokens."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    names = ("train", "heldout")
    found = {f"{name}_ppl": perplexity(model, load_prose(data, name), length, n_rows=n) for name in names}
    return {"length": length, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the tokenised text")
    parser.add_argument("--prepare", action="store_true", help="make that folder from --text and --heldout")
    parser.add_argument("--text", type=pathlib.Path, help="what to train on (.txt or .xz)")
    parser.add_argument("--heldout", type=pathlib.Path, help="what to evaluate on (.txt or .xz)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="checkpoint folder")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few short steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches (on a GPU)")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--n-tests", type=int, default=100, help="rows of an evaluation")
    args = parser.parse_args()
    if args.prepare:
        if not (args.text and args.heldout):
            parser.error("--prepare needs --text and --heldout")
        prepare(args.text, args.heldout, args.data)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(SMOKE_CONFIG if args.smoke else CONFIG, SMOKE_PHASES if args.smoke else PHASES, args)
    (args.out / "train_log.jsonl").unlink(missing_ok=True)
    trainer.train(args.data)
    for length in (512,) if args.smoke else (1024, 4096, 8192):
        trainer.log(**evaluate(args.out, args.data, length, args.n_tests))


if __name__ == "__main__":
    main()
