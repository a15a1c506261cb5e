"""LSR directories for transformers' own `load_adapter`, behind pipelines and ``from_pretrained``.

It puts each stored tensor where its name says, and so would not open the one tensor that all
numbers are packed in; nor does it ask the adapter's model, as PEFT does. So importing
`lsrdecomp.lora.peft` puts a function of its own before `load_adapter` of every transformers model
of the process, once. It passes on every call that names no LSR directory.
``LSRDECOMP_TRANSFORMERS=0`` in the environment leaves transformers as it is; `plain_transformers`
does so for a while.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft.utils import load_peft_weights
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils.peft_utils import find_adapter_config_file

from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.peft.lsr_config import LsrConfig
from lsrdecomp.lora.peft.tuner import unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SWITCH = "LSRDECOMP_TRANSFORMERS"
"""Environment variable: 0 leaves transformers as it is."""
MARK = "_opens_lsr"
_passes_on: ContextVar[bool] = ContextVar("passes_on", default=False)
DOWNLOAD_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Options of a download that transformers, PEFT and the hub call alike."""


def teach_transformers() -> bool:
    """Have `load_adapter` of every transformers model open LSR directories.

    Calling it again changes nothing, also where another library has wrapped the function since.

    Returns
    -------
    bool
        Whether it opens them now: not where ``LSRDECOMP_TRANSFORMERS`` is 0.
    """
    load_adapter = PeftAdapterMixin.load_adapter
    if _opens_lsr(load_adapter):
        return True
    if os.environ.get(SWITCH) == "0":
        return False
    parameters = signature(load_adapter)

    @wraps(load_adapter, assigned=("__doc__", "__name__", "__qualname__"))
    def load_lsr_or_other(*args: Any, **kwargs: Any) -> Any:
        if _passes_on.get():
            return load_adapter(*args, **kwargs)
        call = parameters.bind(*args, **kwargs)
        call.arguments.update(_lsr_arguments(call.arguments))
        return load_adapter(*call.args, **call.kwargs)

    setattr(load_lsr_or_other, MARK, True)
    PeftAdapterMixin.load_adapter = load_lsr_or_other  # type: ignore[method-assign]
    return True


@contextmanager
def plain_transformers() -> Iterator[None]:
    """Leave transformers' own `load_adapter` as it is within the context.

    Of this thread or task; LSR directories do not open there.

    Examples
    --------
    >>> with plain_transformers():
    ...     pass  # model.load_adapter(…) is transformers' own
    """
    token = _passes_on.set(True)
    try:
        yield
    finally:
        _passes_on.reset(token)


def _opens_lsr(function: Callable[..., Any] | None) -> bool:
    """Return whether a function, or one that it wraps, is that of this package."""
    while function is not None:
        if getattr(function, MARK, False):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _lsr_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and tensors of an LSR directory, as arguments of `load_adapter`.

    Empty where the call names no directory, brings settings or tensors of its own, or the adapter
    is of another type: transformers reads that itself.
    """
    if arguments.get("peft_config") is not None or arguments.get("adapter_state_dict") is not None:
        return {}
    load_config = arguments.get("load_config")
    source = arguments.get("peft_model_id")
    if not source:
        source = getattr(load_config, "pretrained_model_name_or_path", None)
    if source is None:
        return {}
    options = _download_options(arguments)
    config_file = find_adapter_config_file(source, **options)
    if config_file is None:
        return {}
    settings = read_json_text(Path(config_file).read_text(encoding="utf-8"))
    if settings.get("peft_type") != "LSR":
        return {}
    config = LsrConfig.from_pretrained(source, **options)
    stored = load_peft_weights(source, device="cpu", **options)
    has_sizes = config.layers is not None
    return {"peft_config": config, "adapter_state_dict": unpack(stored, has_sizes=has_sizes)}


def _download_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a download; what the call says itself goes before its `load_config`."""
    load_config = arguments.get("load_config")
    options: dict[str, Any] = {}
    options.update(getattr(load_config, "download_kwargs", None) or {})
    options.update(arguments.get("adapter_kwargs") or {})
    if arguments.get("local_files_only"):
        options["local_files_only"] = True
    return {name: options[name] for name in DOWNLOAD_OPTIONS if options.get(name) is not None}
