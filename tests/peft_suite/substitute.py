"""A pytest plugin: PEFT's own parametrised lists, LoRA's rows rewritten for one of our types."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from types import ModuleType
from typing import Any

import pytest
from peft import LoraConfig

import lsrdecomp.lora.peft as adapters

KIND = os.environ.get("LSR_SUITE_KIND", "lsr")

CONFIGS = {
    "lora": LoraConfig,
    "lsr": adapters.LsrConfig,
    "dlsr": adapters.DirectConfig,
    "krona": adapters.KronAConfig,
}
CONFIG: Any = CONFIGS[KIND]
FIELDS = {field.name for field in dataclasses.fields(CONFIG)}
# LoRA's names of settings, and the names here that mean the same; the first that the kind has is
# taken.
NAMES = {
    "lora_alpha": ("lsr_alpha", "alpha"),
    "lora_dropout": ("lsr_dropout", "dropout"),
    "init_lora_weights": ("init_weights",),
}
# The tests train with rates tuned to LoRA's product of two factors. Ours have more: with inputs up
# to 90 they overflow, so ΔW is scaled down; behind an embedding, with gradients of 1e-3, three
# steps would not move them: it is scaled up.
SCALED = {"lsr": ("lsr_alpha", 0.5, 64.0), "dlsr": ("alpha", 0.1, 4.0)}
SCALED["krona"] = SCALED["dlsr"]
# Settings that a kind may lack without changing what a test is about.
OPTIONAL = {"r", "fan_in_fan_out", "lora_alpha", "lora_dropout"}
# Tests of what LoRA alone has: weighted combinations, which ours refuse with the way to LoRA's.
NOT_FOR_OURS = ("test_weighted_combination_of_adapters",)
# Tests of what the relatives have not: a ΔW that a LoRA of rank 8 nearly holds.
NOT_FOR_RELATIVES = ("test_lora_conversion",)
# Tests that match an error by the name of LoRA's own class; ours is asked for in test_options.
LORA_NAMED = ("test_mixed_adapter_batches", "test_generate_with_mixed_adapter_batches")
# Files whose tests make their configs themselves, and the name in each that stands for ours. In the
# tests of conversion that is LoKr, what is converted; LoRA, what it is converted to, stays.
WRITTEN_OUT = {
    "test_low_level_api": "LoraConfig",
    "test_other": "LoraConfig",
    "test_tuners_utils": "LoraConfig",
    "test_mixed": "LoraConfig",
    "test_initialization": "LoraConfig",
    "test_lora_conversion": "LoKrConfig",
}
# Of those files, what asks for LoRA's own names (of parameters, classes, a value of bias) or for
# sizes of hub models.
OF_LORA = {
    "test_targeted_modules_identical",
    "test_targeted_modules_identical_target_modules_str",
    "test_rank_higher_than_weight_dim_raises",
    "test_inject_adapter_in_model",
    "test_get_peft_model_state_dict",
    "test_inject_from_state_dict_missing_keys_warning",
    "test_prefix_removal_is_undone",
    "test_get_and_set_peft_model_state_dict_bias_in_module_name",
    "test_base_model_module_named_like_peft_prefix",
    "test_save_pretrained_warns_for_unsharded_state_dict",
    "test_targeting_trainable_tokens_raises",
}
FIXTURES = {"model", "lokr_model"}  # of those files, made of that name
# Our row among those of test_quantization.
QUANTIZED = {
    "r": 8,
    "target_modules": ["q_proj", "v_proj"],
}


def rewritten(row: Any) -> Any | None:
    """Rewrite a row for LoRA for our type; None where it is not LoRA's or our type lacks something.

    That is torch.nn.MultiheadAttention, and settings of LoRA's variants (aLoRA, KaSA, VeLoRA, MiCA,
    …).
    """
    cells = list(row) if isinstance(row, list | tuple) else [row]
    if not any(cell is LoraConfig for cell in cells) or "MHA" in [
        cell for cell in cells if isinstance(cell, str)
    ]:
        return None
    if KIND == "lora":
        return row
    cells = [
        CONFIG if cell is LoraConfig else renamed(cell) if isinstance(cell, dict) else cell
        for cell in cells
    ]
    if any(cell is None for cell in cells):
        return None
    name, small, large = SCALED[KIND]
    words = [cell for cell in cells if isinstance(cell, str)]
    settings = {name: large if "EmbConv1D" in words else small}
    cells = [{**settings, **cell} if isinstance(cell, dict) else cell for cell in cells]
    # Where a row says that it is tuned by LoRA, the test goes on to combine adapters.
    cells = [KIND if cell == "lora" else cell for cell in cells]
    return type(row)(cells) if isinstance(row, list | tuple) else cells[0]


def renamed(settings: dict[str, Any]) -> dict[str, Any] | None:
    mine: dict[str, Any] = {}
    for key, value in settings.items():
        name = next((name for name in (*NAMES.get(key, ()), key) if name in FIELDS), None)
        if name is not None and not (key == "init_lora_weights" and isinstance(value, str)):
            # The relatives' alpha is the scale itself, LoRA's is divided by its rank.
            mine[name] = value / settings.get("r", 8) if name == "alpha" else value
        elif value and key not in OPTIONAL:
            return None
    return mine


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
    return (
        mark
        if arguments == mark.args
        else pytest.Mark(mark.name, arguments, mark.kwargs, _ispytest=True)
    )


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        substitute(collector.obj)
        name = WRITTEN_OUT.get(stem(collector))
        if name is not None and KIND != "lora":
            setattr(collector.obj, name, CONFIG)
        if stem(collector) == "test_quantization":
            collector.obj.TEST_CASES[:] = [(CONFIG, QUANTIZED)]
        # Where a test asks "is this LoRA?" to skip or to relax something, our kind answers as LoRA
        # does.
        ours = {"LoraConfig": CONFIG, "LoraLayer": adapters.LsrLayer, "replace": replace}
        if stem(collector) == "test_lora_conversion":
            return
        for module in (
            collector.obj,
            sys.modules.get(f"{collector.obj.__package__}.testing_common"),
        ):
            for name in ours if KIND != "lora" else ():
                if hasattr(module, name):
                    setattr(module, name, ours[name])


def stem(node: pytest.Item | pytest.Collector) -> str:
    return node.path.stem


def translated(init: Any) -> Any:
    """Return the constructor of our config, which takes LoRA's names too.

    A test of what the type has not is skipped.
    """

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **settings: Any) -> None:
        mine = dict(settings) if FIELDS.issuperset(settings) else renamed(settings)
        if mine is None:
            pytest.skip(f"{KIND} has not all of {sorted(settings)}")
        if "r" in FIELDS:
            mine.setdefault("r", 8)  # LoRA's and LoKr's default
        init(self, *args, **mine)

    return construct


if KIND != "lora":
    CONFIG.__init__ = translated(CONFIG.__init__)


def replace(config: Any, **changes: Any) -> Any:
    """`dataclasses.replace`, where a setting that the kind does not have is left out."""
    known = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: value for name, value in changes.items() if name in known}
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were given our kind; the rest are about other methods."""
    kept = []
    for item in items:
        spec = getattr(item, "callspec", None)
        foreign = KIND != "lora" and not_ours(item)
        given = spec is not None and any(concerns_us(value) for value in spec.params.values())
        if not foreign and (given or written_out(item)):
            kept.append(item)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def written_out(item: pytest.Item) -> bool:
    """Whether a test makes a config of our kind in its text or by a fixture."""
    name = WRITTEN_OUT.get(stem(item))
    if name is None or (KIND != "lora" and getattr(item, "originalname", "") in OF_LORA):
        return False
    return bool(FIXTURES & set(getattr(item, "fixturenames", ()))) or name in inspect.getsource(
        item.function
    )  # type: ignore[attr-defined]


def not_ours(item: pytest.Item) -> bool:
    name = getattr(item, "originalname", "")
    if name in NOT_FOR_OURS:
        return True
    if KIND != "lsr" and name in NOT_FOR_RELATIVES:
        return True
    return name in LORA_NAMED and item.path.name == "test_target_parameters.py"


def concerns_us(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(concerns_us(entry) for entry in value)
    return value is CONFIG or isinstance(value, CONFIG)
