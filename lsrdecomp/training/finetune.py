"""Fine-tuning: one run from settings to an adapter directory and its record."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import PartialState
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

from lsrdecomp.errors import CheckpointError
from lsrdecomp.training.arguments import CHECKPOINTS, check_sharding, common_arguments, training_arguments
from lsrdecomp.training.callbacks import Clock, LayerLog, Progress, StopWhenLost
from lsrdecomp.training.dataset import Dataset, read_dataset
from lsrdecomp.training.encoding import WholeBatches
from lsrdecomp.training.model import LoadedModel, counts, open_model, written_bytes
from lsrdecomp.training.record import ADAPTER, LAYER_LOG, Record, Scores, commit, versions
from lsrdecomp.training.scoring import peak_bytes, reset_peak
from lsrdecomp.training.settings import FinetuneSettings, SettingsError
from lsrdecomp.training.trainer import AdapterTrainer, trainer_of

SETTINGS, CLOCK = "settings.json", "clock.json"
STATE = "trainer_state.json"  # transformers writes it last into a checkpoint
DEFAULT_EPOCHS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """How far a run is, given to ``on_step`` after every step."""

    step: int
    steps: int


def finetune(
    settings: FinetuneSettings,
    out: str | Path,
    *,
    resume: bool = True,
    on_step: Callable[[Step], None] | None = None,
) -> Record:
    """Train an adapter and write ``out/adapter``, ``out/record.json`` and, with ``log_every``, ``out/layers.jsonl``.

    The directory appears as a whole when the run is finished. Until then the run lives in ``.<name>.run`` beside it;
    with ``save_every`` or ``patience``, the same call after a kill goes on from the last whole checkpoint there, and
    ends as an uninterrupted run would. Under `accelerate launch` every process makes this call, and the first writes.

    Parameters
    ----------
    settings : FinetuneSettings
    out : path
        A directory that does not exist.
    resume : bool
        False: an interrupted run to the same place is thrown away.
    on_step : callable, optional
        Called with a `Step` after every step.

    Returns
    -------
    Record
        As `lsrdecomp.training.record.read_record` reads it back.

    Raises
    ------
    SettingsError
        If a setting does not fit the model, the task or the number of processes.
    TaskError
        If a task's file holds a bad row.
    CheckpointError
        If ``out`` exists, if an interrupted run there had other settings, or if an adapter directory does not fit.

    Notes
    -----
    Seeds the global generators of torch, NumPy and Python, as transformers' Trainer does.
    """
    out = Path(out)
    if out.exists():
        raise CheckpointError("already exists; choose another output, or remove it", path=out)
    state = PartialState(cpu=settings.device == "cpu")
    with state.local_main_process_first():
        dataset = read_dataset(settings)
    if settings.batch % state.num_processes:
        raise SettingsError(f"batch = {settings.batch} cannot be shared by {state.num_processes} processes")
    model = open_model(settings, dataset.base, dataset.outputs)
    run = out.absolute().with_name(f".{out.absolute().name}.run")
    if state.is_main_process:
        _enter(run, settings, resume)
    state.wait_for_everyone()
    try:
        record = _train(settings, dataset, model, run, on_step)
    except BaseException:
        if state.is_main_process and not any((run / CHECKPOINTS).glob("checkpoint-*")):
            shutil.rmtree(run, ignore_errors=True)  # nothing to go on from
        raise
    if state.is_main_process:
        record.write(run)
        shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
        for file in (SETTINGS, CLOCK):
            (run / file).unlink(missing_ok=True)
        os.replace(run, out.absolute())
    state.wait_for_everyone()
    return record


def evaluate(settings: FinetuneSettings) -> Scores:
    """Answers on dev of the adapter directory ``settings.init``, or of the bare start, judged without training.

    Raises
    ------
    SettingsError, TaskError, CheckpointError
        As `finetune` does.
    """
    dataset = read_dataset(settings)
    model = open_model(settings, dataset.base, dataset.outputs)
    with TemporaryDirectory() as place:
        args = TrainingArguments(**common_arguments(settings, Path(place)))
        trainer = trainer_of(dataset)(model, settings, args, dataset=dataset, callbacks=[])
        trainer.remove_callback(PrinterCallback)
        return dataset.judge_dev(trainer)


def _enter(run: Path, settings: FinetuneSettings, resume: bool) -> None:
    """Make the place of the run, or find in it an interrupted one with these settings."""
    file = run / SETTINGS
    if run.exists() and not resume:
        shutil.rmtree(run)
    if file.exists():
        if json.loads(file.read_text(encoding="utf-8")) != settings.to_json():
            raise CheckpointError(
                "an interrupted run with other settings is here; remove it, or start afresh without resuming", path=run
            )
    else:
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings.to_json()), encoding="utf-8")
    for checkpoint in (run / CHECKPOINTS).glob("checkpoint-*"):
        if not _whole(checkpoint):
            shutil.rmtree(checkpoint)


def _whole(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _train(
    settings: FinetuneSettings,
    dataset: Dataset,
    model: LoadedModel,
    run: Path,
    on_step: Callable[[Step], None] | None,
) -> Record:
    sampler = WholeBatches(dataset.lengths, settings.batch, settings.seed)
    steps = settings.steps or math.ceil((settings.epochs or DEFAULT_EPOCHS) * sampler.batches)
    args = training_arguments(settings, run, steps, sampler.batches)
    clock, layers = Clock(run / CLOCK), LayerLog(run / LAYER_LOG)
    callbacks: list[TrainerCallback] = [layers] if settings.log_every else []
    callbacks += [clock, StopWhenLost()]  # the clock after what takes time
    if on_step is not None:
        callbacks.append(Progress(lambda step, steps: on_step(Step(step, steps))))
    if settings.patience is not None:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    adapter_parameters, head_parameters = counts(model)
    try:
        trainer: AdapterTrainer = trainer_of(dataset)(
            model,
            settings,
            args,
            dataset=dataset,
            sampler=sampler,
            callbacks=callbacks,
            train_dataset=dataset.train,
            eval_dataset=dataset.validation or None,
        )
    except (ValueError, RuntimeError) as error:  # what to report to is unknown or not installed
        raise SettingsError(str(error)) from error
    if trainer.is_fsdp_enabled:
        check_sharding(trainer.accelerator.state.fsdp_plugin.fsdp_version, settings)
    trainer.remove_callback(PrinterCallback)
    start = dataset.judge_dev(trainer) if settings.measure_start else None
    last = max((run / CHECKPOINTS).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), default=None)
    if last is not None:
        step = int(last.name.split("-")[1])
        clock.resume(step)
        if trainer.is_world_process_zero():
            layers.resume(step)
    set_seed(settings.seed)  # what was judged before must not move the dropout
    reset_peak()
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    peak = peak_bytes()
    dev, validation = dataset.judge_dev(trainer), dataset.judge_validation(trainer)
    said = dataset.samples(trainer)
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        model.model.save_pretrained(str(run / ADAPTER), state_dict=whole)
    trainer.accelerator.wait_for_everyone()
    adapter_bytes, file_bytes = written_bytes(run / ADAPTER)
    history = trainer.state.log_history
    return Record(
        settings=settings,
        start=start,
        dev=dev,
        validation=validation,
        baseline=dataset.baseline,
        adapter_parameters=adapter_parameters,
        head_parameters=head_parameters,
        adapter_bytes=adapter_bytes,
        file_bytes=file_bytes,
        train_examples=len(dataset.train),
        steps=trainer.state.global_step,
        best_step=trainer.state.best_global_step if settings.patience is not None else None,
        losses=tuple(
            (int(entry["step"]), float(entry["loss"]) if math.isfinite(entry["loss"]) else None)
            for entry in history
            if "loss" in entry
        ),
        wall_seconds=clock.seconds,
        step_seconds=clock.step_seconds,
        peak_bytes=peak,
        device=trainer.args.device.type,
        processes=trainer.args.world_size,
        versions=versions(),
        commit=commit(),
        samples=said,
    )
