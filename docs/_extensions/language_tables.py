"""Tables of the language-model suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.language.answer_results import LSR, STORED, SVD, rows_of_task
from benchmarks.language.rival_results import ANSWERS_TASK, GEMMA, NAMES, RivalResults

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def kept_by_size(results: dict[str, Any], *, task: str, base: str = "smollm2") -> Table:
    """Tabulate the share that each method keeps of one task's LoRA, by size."""
    of_task = RivalResults(results, task, base)
    lines = []
    for method in ("LSR", "SVD"):
        if method not in of_task.methods:
            continue
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
            lines.append((of_task.name, NAMES[method], *cells))
    return ("task", "LSR ahead of", *map(kilobytes, budgets)), lines


def whole_answers(results: dict[str, Any]) -> Table:
    """Tabulate how many of the E2E LoRA's whole answers each version gives, smallest first."""
    rows = sorted(rows_of_task(results), key=lambda row: row["bytes"])
    lines = [
        (
            row["method"],
            f"{row['bytes']:,}",
            f"{row['n_matching']} of {row['answered']}",
            f"{row['expected']:.0f}",
            f"{row['prompt_kept']:.4f}",
            f"{row['kept']:.4f}",
            f"{row['kl']:.2g}",
        )
        for row in rows
    ]
    head = (
        "",
        "bytes",
        "whole answers",
        "expected",
        "of what depends on the prompt",
        "of the effect",
        "nats",
    )
    return head, lines


def whole_answers_by_task(results: dict[str, Any]) -> Table:
    """Tabulate how many whole answers each size of a method gives, a line a task and method."""
    tasks = list(dict.fromkeys(row["task"] for row in results["rows"]))
    budgets = sorted({row["budget"] for row in results["rows"] if row["method"] == LSR})
    lines = []
    for task in tasks:
        rows = rows_of_task(results, task)
        for method in (LSR, SVD):
            found = {row["budget"]: row["n_matching"] for row in rows if row["method"] == method}
            if not found:
                continue
            cells = [str(found.get(budget, "–")) for budget in budgets]
            lines.append((task, method, *cells, ""))
        for row in rows:
            if row["method"] in STORED:
                name = f"{row['method']}, {row['bytes'] / 1000:.0f} kB"
                lines.append((task, name, *[""] * len(budgets), str(row["n_matching"])))
    return ("task", "", *map(kilobytes, budgets), "whole"), lines


def whole_answers_trained(results: dict[str, Any]) -> Table:
    """Tabulate whole answers before and after a training alike, a line a method."""
    of_task = RivalResults(results, ANSWERS_TASK)
    lines = []
    for method in of_task.methods:
        cells = []
        for budget in of_task.budgets:
            before = [row["n_matching"] for row in of_task.untrained(method, budget)]
            after = [row["n_matching"] for row in of_task.trained(method, budget)]
            cells += [str(before[0]) if before else "–", str(after[0]) if after else "–"]
        lines.append((NAMES[method], *cells))
    sizes = [
        f"{kilobytes(budget)}, {when}"
        for budget in of_task.budgets
        for when in ("untrained", "trained")
    ]
    return ("", *sizes), lines


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
                    cell = f"{kept:.{3 if kept < 0.998 else 4}f} at {rate:.1g}"
                    cells.append(f"**{cell}**" if rate == best else cell)
                seeds = str(len(of_task.trained(method, budget)))
                line = (of_task.name, NAMES[method], kilobytes(budget), ", ".join(cells), seeds)
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
                spread = f" ({min(shares):.3f} to {max(shares):.3f})" if len(shares) > 1 else ""
                cells += [f"{fmean(shares):.3f}{spread}"]
                cells += [f"{100 * fmean(row['exact'] for row in some):.0f} %"]
            lines.append((name, *cells))
    return ("", "bytes", "kept as compressed", "right", "kept after training", "right"), lines


def tones(results: dict[str, Any]) -> Table:
    """Tabulate what one command keeps of a speech model's LoRA, and what it writes down right."""
    lora = results["rows"][0]["bytes_before"]
    lines = [
        ("no adapter", "", "", "", f"{100 * results['right']:.0f} %"),
        ("the LoRA", f"{lora:,}", "", "", f"{100 * results['right_with_lora']:.0f} %"),
    ]
    for row in results["rows"]:
        said, found = (
            f"{row[name]:.3f} ± {row[error]:.3f}"
            for name, error in (("promised", "promised_error"), ("kept", "standard_error"))
        )
        right = f"{100 * row['right']:.0f} %"
        lines.append((f"`--keep {row['keep']}`", f"{row['bytes']:,}", said, found, right))
    return (
        "",
        "bytes",
        "said by `compress`",
        "found on unseen sounds",
        "written down right",
    ), lines


def by_model(results: dict[str, Any]) -> Table:
    """Tabulate what each structure keeps of each model's LoRA as compressed, by ratio."""
    ratios = sorted({row["ratio"] for row in results["rows"]}, reverse=True)
    lines: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        cells = lines.setdefault((row["model"], row["structure"]), ["–"] * len(ratios))
        cells[ratios.index(row["ratio"])] = f"{row['kept']:.3f} ± {row['error']:.3f}"
    head = ("model", "structure", *(f"1/{ratio:.3g}" for ratio in ratios))
    return head, [(*first, *cells) for first, cells in lines.items()]


def written_texts(results: dict[str, Any]) -> Table:
    """Tabulate shares kept on real texts by the texts of compression, and what those estimated."""
    arms = {"real": "100 prompts", "few": "five prompts", "none": "nothing"}
    given = [*arms.values(), "five others"]
    lines = []
    for row in results["rows"]:
        if row["arm"] not in arms:
            continue
        is_drawn_anew = row["seed"] != row["compressed_by"]
        real, estimate = (
            f"{row[name]['kept']:.3f} ± {row[name]['standard_error']:.3f}"
            for name in ("real", "estimate")
        )
        prompts = given[-1] if is_drawn_anew else arms[row["arm"]]
        lines.append((row["task"], prompts, real, estimate))
    lines.sort(key=lambda line: (line[0], given.index(line[1])))
    return ("task", "given", "kept on real texts", "estimated"), lines


def answers(results: dict[str, Any], *, task: str) -> Table:
    """Tabulate what versions of one task's LoRA answer, and how far they are on another task."""
    rows = [row for row in results["rows"] if row["task"] == task]
    has_whole_answers = any(row["exact"] for row in rows)
    has_texts = "bleu" in rows[0]
    has_other = "other_kl" in rows[0]
    lines = []
    for row in rows:
        cells = [row["name"], f"{row['bytes']:,}", f"{row['kept']:.3f}"]
        if has_whole_answers:
            cells.append(f"{100 * row['exact']:.0f} ± {100 * row['exact_error']:.0f} %")
        if has_texts:
            cells += [f"{row['bleu']:.1f}", f"{row['chrf']:.1f}"]
        if has_other:
            cells.append(f"{row['other_kl']:.3f}")
        lines.append(tuple(cells))
    head = ["", "bytes in all", "share kept"]
    if has_whole_answers:
        head.append("whole answers right")
    if has_texts:
        head += ["BLEU", "chrF"]
    if has_other:
        head.append("nats on another task")
    return tuple(head), lines


def what_is_left(results: dict[str, Any]) -> Table:
    """Tabulate what `measure` says of outputs that people get of a LoRA."""
    verdicts = ("whole", "reduced", "damaged", "gone")
    rows = sorted(results["rows"], key=lambda row: (verdicts.index(row["verdict"]), -row["kept"]))
    lines = [
        (
            row["output"],
            row["verdict"],
            ", ".join(row["reasons"]) or "–",
            f"{row['kept']:.3f} ± {row['standard_error']:.3f}",
            f"{100 * row['agreement']:.0f} %",
            f"{row['alike']} of {row['answered']}",
        )
        for row in rows
    ]
    head = ("", "verdict", "reasons", "share kept", "top predictions the LoRA's", "whole answers")
    return head, lines


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], Table]]] = {
    "small-adapters-e2e": ("rivals.json", partial(kept_by_size, task="E2E")),
    "small-adapters-extraction": ("rivals.json", partial(kept_by_size, task="extraction")),
    "small-adapters-sums": ("rivals.json", partial(kept_by_size, task="sums")),
    "small-adapters-gemma": ("rivals.json", partial(kept_by_size, task="E2E", base=GEMMA)),
    "small-adapters-leads": ("rivals.json", leads),
    "whole-answers": ("answer_curve.json", whole_answers),
    "whole-answers-trained": ("rivals.json", whole_answers_trained),
    "whole-answers-by-task": ("answer_curve.json", whole_answers_by_task),
    "small-adapters-rates": ("rivals.json", rates_run),
    "from-lora": ("from_lora.json", from_lora),
    "dialled": ("speech.json", dialled),
    "tones": ("tones.json", tones),
    "by-model": ("by_model.json", by_model),
    "what-is-left": ("wrecks.json", what_is_left),
    "written-texts": ("written_texts.json", written_texts),
    "answers-e2e": ("answers.json", partial(answers, task="E2E")),
    "answers-sums": ("answers.json", partial(answers, task="sums")),
}
"""Name on a page: file of results, and what makes a table of it."""
