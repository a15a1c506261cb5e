"""The record of one run: settings, what was measured, and on what; one JSON file that appears as a whole."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.provenance import installed_version
from lsrdecomp.checkpoints.writing import new_file
from lsrdecomp.errors import CheckpointError
from lsrdecomp.training.settings import FinetuneSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORD = "record.json"
ADAPTER = "adapter"
LAYER_LOG = "layers.jsonl"
PACKAGES = (
    "lsrdecomp",
    "torch",
    "peft",
    "transformers",
    "accelerate",
    "trl",
    "numpy",
    "scikit-learn",
    "sacrebleu",
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Answers to one set of examples, judged."""

    metrics: Mapping[str, float]  # the task's own; the first is the one its benchmark ranks by
    accuracy: float | None  # None for a regression
    loss: (
        float | None
    )  # mean cross-entropy in nats, or mean squared error; None if outputs are not finite
    examples: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What a language model said to one held-out prompt."""

    prompt: str
    completion: str  # as the file has it
    base: str  # without the adapter
    adapted: str


@dataclass(frozen=True, slots=True)
class FinetuneRecord:
    """One finished run."""

    settings: FinetuneSettings
    start: Scores | None  # on dev before the first step, where it was asked for
    dev: Scores
    validation: (
        Scores | None
    )  # of the kept state on the split of the training set; None without early stopping
    baseline: Mapping[
        str, float
    ]  # the task's metrics on dev for always giving the commonest answer
    adapter_parameters: int  # trained numbers in adapted layers
    head_parameters: int  # trained numbers elsewhere: classifier, biases
    adapter_bytes: int  # of the adapter's tensors in the written file
    file_bytes: int  # of the whole weight file, head included
    train_examples: int
    steps: int  # done
    best_step: int | None  # the one that was kept, with early stopping
    losses: tuple[
        tuple[int, float | None], ...
    ]  # (step, mean training loss since the entry before)
    wall_seconds: float  # training alone, over all resumptions
    step_seconds: float  # median of one step
    peak_bytes: int | None  # of the accelerator, or of the process on a CPU
    device: str
    processes: int
    versions: Mapping[str, str]
    commit: str | None
    samples: tuple[Sample, ...] = ()  # of a language model

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return dataclasses.asdict(dataclasses.replace(self, settings=None)) | {  # type: ignore[arg-type]
            "settings": self.settings.to_json()
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FinetuneRecord:
        """What `to_json` gave."""
        scores = {
            name: None if values[name] is None else Scores(**values[name])
            for name in ("start", "dev", "validation")
        }
        settings = FinetuneSettings.from_mapping(values["settings"])
        samples = tuple(Sample(**each) for each in values.get("samples", ()))
        losses = tuple((int(step), loss) for step, loss in values["losses"])
        return cls(
            **{**values, **scores, "settings": settings, "losses": losses, "samples": samples}
        )

    def write(self, directory: Path) -> Path:
        """Write `record.json` into a directory, whole or not at all."""
        path = directory / RECORD
        with new_file(path) as part:
            part.write_text(
                json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
        return path


def read_record(directory: str | Path) -> FinetuneRecord:
    """The record of a finished run, from its directory.

    Parameters
    ----------
    directory : path
        What `finetune` wrote.

    Returns
    -------
    FinetuneRecord

    Raises
    ------
    CheckpointError
        If there is none, or it is not what `finetune` writes.
    """
    path = Path(directory) / RECORD
    try:
        return FinetuneRecord.from_mapping(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"no finished run: {error.strerror}", path=path) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not the record of a run: {error}", path=path) from None


def versions() -> dict[str, str]:
    """Versions of what computes."""
    installed = {package: installed_version(package) for package in PACKAGES}
    known = {package: version for package, version in installed.items() if version != "unknown"}
    return {"python": platform.python_version()} | known


def commit() -> str | None:
    """The commit of the checkout this library runs from, with ``+`` if it was changed since; None if there is none."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        done = subprocess.run(
            [
                "git",
                "-C",
                str(checkout),
                "describe",
                "--always",
                "--abbrev=12",
                "--dirty=+",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
