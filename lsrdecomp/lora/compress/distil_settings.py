"""Settings of `lsrdecomp.distil`, each written once."""

from __future__ import annotations

from typing import Annotated

from lsrdecomp.fields import INPUT_PATH, ON_COMMAND_LINE, POSITIVE, Alias, settings, whole_number
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings


@settings
class DistilSettings(EvaluatorSettings):
    """Settings of `lsrdecomp.distil` beside base, texts and teacher.

    Examples
    --------
    >>> DistilSettings(steps=60).steps
    60
    """

    steps: Annotated[
        int, ON_COMMAND_LINE, whole_number(1), "Maximum steps, including the learning-rate search."
    ] = 200
    rate: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Learning rate, a relative change per step [default: found by trials].",
    ] = None
    calibrated: Annotated[
        str | None,
        ON_COMMAND_LINE,
        INPUT_PATH,
        Alias("statistics"),
        "Statistics from `calibrate`, to round integers in the Fisher norm.",
    ] = None
    micro: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Examples per micro-batch [default: a whole batch].",
    ] = None
