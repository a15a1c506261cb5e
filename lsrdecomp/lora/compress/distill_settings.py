"""Settings of `lsrdecomp.distill`, each written once."""

from __future__ import annotations

from typing import Annotated

from lsrdecomp.fields import INPUT_PATH, ON_COMMAND_LINE, POSITIVE, settings, whole_number
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings


@settings
class DistillSettings(EvaluatorSettings):
    """Settings of `lsrdecomp.distill` beside base, texts and teacher.

    Examples
    --------
    >>> DistillSettings(steps=60).steps
    60
    """

    steps: Annotated[
        int, ON_COMMAND_LINE, whole_number(1), "Maximum steps, including the learning-rate search."
    ] = 200
    learning_rate: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Learning rate, a relative change per step [default: found by trials].",
    ] = None
    statistics: Annotated[
        str | None,
        ON_COMMAND_LINE,
        INPUT_PATH,
        "Statistics from `calibrate`, to round integers in the Fisher norm.",
    ] = None
    micro: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Examples per micro-batch [default: a whole batch].",
    ] = None
