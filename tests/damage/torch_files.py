"""Faults of torch files: what is pickled, and the zip around it."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from damage.adapter import DOWN, UP, Fault, Files, binary, collect, lora_tensors, torch_file


def pickled(make: Callable[[Any], Any], **options: Any) -> Files:
    """Return a torch file of whatever ``make(torch)`` gives, in place of the safetensors."""
    return binary(partial(torch_file, make, **options))


class Evil:
    """Runs a command when unpickled by a careless reader."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/unpickled-by-a-careless-reader",)


def _cut_zip(share: float) -> Files:
    """Return a torch file of which only the first part is there."""

    def content() -> bytes:
        whole = torch_file(lora_tensors)
        return whole[: int(share * len(whole))]

    return binary(content)


def _zipped(compression: int, records: Mapping[str, bytes]) -> Files:
    """Return a zip file of these records in place of torch's."""

    def content() -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, record in records.items():
                archive.writestr(name, record)
        return file.getvalue()

    return binary(content)


@collect("pickle")
def _pickle() -> Iterator[tuple[str, Fault]]:
    pair = {DOWN: (2, 6), UP: (4, 2)}
    values: dict[str, Callable[[Any], Any]] = {
        "a tensor": lambda torch: torch.ones(2),
        "a number": lambda torch: 3,
        "nothing": lambda torch: None,
        "an empty dict": lambda torch: {},
        "an empty list": lambda torch: [],
        "a list of numbers": lambda torch: [1, 2],
        "a list in a dict": lambda torch: {DOWN: [1, 2]},
        "a state beside an alpha": lambda torch: {
            "state_dict": {key: torch.ones(shape) for key, shape in pair.items()},
            "alpha": 4,
        },
        "two states": lambda torch: {
            name: {key: torch.ones(shape) for key, shape in pair.items()} for name in ("a", "b")
        },
        "a number for a tensor": lambda torch: {DOWN: 1.0, UP: torch.ones(4, 2)},
        "keys that are numbers": lambda torch: {1: torch.ones(2, 6)},
        "a sparse tensor": lambda torch: {DOWN: torch.eye(6).to_sparse(), UP: torch.ones(4, 6)},
        "an expanded tensor": lambda torch: {
            DOWN: torch.ones(1).expand(2, 2**38),
            UP: torch.ones(4, 2),
        },
        "a quantized tensor": lambda torch: {
            DOWN: torch.quantize_per_tensor(torch.ones(2, 6), 0.1, 0, torch.qint8)
        },
        "a complex tensor": lambda torch: {
            DOWN: torch.ones(2, 6, dtype=torch.complex64),
            UP: torch.ones(4, 2),
        },
        "a tensor of nan": lambda torch: {
            DOWN: torch.full((2, 6), float("nan")),
            UP: torch.ones(4, 2),
        },
        "one half": lambda torch: {DOWN: torch.ones(2, 6)},
        "a name with a line break": lambda torch: {"a\nb": torch.ones(2)},
        "code": lambda torch: {"x": Evil()},
        "a module": lambda torch: torch.nn.Linear(2, 2),
        "a numpy array": lambda torch: {DOWN: np.ones((2, 6))},
    }
    for name, make in values.items():
        yield name, pickled(make)
        if name not in ("an expanded tensor", "a quantized tensor", "a sparse tensor"):
            yield f"{name}, old format", pickled(make, _use_new_zipfile_serialization=False)
    for share in (0.1, 0.5, 0.9, 0.99):
        yield f"zip cut to {share:.0%}", _cut_zip(share)
    for content in (
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02}q\x00.",
        b"PK\x03\x04",
        b"hello",
        b"\x80\x05\x95" + b"\xff" * 30,
        bytes(4096),
    ):
        yield f"bytes {content[:8]!r} ({len(content)})", binary(content)
    yield "plain pickle of code", binary(pickle.dumps({"x": Evil()}))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 307151\n"
    yield "git-lfs pointer", binary(pointer)
    yield "empty zip", _zipped(zipfile.ZIP_STORED, {})
    yield "zip of texts", _zipped(zipfile.ZIP_STORED, {"a.txt": b"a"})
    yield "zip bomb", _zipped(zipfile.ZIP_DEFLATED, {"archive/data.pkl": bytes(2**25)})
    yield "17 MiB of pickle", _zipped(zipfile.ZIP_STORED, {"archive/data.pkl": bytes(17 * 2**20)})
    empty = {"archive/data.pkl": b"", "archive/version": b"3\n"}
    yield "zip with an empty pickle", _zipped(zipfile.ZIP_STORED, empty)
