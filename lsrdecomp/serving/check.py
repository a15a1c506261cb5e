"""An adapter by the rules of a server, without running it.

They tell which of its layers would act, and why the others would not. Each rule says what was read
to write it. Servers change: a check that passes is a reason to try, not a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints import BaseModules, Checkpoint, read_modules
from lsrdecomp.errors import LsrError, UnsupportedError, unknown
from lsrdecomp.serving import images, text
from lsrdecomp.serving.adapter import read_adapter, task_type
from lsrdecomp.serving.report import ServingCheck

if TYPE_CHECKING:
    from pathlib import Path

Rule = Callable[[ServingCheck, Checkpoint, BaseModules], None]
"""Fills a check with the fate of every layer of an adapter on a base."""

SERVERS: dict[str, tuple[str, Rule]] = {
    "peft": ("PEFT 0.21.2: tuners_utils.py, utils/save_and_load.py", text.peft),
    "llama.cpp": ("llama.cpp 0650ea8c05bc: src/llama-adapter.cpp", text.llama_cpp),
    "vllm": (
        "vLLM 0.20.2: lora/lora_model.py, model_manager.py, utils.py, peft_helper.py",
        text.vllm,
    ),
    "sglang": (
        "SGLang 0.5.23: srt/lora/lora.py, lora_config.py, utils.py, mem_pool.py",
        text.sglang,
    ),
    "diffusers": (
        "diffusers 0.42.1: loaders/lora_base.py, peft.py, lora_conversion_utils.py",
        images.diffusers,
    ),
    "kohya": ("kohya-ss/sd-scripts 48d368fa5577: networks/lora.py", images.kohya),
}
"""By the name that `check_served` takes: what was read to write the rule, with version or commit,
and the rule."""


def check_served(adapter: str | Path, server: str, base: str | Path) -> ServingCheck:
    """Return which layers of an adapter a server would apply to a base.

    Parameters
    ----------
    adapter : path
        What would be handed to the server: a directory, a safetensors file, or a GGUF file.
    server : str
        One of `SERVERS`.
    base : path
        As `read_modules` takes it.

    Returns
    -------
    ServingCheck
        The fate of every layer, and why a file would be refused as a whole.

    Raises
    ------
    LsrError
        For a server whose rules are not known here, or a package that is missing.
    CheckpointError
        If the adapter or the base cannot be read.
    UnsupportedError
        For experts that are stored stacked.
    """
    if server not in SERVERS:
        raise LsrError(f"no rules are known of the server {unknown(server, SERVERS)}")
    checkpoint = read_adapter(adapter)
    if checkpoint.config.get("target_parameters"):
        # What vLLM makes of them depends on the class of the model and on how it was started.
        raise UnsupportedError(
            f"its experts are stored stacked (target_parameters), and what {server} makes of those "
            "is not known here; it may answer as the base alone, without a word: "
            "run it and ask by --server (ask_server)",
            path=checkpoint.path,
        )
    modules = read_modules(base, task_type=task_type(checkpoint))
    source, rule = SERVERS[server]
    check = ServingCheck(server, source, checkpoint.path, modules.path)
    rule(check, checkpoint, modules)
    return check
