"""Settings of measurements on a base, each written once."""

from __future__ import annotations

from typing import Annotated, Any

from lsrdecomp.fields import ON_COMMAND_LINE, SHARE, Settings, one_of, settings, whole_number
from lsrdecomp.lora.search.plan import ON_DEVICE, TRAINING


@settings
class EvaluatorSettings(Settings):
    """Settings of how a base reads texts, and of how many are held out.

    Examples
    --------
    >>> EvaluatorSettings(held_out=64).dtype
    'float32'
    >>> EvaluatorSettings(held_out=3)
    Traceback (most recent call last):
    lsrdecomp.fields.SettingsError: held_out must be a whole number, 8 or more, got 3
    """

    held_out: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(8),
        "Held-out examples for the final measurement, at most a quarter of the data [default: 64 "
        "prompts or 128 texts].",
    ] = None
    batch: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Examples per batch and per training step [default: 8 for language models, else 32].",
    ] = None
    max_length: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Maximum tokens per example [default: 1024 for prompts, 128 for plain text].",
    ] = None
    truncate: Annotated[
        bool,
        ON_COMMAND_LINE,
        "Cut the beginning of prompts that are too long, instead of refusing them.",
    ] = False
    dtype: Annotated[
        str,
        ON_COMMAND_LINE,
        one_of(("float32", "bfloat16")),
        "Precision of the base: float32 or bfloat16.",
    ] = "float32"
    device: Annotated[
        str | None,
        ON_COMMAND_LINE,
        ON_DEVICE,
        "cuda, cuda:1, … [default: the CPU, where NumPy solves].",
    ] = None
    seed: Annotated[
        int, ON_COMMAND_LINE, "Seed of the order of the texts, and of which are held out."
    ] = 0
    trust_remote_code: Annotated[
        bool,
        ON_COMMAND_LINE,
        "Run program code that the base brings (remote code); without, such a base is refused.",
    ] = False

    @property
    def prompt_limits(self) -> dict[str, Any]:
        """How long prompts may be, as `lora.base.tokens.tokenize` takes it."""
        return {"max_length": self.max_length, "truncate": self.truncate}


@settings
class MeasuredSettings(EvaluatorSettings):
    """Settings of `lsrdecomp.compress` with a base.

    Examples
    --------
    >>> MeasuredSettings(keep=0.9).distill
    0
    """

    keep: Annotated[
        float | None,
        ON_COMMAND_LINE,
        SHARE,
        "With --base: find the smallest version that keeps this share of the effect.",
    ] = None
    keep_answers: Annotated[
        float | None,
        ON_COMMAND_LINE,
        TRAINING,
        SHARE,
        "With --base: find the smallest version that gives this share of the LoRA's answers, word "
        "for word.",
    ] = None
    distill: Annotated[
        int,
        ON_COMMAND_LINE,
        TRAINING,
        whole_number(0),
        "With --base: also train it on the LoRA's answers, for so many steps.",
    ] = 0
    examples: Annotated[
        int,
        ON_COMMAND_LINE,
        whole_number(0),
        "With --base: show so many texts that are answered differently, and truncated SVD; "
        "pictures of an image model.",
    ] = 0
    passes: Annotated[
        int,
        ON_COMMAND_LINE,
        TRAINING,
        whole_number(1),
        "With --base: 2 repeats calibration and search with the first result active.",
    ] = 1
