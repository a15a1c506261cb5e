"""The training loop: transformers' Trainer for tasks and TRL's SFTTrainer for text, in one order and with our rates."""

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

from lsrdecomp.calibration.tokens import length_sorted_batches
from lsrdecomp.training.model import trained
from lsrdecomp.training.settings import FinetuneSettings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from peft import PeftModel

    from lsrdecomp.training.dataset import Dataset

CHECKPOINTS = "checkpoints"
EVALUATION_BATCH = 64


class WholeBatches(Sampler[int]):
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
        return self.batches * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self.seed, self.epoch))
        order = np.resize(generator.permutation(len(self.lengths)), len(self))
        for batch in length_sorted_batches(order, self.lengths, self.batch, generator):
            yield from batch


class AdapterTrainer(Trainer):
    """Trains what an opened model leaves trainable; parameters of one rate are one group of the optimizer.

    Parameters
    ----------
    model, tokenizer
        As `open_model` opens them.
    settings : FinetuneSettings
    args : TrainingArguments
    dataset : Dataset
    sampler : WholeBatches, optional
        The order of the training examples; none for a model that is only judged.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Any,
        settings: FinetuneSettings,
        args: TrainingArguments,
        *,
        dataset: Dataset,
        sampler: WholeBatches | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.sampler = sampler
        self.rates = rates(model, settings)
        super().__init__(
            model,
            args,
            data_collator=dataset.collator(tokenizer),
            train_dataset=dataset.train,
            eval_dataset=dataset.validation or None,
            processing_class=tokenizer,
            callbacks=[*callbacks, *([] if sampler is None else [_Epochs(sampler)])],
        )
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of ``args`` with one group of parameters per rate; vectors are not decayed."""
        if self.optimizer is None:
            groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
            wrapped: nn.Module = self.model if model is None else model  # type: ignore[assignment]
            for name, parameter in wrapped.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault((self.rates[name], parameter.ndim > 1), []).append(parameter)
            optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, wrapped)  # type: ignore[arg-type]
            decay = self.args.weight_decay
            self.optimizer = optimizer(
                [
                    {"params": parameters, "lr": rate, "weight_decay": decay if wide else 0.0}
                    for (rate, wide), parameters in groups.items()
                ],
                **options,
            )
        return self.optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: Trainer's estimate walks over every parameter at every step."""
        return 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Whole batches, shared out over the processes and the micro-batches of each."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_size=self.args.per_device_train_batch_size,
            sampler=self.sampler,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


class TaskTrainer(AdapterTrainer):
    """The loss is the mean of an example: cross-entropy over classes or choices, squared error for scores."""

    model_accepts_loss_kwargs = property(lambda self: False, lambda self, _: None)
    """Never: a batch's loss is a mean of its own, which Trainer then divides by the number of
    micro-batches."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch, and with it the answers, (examples, classes or choices)."""
        labels: Tensor = inputs.pop("labels")
        logits = model(**inputs).logits.float().reshape(len(labels), -1)
        loss = (
            F.mse_loss(logits[:, 0], labels)
            if labels.is_floating_point()
            else F.cross_entropy(logits, labels)
        )
        return (loss, {"logits": logits}) if return_outputs else loss


class TextTrainer(AdapterTrainer, SFTTrainer):
    """TRL's loss of a step: the mean of its tokens that count, whose logits are formed in pieces."""

    def __init__(self, model: PeftModel, *arguments: Any, **options: Any) -> None:
        if isinstance(model.get_output_embeddings(), TrainableTokensWrapper):
            raise SettingsError(
                "the adapter trains token rows of the output layer (trainable_token_indices; a model with tied "
                "embeddings has them in both), and TRL's loss reads that layer without them; train it in a loop of "
                "your own, as any model of PEFT, or leave the rows out"
            )
        super().__init__(model, *arguments, **options)
        for _, parameter, _ in trained(
            model
        ):  # TRL rounds them to bfloat16 on a quantized base; factors multiply up
            parameter.data = parameter.data.float()


class _Epochs(TrainerCallback):
    """Tells the sampler which epoch it is: from the step alone, so that a resumed run finds its order again."""

    def __init__(self, sampler: WholeBatches) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.sampler.epoch = state.global_step // self.sampler.batches


def rates(model: PeftModel, settings: FinetuneSettings) -> dict[str, float]:
    """The learning rate of every trained parameter, by name."""
    head = (
        settings.learning_rate
        if settings.head_learning_rate is None
        else settings.head_learning_rate
    )
    fast = settings.learning_rate * settings.zero_init_lr_factor
    return {
        name: head
        if not adapters
        else settings.learning_rate
        if bool(parameter.detach().any())
        else fast
        for name, parameter, adapters in trained(model)
    }


def judging_arguments(
    settings: FinetuneSettings, directory: Path, **more: Any
) -> TrainingArguments:
    """Settings of a run in the words of Trainer, as far as judging needs them, with ``more``."""
    common: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_eval_batch_size": EVALUATION_BATCH,
        "seed": settings.seed,
        "bf16": settings.precision != "float32",
        # Without this, transformers refuses bfloat16 where there is only a CPU.
        "use_cpu": settings.device == "cpu"
        or (settings.device == "auto" and not torch.accelerator.is_available()),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "report_to": list(settings.report_to) or "none",
        "average_tokens_across_devices": settings.is_language,
        "ddp_find_unused_parameters": False,
        "gradient_checkpointing": bool(settings.gradient_checkpointing),
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    if not settings.is_language:
        return TrainingArguments(**common, **more)
    return SFTConfig(
        **common, **more, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None
    )


def training_arguments(
    settings: FinetuneSettings, run: Path, steps: int, epoch: int
) -> TrainingArguments:
    """Everything for a run of ``steps`` in the directory ``run``, with ``epoch`` steps to an epoch.

    Raises
    ------
    SettingsError
        If transformers refuses a setting, such as bfloat16 on a device without it.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch sees none here; auto takes what there is")
    often = settings.save_every if settings.patience is None else settings.evaluate_every or epoch
    stopping: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": often,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    try:
        return judging_arguments(
            settings,
            run / CHECKPOINTS,
            max_steps=steps,
            per_device_train_batch_size=settings.batch
            // (PartialState().num_processes * settings.accumulate),
            gradient_accumulation_steps=settings.accumulate,
            learning_rate=settings.learning_rate,
            optim=settings.optimizer,
            weight_decay=settings.weight_decay,
            lr_scheduler_type=settings.scheduler,
            warmup_steps=round(settings.warmup * steps),
            logging_strategy="steps" if settings.log_every else "no",
            logging_steps=settings.log_every or 500,
            logging_nan_inf_filter=False,
            save_strategy="steps" if often else "no",
            save_steps=often or 500,
            save_total_limit=2,
            restore_callback_states_from_checkpoint=True,
            **(stopping if settings.patience is not None else {}),
        )
    except (ValueError, ImportError) as error:
        raise SettingsError(str(error)) from error


def check_sharding(version: int, settings: FinetuneSettings) -> None:
    """Refuse what is not to be had where accelerate shards the model over devices.

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
            "measure_start judges the model before it is trained, but FSDP shards it together with its optimizer: "
            "leave measure_start out, or launch without FSDP"
        )
    if settings.storage not in (None, "float32"):
        raise SettingsError(
            f"storage {settings.storage}: what FSDP shards is written in float32, since rounded numbers could not be "
            "judged; leave storage out, or launch without FSDP"
        )
