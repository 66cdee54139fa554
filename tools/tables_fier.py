"""Retrieval by the demo model (H1B-KV's Table IV, FIER's Table 3) and perplexity by length (FIER's Fig. 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import tables_paper as paper
from tables_data import Facts, block, commands, markdown, outcomes, quality, ratio, sources, times
from tables_runs import AT_AN_EIGHTH, BUDGETED, BUDGETS, BY_LENGTH, DENSE, KEEPING, LENGTHS, TASKS

SCHEMES = (*KEEPING, *AT_AN_EIGHTH)


def answers(kv: str, task: str) -> tuple[Counter[str], Counter[str]]:
    """Right answers, and prompts, by depth in percent; over all seeds."""
    right, asked = Counter[str](), Counter[str]()
    for run in outcomes("tables-needles.json"):
        if run["kv"] == kv and run["task"] == task:
            right.update(run["right_by_depth"])
            asked.update(dict.fromkeys(run["right_by_depth"], run["n"] // len(run["right_by_depth"])))
    return right, asked


def score(kv: str, task: str) -> str:
    right, asked = answers(kv, task)
    return f"{right.total()} of {asked.total()}" if asked else ""


def by_depth() -> str:
    """Right answers by task, and of both tasks at each depth."""
    depths = list(outcomes("tables-needles.json")[0]["right_by_depth"])
    head = ["`--kv`", *TASKS, *(f"{depth}%" for depth in depths)]
    rows = []
    for kv in SCHEMES:
        both = [answers(kv, task) for task in TASKS]
        cells = [f"{sum(r[depth] for r, _ in both)}/{sum(n[depth] for _, n in both)}" for depth in depths]
        rows.append([f"`{kv}`", *(score(kv, task) for task in TASKS), *cells])
    return markdown(head, rows) + "\n" + block([retrieval_command(SCHEMES, "KV", "TASK")])


def by_budget(task: str) -> str:
    """FIER's Table 3: the paper's percentages where it has them, and ours."""
    head = ["method", "`--kv`", *(f"{budget} tokens" for budget in BUDGETS)]
    rows = []
    for name, pattern in BUDGETED.items():
        ours = [score(pattern.format(budget), task) for budget in BUDGETS]
        if not any(ours):
            continue
        if task == "pass-key" and name in paper.FIER_TABLE3:
            rows.append([f"{name}, paper (LongChat-7B, 10k)", "", *(f"{x}%" for x in paper.FIER_TABLE3[name])])
        rows.append([f"{name}, ours", f"`{pattern.format('B')}`", *ours])
    kvs = [pattern.format(budget) for pattern in BUDGETED.values() for budget in BUDGETS]
    return markdown(head, rows) + "\n" + block([retrieval_command(kvs, "KV", task)])


def retrieval_command(kvs: Iterable[str], kv: str, task: str) -> str:
    """One line stands for all runs with these schemes; ``kv`` and ``task`` say what differs."""
    wanted = set(kvs)
    runs: list[Facts] = [run for run in outcomes("tables-needles.json") if run["kv"] in wanted]
    seeds = " and ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    return (
        f"python tools/needles.py --text heldout3.txt --kv {kv} --task {task} --length {runs[0]['length']} "
        f"-n {runs[0]['n']} --seed SEED    # seeds {seeds}"
    )


def by_length(model: str) -> str:
    """Perplexity of the same text cut into windows of each length."""
    text = "heldout3.txt"
    head = ["tokens", "dense, perplexity", *(f"`{kv}`, x dense" for kv in BY_LENGTH if kv != DENSE)]
    rows = []
    for ctx in LENGTHS:
        dense = quality(model, text, DENSE, ctx)
        cells = [times(ratio(model, text, kv, ctx)) for kv in BY_LENGTH if kv != DENSE]
        rows.append([f"{ctx:,}", f"{dense['perplexity']:.2f}" if dense else "", *cells])
    runs = [run for ctx in LENGTHS for run in sources(model, [text], BY_LENGTH, ctx)]
    return markdown(head, rows) + "\n" + block(commands(runs))
