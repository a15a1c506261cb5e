"""An adapter in a server, without running it: which of its layers would act, and why others not.

Of vLLM, SGLang, TGI and LoRAX the installed package's own loader is asked. Of the others there are
rules, and each says what was read to write it. Servers change: a check that passes is a reason to
try, not a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints import BaseModules, Checkpoint, read_modules
from lsrdecomp.errors import LsrError, UnsupportedError, unknown
from lsrdecomp.serving import images, text
from lsrdecomp.serving.adapter import read_adapter, task_type
from lsrdecomp.serving.loaded import TITLES, check_loaded
from lsrdecomp.serving.report import ServingCheck

if TYPE_CHECKING:
    from pathlib import Path

Rule = Callable[[ServingCheck, Checkpoint, BaseModules], None]
"""Fills a check with the fate of every layer of an adapter on a base."""

RULES: dict[str, tuple[str, Rule]] = {
    "peft": ("PEFT 0.21.2: tuners_utils.py, utils/save_and_load.py", text.peft),
    "llama.cpp": ("llama.cpp 0650ea8c05bc: src/llama-adapter.cpp", text.llama_cpp),
    "diffusers": (
        "diffusers 0.42.1: loaders/lora_base.py, peft.py, lora_conversion_utils.py",
        images.diffusers,
    ),
    "kohya": ("kohya-ss/sd-scripts 48d368fa5577: networks/lora.py", images.kohya),
}
"""By the name that `check_served` takes: what was read to write the rule, with version or commit,
and the rule."""
SERVERS = (*RULES, *TITLES)
"""Servers that `check_served` knows: those by rules, and those whose own loader is run."""


def check_served(
    adapter: str | Path, server: str, base: str | Path, *, python: str | Path | None = None
) -> ServingCheck:
    """Return which layers of an adapter a server would apply to a base.

    Parameters
    ----------
    adapter : path
        What would be handed to the server: a directory, a safetensors file, or a GGUF file.
    server : str
        One of `SERVERS`.
    base : path
        As `read_modules` takes it.
    python : path, optional
        For vLLM, SGLang, TGI and LoRAX: the interpreter of the environment that serves, whose
        loader is run; absent, this one. Where it has no such package, names, sizes and the form of
        the file are compared instead, and the check says so.

    Returns
    -------
    ServingCheck
        The fate of every layer, and why a file would be refused as a whole.

    Raises
    ------
    LsrError
        For a server that is not known here, a package that is missing, or an interpreter that
        cannot be run.
    CheckpointError
        If the adapter or the base cannot be read.
    UnsupportedError
        For experts that are stored stacked.
    """
    if server not in SERVERS:
        raise LsrError(f"nothing is known of the server {unknown(server, SERVERS)}")
    if python is not None and server not in TITLES:
        raise LsrError(
            f"--python names the interpreter of {', '.join(TITLES)}, and {server} goes by rules"
        )
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
    if server in TITLES:
        check = ServingCheck(server, "", checkpoint.path, modules.path)
        check_loaded(check, checkpoint, modules, python)
        return check
    source, rule = RULES[server]
    check = ServingCheck(server, f"rules read in {source}", checkpoint.path, modules.path)
    rule(check, checkpoint, modules)
    return check
