"""LSR directories for transformers' own `load_adapter`, behind ``AutoModel….from_pretrained(directory)`` and pipelines.

It puts each stored tensor where its name says, and so would not open the one tensor that all
numbers are packed in; nor does it ask the adapter's model, as PEFT does.
"""

from __future__ import annotations

import json
from functools import wraps
from inspect import signature
from typing import Any

from peft import PeftConfig
from peft.utils import load_peft_weights
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils.peft_utils import find_adapter_config_file

from lsrdecomp.adapters.tuner import unpacked

HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Settings of a download that transformers, PEFT and the hub call alike."""


def teach_transformers() -> None:
    """Have `load_adapter` of every transformers model open LSR directories; doing so twice changes nothing."""
    load_adapter = PeftAdapterMixin.load_adapter
    if getattr(load_adapter, "__module__", None) == __name__:
        return
    parameters = signature(load_adapter)

    @wraps(load_adapter, assigned=("__doc__", "__name__", "__qualname__"))
    def load_lsr_or_other(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        values = call.arguments
        load_config = values.get("load_config")
        source = values.get("peft_model_id") or getattr(
            load_config, "pretrained_model_name_or_path", None
        )
        if (
            source is not None
            and values.get("peft_config") is None
            and values.get("adapter_state_dict") is None
        ):
            options = {
                **(getattr(load_config, "download_kwargs", None) or {}),
                **(values.get("adapter_kwargs") or {}),
            }
            options |= {"local_files_only": True} if values.get("local_files_only") else {}
            options = {name: options[name] for name in HUB if options.get(name) is not None}
            values |= _read(source, options)
        return load_adapter(*call.args, **call.kwargs)

    PeftAdapterMixin.load_adapter = load_lsr_or_other  # type: ignore[method-assign]


def _read(source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Settings and tensors of an LSR directory, as arguments; none for another kind, which transformers reads."""
    file = find_adapter_config_file(source, **options)
    if file is None:
        return {}
    with open(file, encoding="utf-8") as text:
        kind = json.load(text).get("peft_type")
    if kind != "LSR":
        return {}
    config: Any = PeftConfig.from_pretrained(source, **options)
    tensors = unpacked(load_peft_weights(source, device="cpu", **options), config.layers)
    return {"peft_config": config, "adapter_state_dict": tensors}
