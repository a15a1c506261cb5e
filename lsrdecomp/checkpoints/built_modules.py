"""Names and sizes of a model that is known by its config alone: built on torch's meta device, without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.safetensors import first_line
from lsrdecomp.errors import CheckpointError, LsrError

LOADERS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""transformers' classes by PEFT's task type; without one, the config's own class."""


def built_modules(config: Path, task_type: str | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each module that has a weight of two and more axes.

    Raises
    ------
    LsrError
        Without torch, or without transformers or diffusers for a config of theirs.
    CheckpointError
        If they cannot build a model from this config.
    """
    raw = read_json(config)
    try:
        import torch

        with torch.device("meta"):
            model = _diffusers(raw) if "_class_name" in raw else _transformers(config, raw, task_type)
    except ImportError as error:
        text = f"{config}: of a config alone names come from the model it describes; without {error.name}"
        raise LsrError(f"{text}: pip install 'lsrdecomp[peft]', or name a base with weights") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"no model can be built from it: {first_line(error)}", path=config) from error
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim > 1:
            yield name, tuple(weight.shape)


def _transformers(config: Path, raw: dict[str, Any], task_type: str | None) -> Any:
    import transformers

    known = transformers.AutoConfig.from_pretrained(str(config.parent) if config.name == "config.json" else str(config))
    own = next(iter(raw.get("architectures") or ()), None)
    if task_type not in LOADERS and isinstance(own, str) and hasattr(transformers, own):
        return getattr(transformers, own)(known)
    return getattr(transformers, LOADERS.get(str(task_type), "AutoModel")).from_config(known)


def _diffusers(raw: dict[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, str(raw["_class_name"])).from_config(raw)
