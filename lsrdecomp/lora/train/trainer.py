"""The training loop: transformers' Trainer for tasks, TRL's SFTTrainer for text.

Both read batches in our order and train parameters at our rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from typing_extensions import override

from lsrdecomp.lora.base.tokens import length_sorted_batches
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError
from lsrdecomp.lora.train.trainable_model import trainable_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from peft import PeftModel

    from lsrdecomp.lora.train.run_data import Dataset

CHECKPOINTS = "checkpoints"


class FullBatchSampler(Sampler[int]):
    """A random order of examples in batches of like length, all of them full.

    The last batch of an epoch is filled up with examples from its beginning, so that any number of
    processes that divides ``batch`` sees the same batches. The order depends on ``seed`` and
    ``epoch`` alone.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch = batch
        self.seed = seed
        self.epoch = 0

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.lengths) // self.batch)

    def __len__(self) -> int:
        """Return the examples of an epoch, those that fill the last batch up included."""
        return self.batches * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self.seed, self.epoch))
        order = np.resize(generator.permutation(len(self.lengths)), len(self))
        for batch in length_sorted_batches(order, self.lengths, self.batch, generator):
            yield from batch


class AdapterTrainer(Trainer):
    """Trains what an opened model leaves trainable; parameters of one rate are one group.

    Parameters
    ----------
    model, tokenizer
        As `open_model` opens them.
    settings : FinetuneSettings
    args : TrainingArguments
    dataset : Dataset
    sampler : FullBatchSampler, optional
        The order of the training examples; none for a model that is only evaluated.
    callbacks : sequence of TrainerCallback
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Any,
        settings: FinetuneSettings,
        args: TrainingArguments,
        *,
        dataset: Dataset,
        sampler: FullBatchSampler | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.sampler = sampler
        self.learning_rates = learning_rates(model, settings)
        follow_epochs = [] if sampler is None else [_FollowEpochs(sampler)]
        super().__init__(
            model,
            args,
            data_collator=dataset.collator(tokenizer),
            train_dataset=dataset.train,
            eval_dataset=dataset.validation or None,
            processing_class=tokenizer,
            callbacks=[*callbacks, *follow_epochs],
        )
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer of ``args`` with one group of parameters per rate.

        Vectors are not decayed.
        """
        if self.optimizer is not None:
            return self.optimizer
        wrapped: nn.Module = self.model if model is None else model  # type: ignore[assignment]
        parameters: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                is_vector = parameter.ndim < 2
                group = self.learning_rates[name], is_vector
                parameters.setdefault(group, []).append(parameter)
        groups = []
        for (rate, is_vector), of_group in parameters.items():
            decay = 0.0 if is_vector else self.args.weight_decay
            groups.append({"params": of_group, "lr": rate, "weight_decay": decay})
        optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, wrapped)  # type: ignore[arg-type]
        self.optimizer = optimizer(groups, **options)
        return self.optimizer

    @override
    def floating_point_ops(self, inputs: Any) -> int:
        """Count no operations: Trainer's estimate walks over every parameter at every step."""
        return 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Read full batches, shared out over the processes and the micro-batches of each."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_size=self.args.per_device_train_batch_size,
            sampler=self.sampler,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


class TaskTrainer(AdapterTrainer):
    """The loss is the mean of an example.

    It is the cross-entropy over classes or choices, or the squared error of scores.
    """

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Never: the loss of a batch is a mean, which Trainer divides by its micro-batches."""
        return False

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        """Ignore what Trainer finds in the model's signature."""

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean loss of a batch, with logits of shape (examples, classes or choices)."""
        labels: Tensor = inputs.pop("labels")
        logits = model(**inputs).logits.float().reshape(len(labels), -1)
        if labels.is_floating_point():
            loss = F.mse_loss(logits[:, 0], labels)
        else:
            loss = F.cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss


class TextTrainer(AdapterTrainer, SFTTrainer):
    """The loss is TRL's: the mean of the tokens of a step that count, logits formed in pieces."""

    def __init__(self, model: PeftModel, *arguments: Any, **options: Any) -> None:
        if isinstance(model.get_output_embeddings(), TrainableTokensWrapper):
            raise SettingsError(
                "the adapter trains token rows of the output layer (trainable_token_indices; a "
                "model with tied embeddings has them in both), and TRL's loss reads that layer "
                "without them; train it in a loop of your own, as any model of PEFT, or leave the "
                "rows out"
            )
        super().__init__(model, *arguments, **options)
        # TRL rounds them to bfloat16 on a quantized base; factors multiply the error up.
        for _, parameter, _ in trainable_parameters(model):
            parameter.data = parameter.data.float()


class _FollowEpochs(TrainerCallback):
    """Tells the sampler which epoch it is.

    It knows from the step alone, so that a resumed run finds its order again.
    """

    def __init__(self, sampler: FullBatchSampler) -> None:
        self.sampler = sampler

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch."""
        self.sampler.epoch = state.global_step // self.sampler.batches


def learning_rates(model: PeftModel, settings: FinetuneSettings) -> dict[str, float]:
    """Return the learning rate of every trained parameter, by name, of settings with a number."""
    rate = float(settings.learning_rate)  # type: ignore[arg-type]
    head_rate = settings.head_learning_rate
    if head_rate is None:
        head_rate = rate
    rates = {}
    for name, parameter, is_adapter in trainable_parameters(model):
        if not is_adapter:
            rates[name] = head_rate
        elif bool(parameter.detach().any()):
            rates[name] = rate
        else:
            rates[name] = rate * settings.zero_init_lr_factor
    return rates


def evaluation_arguments(
    settings: FinetuneSettings, directory: Path, **more: Any
) -> TrainingArguments:
    """Return settings of a run in the words of Trainer, as far as evaluation needs them.

    Parameters
    ----------
    settings : FinetuneSettings
    directory : Path
        Where Trainer writes.
    **more
        Further arguments of Trainer's.
    """
    cpu_is_all = settings.device == "auto" and not torch.accelerator.is_available()
    common: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_eval_batch_size": 64,
        "seed": settings.seed,
        "bf16": settings.precision != "float32",
        # Without this, transformers refuses bfloat16 where there is only a CPU.
        "use_cpu": settings.device == "cpu" or cpu_is_all,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "report_to": "none",
        "average_tokens_across_devices": settings.is_language,
        "ddp_find_unused_parameters": False,
        "gradient_checkpointing": bool(settings.gradient_checkpointing),
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    common |= more
    if not settings.is_language:
        return TrainingArguments(**common)
    return SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)


def training_arguments(
    settings: FinetuneSettings, run: Path, steps: int, epoch_steps: int
) -> TrainingArguments:
    """Return settings of a run in the words of Trainer.

    Parameters
    ----------
    settings : FinetuneSettings
    run : Path
        Its directory.
    steps : int
        Steps of the run.
    epoch_steps : int
        Steps of an epoch.

    Raises
    ------
    SettingsError
        If transformers refuses a setting, such as bfloat16 on a device without it.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch sees none here; auto takes what there is")
    processes = PartialState().num_processes
    try:
        return evaluation_arguments(
            settings,
            run / CHECKPOINTS,
            max_steps=steps,
            per_device_train_batch_size=settings.batch // (processes * settings.accumulate),
            gradient_accumulation_steps=settings.accumulate,
            learning_rate=float(settings.learning_rate),  # type: ignore[arg-type]
            optim=settings.optimizer,
            weight_decay=settings.weight_decay,
            lr_scheduler_type=settings.scheduler,
            warmup_steps=round(settings.warmup * steps),
            logging_nan_inf_filter=False,
            save_total_limit=2,
            restore_callback_states_from_checkpoint=True,
            **_events(settings, epoch_steps),
        )
    except (ValueError, ImportError) as error:
        raise SettingsError(str(error)) from error


def _events(settings: FinetuneSettings, epoch_steps: int) -> dict[str, Any]:
    """Return when a run logs, saves and is evaluated, in the words of Trainer."""
    events: dict[str, Any] = {}
    save_every = settings.save_every
    if settings.patience is not None:
        save_every = settings.evaluate_every or epoch_steps
        events = {
            "eval_strategy": "steps",
            "eval_steps": save_every,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": False,
        }
    for event, every in (("logging", settings.log_every), ("save", save_every)):
        events[f"{event}_strategy"] = "steps" if every else "no"
        if every:  # Trainer refuses 0
            events[f"{event}_steps"] = every
    return events


def check_sharding(version: int, settings: FinetuneSettings) -> None:
    """Refuse settings that do not work where accelerate shards the model over devices.

    Raises
    ------
    SettingsError
        For FSDP's first version, which holds an adapter and its frozen base in one flat parameter,
        and for ``measure_start`` and ``storage``.
    """
    if version != 2:
        raise SettingsError(
            f"FSDP version {version} is not supported; launch with --fsdp_version 2"
        )
    if settings.measure_start:
        raise SettingsError(
            "measure_start evaluates the model before it is trained, but FSDP shards it together "
            "with its optimizer: leave measure_start out, or launch without FSDP"
        )
    if settings.storage not in (None, "float32"):
        raise SettingsError(
            f"storage {settings.storage}: what FSDP shards is written in float32, since rounded "
            "numbers could not be evaluated; leave storage out, or launch without FSDP"
        )
