"""Settings of a run in the words of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from lsrdecomp.training.settings import FinetuneSettings, SettingsError

CHECKPOINTS = "checkpoints"
EVALUATION_BATCH = 64
RECOMPUTE: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def common_arguments(settings: FinetuneSettings, place: Path) -> dict[str, Any]:
    """What training and judging share."""
    return {
        "output_dir": str(place),
        "per_device_eval_batch_size": EVALUATION_BATCH,
        "seed": settings.seed,
        "bf16": settings.precision != "float32",
        # Without this, transformers refuses bfloat16 where there is only a CPU.
        "use_cpu": settings.device == "cpu" or (settings.device == "auto" and not torch.accelerator.is_available()),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "report_to": list(settings.report_to) or "none",
        "average_tokens_across_devices": False,
        "ddp_find_unused_parameters": False,
    }


def training_arguments(settings: FinetuneSettings, run: Path, steps: int, epoch: int) -> TrainingArguments:
    """Everything for a run of ``steps`` in the directory ``run``, with ``epoch`` steps to an epoch.

    Raises
    ------
    SettingsError
        If transformers refuses a setting, such as bfloat16 on a device without it.
    """
    processes = PartialState().num_processes
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch sees none here; auto takes what there is")
    measure = settings.evaluate_every or epoch
    early: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": measure,
        "save_strategy": "steps",
        "save_steps": measure,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "restore_callback_states_from_checkpoint": True,
    }
    plain: dict[str, Any] = {
        "save_strategy": "steps" if settings.save_every else "no",
        "save_steps": settings.save_every or 500,
        "save_total_limit": 2,
    }
    try:
        return TrainingArguments(
            **common_arguments(settings, run / CHECKPOINTS),
            max_steps=steps,
            per_device_train_batch_size=settings.batch // processes,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=round(settings.warmup * steps),
            logging_strategy="steps" if settings.log_every else "no",
            logging_steps=settings.log_every or 500,
            logging_nan_inf_filter=False,
            **(RECOMPUTE if settings.gradient_checkpointing else {}),
            **(plain if settings.patience is None else early),
        )
    except (ValueError, ImportError) as error:
        raise SettingsError(str(error)) from error


def check_sharding(version: int, settings: FinetuneSettings) -> None:
    """Refuse what is not to be had where accelerate shards the model over devices.

    Raises
    ------
    SettingsError
        For FSDP's first version, which holds an adapter and its frozen base in one flat parameter, and for
        ``measure_start``.
    """
    if version != 2:
        raise SettingsError(f"FSDP version {version} is not supported; launch with --fsdp_version 2")
    if settings.measure_start:
        raise SettingsError(
            "measure_start judges the model before it is trained, but FSDP shards it together with its optimizer: "
            "leave measure_start out, or launch without FSDP"
        )
