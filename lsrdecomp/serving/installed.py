"""What an installed server loads of an adapter: its own loader is run, and ΔW is compared."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from lsrdecomp.checkpoints.families import names_in_all_blocks
from lsrdecomp.errors import LsrError
from lsrdecomp.serving.loaders import script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.checkpoints import BaseModules, Checkpoint
    from lsrdecomp.checkpoints.records import Layer
    from lsrdecomp.checkpoints.tensors import Array

    Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoaderRun:
    """How a server's loader is run; by hand."""

    timeout: float = 600.0  # seconds: a server's package may take a minute to import
    tolerance: float = 1e-4  # relative difference of ΔW above which it is another one


@dataclass(frozen=True)
class Loaded:
    """What a server's loader made of an adapter.

    Attributes
    ----------
    version : str or None
        Of the server's package; None where there is none.
    failure : str or None
        Why its loader could not be run.
    refusal : str or None
        Its own words where it refuses the adapter.
    options : list of str
        That the server must be started with.
    pairs : mapping of str to (B, A)
        Of each module that it loaded, with all scales in B.

    Examples
    --------
    >>> Loaded("0.33.0", refusal="ValueError: vLLM does not yet support DoRA.").was_run
    True
    """

    version: str | None
    failure: str | None = None
    refusal: str | None = None
    options: list[str] = field(default_factory=list)
    pairs: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def was_run(self) -> bool:
        """Whether the loader was run at all."""
        return self.failure is None


def load_by_server(
    server: str,
    adapter: Checkpoint,
    base: BaseModules,
    python: str | Path | None = None,
    settings: LoaderRun | None = None,
) -> Loaded:
    """Run a server's own loader on an adapter, on the CPU and without a model.

    Parameters
    ----------
    server : str
        One of `loaders.script.LOADERS`.
    adapter : Checkpoint
        A PEFT directory.
    base : BaseModules
        Gives names and sizes.
    python : path, optional
        Interpreter of the environment that serves; absent, this one.
    settings : LoaderRun, optional

    Returns
    -------
    Loaded
        With a ``failure`` where the package is missing or its loader cannot be imported.

    Raises
    ------
    LsrError
        If the interpreter cannot be run, or dies.
    """
    settings = settings or LoaderRun()
    package, distribution = script.DISTRIBUTIONS[server]
    if python is None and importlib.util.find_spec(package) is None:
        return Loaded(None, failure=f"{distribution} is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request.json")
        pairs_file = Path(folder, "pairs.safetensors")
        fields = {
            "server": server,
            "adapter": str(adapter.path.resolve()),
            "shapes": shapes_by_module_name(adapter, base),
            "config": _base_config(base),
            "pairs": str(pairs_file),
        }
        request.write_text(json.dumps(fields), encoding="utf-8")
        command = [str(python or sys.executable), script.__file__, str(request)]
        answer = _answer(command, settings.timeout)
        if answer["failure"] is not None:
            missing = f"No module named '{package}'" in answer["failure"]
            reason = "is not installed" if missing else "cannot load its loader"
            detail = "" if missing else f" ({answer['failure'][:200]})"
            return Loaded(None, failure=f"{distribution} {reason} in {command[0]}{detail}")
        tensors = load_file(pairs_file) if pairs_file.exists() else {}
    pairs = {}
    for name, down in tensors.items():
        if name.endswith(".A"):
            module = name.removesuffix(".A")
            pairs[module] = tensors[f"{module}.B"], down
    return Loaded(
        answer["version"], refusal=answer["refusal"], options=answer["options"], pairs=pairs
    )


def _answer(command: list[str], timeout: float) -> dict[str, Any]:
    """Return what the script prints last."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except OSError as error:
        raise LsrError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LsrError(f"{command[0]} gave no answer in {timeout:g} seconds") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        raise LsrError(
            f"{command[0]} ended with status {done.returncode} while it loaded: {last[:200]}"
        ) from None
    return answer


def shapes_by_module_name(
    adapter: Checkpoint, base: BaseModules
) -> dict[str, tuple[int, ...] | None]:
    """Return sizes of a base's weights by the names that transformers gives their modules.

    Names are the architecture's, not a file's: of a GGUF file those are asked for that the adapter
    has, in every numbered block.
    """
    if not base.from_gguf:
        return dict(base.shapes)
    shapes: dict[str, tuple[int, ...] | None] = {}
    for layer in adapter.layers:
        for name in names_in_all_blocks(layer.name, base):
            stored = base.find(name)
            if stored is not None:
                shapes[name] = base.shapes[stored]
    return shapes


def _base_config(base: BaseModules) -> dict[str, Any]:
    """Return the base's config.json; empty where there is none."""
    folder = base.path if base.path.is_dir() else base.path.parent
    path = base.path if base.path.name == "config.json" else folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def compare(layer: Layer, up: Array, down: Array) -> tuple[float, float]:
    """Return at which factor a server's ΔW is nearest to a layer's own, and how far it is there.

    The distance is relative to the server's, in the Frobenius norm; of a layer that is zero the
    factor is 1.
    """
    own_up, own_down = (np.asarray(half, np.float64) for half in layer.load())
    own_up = own_up * layer.scale
    up, down = np.asarray(up, np.float64), np.asarray(down, np.float64)
    squared = _inner(own_up, own_down, own_up, own_down)
    theirs = _inner(up, down, up, down)
    if squared == 0.0:
        return 1.0, float(theirs > 0.0)
    if theirs == 0.0:
        return 0.0, 0.0
    factor = _inner(own_up, own_down, up, down) / squared
    # ‖S − f E‖² by an orthogonal basis of both, which cancels nothing
    both_up = np.concatenate([up, -factor * own_up], axis=1)
    both_down = np.concatenate([down, own_down], axis=0)
    _, r_up = np.linalg.qr(both_up)
    _, r_down = np.linalg.qr(both_down.T)
    return factor, float(np.linalg.norm(r_up @ r_down.T)) / math.sqrt(theirs)


def _inner(up: Array, down: Array, other_up: Array, other_down: Array) -> float:
    """Return the inner product of two pairs, tr((B₁ A₁)ᵀ B₂ A₂)."""
    return float(np.sum((up.T @ other_up) * (down @ other_down.T)))
