"""Settings of one fine-tuning run, read and checked without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.fields import (
    ABOVE_ONE,
    INPUT_PATH,
    ON_COMMAND_LINE,
    POSITIVE,
    SHARE,
    SHARE_OR_ZERO,
    Check,
    Flag,
    Settings,
    list_of,
    one_of,
    settings,
    whole_number,
)
from lsrdecomp.fields import SettingsError as SettingsError
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.train.methods import METHODS, method_of

TEXT = "text"
CLASSES = "classes"
SCORES = "scores"
TASKS = (TEXT, CLASSES, SCORES)
LANGUAGE_DEFAULTS = {"batch": 8, "max_length": 1024}
"""Defaults of a language model that differ from those of a classifier."""
STORAGES = ("float32", "float16", "bfloat16", "int8", "int4")
PRECISIONS = ("auto", "float32", "bfloat16", "bfloat16-autocast")
METRICS = ("loss", "exact", "bleu", "chrf")
AUTO = "auto"
POSITIVE_OR_AUTO = Check(
    lambda value: value == AUTO or POSITIVE.test(value), lambda: f"a number above 0, or {AUTO}"
)
LANGUAGE = Flag("Language models: ")


@settings
class FinetuneSettings(Settings):
    """One run of `finetune`.

    Examples
    --------
    >>> run = FinetuneSettings(base="BASE", data="train.tsv", task="classes", steps=40)
    >>> run.method, run.batch
    ('lora', 32)
    >>> run.replace(steps=0)
    Traceback (most recent call last):
    lsrdecomp.fields.SettingsError: steps must be a whole number, 1 or more, got 0
    """

    base: Annotated[
        str,
        ON_COMMAND_LINE,
        INPUT_PATH,
        "The base model: a name, a directory, a GGUF file, or smollm2.",
    ]
    data: Annotated[
        str,
        ON_COMMAND_LINE,
        INPUT_PATH,
        "File of examples: .jsonl, .json, .csv or .tsv.",
    ]
    task: Annotated[
        str,
        ON_COMMAND_LINE,
        one_of(TASKS),
        "What is learnt: text, by a language model; classes or scores, from the label of a row.",
    ] = TEXT
    dev_data: Annotated[
        str | None,
        ON_COMMAND_LINE,
        INPUT_PATH,
        "File to evaluate on; if absent, a tenth of data, 200 at most.",
    ] = None
    method: Annotated[
        str, ON_COMMAND_LINE, one_of(METHODS), "lora, lsr, dora, krona, …; a wrong one shows all."
    ] = "lora"
    options: Annotated[
        Mapping[str, Any], "Of the method, under the names of its config, such as r."
    ] = field(default_factory=dict)
    init: Annotated[
        str | None,
        ON_COMMAND_LINE,
        INPUT_PATH,
        "Adapter directory to train on from; it brings its method, options, layers and head.",
    ] = None
    ratio: Annotated[
        float | None,
        ON_COMMAND_LINE,
        ABOVE_ONE,
        "First compress the LoRA in init so many times, by the task's own statistics; method is "
        "lsr then.",
    ] = None
    storage: Annotated[
        str | None,
        ON_COMMAND_LINE,
        one_of(STORAGES),
        "Type of LSR's factors in the file: float32, float16, bfloat16, int8 or int4; if absent, "
        "as in init, else float32.",
    ] = None
    head: Annotated[
        str | None,
        INPUT_PATH,
        "Adapter directory whose saved head is the start of this run's head.",
    ] = None
    target_modules: Annotated[
        tuple[str, ...] | None, "Endings of module names; if absent, the usual ones."
    ] = None
    layers: Annotated[
        tuple[int, ...] | None,
        list_of(whole_number(0), "a list of layer indices", min_length=1),
        "Only these layer indices.",
    ] = None
    learning_rate: Annotated[
        float | str | None,
        ON_COMMAND_LINE,
        POSITIVE_OR_AUTO,
        "Largest learning rate of the schedule; if absent, one that suits the method; auto tries "
        "three around that, each for a twentieth of the steps, before the run.",
    ] = None
    # Four, as in LoRA+, was behind for LSR from scratch:
    # benchmarks/experiments/sst2-minilm.toml.
    zero_init_lr_factor: Annotated[
        float,
        POSITIVE,
        "Factor on the learning rate of what starts as all zeros, as in LoRA+.",
    ] = 1.0
    head_learning_rate: Annotated[
        float | None,
        POSITIVE,
        "Learning rate of the head; if absent, that of the rest.",
    ] = None
    batch: Annotated[
        int,
        ON_COMMAND_LINE,
        whole_number(1),
        "Examples per step, over all processes; 8 for a language model.",
    ] = 32
    accumulate: Annotated[
        int,
        ON_COMMAND_LINE,
        whole_number(1),
        "Pieces in which each process reads its share of a batch.",
    ] = 1
    packing: Annotated[
        bool,
        ON_COMMAND_LINE,
        LANGUAGE,
        "Fill rows of max_length with several examples each, by TRL.",
    ] = False
    epochs: Annotated[
        float | None, ON_COMMAND_LINE, POSITIVE, "Passes over the training set; 3 if absent."
    ] = None
    steps: Annotated[int | None, ON_COMMAND_LINE, whole_number(1), "Steps, instead of epochs."] = (
        None
    )
    optimizer: Annotated[
        str, ON_COMMAND_LINE, "As transformers names it, such as adafactor or paged_adamw_8bit."
    ] = "adamw_torch"
    scheduler: Annotated[
        str, ON_COMMAND_LINE, "Of the learning rate, as transformers names it, such as cosine."
    ] = "linear"
    weight_decay: Annotated[float, ON_COMMAND_LINE, "Of what is no vector."] = 0.0
    warmup: Annotated[
        float,
        ON_COMMAND_LINE,
        SHARE_OR_ZERO,
        "Share of the steps over which the learning rate rises.",
    ] = 0.06
    max_length: Annotated[
        int,
        ON_COMMAND_LINE,
        whole_number(2),
        "Maximum tokens of an example, the rest is cut; for a language model 1024, and longer is "
        "refused.",
    ] = 128
    truncate: Annotated[
        bool,
        ON_COMMAND_LINE,
        LANGUAGE,
        "Cut longer prompts at their beginning, instead of refusing them.",
    ] = False
    seed: Annotated[
        int,
        ON_COMMAND_LINE,
        "Of the start and the order of examples; it leaves the splits as they are.",
    ] = 0
    precision: Annotated[
        str,
        ON_COMMAND_LINE,
        one_of(PRECISIONS),
        "bfloat16 loads the base in it and keeps what is trained in float32; auto does so on a GPU "
        "that has it.",
    ] = "auto"
    device: Annotated[
        str, ON_COMMAND_LINE, one_of(("auto", "cpu", "cuda")), "auto, cpu or cuda."
    ] = "auto"
    device_map: Annotated[
        str | None, ON_COMMAND_LINE, "How transformers spreads the base over devices, such as auto."
    ] = None
    four_bit: Annotated[
        bool, ON_COMMAND_LINE, "Hold the base in 4 bits (NF4, by bitsandbytes), for any method."
    ] = False
    trust_remote_code: Annotated[
        bool,
        ON_COMMAND_LINE,
        "Run program code that the base brings (remote code); without, such a base is refused.",
    ] = False
    gradient_checkpointing: Annotated[
        bool | None,
        ON_COMMAND_LINE,
        "Recompute activations in the backward pass; if absent, where memory asks for it.",
    ] = None
    patience: Annotated[
        int | None,
        whole_number(1),
        "Stop after so many evaluations on a split without a smaller loss, and keep the best.",
    ] = None
    validation: Annotated[
        float, SHARE, "With patience, share of the training set split off; dev only measures."
    ] = 0.1
    evaluate_every: Annotated[
        int | None, whole_number(1), "Steps between these evaluations; an epoch if absent."
    ] = None
    train_head: Annotated[bool, "false: the head keeps the values it starts with."] = True
    measure_start: Annotated[
        bool | None,
        "Also evaluate on dev before the first step; if absent, where there is an adapter in init.",
    ] = None
    train_examples: Annotated[
        int | None, whole_number(1), "Maximum examples to train on, always the same ones."
    ] = None
    dev_examples: Annotated[
        int | None, whole_number(1), "Maximum examples to evaluate on, always the same ones."
    ] = None
    log_every: Annotated[
        int,
        "Steps between entries of losses and spectra; with 0 a diverged run is not stopped early "
        "either.",
    ] = 50
    save_every: Annotated[int, "Steps between checkpoints to resume from; 0 for none."] = 0
    logs: Annotated[
        str | None, ON_COMMAND_LINE, "Directory to write TensorBoard's events to while it trains."
    ] = None
    metric: Annotated[
        str, LANGUAGE, one_of(METRICS), "Measured beside the loss: exact, bleu or chrf."
    ] = "loss"
    answers: Annotated[
        str, LANGUAGE, one_of(("completion", "all")), "Tokens that are learned: completion or all."
    ] = "completion"
    samples: Annotated[int, LANGUAGE, "Held-out prompts whose answers go into the record."] = 4
    new_tokens: Annotated[int, LANGUAGE, whole_number(1), "Maximum tokens of an answer."] = 64
    split_seed: Annotated[int, "Of the examples that are held out, or left out."] = 0

    @property
    def is_language(self) -> bool:
        """Whether the task is text to go on from."""
        return self.task == TEXT

    def training_steps(self, epoch_steps: int) -> int:
        """Return the steps of a run whose epochs have ``epoch_steps``."""
        if self.steps is not None:
            return self.steps
        epochs = 3 if self.epochs is None else self.epochs
        return math.ceil(epochs * epoch_steps)

    def check_together(self) -> None:
        """Refuse settings that do not go together."""
        if self.epochs is not None and self.steps is not None:
            raise SettingsError(
                f"give epochs or steps, not both; got {self.epochs} and {self.steps}"
            )
        if self.evaluate_every is not None and self.patience is None:
            raise SettingsError("evaluate_every is about early stopping: give patience too")
        self._check_start()
        self._check_storage()
        if self.method == "head" and not self.train_head:
            raise SettingsError(
                "method head trains the head alone: train_head = false leaves nothing to train"
            )
        if self.is_language:
            self._check_language()
        else:
            self._check_labelled()

    def _check_start(self) -> None:
        """Refuse settings that an adapter in ``init`` brings itself."""
        if self.init is not None:
            brought = ("options", "target_modules", "layers", "head")
            twice = [name for name in brought if getattr(self, name)]
            if twice:
                raise SettingsError(
                    f"init brings its own {', '.join(twice)}; leave out one or the other"
                )
        if self.ratio is not None and (self.init is None or not self._is_lsr):
            raise SettingsError(
                "ratio makes an LSR adapter of the LoRA in init: give init, and no method but lsr "
                "or qlsr"
            )

    def _check_storage(self) -> None:
        """Refuse a storage for adapters that are not stored so."""
        if self.storage in (None, "float32"):
            return
        about = f"storage {self.storage} is of LSR's factors"
        if not self._is_lsr:
            raise SettingsError(f"{about}: method is {self.method}, not lsr or qlsr")
        if self.options.get("use_dora"):
            raise SettingsError(
                f"{about}: with use_dora they are written in float32; leave out one or the other"
            )

    @property
    def _is_lsr(self) -> bool:
        return self.method in ("lsr", "qlsr")

    def _check_language(self) -> None:
        """Refuse what a language model does not have."""
        if self.method == "head" or self.head is not None or not self.train_head:
            raise SettingsError(
                "a language model has no head to train: leave out head and train_head, or give "
                f"task {CLASSES} or {SCORES}"
            )

    def _check_labelled(self) -> None:
        """Refuse what only a language model has."""
        changed = [
            entry.name
            for entry in self.fields.values()
            if LANGUAGE in entry.flags and getattr(self, entry.name) != entry.default
        ]
        if changed:
            raise SettingsError(f"{', '.join(changed)}: for a language model, whose task is {TEXT}")

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what given values imply.

        A language model implies its defaults, an adapter in ``init`` its method.
        """
        implied: dict[str, Any] = {}
        if values.get("task", TEXT) == TEXT:
            implied |= LANGUAGE_DEFAULTS
        method = _method_in(values.get("init"))
        if values.get("ratio") is not None:
            method = "lsr"
        if method is not None:
            implied["method"] = method
        return implied


def _method_in(directory: Any) -> str | None:
    """Return the method of an adapter directory, where its config tells."""
    if not isinstance(directory, str | PathLike):
        return None
    try:
        return method_of(read_json(Path(directory) / "adapter_config.json"))
    except CheckpointError:  # whoever opens the adapter says what is wrong with it
        return None
