"""Methods of fine-tuning by name, PEFT's, ours and the head alone, and their PEFT configs."""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lsrdecomp.fields import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peft import PeftConfig

NOT_OPTIONS = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "modules_to_save",
    "layers_to_transform",
    "runtime_config",
    "load_with",
)
"""Fields of a config that settings of a run decide, or PEFT itself."""
TELLING_FIELDS = ("use_dora", "use_rslora")
"""Fields by which methods of one PEFT type are told apart."""


REFERENCE_WIDTH = 384.0
"""Inputs of the layers that rates were tuned on, those of all-MiniLM-L6-v2."""


@dataclass(frozen=True, slots=True)
class RateRule:
    """Learning rate of a method by the sizes of a layer.

    It is ``of_one / (r ** rank_power * terms ** term_power)`` at the reference width, and falls
    with the inputs as ``(REFERENCE_WIDTH / width) ** width_power``: a step moves every number by
    the rate, so the more products ΔW sums, and the more inputs an output sums over, the smaller a
    step of each has to be [1]_.

    References
    ----------
    .. [1] S. Hayou, N. Ghosh and B. Yu, LoRA+: Efficient low rank adaptation of large models,
           ICML (2024), arXiv:2402.12354.
    """

    of_one: float
    """Rate of a layer of rank one with one term, `REFERENCE_WIDTH` inputs wide."""

    rank_power: float = 0.0
    """How fast the rate falls with the rank, or inner rank."""

    term_power: float = 0.0
    """How fast the rate falls with the terms of a side."""

    width_power: float = 0.0
    """How fast the rate falls with the inputs of a layer. One half for LoRA is where learning at
    one rate for both factors is stable at every width [1]_. A quarter for two Kronecker factors:
    their entries are about ``width ** -0.25``, so a step of one moves their product so much less.
    """

    def rate(self, rank: float, terms: float, width: float | None) -> float:
        """Return the rate of a layer by its number of inputs; of the reference width if None."""
        of_products = math.pow(rank, self.rank_power) * math.pow(terms, self.term_power)
        narrowness = 1.0 if width is None else REFERENCE_WIDTH / width
        return self.of_one / of_products * math.pow(narrowness, self.width_power)


@dataclass(frozen=True, slots=True)
class Method:
    """One way to fine-tune, by a PEFT config.

    Attributes
    ----------
    config_path : str
        Module and class of its config, ``"module:Class"``, loaded when it is first asked for.
    defaults : mapping
        Fields of the config unless options say otherwise.
    fixed : mapping
        Fields that no option changes.
    four_bit : bool
        Whether the base is held in 4 bits.
    rate : RateRule
        Its learning rate where settings give none.
    """

    config_path: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    four_bit: bool = False
    rate: RateRule = RateRule(1e-3)

    @property
    def config(self) -> type[PeftConfig]:
        """The class of its config."""
        module, _, class_name = self.config_path.partition(":")
        config: type[PeftConfig] = getattr(importlib.import_module(module), class_name)
        return config

    @property
    def peft_type(self) -> str:
        """The type that an adapter_config.json of it names."""
        class_name = self.config_path.partition(":")[2]
        if class_name == "DirectConfig":
            return "DLSR"
        return class_name.removesuffix("Config").upper()

    @property
    def options(self) -> tuple[str, ...]:
        """Names a user may set."""
        not_options = {*NOT_OPTIONS, *self.fixed}
        names = [entry.name for entry in dataclasses.fields(self.config)]
        return tuple(name for name in names if name not in not_options)

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Return whether an adapter_config.json with these values may be of this method."""
        if config.get("peft_type") != self.peft_type:
            return False
        return all(bool(config.get(name)) == (name in self.fixed) for name in TELLING_FIELDS)


LORA = {"r": 8, "lora_alpha": 16}
# r = 2·2 with 4 terms, scaled by 2 as LoRA is by default: docs/evidence/fine-tuning-measured.md.
LSR = {"inner_shape": [2, 2], "separation_rank": 4, "lsr_alpha": 8}
# Tuned by `python -m benchmarks.adapters.rates` on SST-2 and E2E: docs/evidence.
LORA_RATE = RateRule(of_one=8e-3, rank_power=0.5, width_power=0.5)
LSR_RATE = RateRule(of_one=0.03, rank_power=0.5, term_power=0.25, width_power=0.25)
# PEFT's DUMMY_TARGET_MODULES: no layer is adapted.
HEAD = {"target_modules": "dummy-target-modules", "r": 1}

METHODS: dict[str, Method] = {
    "lora": Method("peft:LoraConfig", LORA, rate=LORA_RATE),
    "rslora": Method("peft:LoraConfig", LORA, {"use_rslora": True}, rate=LORA_RATE),
    "dora": Method("peft:LoraConfig", LORA, {"use_dora": True}, rate=LORA_RATE),
    "qlora": Method("peft:LoraConfig", LORA, four_bit=True, rate=LORA_RATE),
    "lokr": Method("peft:LoKrConfig", {"r": 8, "alpha": 16}),
    "vera": Method("peft:VeraConfig"),
    # Sizes that divide the layers of small models too; PEFT's 256 does not divide 384.
    "vblora": Method("peft:VBLoRAConfig", {"num_vectors": 90, "vector_length": 64}),
    "fourierft": Method("peft:FourierFTConfig"),
    "c3a": Method("peft:C3AConfig", {"block_size": 64}),
    "krona": Method("lsrdecomp.lora.peft:KronAConfig"),
    "direct": Method("lsrdecomp.lora.peft:DirectConfig"),
    "lsr": Method("lsrdecomp.lora.peft:LsrConfig", LSR, rate=LSR_RATE),
    "qlsr": Method("lsrdecomp.lora.peft:LsrConfig", LSR, four_bit=True, rate=LSR_RATE),
    "lsr-dora": Method("lsrdecomp.lora.peft:LsrConfig", LSR, {"use_dora": True}, rate=LSR_RATE),
    "head": Method("peft:LoraConfig", fixed=HEAD),
}
"""What ``--method`` may be. All that a method is stands in its row; one more is one more row."""


def find_method(name: str) -> Method:
    """Return the method of this name.

    Raises
    ------
    SettingsError
        If there is none.
    """
    if name not in METHODS:
        raise SettingsError(f"no method is called {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the first of `METHODS` that an adapter_config.json with these values fits, or None.

    >>> method_of({"peft_type": "LSR"}), method_of({"peft_type": "LORA", "use_dora": True})
    ('lsr', 'dora')
    """
    for name, method in METHODS.items():
        if method.fits(config):
            return name
    return None


def adapter_config(
    method: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    target_modules: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    task_type: str = "SEQ_CLS",
    modules_to_save: Sequence[str] | None = None,
) -> PeftConfig:
    """Make the PEFT config of a method.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    options : mapping
        Settings of its own, under the names of its config's fields.
    target_modules : sequence of str, optional
        Endings of module names; the architecture's usual ones if absent.
    layers : sequence of int, optional
        Only these layer indices.
    task_type : str
        PEFT's name of the task.
    modules_to_save : sequence of str, optional
        Modules trained in full, such as the head.

    Raises
    ------
    SettingsError
        If the method or an option is unknown, or the config refuses a value; the message lists what
        there is.
    """
    from peft import TaskType

    chosen = find_method(method)
    unknown = [str(name) for name in options if name not in chosen.options]
    if unknown:
        known = ", ".join(chosen.options) or "none"
        raise SettingsError(
            f"{method} has no option {', '.join(unknown)}; its options are: {known}"
        )
    defaults = dict(chosen.defaults)
    if chosen.defaults is LSR and "r" in options and "inner_shape" not in options:
        del defaults["inner_shape"]  # an inner rank that is given gets its most even split
    fields: dict[str, Any] = {
        "target_modules": None if target_modules is None else list(target_modules)
    }
    if layers is not None and method != "head":
        fields["layers_to_transform"] = list(layers)
    fields |= defaults
    fields |= options
    fields |= chosen.fixed
    fields["task_type"] = TaskType(task_type)
    fields["modules_to_save"] = None if modules_to_save is None else list(modules_to_save)
    try:
        return chosen.config(**fields)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{method}: {error}") from error
