"""What a run reports to other programs: where its logs lie, and that they are whole."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    get_available_reporting_integrations,
)

from lsrdecomp.errors import unknown
from lsrdecomp.training.settings import FinetuneSettings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import Trainer, TrainerCallback

TENSORBOARD = "tensorboard"
DIRECTORY_VARIABLES = ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "DVCLIVE_DIR", "TRACKIO_DIR")
"""Read by the programs, or by transformers for them; what a user has set stays."""


def logs_beside(out: Path) -> Path:
    """Return the directory of a run's logs: beside its output, which is there only at the end.

    Examples
    --------
    >>> from pathlib import Path
    >>> logs_beside(Path("runs/my-lora")).name
    'my-lora-logs'
    """
    return out.with_name(f"{out.name}-logs")


def reporters(settings: FinetuneSettings) -> list[str]:
    """Return the programs that a run reports to.

    Raises
    ------
    SettingsError
        For one that transformers does not know, or that is not installed.
    """
    available: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    names: list[str] = []
    for name in settings.report_to:
        if name == "all":
            names += available
        elif name != "none":
            names.append(name)
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise SettingsError(f"report_to: {unknown(name, INTEGRATION_TO_CALLBACK)}")
        if name not in available:
            raise SettingsError(f"report_to: {name} is not installed: pip install {name}")
    return list(dict.fromkeys(names))


@contextmanager
def logging_beside(out: Path, names: list[str]) -> Iterator[None]:
    """Let programs that are reported to write beside the output while a run lasts."""
    unset = [name for name in DIRECTORY_VARIABLES if names and name not in os.environ]
    for name in unset:
        os.environ[name] = str(logs_beside(out).absolute())
    if "WANDB_DIR" in unset and "wandb" in names:
        logs_beside(out).mkdir(parents=True, exist_ok=True)  # else wandb takes another place
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


class OneEventFile(TensorBoardCallback):
    """TensorBoard's events of a whole run in one file.

    That of transformers closes its file when training ends, and begins another one, in another
    place, for the evaluations before and after.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_closed = False

    def on_log(self, *arguments: Any, **more: Any) -> None:
        """Write what was logged, as long as the run lasts."""
        if not self._is_closed:
            super().on_log(*arguments, **more)  # type: ignore[no-untyped-call]

    def on_train_end(self, *arguments: Any, **more: Any) -> None:
        """Keep the file open: scores come after training."""

    def close(self) -> None:
        """End the file."""
        self._is_closed = True
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None


def reporting_callbacks(names: list[str]) -> list[TrainerCallback]:
    """Return the callbacks that Trainer does not make itself by ``report_to``."""
    return [OneEventFile()] if TENSORBOARD in names else []


def end_reports(trainer: Trainer) -> None:
    """Close what was kept open until the last scores were written."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, OneEventFile):
            callback.close()
