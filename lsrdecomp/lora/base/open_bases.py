"""Opening a base: plain, with an adapter on it, or twice with two adapters.

Which opener it is depends on the base: an open model (`base_model.own_base`), a directory of
diffusers (`diffusion_base`), a model of images, sounds or embeddings (`other_bases`), or one of
texts (`base_model.open_text_base`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.base.base_model import Base, open_text_base, own_base
from lsrdecomp.lora.base.diffusion_base import open_diffusion
from lsrdecomp.lora.base.other_bases import open_other
from lsrdecomp.lora.files.file_checks import is_diffusers

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("float32", "bfloat16")
"""Precisions a base may be opened in."""


def load_base(
    base: str | Path,
    adapter: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Base:
    """Open a base with an adapter on it.

    Parameters
    ----------
    base : str or path
        A name or directory that transformers opens, a GGUF file, or ``"smollm2"``; see
        `lora.base.base_files.find_base`.
    adapter : path
        A PEFT directory: LoRA, LSR or any other kind PEFT opens.
    dtype, device : str
        Precision and device of the base.
    trust_remote_code : bool
        Whether program code that the base brings may run; without, such a base is refused.

    Raises
    ------
    CheckpointError
        If the adapter's head does not fit, or its task type is none of `LOADERS`.
    """
    plain = open_base(
        base, adapter, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    return plain.with_adapter(adapter)


def open_base(
    base: str | Path | nn.Module | Base,
    adapter: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Base:
    """Open the plain base, with the kind of head that ``adapter`` was trained for.

    Parameters and errors are those of `load_base`; a base that is open already is taken as it is.
    """
    if isinstance(base, Base):
        return base
    if isinstance(base, nn.Module):
        return own_base(base.to(device))
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", path=base)
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    if is_diffusers(base):
        return open_diffusion(base, **options)
    other = open_other(base, adapter, **options)
    if other is not None:
        return other
    return open_text_base(base, adapter, **options)
