"""Fine-tuning: one run from settings to an adapter directory and its record."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.trainer_utils import set_seed

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import Journal, content_key
from lsrdecomp.lora.train.callbacks import (
    Clock,
    EventLog,
    LayerLog,
    ReportProgress,
    StopWhenDiverged,
)
from lsrdecomp.lora.train.compressed_start import compressed_start
from lsrdecomp.lora.train.finetune_record import (
    ADAPTER,
    LAYER_LOG,
    FinetuneRecord,
    Sample,
    Scores,
    commit,
    versions,
)
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError
from lsrdecomp.lora.train.rate_trials import TRIAL_WARMUP_STEPS
from lsrdecomp.lora.train.rates import RATE, ChosenRate, choose_rate, default_rate
from lsrdecomp.lora.train.run_data import Dataset, read_dataset
from lsrdecomp.lora.train.saving import load_written_numbers, save_adapter
from lsrdecomp.lora.train.trainable_model import (
    count_trainable,
    needs_checkpointing,
    open_model,
    written_bytes,
)
from lsrdecomp.lora.train.trainer import (
    CHECKPOINTS,
    FullBatchSampler,
    TaskTrainer,
    TextTrainer,
    check_sharding,
    evaluation_arguments,
    training_arguments,
)

if TYPE_CHECKING:
    from peft import PeftModel

    from lsrdecomp.lora.files.progress import OnStep

START = "start"
TRAINER_STATE = "trainer_state.json"  # transformers writes it last into a checkpoint


def finetune(
    settings: FinetuneSettings,
    out: str | Path,
    *,
    resume: bool = True,
    on_step: OnStep | None = None,
) -> FinetuneRecord:
    """Train an adapter and write ``out/adapter`` and ``out/record.json``.

    With ``log_every``, ``out/layers.jsonl`` too. The directory appears as a whole when the run is
    finished. Until then the run lives in the journal beside it; with ``save_every`` or
    ``patience``, the same call after a kill goes on from the last whole checkpoint there, and ends
    as an uninterrupted run would. Under `accelerate launch` every process makes this call, and the
    first writes.

    Parameters
    ----------
    settings : FinetuneSettings
    out : path
        A directory that does not exist.
    resume : bool
        False: an interrupted run to the same place with these settings is thrown away.
    on_step : callable, optional
        Called with a `ProgressUpdate` after every step of training.

    Returns
    -------
    FinetuneRecord
        As `lsrdecomp.lora.train.finetune_record.read_record` reads it back.

    Raises
    ------
    SettingsError
        If a setting does not fit the model, the task or the number of processes.
    DataError
        If a task's file holds a bad row.
    CheckpointError
        If ``out`` exists, if another run is writing there, or if an adapter directory does not fit.

    Notes
    -----
    Seeds the global generators of torch, NumPy and Python, as transformers' Trainer does.
    """
    out = Path(out)
    # 1. What does not fit is refused before any work.
    if out.exists():
        raise CheckpointError("already exists; choose another output, or remove it", path=out)
    if settings.logs is not None and not is_tensorboard_available():  # type: ignore[no-untyped-call]
        raise SettingsError("logs: TensorBoard is not installed: pip install tensorboard")
    key = content_key(settings.to_json())  # as it was asked: "auto" goes on where it was
    processes = PartialState(cpu=settings.device == "cpu")
    # The data set evaluates in the precision of the training.
    settings = _with_precision(settings)
    with processes.local_main_process_first():
        dataset = read_dataset(settings)
    _check_shares_of_batch(settings, processes.num_processes)
    # 2. The run, in the journal beside its output.
    with Journal.beside(out, reads_only=not processes.is_main_process) as journal:
        run = journal.directory(key)
        if processes.is_main_process:
            _prepare_directory(run, resume)
        processes.wait_for_everyone()
        try:
            with processes.main_process_first():
                start = settings
                if settings.ratio is not None:
                    start = compressed_start(settings, dataset, run / START)
            model, tokenizer = open_model(start, dataset.base, dataset.outputs)
            record = _train(settings, dataset, model, tokenizer, run, on_step)
        except BaseException:
            has_checkpoint = any((run / CHECKPOINTS).glob("checkpoint-*"))
            if processes.is_main_process and not has_checkpoint:
                shutil.rmtree(run, ignore_errors=True)  # nothing to go on from
            raise
        # 3. The directory of the run becomes the output.
        if processes.is_main_process:
            record.write(run)
            for name in (CHECKPOINTS, START):
                shutil.rmtree(run / name, ignore_errors=True)
            (run / RATE).unlink(missing_ok=True)
            run.replace(out.absolute())
        processes.wait_for_everyone()
    return record


def evaluate(settings: FinetuneSettings) -> Scores:
    """Score the adapter directory ``settings.init``, or the bare start, on dev without training.

    Parameters
    ----------
    settings : FinetuneSettings
        Of a run; settings of training do not matter.

    Returns
    -------
    Scores

    Raises
    ------
    SettingsError, DataError, CheckpointError
        As `finetune` does.
    """
    settings = _with_precision(settings)
    dataset = read_dataset(settings)
    with TemporaryDirectory() as directory:
        if settings.ratio is not None:
            settings = compressed_start(settings, dataset, Path(directory))
        model, tokenizer = open_model(settings, dataset.base, dataset.outputs)
        # No step is made, but a trainer wants a rate.
        settings = settings.replace(learning_rate=default_rate(settings.method, model))
        arguments = evaluation_arguments(settings, Path(directory))
        trainer_class = TextTrainer if settings.is_language else TaskTrainer
        trainer = trainer_class(model, tokenizer, settings, arguments, dataset=dataset)
        return dataset.evaluate_dev(trainer)


def _check_shares_of_batch(settings: FinetuneSettings, processes: int) -> None:
    """Refuse a batch that the processes, and the pieces of each, cannot share."""
    if settings.batch % (processes * settings.accumulate):
        pieces = f" in {settings.accumulate} pieces each" if settings.accumulate > 1 else ""
        raise SettingsError(
            f"batch = {settings.batch} cannot be shared by {processes} processes{pieces}"
        )


def _with_precision(settings: FinetuneSettings) -> FinetuneSettings:
    """Replace ``auto`` by the precision it stands for here: bfloat16 on a GPU that has it."""
    if settings.precision != "auto":
        return settings
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(False)
    return settings.replace(precision="bfloat16" if has_bfloat16 else "float32")


def _prepare_directory(run: Path, resume: bool) -> None:
    """Make the directory of a run, or keep of an interrupted one the checkpoints that are whole."""
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    for checkpoint in (run / CHECKPOINTS).glob("checkpoint-*"):
        if not _is_whole(checkpoint):
            shutil.rmtree(checkpoint)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


# -- the training of a run -------------------------------------------------------------------------


def _train(
    settings: FinetuneSettings,
    dataset: Dataset,
    model: PeftModel,
    tokenizer: Any,
    run: Path,
    on_step: OnStep | None,
) -> FinetuneRecord:
    """Train, save the adapter in the directory of the run, and evaluate what was saved."""
    # 1. The loop with its learning rate, and what the start scores and says.
    settings = _with_gradient_checkpointing(settings, dataset, model)
    parameters = count_trainable(model)
    loop = _Loop(dataset, model, tokenizer, run)
    choice = _choose_rate(loop, settings, on_step)
    settings = settings.replace(learning_rate=choice.rate)
    layer_log = LayerLog(run / LAYER_LOG)
    event_log = None if settings.logs is None else EventLog(settings.logs)
    trainer = loop.trainer(settings, _callbacks(settings, layer_log, event_log, on_step))
    start = None
    answers_before: tuple[str, ...] = ()
    if _measures_start(settings, trainer):
        start = dataset.evaluate_dev(trainer)
        answers_before = dataset.answers(trainer) if settings.init else ()
    # 2. Training, from the last checkpoint if a run was killed; the adapter on disk.
    costs = _train_from_last_checkpoint(trainer, settings, run, layer_log)
    _save(trainer, model, settings, run)
    # 3. The scores of the numbers that were written.
    load_written_numbers(model, run)
    end = _End(
        dataset.evaluate_dev(trainer),
        dataset.evaluate_validation(trainer),
        dataset.samples(trainer, answers_before),
    )
    if event_log is not None:
        event_log.close()
    return _record(settings, dataset, trainer, run, parameters, choice, start, costs, end)


def _choose_rate(loop: _Loop, settings: FinetuneSettings, on_step: OnStep | None) -> ChosenRate:
    """Return the learning rate of a run, by trials where settings ask for them."""
    steps = settings.training_steps(loop.sampler(settings).batches)
    run_trial = partial(_run_trial, loop, settings, on_step)
    return choose_rate(settings, loop.model, steps, run_trial, loop.run / RATE)


def _measures_start(settings: FinetuneSettings, trainer: TaskTrainer | TextTrainer) -> bool:
    """Return whether dev is evaluated before the first step, too."""
    if settings.measure_start is None:
        return settings.init is not None and not trainer.is_fsdp_enabled
    return settings.measure_start


@dataclass(frozen=True, slots=True)
class _End:
    """What was measured after the training."""

    dev: Scores
    validation: Scores | None
    samples: tuple[Sample, ...]


def _record(
    settings: FinetuneSettings,
    dataset: Dataset,
    trainer: TaskTrainer | TextTrainer,
    run: Path,
    parameters: tuple[int, int],
    choice: ChosenRate,
    start: Scores | None,
    costs: _Costs,
    end: _End,
) -> FinetuneRecord:
    """Gather the record of a finished training."""
    adapter_parameters, head_parameters = parameters
    adapter_bytes, file_bytes = written_bytes(run / ADAPTER)
    state = trainer.state
    return FinetuneRecord(
        settings=settings,
        start=start,
        dev=end.dev,
        validation=end.validation,
        baseline=dataset.baseline,
        adapter_parameters=adapter_parameters,
        head_parameters=head_parameters,
        adapter_bytes=adapter_bytes,
        file_bytes=file_bytes,
        train_examples=len(dataset.train),
        steps=state.global_step,
        best_step=state.best_global_step if settings.patience is not None else None,
        losses=_logged_losses(state.log_history),
        wall_seconds=costs.wall_seconds,
        step_seconds=costs.step_seconds,
        peak_bytes=costs.peak_bytes,
        device=trainer.args.device.type,
        processes=trainer.args.world_size,
        versions=versions(),
        commit=commit(),
        samples=end.samples,
        rate_trials=choice.trials,
    )


def _with_gradient_checkpointing(
    settings: FinetuneSettings, dataset: Dataset, model: PeftModel
) -> FinetuneSettings:
    """Decide by the free memory whether activations are kept, where settings leave that open."""
    if settings.gradient_checkpointing is not None:
        return settings
    tokens = max(dataset.lengths) if settings.is_language else settings.max_length
    rows = settings.batch // (PartialState().num_processes * settings.accumulate)
    return settings.replace(gradient_checkpointing=needs_checkpointing(model, tokens * rows))


@dataclass(frozen=True, slots=True)
class _Loop:
    """What every training loop of a run shares: the run itself, and trials of learning rates."""

    dataset: Dataset
    model: PeftModel
    tokenizer: Any
    run: Path

    def sampler(self, settings: FinetuneSettings) -> FullBatchSampler:
        """Return the order of the training examples."""
        return FullBatchSampler(self.dataset.lengths, settings.batch, settings.seed)

    def trainer(
        self, settings: FinetuneSettings, callbacks: list[TrainerCallback]
    ) -> TaskTrainer | TextTrainer:
        """Make a training loop as settings say, with what is to be called beside it."""
        sampler = self.sampler(settings)
        steps = settings.training_steps(sampler.batches)
        arguments = training_arguments(settings, self.run, steps, sampler.batches)
        trainer_class = TextTrainer if settings.is_language else TaskTrainer
        trainer = trainer_class(
            self.model,
            self.tokenizer,
            settings,
            arguments,
            dataset=self.dataset,
            sampler=sampler,
            callbacks=callbacks,
        )
        if trainer.is_fsdp_enabled:
            check_sharding(trainer.accelerator.state.fsdp_plugin.fsdp_version, settings)
        return trainer


def _callbacks(
    settings: FinetuneSettings,
    layer_log: LayerLog,
    event_log: EventLog | None,
    on_step: OnStep | None,
) -> list[TrainerCallback]:
    """Return what is called beside the training of a run."""
    # The clock comes after the log of layers, which takes time of its own.
    callbacks: list[TrainerCallback] = []
    if settings.log_every:
        callbacks.append(layer_log)
    callbacks += [Clock(), StopWhenDiverged()]
    if event_log is not None:
        callbacks.append(event_log)
    if on_step is not None:
        callbacks.append(ReportProgress(on_step))
    if settings.patience is not None:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    return callbacks


def _run_trial(
    loop: _Loop, settings: FinetuneSettings, on_step: OnStep | None, rate: float, steps: int
) -> list[float]:
    """Train for a few steps with a learning rate; return the loss before each."""
    trial = settings.replace(
        learning_rate=rate,
        steps=steps,
        epochs=None,
        scheduler="constant_with_warmup",
        warmup=min(0.5, TRIAL_WARMUP_STEPS / steps),
        log_every=1,
        save_every=0,
        patience=None,
        evaluate_every=None,
    )
    callbacks: list[TrainerCallback] = [StopWhenDiverged()]
    if on_step is not None:
        callbacks.append(ReportProgress(on_step, f"trying a rate of {rate:g}"))
    trainer = loop.trainer(trial, callbacks)
    if trainer.is_fsdp_enabled:
        raise SettingsError(
            "learning_rate auto tries rates on one model in turn, but FSDP shards it together "
            "with its optimizer: give a rate, or launch without FSDP"
        )
    set_seed(settings.seed)
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@dataclass(frozen=True, slots=True)
class _Costs:
    """Time and memory of a training."""

    wall_seconds: float
    step_seconds: float
    peak_bytes: int | None


def _train_from_last_checkpoint(
    trainer: TaskTrainer | TextTrainer, settings: FinetuneSettings, run: Path, layer_log: LayerLog
) -> _Costs:
    """Train to the end, from the last checkpoint of a run that was killed."""
    checkpoints = (run / CHECKPOINTS).glob("checkpoint-*")
    last = max(checkpoints, key=_step_of, default=None)
    if last is not None and trainer.is_world_process_zero():
        layer_log.resume(_step_of(last))
    set_seed(settings.seed)  # what was evaluated before must not move the dropout
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    # Resuming makes callbacks anew, so the clock is that of the trainer.
    callbacks = trainer.callback_handler.callbacks
    clock = next(callback for callback in callbacks if isinstance(callback, Clock))
    step_seconds = statistics.median(clock.steps) if clock.steps else 0.0
    return _Costs(clock.seconds, step_seconds, _peak_bytes())


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _peak_bytes() -> int | None:
    """Return the peak memory of the accelerator while it trained, or of the process on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _save(
    trainer: TaskTrainer | TextTrainer, model: PeftModel, settings: FinetuneSettings, run: Path
) -> None:
    """Save the adapter, of sharded parameters gathered."""
    tensors = None
    storage = settings.storage
    if trainer.is_fsdp_enabled:
        tensors = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        storage = "float32"
    if trainer.is_world_process_zero():
        save_adapter(model, run, tensors, storage=storage, like=settings.init)
    trainer.accelerator.wait_for_everyone()


def _logged_losses(
    log_history: list[dict[str, float]],
) -> tuple[tuple[int, float | None], ...]:
    """Return (step, mean training loss since the entry before); None for one that is not finite."""
    losses: list[tuple[int, float | None]] = []
    for entry in log_history:
        if "loss" in entry:
            loss = float(entry["loss"])
            losses.append((int(entry["step"]), loss if math.isfinite(loss) else None))
    return tuple(losses)
