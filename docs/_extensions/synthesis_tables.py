"""Tables of results/synthesis.json: participation ratios, shares, synthetic wide layers."""

from __future__ import annotations

from math import exp
from statistics import median
from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

SIDES = ("input", "output", "update")


def loras(results: dict[str, Any]) -> Table:
    """Of each LoRA the median participation ratios of its layers, and what is kept at two sizes."""
    ratios = (96.0, 48.0)
    sizes = [f"1/{ratio:g}, {what}" for ratio in ratios for what in ("norm", "answers")]
    rows = []
    for lora in results["loras"]:
        middle = (f"{median(layer[side] for layer in lora['layers']):.1f}" for side in SIDES)
        cells: list[str] = []
        for form in (form for ratio in ratios for form in lora["forms"] if form["ratio"] == ratio):
            cells += [
                f"{form['share']:.2f}",
                f"{form['answers']:.2f} ± {form['standard_error']:.3f}",
            ]
        rows.append((f"{lora['model']}, {lora['task']}", str(len(lora["layers"])), *middle, *cells))
    return ("LoRA", "layers", *SIDES, *sizes), rows


def fits(results: dict[str, Any]) -> Table:
    """Tabulate exponents that explain a layer's numbers, and each model predicted by the others."""
    fits = results["fit"]["fits"]
    said = {"size": "m + n"} | {side: f"ratio of the {side}" for side in SIDES}
    labels = [*SIDES, "size"]
    columns = []
    for fit in fits.values():
        powers, errors = fit["coefficients"], fit["standard_errors"]
        cells = [
            f"{powers[name]:.2f} ± {errors[name]:.2f}" if name in powers else "–" for name in labels
        ]
        cells += [f"{100 * fit['explained']:.0f} %", f"{exp(fit['rms']):.2f}"]
        columns.append([*cells, *(f"{exp(left['rms']):.2f}" for left in fit["left_out"].values())])
    rows = [f"exponent of: {said[name]}" for name in labels]
    rows += ["explained, of the variance", "a layer is missed by a factor of"]
    rows += [f"one of {model}, from the others" for model in fits["nothing"]["left_out"]]
    return ("", *fits), [
        (row, *cells) for row, cells in zip(rows, zip(*columns, strict=True), strict=True)
    ]


def twins(results: dict[str, Any]) -> Table:
    """Tabulate shares in the norm of measured LoRAs and of their synthetic twins."""
    measured = {f"{lora['model']}, {lora['task']}": lora for lora in results["loras"]}
    rows = []
    for twin in (run for run in results["wide"] if run["of"] == "twin"):
        real = measured[twin["like"]]
        shares = (
            f"{own['share']:.2f} → {made['share']:.2f}"
            for own, made in zip(real["forms"], twin["forms"], strict=True)
        )
        numbers = [
            sum(
                form["numbers"]
                for layer in each["layers"]
                for form in layer["forms"]
                if form["wanted"] == 0.9
            )
            for each in (real, twin)
        ]
        rows.append((twin["like"], *shares, f"{numbers[0]:,} → {numbers[1]:,}"))
    sizes = (f"1/{form['ratio']:g}" for form in results["loras"][0]["forms"])
    return ("measured → twin", *sizes, "numbers that keep 0.9 of every layer"), rows


def wide(results: dict[str, Any]) -> Table:
    """Tabulate synthetic layers at 1/48: shares, and bytes, seconds and memory of a model."""
    head = (
        "",
        "ratios",
        "LSR",
        "SVD",
        "LoRA, float16",
        "LSR, float16",
        "CPU, three sizes",
        "SVD's CPU, times",
        "memory",
    )
    rows = []
    for run in (run for run in results["wide"] if run["of"] != "twin"):
        (form,) = (form for form in run["forms"] if form["ratio"] == 48.0)
        scale, seconds = run["blocks"] / run["made"], run["forms"][-1]["cpu_seconds"]
        numbers = sum(layer["rank"] * (layer["rows"] + layer["columns"]) for layer in run["layers"])
        sizes = (
            f"{scale * 2 * numbers / 1e6:.1f} MB",
            f"{scale * form['weight_bytes'] / 1e3:,.0f} kB",
        )
        shares = (f"{form['share']:.2f}", f"{form['svd']:.2f}")
        cost = (f"{scale * seconds:,.0f} s", f"{seconds / run['peer_cpu_seconds']:.0f}")
        memory = f"{run['peak_bytes'] / 1e6:.0f} MB"
        rows.append((run["of"], f"× {run['factor']:g}", *shares, *sizes, *cost, memory))
    return head, rows


TABLES = {
    "synthesis-loras": ("synthesis.json", loras),
    "synthesis-fit": ("synthesis.json", fits),
    "synthesis-twins": ("synthesis.json", twins),
    "synthesis-wide": ("synthesis.json", wide),
}
