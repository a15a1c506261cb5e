"""The training loop: transformers' Trainer with our batches, our rates and one loss for all tasks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from lsrdecomp.training.dataset import Dataset
from lsrdecomp.training.encoding import WholeBatches
from lsrdecomp.training.language import asked
from lsrdecomp.training.model import LoadedModel, trained
from lsrdecomp.training.settings import FinetuneSettings


class AdapterTrainer(Trainer):
    """Trains what a loaded model leaves trainable.

    AdamW without decay; parameters of the adapter that start as all zeros have ``zero_init_lr_factor`` times the
    learning rate, the head its own. The loss is the mean of an example: cross-entropy over classes or choices, squared
    error for scores.

    Parameters
    ----------
    loaded : LoadedModel
    settings : FinetuneSettings
    args : TrainingArguments
    dataset : Dataset
    sampler : WholeBatches, optional
        The order of the training examples; none for a model that is only judged.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: FinetuneSettings,
        args: TrainingArguments,
        *,
        dataset: Dataset,
        sampler: WholeBatches | None = None,
        callbacks: list[TrainerCallback],
        **datasets: Any,
    ) -> None:
        self.sampler = sampler
        self.rates = rates(loaded, settings)
        self.regression = dataset.regression
        collate: Any = dataset.collator(loaded.tokenizer)
        super().__init__(loaded.model, args, data_collator=collate, callbacks=callbacks, **datasets)
        if sampler is not None:
            self.add_callback(_Epochs(sampler))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with one group of parameters per rate."""
        if self.optimizer is None:
            groups: dict[float, list[nn.Parameter]] = {}
            found: nn.Module = self.model if model is None else model  # type: ignore[assignment]
            for name, parameter in found.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault(self.rates[name], []).append(parameter)
            self.optimizer = torch.optim.AdamW(
                [{"params": parameters, "lr": rate} for rate, parameters in groups.items()], weight_decay=0.0
            )
        return self.optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch, and with it the answers, (examples, classes or choices)."""
        labels: Tensor = inputs.pop("labels")
        logits = model(**inputs).logits.float().reshape(len(labels), -1)
        loss = F.mse_loss(logits[:, 0], labels) if self.regression else F.cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: Trainer's estimate walks over every parameter at every step."""
        return 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Whole batches, shared out over the processes."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_size=self.args.per_device_train_batch_size,
            sampler=self.sampler,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


class LanguageTrainer(AdapterTrainer):
    """The same for a language model: the loss is the mean of a token that counts, its logits alone are formed."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch's answers, and with it their logits, (answers, vocabulary)."""
        answers, wanted = asked(model, inputs)
        loss = F.cross_entropy(answers.logits, wanted)
        return (loss, {"logits": answers.logits}) if return_outputs else loss


def trainer_of(dataset: Dataset) -> type[AdapterTrainer]:
    """The loop for the examples of a run."""
    return LanguageTrainer if dataset.outputs is None else AdapterTrainer


class _Epochs(TrainerCallback):
    """Tells the sampler which epoch it is: from the step alone, so that a resumed run finds its order again."""

    def __init__(self, sampler: WholeBatches) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.sampler.epoch = state.global_step // self.sampler.batches


def rates(loaded: LoadedModel, settings: FinetuneSettings) -> dict[str, float]:
    """The learning rate of every trained parameter, by name."""
    found = {}
    for name, parameter, adapters in trained(loaded):
        if adapters:
            zero = not bool(parameter.detach().any())
            found[name] = settings.learning_rate * (settings.zero_init_lr_factor if zero else 1.0)
        else:
            found[name] = settings.learning_rate if settings.head_learning_rate is None else settings.head_learning_rate
    return found
