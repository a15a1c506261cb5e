"""Faults of places: files that are missing, or are no files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import write_lora_directory
from safetensors.numpy import save

from damage.adapter import SETTINGS, SINGLE, WEIGHTS, Fault, Files, collect
from damage.headers import VALID


@collect("place")
def _nothing_there() -> Iterator[tuple[str, Fault]]:
    yield "nothing there", lambda path: path / "absent"
    yield "a file that is absent", lambda path: path / "absent.safetensors"


def _two_adapters(path: Path) -> Path:
    for name in "ab":
        write_lora_directory(path / name)
    return path


@collect("place")
def _other_files() -> Iterator[tuple[str, Fault]]:
    yield "an empty directory", Files({})
    yield "a directory of something else", Files({"README.md": b"hello"})
    yield "two weight files", Files({f"{i}.safetensors": VALID for i in "ab"})
    yield "two adapters inside", _two_adapters
    yield "an unknown weight file", Files({SINGLE: save({"a": np.ones(2)})})
    yield "no tensor at all", Files({SINGLE: save({})})


def _replaced(name: str, replace: Callable[[Path], Any]) -> Fault:
    """Return a sound directory of which one file is replaced by something else."""

    def build(path: Path) -> Path:
        file = write_lora_directory(path) / name
        file.unlink()
        replace(file)
        return path

    return build


@collect("place")
def _no_files() -> Iterator[tuple[str, Fault]]:
    replacements: dict[str, Callable[[Path], Any]] = {
        "is missing": lambda file: None,
        "is a directory": lambda file: file.mkdir(),
        "is a pipe": os.mkfifo,
        "is a device": lambda file: file.symlink_to("/dev/zero"),
        "leads nowhere": lambda file: file.symlink_to("/nonexistent/file"),
        "leads in a circle": lambda file: file.symlink_to(file),
        "is another text": lambda file: file.symlink_to("/etc/hostname"),
    }
    for name in (WEIGHTS, SETTINGS):
        for fault, replace in replacements.items():
            yield f"{name} {fault}", _replaced(name, replace)
