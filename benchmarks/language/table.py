"""The records of the language-model suite as figures over seeds and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
KEYS = ("task", "lora", "structure", "kind", "budget")


def collect(work: Path, suite: Mapping[str, Any]) -> dict[str, Any]:
    """All records below ``work``, and means over seeds with their intervals."""
    loras, forms = [], []
    for file in sorted(work.glob("*/*/*/lora.json")):
        task, lora, seed = file.relative_to(work).parts[:3]
        about = json.loads(file.read_text(encoding="utf-8"))
        record = json.loads((file.parent / "lora" / "record.json").read_text(encoding="utf-8"))
        numbers = {"parameters": record["adapter_parameters"], "file_bytes": record["file_bytes"]}
        facts = {**about, "trained": about["lora"]}  # a row's "lora" is its name, as in the forms
        loras.append({**facts, "task": task, "lora": lora, "seed": int(seed), **numbers})
        for judged in sorted(file.parent.glob("forms/*/judged.json")):
            form = json.loads((judged.parent / "form.json").read_text(encoding="utf-8"))
            facts = json.loads(judged.read_text(encoding="utf-8"))
            forms.append(
                {
                    "task": task,
                    "lora": lora,
                    "seed": int(seed),
                    **form,
                    **figures(about, facts),
                    **facts,
                }
            )
    shown = {
        name: suite[name]
        for name in (
            "title",
            "model",
            "seeds",
            "samples",
            "held",
            "others",
            "training",
            "tasks",
            "loras",
        )
    }
    return {"suite": shown, "loras": loras, "forms": forms, "means": list(means(forms))}


def figures(whole: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float | None]:
    """Return shares of the LoRA's gain in loss and answers, and the divergence on other tasks."""
    before, after, form = whole["none"]["loss"], whole["lora"]["loss"], facts["own"]
    others = list(facts["others"].values())
    return {
        "loss_share": (before - form["loss"]) / (before - after) if before > after else None,
        "kl_share": 1.0 - form["kl"] / form["effect"] if form["effect"] > 0 else None,
        "other_kl": float(np.mean([each["kl"] for each in others])) if others else None,
        "other_effect": float(np.mean([each["effect"] for each in others])) if others else None,
    }


def means(forms: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Return the mean of every figure over seeds, and half the width of its t interval."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for form in forms:
        groups.setdefault(tuple(form[key] for key in KEYS), []).append(form)
    for key, rows in groups.items():
        row: dict[str, Any] = dict(zip(KEYS, key, strict=True)) | {
            "seeds": sorted(each["seed"] for each in rows)
        }
        for name in ("parameters", "file_bytes", "directory_bytes", "number_bytes"):
            row[name] = round(float(np.mean([each[name] for each in rows])))
        for name in ("loss_share", "kl_share", "other_kl", "other_effect"):
            row[name], row[f"{name}_half_width"] = interval([each[name] for each in rows])
        for name in ("loss", "token_accuracy", "exact", "kl", "agreement", "bleu", "chrf"):
            row[name], row[f"{name}_half_width"] = interval(
                [each["own"].get(name) for each in rows]
            )
        yield row


def interval(values: list[float | None]) -> tuple[float | None, float | None]:
    """Mean, and half the width of the t interval at `LEVEL`."""
    if not values or any(value is None for value in values):
        return None, None
    numbers = np.array(values, dtype=float)
    if len(numbers) < 2:
        return float(numbers.mean()), None
    error = numbers.std(ddof=1) / math.sqrt(len(numbers))
    return float(numbers.mean()), float(stats.t.ppf(0.5 + LEVEL / 2, len(numbers) - 1) * error)


def markdown(record: Mapping[str, Any]) -> str:
    """Tables, one for each task, LoRA and kind of budget."""
    lines = [f"# {record['suite']['title']}", ""]
    kinds = dict.fromkeys((row["task"], row["lora"], row["kind"]) for row in record["means"])
    for task, lora, kind in kinds:
        rows = [
            row
            for row in record["means"]
            if (row["task"], row["lora"], row["kind"]) == (task, lora, kind)
        ]
        rows.sort(key=lambda row: (row["structure"], row["number_bytes"]))
        lines += [f"## {task}, {lora}, by {'parameters' if kind == 'ratio' else 'bytes'}", ""]
        lines += [
            (
                "| structure | budget | parameters | file, bytes | share of the gain in loss | KL "
                "to the LoRA | share of its answers | same word | exact | BLEU | KL elsewhere "
                "(without it) | seeds |"
            ),
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            budget = (
                f"1/{row['budget']:g}"
                if kind == "ratio"
                else f"{row['budget']:,.0f}"
                if row["budget"]
                else ""
            )
            cells = [row["structure"], budget, f"{row['parameters']:,}", f"{row['file_bytes']:,}"]
            cells += [
                cell(row, name)
                for name in ("loss_share", "kl", "kl_share", "agreement", "exact", "bleu")
            ]
            elsewhere = (
                ""
                if row["other_kl"] is None
                else f"{cell(row, 'other_kl')} ({cell(row, 'other_effect')})"
            )
            cells += [elsewhere, str(len(row["seeds"]))]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def cell(row: Mapping[str, Any], name: str) -> str:
    """A mean with its interval."""
    value, half = row[name], row[f"{name}_half_width"]
    if value is None:
        return ""
    digits = 1 if name in ("bleu", "chrf") else 3
    return f"{value:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
