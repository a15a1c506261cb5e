"""The record of one run: its settings, what was measured, and on what; one JSON file."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import TRUST, read_json_text
from lsrdecomp.lora.files.provenance import installed_version
from lsrdecomp.lora.files.writing import new_file
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

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
    """Scores of a model on one set of examples.

    Attributes
    ----------
    metrics : Mapping of str to float
        The task's own; the first is the one its benchmark ranks by.
    accuracy : float, optional
        None for a regression.
    loss : float, optional
        Mean cross-entropy in nats, or mean squared error; None if outputs are not finite.
    examples : int
    """

    metrics: Mapping[str, float]
    accuracy: float | None
    loss: float | None
    examples: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers of a language model to one held-out prompt.

    Attributes
    ----------
    prompt : str
    completion : str
        As the file has it.
    base, adapted : str
        Generated without the adapter, and with it.
    start : str, optional
        Generated with the adapter in ``init`` as it was, where there is one and it was measured.
    """

    prompt: str
    completion: str
    base: str
    adapted: str
    start: str | None = None


@dataclass(frozen=True, slots=True)
class FinetuneRecord:
    """One finished run.

    Attributes
    ----------
    settings : FinetuneSettings
    start : Scores, optional
        On dev before the first step, where that was asked for or there is an adapter in ``init``.
    dev : Scores
    validation : Scores, optional
        Of the kept state on the split of the training set; None without early stopping.
    baseline : Mapping of str to float
        The task's metrics on dev for always giving the commonest answer.
    adapter_parameters, head_parameters : int
        Trained numbers in adapted layers, and elsewhere: classifier, biases.
    adapter_bytes, file_bytes : int
        Bytes of the adapter's tensors in the written file, and of the whole file, head included.
    train_examples : int
    steps : int
        Steps that were made.
    best_step : int, optional
        The step that was kept, with early stopping.
    losses : tuple of (int, float)
        Step and mean training loss since the entry before; None for one that is not finite.
    wall_seconds : float
        Of training alone, over all resumptions.
    step_seconds : float
        Median of one step.
    peak_bytes : int, optional
        Of the accelerator, or of the process on a CPU.
    device : str
    processes : int
    versions : Mapping of str to str
    commit : str, optional
    samples : tuple of Sample
        Of a language model.
    rate_trials : tuple of (float, float)
        Learning rates that were tried, and the mean loss of the last steps of each trial; None for
        one that is not finite. The rate of the run is in ``settings``.
    """

    settings: FinetuneSettings
    start: Scores | None
    dev: Scores
    validation: Scores | None
    baseline: Mapping[str, float]
    adapter_parameters: int
    head_parameters: int
    adapter_bytes: int
    file_bytes: int
    train_examples: int
    steps: int
    best_step: int | None
    losses: tuple[tuple[int, float | None], ...]
    wall_seconds: float
    step_seconds: float
    peak_bytes: int | None
    device: str
    processes: int
    versions: Mapping[str, str]
    commit: str | None
    samples: tuple[Sample, ...] = ()
    rate_trials: tuple[tuple[float, float | None], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything, as JSON has it."""
        without_settings = dataclasses.replace(self, settings=None)  # type: ignore[arg-type]
        return dataclasses.asdict(without_settings) | {"settings": self.settings.to_json()}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FinetuneRecord:
        """Make a record of what `to_json` returned."""
        fields = dict(values)
        for name in ("start", "dev", "validation"):
            if fields[name] is not None:
                fields[name] = Scores(**fields[name])
        # Trust in program code is typed; a record may be a stranger's.
        settings = {name: value for name, value in values["settings"].items() if name != TRUST}
        fields["settings"] = FinetuneSettings.from_mapping(settings)
        fields["samples"] = tuple(Sample(**sample) for sample in values.get("samples", ()))
        fields["losses"] = tuple((int(step), loss) for step, loss in values["losses"])
        fields["rate_trials"] = tuple((rate, loss) for rate, loss in values.get("rate_trials", ()))
        return cls(**fields)

    def write(self, directory: Path) -> Path:
        """Write `record.json` into a directory, whole or not at all."""
        path = directory / RECORD
        text = json.dumps(self.to_json(), indent=2, allow_nan=False)
        with new_file(path) as part:
            part.write_text(f"{text}\n", encoding="utf-8")
        return path


def read_record(directory: str | Path) -> FinetuneRecord:
    """Read the record of a finished run from its directory.

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
        return FinetuneRecord.from_mapping(read_json_text(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"no finished run: {error.strerror}", path=path) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not the record of a run: {error}", path=path) from None


def versions() -> dict[str, str]:
    """Return versions of what computes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        version = installed_version(package)
        if version != "unknown":
            found[package] = version
    return found


def commit() -> str | None:
    """Return the commit of the checkout this library runs from, or None outside of one.

    It ends with ``+`` if the checkout was changed since.
    """
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
