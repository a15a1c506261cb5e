"""Fine-tuning: one run from settings to an adapter directory and its record."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import set_seed

from lsrdecomp.calibration.base_model import load_base
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.checkpoints import Checkpoint, Journal, content_key, open_checkpoint
from lsrdecomp.checkpoints.packed_index import stored_layers
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.checkpoints.writers.lsr import pack_lsr
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.layers import layer_product
from lsrdecomp.compression.quantize import INTEGER_BITS, coded_product, stored_like
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.training.callbacks import Clock, LayerLog, Progress, StopWhenLost
from lsrdecomp.training.dataset import Dataset, read_dataset
from lsrdecomp.training.model import counts, needs_checkpointing, open_model, written_bytes
from lsrdecomp.training.record import ADAPTER, LAYER_LOG, FinetuneRecord, Scores, commit, versions
from lsrdecomp.training.settings import FinetuneSettings, SettingsError
from lsrdecomp.training.trainer import (
    CHECKPOINTS,
    TaskTrainer,
    TextTrainer,
    WholeBatches,
    check_sharding,
    judging_arguments,
    training_arguments,
)

if TYPE_CHECKING:
    from peft import PeftModel

    from lsrdecomp.checkpoints.progress import OnStep
    from lsrdecomp.formats.stored import Stored

START = "start"
TRAINER_STATE = "trainer_state.json"  # transformers writes it last into a checkpoint
DEFAULT_EPOCHS = 3


def finetune(
    settings: FinetuneSettings,
    out: str | Path,
    *,
    resume: bool = True,
    on_step: OnStep | None = None,
) -> FinetuneRecord:
    """Train an adapter and write ``out/adapter``, ``out/record.json`` and, with ``log_every``, ``out/layers.jsonl``.

    The directory appears as a whole when the run is finished. Until then the run lives in the
    journal beside it; with ``save_every`` or ``patience``, the same call after a kill goes on from
    the last whole checkpoint there, and ends as an uninterrupted run would. Under `accelerate
    launch` every process makes this call, and the first writes.

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
        As `lsrdecomp.training.record.read_record` reads it back.

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
    if out.exists():
        raise CheckpointError("already exists; choose another output, or remove it", path=out)
    state = PartialState(cpu=settings.device == "cpu")
    with state.local_main_process_first():
        dataset = read_dataset(settings)
    settings, wanted = _settled(settings), settings
    if settings.batch % (state.num_processes * settings.accumulate):
        pieces = f" in {settings.accumulate} pieces each" if settings.accumulate > 1 else ""
        raise SettingsError(
            f"batch = {settings.batch} cannot be shared by {state.num_processes} processes{pieces}"
        )
    with Journal.beside(out, reads_only=not state.is_main_process) as journal:
        run = journal.directory(content_key(wanted.to_json()))
        if state.is_main_process:
            _enter(run, resume)
        state.wait_for_everyone()
        try:
            with state.main_process_first():
                start = (
                    compressed_start(settings, dataset, run / START)
                    if settings.ratio is not None
                    else settings
                )
            record = _train(
                settings, dataset, *open_model(start, dataset.base, dataset.outputs), run, on_step
            )
        except BaseException:
            if state.is_main_process and not any((run / CHECKPOINTS).glob("checkpoint-*")):
                shutil.rmtree(run, ignore_errors=True)  # nothing to go on from
            raise
        if state.is_main_process:
            record.write(run)
            for directory in (CHECKPOINTS, START):
                shutil.rmtree(run / directory, ignore_errors=True)
            os.replace(run, out.absolute())
        state.wait_for_everyone()
    return record


def evaluate(settings: FinetuneSettings) -> Scores:
    """Answers on dev of the adapter directory ``settings.init``, or of the bare start, judged without training.

    Parameters
    ----------
    settings : FinetuneSettings
        Of a run; what is about training does not matter.

    Returns
    -------
    Scores

    Raises
    ------
    SettingsError, DataError, CheckpointError
        As `finetune` does.
    """
    settings, dataset = _settled(settings), read_dataset(settings)
    with TemporaryDirectory() as directory:
        if settings.ratio is not None:
            settings = compressed_start(settings, dataset, Path(directory))
        opened = open_model(settings, dataset.base, dataset.outputs)
        trainer_class = TextTrainer if settings.is_language else TaskTrainer
        trainer = trainer_class(
            *opened, settings, judging_arguments(settings, Path(directory)), dataset=dataset
        )
        return dataset.judge_dev(trainer)


def compressed_start(
    settings: FinetuneSettings, dataset: Dataset, directory: Path
) -> FinetuneSettings:
    """The LoRA in ``init``, compressed ``ratio`` times by statistics of the training examples, as a new ``init``.

    The statistics are of 128 examples of a language model and 512 of a task: a pass forward and
    back each. What is in ``directory`` already is not made again.
    """
    adapter, statistics = directory / ADAPTER, directory / "statistics"
    if not adapter.exists():
        if not (statistics / METADATA).exists():
            on_gpu = settings.device != "cpu" and torch.cuda.is_available()
            dtype = "bfloat16" if settings.precision == "bfloat16" else "float32"
            base = load_base(
                dataset.base, str(settings.init), dtype=dtype, device="cuda" if on_gpu else "cpu"
            )
            rounds = dataset.questions(base, size=settings.batch, seed=settings.seed)
            samples = min(128 if settings.is_language else 512, len(dataset.train))
            calibrate(
                base, rounds, out=statistics, seed=settings.seed, samples=samples, effect=False
            )
        plan = CompressionPlan(ratio=settings.ratio, storage=settings.storage or "float32")
        lora = open_checkpoint(str(settings.init))
        search_adapter(lora, [plan], statistics=read_statistics(statistics)).compress(plan).save(
            adapter
        )
    return settings.replace(init=str(adapter), ratio=None)


def _settled(settings: FinetuneSettings) -> FinetuneSettings:
    """With the precision that ``auto`` stands for here: bfloat16 on a GPU that has it."""
    if settings.precision != "auto":
        return settings
    on_gpu = (
        settings.device != "cpu"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(False)
    )
    return settings.replace(precision="bfloat16" if on_gpu else "float32")


def _enter(run: Path, resume: bool) -> None:
    """Make the place of the run, or keep of an interrupted one with these settings what is whole."""
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    for checkpoint in (run / CHECKPOINTS).glob("checkpoint-*"):
        if not _whole(checkpoint):
            shutil.rmtree(checkpoint)


def _whole(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _train(
    settings: FinetuneSettings,
    dataset: Dataset,
    model: PeftModel,
    tokenizer: Any,
    run: Path,
    on_step: OnStep | None,
) -> FinetuneRecord:
    # 1. The loop, and what the untrained adapter answers where that is asked for.
    if settings.gradient_checkpointing is None:
        tokens = max(dataset.lengths) if settings.is_language else settings.max_length
        rows = settings.batch // (PartialState().num_processes * settings.accumulate)
        settings = settings.replace(
            gradient_checkpointing=needs_checkpointing(model, tokens * rows)
        )
    adapter_parameters, head_parameters = counts(model)
    layers = LayerLog(run / LAYER_LOG)
    trainer = _trainer(settings, dataset, model, tokenizer, run, layers, on_step)
    start = dataset.judge_dev(trainer) if settings.measure_start else None
    # 2. Training, from the last checkpoint if a run was killed.
    last = max(
        (run / CHECKPOINTS).glob("checkpoint-*"),
        key=lambda path: int(path.name.split("-")[1]),
        default=None,
    )
    if last is not None and trainer.is_world_process_zero():
        layers.resume(int(last.name.split("-")[1]))
    set_seed(settings.seed)  # what was judged before must not move the dropout
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    peak = _peak_bytes()
    clock = next(
        each for each in trainer.callback_handler.callbacks if isinstance(each, Clock)
    )  # resuming makes anew
    # 3. The adapter on disk, of sharded parameters gathered; and what it answers, with the numbers
    # that were written.
    whole = (
        trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.is_fsdp_enabled
        else None
    )
    if trainer.is_world_process_zero():
        storage = "float32" if trainer.is_fsdp_enabled else settings.storage
        save_adapter(model, run, whole, storage=storage, like=settings.init)
    trainer.accelerator.wait_for_everyone()
    if _is_lsr(model) and any(
        layer.dtype != "float32" for layer in open_checkpoint(run / ADAPTER).layers
    ):
        model.load_adapter(run / ADAPTER, "written")
        model.set_adapter("written")
    dev, validation = dataset.judge_dev(trainer), dataset.judge_validation(trainer)
    samples = dataset.samples(trainer)
    # 4. The record.
    adapter_bytes, file_bytes = written_bytes(run / ADAPTER)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return FinetuneRecord(
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
            for entry in logged
        ),
        wall_seconds=clock.seconds,
        step_seconds=statistics.median(clock.steps) if clock.steps else 0.0,
        peak_bytes=peak,
        device=trainer.args.device.type,
        processes=trainer.args.world_size,
        versions=versions(),
        commit=commit(),
        samples=samples,
    )


def save_adapter(
    model: PeftModel,
    run: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    storage: str | None = None,
    like: str | None = None,
) -> None:
    """The adapter as PEFT saves it; of LSR all numbers and sizes packed, which takes a fraction of the bytes.

    Parameters
    ----------
    model : PeftModel
    run : Path
        Its directory ``adapter`` is written.
    tensors : dict, optional
        Of a sharded model, gathered.
    storage : str, optional
        Of LSR's factors, such as ``"int4"``; absent, that of each layer in ``like``, else float32.
    like : str, optional
        Adapter directory that was trained on.
    """
    with TemporaryDirectory(dir=run) as folder:
        model.save_pretrained(folder, state_dict=tensors)
        if _is_lsr(model):
            try:
                trained = open_checkpoint(folder)
                stored, floats = _stored(trained, storage, like)
                pack_lsr(trained, run / ADAPTER, storage=floats, stored=stored, force=True)
                return
            except LsrError:  # DoRA's magnitudes, which packed directories do not carry, or a number beyond the type
                pass
        shutil.copytree(folder, run / ADAPTER, dirs_exist_ok=True)


def _is_lsr(model: PeftModel) -> bool:
    return bool(model.peft_config[model.active_adapter].peft_type == "LSR")


def _stored(
    trained: Checkpoint, storage: str | None, like: str | None
) -> tuple[dict[str, Stored], str]:
    """Return the layers that are not stored in floats, and the floating type of the others."""
    if storage in INTEGER_BITS:
        bits = INTEGER_BITS[storage]
        coded = {layer.name: coded_product(layer_product(layer), bits) for layer in trained.layers}
        return dict(coded), "float32"
    if storage is not None or like is None:
        return {}, storage or "float32"
    old = open_checkpoint(like)
    others = {
        name: stored_like(stored, layer_product(trained.layer(name)))
        for name, stored in stored_layers(old).items()
        if not isinstance(stored, FloatProduct)
    }
    floats = [layer.dtype for layer in old.layers if layer.name not in others]
    return others, floats[0] if floats else "float32"


def _trainer(
    settings: FinetuneSettings,
    dataset: Dataset,
    model: PeftModel,
    tokenizer: Any,
    run: Path,
    layers: LayerLog,
    on_step: OnStep | None,
) -> TaskTrainer | TextTrainer:
    """The training loop of a run, with what is to be called beside it."""
    sampler = WholeBatches(dataset.lengths, settings.batch, settings.seed)
    steps = settings.steps or math.ceil((settings.epochs or DEFAULT_EPOCHS) * sampler.batches)
    callbacks: list[TrainerCallback] = [layers] if settings.log_every else []
    callbacks += [Clock(), StopWhenLost()]  # the clock after what takes time
    if on_step is not None:
        callbacks.append(Progress(on_step))
    if settings.patience is not None:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    args = training_arguments(settings, run, steps, sampler.batches)
    try:
        trainer_class = TextTrainer if settings.is_language else TaskTrainer
        trainer = trainer_class(
            model, tokenizer, settings, args, dataset=dataset, sampler=sampler, callbacks=callbacks
        )
    except (ValueError, RuntimeError) as error:  # what to report to is unknown or not installed
        raise SettingsError(str(error)) from error
    if trainer.is_fsdp_enabled:
        check_sharding(trainer.accelerator.state.fsdp_plugin.fsdp_version, settings)
    return trainer


def _peak_bytes() -> int | None:
    """Most bytes in use: tensors on the accelerator while it trained, else the process since it started."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
