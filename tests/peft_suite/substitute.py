"""A pytest plugin: PEFT's own parametrised lists, with the rows of LoRA rewritten for one of our adapter kinds."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
from peft import LoraConfig

import lsrdecomp.adapters as adapters

KIND = os.environ.get("LSR_SUITE_KIND", "lsr")

# LoRA's names of settings that mean the same here.
RENAMED = {
    "lsr": {"lora_alpha": "lsr_alpha", "lora_dropout": "lsr_dropout", "init_lora_weights": "init_weights"},
}
# Tests of what is LoRA's alone: combinations of adapters by SVD, TIES and DARE.
LORA_ALONE = ("test_weighted_combination_of_adapters",)
# Settings of methods that are not LSR, and of layers that LSR does not adapt: rows that use them are left out.
FOREIGN = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "lora_bias": "a bias inside the low-rank pair",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "BD-LoRA",
    "velora_config": "VeLoRA",
}
CONFIGS = {"lsr": adapters.LsrConfig}
CONFIG: Any = LoraConfig if KIND == "lora" else CONFIGS[KIND]


def rewritten(row: Any) -> Any | None:
    """A row for our kind from a row for LoRA; None if the row is not LoRA's or asks for something foreign."""
    cells = list(row) if isinstance(row, list | tuple) else [row]
    if LoraConfig not in [cell for cell in cells if isinstance(cell, type)]:
        return None
    if any(cell == "MHA" for cell in cells):
        return None  # torch.nn.MultiheadAttention
    settings = [cell for cell in cells if isinstance(cell, dict)]
    for cell in settings:
        if any(cell.get(name) for name in FOREIGN) or isinstance(cell.get("init_lora_weights"), str):
            return None
    if KIND == "lora":
        return row
    cells = [CONFIG if cell is LoraConfig else renamed(cell) if isinstance(cell, dict) else cell for cell in cells]
    return type(row)(cells) if isinstance(row, list | tuple) else cells[0]


def renamed(settings: dict[str, Any]) -> dict[str, Any]:
    names = RENAMED[KIND]
    dropped = {"fan_in_fan_out"}  # here the type of the layer decides
    return {names.get(key, key): value for key, value in settings.items() if key not in dropped}


def substitute(module: ModuleType) -> None:
    """Change the lists in place: the parametrize marks hold the same objects."""
    for name, rows in vars(module).items():
        if not name.isupper() or not isinstance(rows, list | tuple):
            continue
        mine = [row for row in map(rewritten, rows) if row is not None]
        if not mine:
            continue
        if isinstance(rows, list):
            rows[:] = mine
        else:
            replace_marks(module, rows, tuple(mine))


def replace_marks(module: ModuleType, old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    """A tuple cannot change in place, so the marks that hold it are exchanged."""
    for holder in [module, *(entry for entry in vars(module).values() if isinstance(entry, type))]:
        for test in vars(holder).values():
            marks = getattr(test, "pytestmark", [])
            test_marks = [exchange(mark, old, new) for mark in marks]
            if test_marks != marks:
                test.pytestmark = test_marks


def exchange(mark: pytest.Mark, old: tuple[Any, ...], new: tuple[Any, ...]) -> pytest.Mark:
    arguments = tuple(new if argument is old else argument for argument in mark.args)
    return mark if arguments == mark.args else pytest.Mark(mark.name, arguments, mark.kwargs, _ispytest=True)


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        substitute(collector.obj)
        # Where a test asks "is this LoRA?" to skip or to relax something, our kind answers as LoRA does.
        for module in (collector.obj, sys.modules.get(f"{collector.obj.__package__}.testing_common")):
            if hasattr(module, "LoraConfig"):
                module.LoraConfig = CONFIG


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were given our kind; the rest are about other methods."""
    kept = []
    for item in items:
        spec = getattr(item, "callspec", None)
        foreign = KIND != "lora" and item.originalname in LORA_ALONE  # type: ignore[attr-defined]
        if spec is not None and not foreign and any(concerns_us(value) for value in spec.params.values()):
            kept.append(item)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def concerns_us(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(concerns_us(entry) for entry in value)
    return value is CONFIG or isinstance(value, CONFIG)
