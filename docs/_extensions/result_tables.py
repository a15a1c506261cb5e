"""Tables of benchmarks/results for pages: the site shows the figures of the repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path

import command_tables
import language_tables
import operator_tables
import solver_tables

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def gauge(results: dict[str, Any]) -> Table:
    """Tabulate each adapter's median error over its layers, by three routes at equal parameters."""
    head = (
        "adapter",
        "layers",
        "rank",
        "side by side, as found",
        "side by side, singular gauge",
        "jointly",
    )
    rows = []
    for name, adapter in results["adapters"].items():
        if "own_rank" not in adapter:
            continue
        layers = adapter["own_rank"]["layers"]
        errors = (
            f"{median(layer[route] for layer in layers):.3f}"
            for route in ("given_gauge", "svd_gauge", "joint")
        )
        rows.append((name, str(len(layers)), str(layers[0]["rank"]), *errors))
    return head, rows


def rounding(results: dict[str, Any]) -> Table:
    """Tabulate the largest relative error that storing adds to the joint solution."""
    kinds = ("float16", "bfloat16", "int8", "int4")
    layers = [
        x for a in results["adapters"].values() if "own_rank" in a for x in a["own_rank"]["layers"]
    ]
    worst = (f"{max(layer[f'extra_{kind}'] for layer in layers):.1g}" for kind in kinds)
    return ("", *kinds), [("added to the error, at most", *worst)]


def at_parameters(results: dict[str, Any]) -> Table:
    """Tabulate errors over all layers at equal parameters in float16, the median over adapters."""
    resized = ("SVD, same energy", "SVD, same ratio", "SVD, same rank", "PEFT convert_to_lora")
    arms = ("ours, float16", "low rank, float16", "ours, Kronecker only, float16", *resized, "LoKr")
    return _by_budget(results, arms, ("1/2", "1/4", "1/8", "1/16", "1/48"))


def at_bytes(results: dict[str, Any]) -> Table:
    """The same at equal bytes."""
    ours = (
        "ours, bits chosen",
        "low rank, bits chosen",
        "ours, Kronecker only, bits chosen",
        "ours, float16",
    )
    integers = ("LoRA int8", "LoRA NF4", "LoRA int4")
    arms = (*ours, "SVD, same rank, int8 or int4", *integers, "SVD, same rank", "LoKr")
    return _by_budget(results, arms, (*integers, "1/8", "1/16", "1/32"))


def _by_budget(results: dict[str, Any], arms: tuple[str, ...], budgets: tuple[str, ...]) -> Table:
    adapters = [one for one in results["adapters"].values() if min(one["ranks"]) >= 8]
    rows = []
    for arm in arms:
        cells = []
        for budget in budgets:
            wanted = (arm, budget)
            errors = [
                row["error"]
                for a in adapters
                for row in a["rows"]
                if (row["arm"], row["budget"]) == wanted
            ]
            cells.append(f"{median(errors):.3f}" if len(errors) == len(adapters) else "–")
        rows.append((arm, *cells))
    return ("", *(budget.replace("LoRA", "as") for budget in budgets)), rows


def byte_budgets(results: dict[str, Any]) -> Table:
    """Tabulate errors at numbers of bytes: ours and the best plain truncated SVD."""
    found = [row for each in results["adapters"].values() for row in each["rows"]]
    times = sorted({row["times"] for row in found})
    columns = []
    for one in times:
        rows = [row for row in found if row["times"] == one and "error" in row]
        ours, rival = (median(row[key] for row in rows) for key in ("error", "rival"))
        largest = max(row["ratio"] for row in rows if row["ratio"] is not None)
        columns.append((f"{ours:.4f}", f"{rival:.4f}", f"{largest:.2f}"))
    labels = ("`compress`, median", "best plain SVD, median", "largest ratio of the two")
    lines = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    return ("bytes, of those in float16", *(f"1/{one}" for one in times)), lines


def byte_times(results: dict[str, Any]) -> Table:
    """Tabulate CPU seconds of goals, and how many times those of a QR core they are."""
    timed = results["times"]
    goals = [row["goal"] for row in next(iter(timed.values()))]
    lines = []
    for place, goal in enumerate(goals):
        rows = [rows[place] for rows in timed.values()]
        cells = [f"{row['cpu_seconds']:.2f} ({row['times_core']:.1f})" for row in rows]
        lines.append((goal, *cells))
    return ("", *timed), lines


def function(results: dict[str, Any]) -> Table:
    """Share of the demo adapter's held-out gain that is kept, by structure and size."""
    names = {
        "svd-frobenius": "truncated SVD, Frobenius norm",
        "svd-kfac": "truncated SVD, Fisher norm",
        "lsr-kfac": "LSR, Fisher norm",
    }
    ratios = sorted({row["ratio"] for row in results["rows"] if "ratio" in row}, reverse=True)
    kept = {
        (row["method"], row.get("ratio")): (row["share"], row["accuracy"])
        for row in results["rows"]
    }
    head = ("share kept (accuracy)", *(f"1/{ratio:.0f}" for ratio in ratios))
    cells = {
        m: [f"{kept[m, r][0]:.2f} ({100 * kept[m, r][1]:.1f} %)" for r in ratios] for m in names
    }
    return head, [(name, *cells[method]) for method, name in names.items()]


def shares_hold(results: dict[str, Any]) -> Table:
    """Count draws whose share holds on fresh texts, by which texts chose the size."""
    ways = {
        "replaced": "64 others, replaced by the 128 where these show too little: `compress` from "
        "240 texts on",
        "apart": "64 others",
        "same": "the 128 that measure: `compress` with fewer than 240",
    }
    rows = []
    for way, label in ways.items():
        draws = [draw[way] for draw in results["draws"]]
        enough = sum(draw[way]["fresh"] >= draw["keep"] for draw in results["draws"])
        errors = [abs(draw["kept"] - draw["fresh"]) for draw in draws]
        high = sum(draw["kept"] > draw["fresh"] for draw in draws)
        cells = (str(enough), f"{sum(draw['holds'] for draw in draws)} of {len(draws)}", str(high))
        rows.append((label, *cells, f"{median(errors):.3f}", f"{max(errors):.3f}"))
    head = (
        "size chosen by",
        "keep what was asked",
        "shares that hold",
        "too high",
        "off by, median",
        "off by, at most",
    )
    return head, rows


def comparison(results: dict[str, Any]) -> Table:
    """Methods by tasks of one suite: scores in percent over seeds."""
    lines = results["lines"]
    tasks = {line["task"]: line for line in lines}
    names = (
        f"{task} ({line['metric']}, %; n = {_seeds(lines, task)})" for task, line in tasks.items()
    )
    majority = [f"{100 * line['baseline']:.1f}" for line in tasks.values()]
    rows = [("majority", "0", *majority)]
    for method in dict.fromkeys(line["method"] for line in lines):
        own = {line["task"]: line for line in lines if line["method"] == method}
        cells = (
            _spread(own[task]["score"]["values"], 100, 1) if task in own else "–" for task in tasks
        )
        rows.append((method, f"{next(iter(own.values()))['adapter_parameters']:,}", *cells))
    return ("method", "parameters", *names), rows


def _seeds(lines: list[dict[str, Any]], task: str) -> str:
    """How many seeds the methods have on a task."""
    counts = sorted({line["score"]["seeds"] for line in lines if line["task"] == task})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def scratch(results: dict[str, Any]) -> Table:
    """Tabulate methods trained from scratch on one task, and each beside the one it is judged by.

    The difference of scores is in points, with its 95 % interval over seeds.
    """
    rows = []
    for line in results["lines"]:
        rate = f"{line['rate']:g}{' (edge)' if line['edge'] else ''}"
        beside = "–"
        if line["difference"]:
            low, high = (f"{100 * end:+.1f}" for end in line["difference"]["interval"])
            mean = f"{100 * line['difference']['mean']:+.1f} ({low} to {high})"
            beside = f"{mean} to {line['difference']['against']}"
        scores = _spread(line["score"]["values"], 100, 1)
        cells = (scores, _spread(line["loss"]["values"], 1, 3), rate, beside)
        rows.append((line["method"], f"{line['adapter_parameters']:,}", *cells))
    return ("method", "parameters", "accuracy, %", "loss", "rate", "points, 95 % interval"), rows


def integers(results: dict[str, Any]) -> Table:
    """Errors of integer factors over all layers: rounded, and solved for in the norm."""
    head = (
        "parameters",
        "in float64",
        "int8, rounded",
        "solved for",
        "int4, rounded",
        "solved for",
    )
    rows = []
    for ratio in dict.fromkeys(row["ratio"] for row in results["rows"]):
        own = {row["storage"]: row["errors"] for row in results["rows"] if row["ratio"] == ratio}
        cells = (
            f"{own[kind][way]:.3f}" for kind in ("int8", "int4") for way in ("rounded", "solved")
        )
        rows.append((f"1/{ratio:.3g}", f"{own['int4']['float64']:.3f}", *cells))
    return head, rows


def recovery(results: dict[str, Any]) -> Table:
    """Shares of the LoRA's gain: as compressed, after recovery, from scratch."""
    stages = ("compressed", "recovered", "scratch")
    head = (
        "task",
        "structure",
        "parameters",
        "bytes",
        "as compressed",
        "after recovery",
        "from scratch",
        "seeds",
    )
    rows = []
    for line in results["lines"]:
        shares = [line[stage]["share"] for stage in stages]
        cells = (_spread(share, 1, 2) if share else "–" for share in shares)
        sizes = (f"{line['parameters']:,.0f}", f"{line['bytes']:,.0f}")
        rows.append((line["task"], line["label"], *sizes, *cells, str(max(map(len, shares)))))
    return head, rows


def _spread(values: list[float], scale: float, digits: int) -> str:
    """Mean ± standard deviation."""
    deviation = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * fmean(values):.{digits}f}{deviation}"


ROUTES = {
    "terms": "given terms",
    "rtol": "tolerance for each layer",
    "ratio": "one budget",
}


def memory(results: dict[str, Any]) -> Table:
    """Tabulate the peak of a compression by route and blocks, above what was held before."""
    head = (
        "route",
        "blocks",
        "layers",
        "file",
        "peak of solving and writing",
        "in layers of the largest size",
    )
    rows = []
    for run in sorted(
        results["runs"], key=lambda run: (list(ROUTES).index(run["route"]), run["blocks"])
    ):
        peak = run["peak_after_writing"] - run["peak_after_import"]
        share = peak / run["largest_layer_float64_bytes"]
        sizes = (f"{run['source_bytes'] / 1e6:,.0f} MB", f"{peak / 1e6:.0f} MB", f"{share:.1f}")
        rows.append((ROUTES[run["route"]], str(run["blocks"]), str(run["layers"]), *sizes))
    return head, rows


def layer_times(results: dict[str, Any]) -> Table:
    """Tabulate seconds of one core for a layer of each size, and the same in readings with QR."""
    head = ("matrix", "reading and QR", "compressing", "ratio")
    return head, [
        (
            f"{row['rows']} × {row['columns']}",
            f"{row['read_and_qr_seconds']:.3f} s",
            f"{row['compress_seconds']:.2f} s",
            f"{row['ratio']:.0f}",
        )
        for row in results["times"]
    ]


def cp(results: dict[str, Any]) -> Table:
    """Tabulate CPU seconds of other libraries to our error, in ours, and where they gave up."""
    head = ("problem", "error of ALS", "in float16", "γ", "TensorLy takes", "pyttb takes")
    rows = []
    for row in results["rows"]:
        ours = row["ALS"]
        cells = (f"{ours[key]:.1e}" for key in ("error", "error in float16"))
        others = (
            f"{row[name]['ratio']:.2g} times"
            if row[name]["reached"]
            else f"over {row[name]['ratio']:.2g} times ({row[name]['error']:.1e} then)"
            for name in ("tensorly", "pyttb")
        )
        rows.append((row["problem"], *cells, f"{ours['condition']:.1f}", *others))
    return head, rows


def three_factor_noise(results: dict[str, Any]) -> Table:
    """Tabulate errors of Gaussian matrices, and CPU seconds in those of other libraries."""
    head = ("matrices", "ALS", "TensorLy", "pyttb", "time in TensorLy's", "in pyttb's")
    rows = []
    for row in results["rows"]:
        if "seeds" not in row:
            continue
        libraries = [row[name] for name in ("ALS", "tensorly", "pyttb")]
        errors = (f"{library['mean error']:.5f}" for library in libraries)
        ours, *others = (library["mean seconds"] for library in libraries)
        ratios = (f"{ours / seconds:.1f}" for seconds in others)
        rows.append((f"{row['seeds']} × {row['problem']}", *errors, *ratios))
    return head, rows


def single_entries(results: dict[str, Any]) -> Table:
    """Tabulate errors of non-negative and of completed sums, and the time in that of the peer."""
    head = (
        "problems",
        "largest error",
        "of the peer",
        "nearest and farthest, in its error",
        "time in its",
    )
    kinds = {
        "non-negative, exact sums": [r for r in results["non-negative"] if r["noise"] == 0.0],
        "non-negative, with noise": [r for r in results["non-negative"] if r["noise"] > 0.0],
        "missing entries": [r for r in results["missing"] if r["status"] != "undetermined"],
    }
    rows = []
    for name, problems in kinds.items():
        peer = "plain" if name.startswith("missing") else "hals"
        ratios = [problem["ours"] / problem[peer] for problem in problems]
        largest = (max(problem[key] for problem in problems) for key in ("ours", peer))
        seconds = (sum(p[key] for p in problems) for key in ("seconds", f"{peer} seconds"))
        errors = [f"{error:.2g}" for error in largest]
        span = f"{min(ratios):.2g} to {max(ratios):.6g}"
        ours, theirs = seconds
        rows.append((f"{len(problems)} {name}", *errors, span, f"{ours / theirs:.2f}"))
    return head, rows


def three_factor_condition(results: dict[str, Any]) -> Table:
    """Tabulate error and γ of the last matrix by the type whose penalty was used."""
    row = results["rows"][-1]
    cells = []
    for storage in ("no storage", "float16", "bfloat16"):
        solver = "ALS()" if storage == "no storage" else f'ALS(storage="{storage}")'
        held = row[storage]
        cells.append((f"`{solver}`", f"{held['error']:.2e}", f"{held['condition']:.3g}"))
    return (row["problem"], "error", "γ"), cells


def route_cost(results: dict[str, Any]) -> Table:
    """Seconds of a route over all layers of an adapter, and of what any route has to do."""
    cost = results["frobenius"]
    seconds = cost["seconds"]
    peer = [seconds[name] for name in ("read", "factorize", "write")]
    head = (
        "layers",
        "reading",
        "thin QR, twice a layer",
        "writing",
        "compressing and writing that",
        "ratio",
    )
    ours = seconds["compress"] + seconds["save"]
    cells = (f"{second:.2f} s" for second in (*peer, ours))
    return head, [(str(cost["layers"]), *cells, f"{cost['ratio']:.1f}")]


def kfac_cost(results: dict[str, Any]) -> Table:
    """Tabulate seconds of a layer n × n in the Fisher norm, a sweep, a search, and their fits."""
    cost = results["kfac"]
    names = {
        "seconds_sweep": ("one sweep", 1e3, "ms"),
        "seconds_layer": ("the whole search", 1.0, "s"),
    }
    rows = []
    for key, (label, scale, unit) in names.items():
        fit = cost["fits"][key]
        model = f"{scale * fit['a']:.2g} + {1000 * scale * fit['b']:.2g} n/1000 {unit}"
        cells = (f"{scale * row[key]:.0f} {unit}" for row in cost["rows"])
        rows.append((label, *cells, model, f"{100 * fit['worst']:.0f} %"))
    return ("", *(f"n = {row['width']}" for row in cost["rows"]), "fitted", "off by at most"), rows


def fleet(results: dict[str, Any]) -> Table:
    """Adapters a second by runner."""
    rates = results["throughput"]["adapters_per_second"]
    return ("", *rates), [("adapters a second", *(f"{rate:.1f}" for rate in rates.values()))]


def layer_ratios(results: dict[str, Any]) -> Table:
    """Tabulate CPU seconds of layers in those of PEFT's LoRA of rank 8."""
    arms = ("LSR", "LSR, r = 8", "LoKr")
    lines = []
    for row in results["rows"]:
        cells = [
            " / ".join(f"{row[way]['ratio'][arm]:.2f}" for arm in arms)
            for way in ("training", "a pass", "a token")
        ]
        lines.append((str(row["width"]), str(row["tokens"]), *cells))
    return ("width", "tokens", "training", "a pass without a graph", "within one `generate`"), lines


ARMS = {
    "lsr": "LSR, r = 4, 4 terms",
    "lsr, 1 term": "LSR, r = 4, one term",
    "lsr, 16 terms": "LSR, r = 4, 16 terms",
    "lsr, r = 64": "LSR, r = 64, 4 terms",
    "lora": "LoRA, r = 8",
    "lora, r = 1": "LoRA, r = 1",
    "lsr from lora": "a LoRA compressed 48 times",
}
"""Adapters of the record of learning rates, as the page calls them."""


def rates(results: dict[str, Any]) -> Table:
    """Tabulate held-out losses of short runs by learning rate, the least of a row in bold."""
    columns = (0.001, 0.003, 0.01, 0.03)
    losses: dict[tuple[str, str], dict[Any, float]] = {}
    for row in results["rows"]:
        losses.setdefault((row["task"], row["arm"]), {})[row["asked"]] = row["loss"]
    lines = []
    for (task, arm), by_rate in losses.items():
        tried = {rate: by_rate[rate] for rate in columns if rate in by_rate}
        least = min(tried.values())
        cells = []
        for rate in columns:
            text = f"{tried[rate]:.3f}" if rate in tried else ""
            cells.append(f"**{text}**" if tried.get(rate) == least else text)
        lines.append((task.replace("e2e", "E2E"), ARMS[arm], *cells))
    return ("task", "adapter", *(f"{rate:g}" for rate in columns)), lines


def default_rates(results: dict[str, Any]) -> Table:
    """Tabulate held-out losses at the default learning rate and around it, means over seeds."""
    multiples = {"0.11": "÷ 9", "0.33": "÷ 3", "1": "default", "3": "× 3", "9": "× 9"}
    lines = []
    for entry in results["defaults"]:
        best = min(entry["losses"].values())
        cells = []
        for multiple in multiples:
            loss = entry["losses"].get(multiple)
            text = "" if loss is None else f"{loss:.3f}"
            cells.append(f"**{text}**" if loss == best else text)
        behind = entry["behind_of_each_seed"]
        each = ", ".join(f"{value:.3f}" for value in behind)
        steps = next(
            row["steps"]
            for row in results["rows"]
            if (row["task"], row["arm"]) == (entry["task"], entry["arm"])
        )
        lines.append(
            (entry["task"], entry["arm"], str(steps), f"{entry['rate']:.2g}", *cells, each)
        )
    head = ("task", "adapter", "steps", "default rate", *multiples.values())
    return (*head, "behind the best, each seed"), lines


def thread_commands(results: dict[str, Any]) -> Table:
    """Tabulate CPU seconds of commands as a user runs them, and with one BLAS thread."""
    lines = []
    for row in results["rows"]:
        if row["part"] != "commands" or row["quick"]:
            continue
        command, *_, load = row["case"].split(", ")
        if load != "as it is":
            continue
        default, one = (f"{row[way]['cpu_seconds']:.3g}" for way in ("default", "one"))
        lines.append((f"`{command}`", default, one, f"{row['cpu_default_over_one']:.2f}"))
    return ("command", "default", "one thread", "ratio"), lines


TABLES = {
    **command_tables.TABLES,
    **language_tables.TABLES,
    **solver_tables.TABLES,
    "memory": ("memory.json", memory),
    "layer-times": ("memory.json", layer_times),
    "cp": ("cp.json", cp),
    "three-factor-noise": ("three_factor_ends.json", three_factor_noise),
    "three-factor-condition": ("three_factor_ends.json", three_factor_condition),
    "single-entries": ("single_entries.json", single_entries),
    "route-cost": ("route_cost.json", route_cost),
    "kfac-cost": ("route_cost.json", kfac_cost),
    "fleet": ("fleet.json", fleet),
    "compare-sst2": ("compare-sst2.json", scratch),
    "integers": ("integer_factors.json", integers),
    "recover-minilm": ("recover-minilm.json", recovery),
    "compare-embedded": ("compare-embedded.json", comparison),
    "recover-embedded": ("recover-embedded.json", recovery),
    "gauge": ("compression_frobenius.json", gauge),
    "rounding": ("compression_frobenius.json", rounding),
    "compression-parameters": ("compression.json", at_parameters),
    "compression-bytes": ("compression.json", at_bytes),
    "byte-budgets": ("byte_budgets.json", byte_budgets),
    "byte-times": ("byte_budgets.json", byte_times),
    "function": ("demo_function.json", function),
    "shares-hold": ("promise.json", shares_hold),
    "operators-naive": ("operators-peers.json", operator_tables.naive),
    "operators-diffusion": ("operators-peers.json", operator_tables.diffusion),
    "operators-million": ("operators-million.json", operator_tables.million),
    "layer-ratios": ("layers-cpu.json", layer_ratios),
    "rates": ("rates.json", rates),
    "default-rates": ("default_rates.json", default_rates),
    "thread-commands": ("threads.json", thread_commands),
    "operators-galerkin": ("operators-galerkin.json", operator_tables.galerkin),
}
"""Name on a page: file of results, and what makes a table of it."""


def table(name: str) -> Table:
    file, make = TABLES[name]
    return make(json.loads((RESULTS / file).read_text(encoding="utf-8")))
