"""H1B-KV's Tables I, II and V, and the arithmetic of what the paper prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import tables_paper as paper
from tables_data import (
    block,
    cache_bytes,
    commands,
    markdown,
    mb,
    outcomes,
    quality,
    ratio,
    shape,
    sources,
    times,
)
from tables_paper import Row
from tables_runs import ADAPTERS, CTX, DENSE, TEXTS

OURS = ("h1b:fit=head", "onebit", "onebit:v_bits=1", "bitplane")
PER_BYTE = 1000  # H1B-KV's quality per byte is this many times (1 / PPL) / MB

KEYS_ONLY = "h1b:keys_only=true"
ORDER = ("dense", "h1b", "onebit", "bitplane")
LEARNT = {
    "h1b-paper": "as printed: V and one tau",
    "h1b-head": "V and a tau per head",
    "h1b-qkv": "Q, K, V and a tau per head",
    "h1b-learned": "Q, K, V, R, a centre and a tau per head",
    "onebit-head": "V and a lambda per head",
}


def per_byte(perplexity: float, megabytes: float) -> float:
    return PER_BYTE / (perplexity * megabytes)


Columns = dict[str, Callable[[str], str]]  # title -> cell of a scheme


def table1(model: str) -> str:
    """Every method of Table I on three texts, then ours; with the paper's figures where the shape is its own."""
    printed = {row.kv: row for row in paper.TABLE1}
    kvs = (*printed, *OURS)

    def of_paper(cell: Callable[[Row], str]) -> Callable[[str], str]:
        return lambda kv: cell(printed[kv]) if kv in printed else ""

    columns: Columns = {"in the paper": of_paper(lambda row: row.name), "`--kv`": "`{}`".format}
    if model == paper.MODEL:
        columns["MB, paper"] = of_paper(lambda row: f"{row.mb:g}")
        columns["x FP16, paper, WikiText-2"] = of_paper(lambda row: times(over_fp16(row, 0)))
        columns["x FP16, paper, PTB"] = of_paper(lambda row: times(over_fp16(row, 1)))
        columns["QpB, paper, WikiText-2"] = of_paper(lambda row: f"{row.figures[0][1]:.2f}")
    columns["MB"] = lambda kv: mb(held(model, kv))
    columns |= by_text(model)
    columns["QpB, WikiText-2"] = lambda kv: quality_per_byte(model, kv)
    return table(columns, kvs) + "\n" + block(commands(sources(model, TEXTS, kvs)))


def table(columns: Columns, kvs: Iterable[str]) -> str:
    return markdown(list(columns), ([cell(kv) for cell in columns.values()] for kv in kvs))


def by_text(model: str, adapter: str | None = None) -> Columns:
    """A column per text: perplexity, and its ratio to that of the unadapted model with a dense cache."""

    def cell(text: str) -> Callable[[str], str]:
        def of(kv: str) -> str:
            result = quality(model, text, kv, adapter=adapter)
            return (
                f"{result['perplexity']:.2f}, {times(ratio(model, text, kv, adapter=adapter))}" if result else ""
            )

        return of

    return {f"{name}: perplexity, x dense": cell(text) for text, name in TEXTS.items()}


def held(model: str, kv: str) -> int:
    """Bytes that the scheme's caches took on the model, in any run."""
    return next(result["cache_bytes"] for text in TEXTS if (result := quality(model, text, kv)))


def quality_per_byte(model: str, kv: str) -> str:
    result = quality(model, "test.txt", kv)
    return f"{per_byte(result['perplexity'], result['cache_bytes'] / 1e6):.3f}" if result else ""


def over_fp16(row: Row, text: int) -> float:
    """Perplexity over the FP16 row's, as printed in Table I."""
    return row.figures[text][0] / paper.TABLE1[0].figures[text][0]


def adapted(model: str) -> str:
    """Untrained and adapted schemes beside dense; the ratio is to the dense cache of the unadapted checkpoint."""
    learnt = {None: "nothing"} | {name: LEARNT[name.split("-", 1)[1]] for name in ADAPTERS}
    of_model = [(scheme, name) for name, (owner, scheme) in ADAPTERS.items() if owner == model]
    plain = [(kv, None) for kv in (DENSE, "h1b", "h1b:fit=head", "onebit", "onebit:v_bits=1", "bitplane")]
    head = ["`--kv`", "trained", "adapter", "MB", *by_text(model), "dense cache under the same adapter, novels"]
    rows = []
    for kv, adapter in sorted([*plain, *of_model], key=lambda pair: ORDER.index(pair[0].partition(":")[0])):
        cells = [cell(kv) for cell in by_text(model, adapter).values()]
        own = times(ratio(model, "heldout3.txt", DENSE, adapter=adapter)) if adapter else ""
        rows.append(
            [f"`{kv}`", learnt[adapter], f"`{adapter}`" if adapter else "", mb(held(model, kv)), *cells, own]
        )
    runs = [run for kv, adapter in of_model for run in sources(model, TEXTS, [kv], adapter=adapter)]
    return markdown(head, rows) + "\n" + block([*training(model), *commands(runs)])


def training(model: str) -> Iterator[str]:
    """The commands that made the adapters, from what they say of themselves."""
    for facts in outcomes("tables-adapters.json"):
        s, (windows, ctx) = facts["settings"], facts["windows"]
        learned = f"--projection --epochs {s['epochs']} " if s.get("projection") else ""
        if ADAPTERS[facts["name"]][0] == model:
            yield (
                f"python tools/adapt.py --model {model} --text {facts['text']} --kv {facts['scheme']} --ctx {ctx} "
                f"--tokens {-(-windows * ctx // 10**5) * 10**5} --batch {s['batch']} --seconds {s['seconds']:g} "
                f"--scope {s['scope']} --train {s['train']} --lr {s['lr']:g} "
                f"{learned}--out {facts['name']}.safetensors"
            )


def table2() -> str:
    """Bytes of the 7B shape, printed and as the caches would allocate them; quality per byte of both."""
    head = [
        "in the paper",
        "`--kv`",
        "MB, paper",
        "MB, exact",
        "printed / exact",
        "perplexity, paper",
        "QpB, paper",
    ]
    head += [f"{PER_BYTE} / (PPL x MB printed)", f"{PER_BYTE} / (PPL x MB exact)"]
    rows = []
    for row in paper.TABLE2:
        exact = cache_bytes(paper.SHAPE2, row.kv) / 1e6
        perplexity, printed = row.figures[0]
        cells = [row.name, f"`{row.kv}`", f"{row.mb:,.1f}", f"{exact:,.1f}", f"{row.mb / exact:.3f}"]
        cells += [f"{perplexity:.2f}", f"{printed:.2f}", f"{per_byte(perplexity, row.mb):.3f}"]
        rows.append([*cells, f"{per_byte(perplexity, exact):.3f}"])
    ours = ("int4", "kvcomp", "onebit", "onebit:v_bits=1", "bitplane")
    rows += [["", f"`{kv}`", "", mb(cache_bytes(paper.SHAPE2, kv)), *[""] * 5] for kv in ours]
    names = ",".join([*(row.kv for row in paper.TABLE2), *ours])
    return (
        markdown(head, rows) + "\n" + block([f"python tools/tables.py bytes --shape {paper.SHAPE2} --kv {names}"])
    )


def arithmetic() -> str:
    """Bytes that the paper's own equations give for its two shapes, beside what it prints."""
    rows = []
    for name, table, title in ((paper.SHAPE1, paper.TABLE1, "60M"), (paper.SHAPE2, paper.TABLE2, "7B")):
        c = shape(name)
        vectors, d = c.n_layers * c.n_kv_heads * CTX, c.head_dim
        count = f"{c.n_layers} layers x {c.n_kv_heads} heads x {CTX:,} tokens"
        printed = {row.name: row.mb for row in table}
        values = vectors * d // 2
        cases = [
            ("FP16", f"{count} x 2 x {d} x 2 bytes", vectors * 4 * d, printed["FP16"]),
            ("H1B-KV, keys alone", f"{count} x 256 bits", vectors * 32, None),
            ("H1B-KV, values alone", f"{count} x {d} x 4 bits", values, None),
            ("H1B-KV", f"{count} x (256 + {4 * d}) bits", vectors * 32 + values, printed["H1B-KV"]),
            ("Loki", f"{count} x (256 bits + {d} x 2 bytes)", vectors * (32 + 2 * d), printed["Loki (1-bit K)"]),
        ]
        for method, formula, exact, said in cases:
            times_less = f"{exact / 1e6 / said:.1f}" if said else ""
            rows.append([f"{title}, {method}", formula, mb(exact), f"{said:,.1f}" if said else "", times_less])
    return markdown(["what", "by the paper's method", "MB", "MB printed", "method / printed"], rows)


def qpb() -> str:
    """Every printed quality per byte beside the paper's definition, times PER_BYTE."""
    rows = []
    for title, rows_of in (("I", paper.TABLE1), ("II", paper.TABLE2), ("V", paper.TABLE5)):
        for row in rows_of:
            for text, (perplexity, printed) in zip(("WikiText-2", "PTB"), row.figures, strict=False):
                mine = per_byte(perplexity, row.mb)
                cells = [title, row.name, text, f"{row.mb:,.1f}", f"{perplexity:.2f}", f"{printed:.2f}"]
                rows.append([*cells, f"{mine:.3f}", f"{printed / mine:.2f}"])
    head = ["table", "method", "text", "MB", "PPL", "QpB, printed", f"{PER_BYTE} / (PPL x MB)", "printed / that"]
    return markdown(head, rows)


def table5(model: str) -> str:
    """The ablation, untrained and with the adapter that was trained as printed, at b = 256."""
    adapter = next((n for n, (m, _) in ADAPTERS.items() if m == model and n.endswith("-h1b-paper")), None)
    texts = {text: TEXTS[text] for text in ("test.txt", "heldout3.txt")}
    kinds = [("untrained", None)] + ([("adapted", adapter)] if adapter else [])
    head = ["in the paper", "`--kv`", "MB, paper", "x FP16, paper", "MB"]
    head += [f"{kind}, {name}: x dense" for kind, _ in kinds for name in texts.values()]
    rows = []
    for row in paper.TABLE5:
        untrained = "sign_keys" if row.kv == KEYS_ONLY else row.kv  # two names of one cache
        cells = [row.name, f"`{row.kv}`", f"{row.mb:g}", times(over_fp16(row, 0)), mb(held(model, untrained))]
        for _, trained in kinds:
            kv = row.kv if trained else untrained
            cells += [times(ratio(model, text, kv, adapter=trained)) for text in texts]
        rows.append(cells)
    kvs = [row.kv for row in paper.TABLE5]
    runs = sources(model, texts, ["sign_keys", *kvs])
    if adapter:
        runs += sources(model, texts, kvs, adapter=adapter)
    return markdown(head, rows) + "\n" + block(commands(runs))
