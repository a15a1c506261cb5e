"""The methods a base can be fine-tuned by: PEFT's, ours, and the head alone; from a name and options to a config."""

from __future__ import annotations

import dataclasses
import importlib
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
MARKS = ("use_dora", "use_rslora")
"""Fields by which methods of one kind of adapter are told apart."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to fine-tune: its PEFT config, what that is given always, and what it is given unless told otherwise."""

    home: str  # the module and class of its config, loaded when it is first wanted
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    four_bit: bool = False  # the base is held in 4 bits

    @property
    def config(self) -> type[PeftConfig]:
        """The class of its config."""
        module, _, name = self.home.partition(":")
        config: type[PeftConfig] = getattr(importlib.import_module(module), name)
        return config

    @property
    def options(self) -> tuple[str, ...]:
        """Names a user may set."""
        taken = {*NOT_OPTIONS, *self.fixed}
        return tuple(
            entry.name for entry in dataclasses.fields(self.config) if entry.name not in taken
        )

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether an adapter_config.json with these values may be of this method."""
        kind = self.home.partition(":")[2].removesuffix("Config").upper().replace("DIRECT", "DLSR")
        marked = all(bool(config.get(mark)) == (mark in self.fixed) for mark in MARKS)
        return config.get("peft_type") == kind and marked


LORA = {"r": 8, "lora_alpha": 16}
# r = 2·2 with 4 terms, scaled by 2 as LoRA's default is: docs/fine-tune.md has the comparison.
LSR = {"inner_shape": [2, 2], "separation_rank": 4, "lsr_alpha": 8}
HEAD = {
    "target_modules": "dummy-target-modules",
    "r": 1,
}  # PEFT's DUMMY_TARGET_MODULES: no layer is adapted

METHODS: dict[str, Method] = {
    "lora": Method("peft:LoraConfig", LORA),
    "rslora": Method("peft:LoraConfig", LORA, {"use_rslora": True}),
    "dora": Method("peft:LoraConfig", LORA, {"use_dora": True}),
    "qlora": Method("peft:LoraConfig", LORA, four_bit=True),
    "lokr": Method("peft:LoKrConfig", {"r": 8, "alpha": 16}),
    "vera": Method("peft:VeraConfig"),
    # Sizes that divide the layers of small models too; PEFT's 256 does not divide 384.
    "vblora": Method("peft:VBLoRAConfig", {"num_vectors": 90, "vector_length": 64}),
    "fourierft": Method("peft:FourierFTConfig"),
    "c3a": Method("peft:C3AConfig", {"block_size": 64}),
    "krona": Method("lsrdecomp.adapters:KronAConfig"),
    "direct": Method("lsrdecomp.adapters:DirectConfig"),
    "lsr": Method("lsrdecomp.adapters:LsrConfig", LSR),
    "qlsr": Method("lsrdecomp.adapters:LsrConfig", LSR, four_bit=True),
    "lsr-dora": Method("lsrdecomp.adapters:LsrConfig", LSR, {"use_dora": True}),
    "head": Method("peft:LoraConfig", fixed=HEAD),
}
"""What ``--method`` may be; a method is all here in its row. Who has one more adds its row."""


def find_method(name: str) -> Method:
    """The method of this name.

    Raises
    ------
    SettingsError
        If there is none.
    """
    if name not in METHODS:
        raise SettingsError(f"no method is called {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def method_of(config: Mapping[str, Any]) -> str | None:
    """The first method of `METHODS` that an adapter_config.json with these values fits; None if it fits none.

    >>> method_of({"peft_type": "LSR"}), method_of({"peft_type": "LORA", "use_dora": True}), method_of({})
    ('lsr', 'dora', None)
    """
    return next((name for name, method in METHODS.items() if method.fits(config)), None)


def adapter_config(
    method: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    target_modules: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    task_type: str = "SEQ_CLS",
    modules_to_save: Sequence[str] | None = None,
) -> PeftConfig:
    """The PEFT config of a method.

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
        raise SettingsError(
            f"{method} has no option {', '.join(unknown)}; its options are: {', '.join(chosen.options) or 'none'}"
        )
    own = {**chosen.defaults, **options}
    if chosen.defaults is LSR and "r" in options and "inner_shape" not in options:
        del own["inner_shape"]  # an inner rank of its own gets its most even split
    places: dict[str, Any] = {
        "target_modules": None if target_modules is None else list(target_modules)
    }
    if layers is not None:
        places["layers_to_transform"] = list(layers)
    saved = None if modules_to_save is None else list(modules_to_save)
    fields = {
        **places,
        **own,
        **chosen.fixed,
        "task_type": TaskType(task_type),
        "modules_to_save": saved,
    }
    if method == "head":
        fields.pop("layers_to_transform", None)
    try:
        return chosen.config(**fields)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{method}: {error}") from error
