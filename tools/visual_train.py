"""Train the model of models/scenes, which describes pictures of coloured shapes and numbers, from scratch.

    python tools/visual_train.py --out models/scenes --minutes 5          (one H200)
    python tools/visual_train.py --out OUT --smoke                        (a tiny model on a CPU: that it runs)

Vision tower, projector and Llama learn together, from pictures that are drawn as they are needed
(tools/visual_scenes.py) and conversations about them (tools/visual_captions.py). Rows hold one picture at first,
later one, two or four. A linear layer that is thrown away afterwards reads every cell's contents from the vision
tower's features, so that these are soon worth reading. Needs `.[visual-train]`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from visual_captions import accuracies, describe, pictures, score
from visual_data import CELL_CLASSES, IMAGE_TOKEN, Batch, Batches, train_tokenizer
from visual_model import CONFIG, SceneModel, normalised, rounded, save
from visual_scenes import draw_scene, render

PER_ROW = ((0.0, (1,)), (0.4, (1, 2, 4)))  # from this share of the time on, rows of so many pictures
LEARNING_RATE, FINAL_RATE, WARMUP_STEPS = 1.5e-3, 0.02, 300
WEIGHT_DECAY, CELL_WEIGHT, GRID = 0.05, 0.5, 4
MAX_ANSWER = 160
TEST_SEED = 1_000_003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMOKE_CONFIG = copy.deepcopy(CONFIG)
SMOKE_CONFIG["vision_config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMOKE_CONFIG["vision_config"] |= {"num_attention_heads": 2, "patch_size": 16}
SMOKE_CONFIG["text_config"] |= {"hidden_size": 128, "num_hidden_layers": 2}
SMOKE_CONFIG["text_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def n_tokens(config: dict[str, Any]) -> int:
    """Tokens of one picture."""
    vision = config["vision_config"]
    return int((vision["image_size"] // vision["patch_size"]) ** 2)


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up, then cosine down to FINAL_RATE of the peak."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def token_losses(hidden: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy (n,) of each target, and whether it is the likeliest token."""
    logits = F.linear(hidden, embedding).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


def cell_loss(features: Tensor, reader: nn.Linear, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what each cell holds, read from the mean of its patches, and the share of right cells.

    features (n, tokens, width), cells (n, 16, 5).
    """
    n, tokens, width = features.shape
    side = math.isqrt(tokens) // GRID
    means = features.view(n, GRID, side, GRID, side, width).mean((2, 4)).view(n * GRID**2, width)
    parts = reader(means).float().split(CELL_CLASSES, 1)
    targets = cells.view(n * GRID**2, len(CELL_CLASSES)).unbind(1)
    losses = [F.cross_entropy(part, target) for part, target in zip(parts, targets, strict=True)]
    right = torch.stack([part.argmax(1) == target for part, target in zip(parts, targets, strict=True)]).all(0)
    return torch.stack(losses).sum(), right.float().mean()


class Trainer:
    """A model with its optimizer and its log. Losses that `update` returns stay on the device."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = SceneModel(config).to(DEVICE)
        self.reader = nn.Linear(config["vision_config"]["hidden_size"], sum(CELL_CLASSES)).to(DEVICE)
        if DEVICE == "cuda":
            torch.set_float32_matmul_precision("high")
            for block in (*self.model.vision_tower.blocks, *self.model.language_model.model.layers):
                block.compile(dynamic=False)  # one graph serves all blocks of a kind
        named = list(self.model.named_parameters()) + list(self.reader.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and name != "positions"]
        others = [p for name, p in named if not any(p is matrix for matrix in matrices)]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=DEVICE == "cuda",
        )
        self.step = 0

    def update(self, batch: Batch, progress: float) -> Tensor:
        """One step; returns loss, share of answers' tokens and share of cells that are right, (3,)."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, progress)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            features = self.model.vision_tower(normalised(batch.pictures))
            on_cells, cells_right = cell_loss(features, self.reader, batch.cells)
            hidden = self.model(batch.ids[:, :-1], features)
            asked = batch.labels[:, 1:].flatten().nonzero()[:, 0]
            embedding = self.model.language_model.lm_head.weight
            losses, right = token_losses(hidden.flatten(0, 1)[asked], embedding, batch.ids[:, 1:].flatten()[asked])
        loss = losses.mean()
        (loss + CELL_WEIGHT * on_cells).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return torch.stack([loss.detach(), right.float().mean(), cells_right])


def batches(
    tokenizer: bytes, config: dict[str, Any], args: argparse.Namespace, per_row: tuple[int, ...]
) -> Iterator[Batch]:
    data = Batches(tokenizer, args.pictures, per_row, n_tokens(config), args.seed)
    workers = args.workers if DEVICE == "cuda" else 0
    for batch in DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None):
        yield batch.to(DEVICE)


def train(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Trains for ``args.minutes``, saves, and logs how well fresh scenes are described."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_log.jsonl").unlink(missing_ok=True)
    tokenizer = train_tokenizer()
    trainer, begin = Trainer(config, args.seed), time.perf_counter()
    sources = {start: batches(tokenizer, config, args, per_row) for start, per_row in PER_ROW}
    sums, n_pictures = [], 0
    while (progress := (time.perf_counter() - begin) / (60 * args.minutes)) < 1:
        batch = next(sources[max(start for start in sources if start <= progress)])
        sums.append(trainer.update(batch, progress))
        n_pictures += len(batch.pictures)
        if trainer.step % args.log_every == 0:
            means = zip(("loss", "answers", "cells"), torch.stack(sums).mean(0).tolist(), strict=True)
            seconds = time.perf_counter() - begin
            log(args.out, step=trainer.step, pictures=n_pictures, seconds=seconds, **dict(means))
            sums.clear()
    log(args.out, step=trainer.step, pictures=n_pictures, seconds=time.perf_counter() - begin)
    del sources
    model = rounded(trainer.model.eval())
    save(model, tokenizer, args.out)
    for n in (1, 2, 4):
        log(args.out, pictures_in_prompt=n, scenes=args.n_tests, **evaluate(model, tokenizer, n, args.n_tests))


def log(out: pathlib.Path, **record: Any) -> None:
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()})
    print(line, flush=True)
    with open(out / "train_log.jsonl", "a") as file:
        file.write(line + "\n")


@torch.no_grad()
def evaluate(model: SceneModel, tokenizer: bytes, n_pictures: int, n_tests: int) -> dict[str, float | None]:
    """Share of each attribute that is right in greedy captions of fresh scenes with 1 to 10 things, in float32.

    Prompts hold ``n_pictures``, and the last test // n_pictures of them is asked about, in turn.
    """
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    rng, tallies = np.random.default_rng(TEST_SEED), []
    for first in range(0, n_tests, 64):
        n = min(64, n_tests - first)
        scenes = [[draw_scene(rng) for _ in range(n_pictures)] for _ in range(n)]
        drawn = np.stack([render(scene, rng) for row in scenes for scene in row])
        which = first // 64 % n_pictures
        prompt = pictures(n_pictures) + describe(which if n_pictures > 1 else None)
        ids = [library.bos_id()]
        for token in library.encode(prompt):
            ids += [token] * (n_tokens(model.config) if token == IMAGE_TOKEN else 1)
        features = model.vision_tower(normalised(torch.from_numpy(drawn).to(DEVICE)))
        x = model.embed(torch.tensor([ids] * n, device=DEVICE), features)
        written = model.language_model.generate(
            inputs_embeds=x,
            attention_mask=torch.ones(x.shape[:2], device=DEVICE),
            max_new_tokens=MAX_ANSWER,
            do_sample=False,
            pad_token_id=library.eos_id(),
        )
        texts = [library.decode(row) for row in written.tolist()]
        tallies += [score(text, row[which]) for text, row in zip(texts, scenes, strict=True)]
    return accuracies(tallies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="model folder")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to train, compilation included")
    parser.add_argument("--pictures", type=int, default=256, help="pictures a step")
    parser.add_argument("--workers", type=int, default=14, help="processes that draw (on a GPU)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--n-tests", type=int, default=512, help="scenes of an evaluation")
    parser.add_argument("--smoke", action="store_true", help="a tiny model for a few steps")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.pictures, args.log_every, args.n_tests = 0.5, 16, 10, 4
    train(SMOKE_CONFIG if args.smoke else CONFIG, args)


if __name__ == "__main__":
    main()
