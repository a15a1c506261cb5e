"""Whether an adapter acts in a running server, and at which scale: from log-probabilities alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.serving.client import Prompt, Token, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROMPTS = (
    "The city by the river is",
    "In winter the old doctor",
    "A short letter to my teacher:",
    "Question: What is seven plus five? Answer:",
    "The history of music begins",
    "def add(a, b):",
    "Dear customer, we are sorry that",
    "Name: The Eagle. Food: French. Text:",
)
"""Eight short beginnings of different kinds: what an adapter was trained for moves at least some of
them."""
BEYOND = 3.0
"""An effect counts from so many times what two equal requests differ by."""
LEAST = 1e-4  # nats
SCALES = (0.0, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
REFINEMENTS = 8
LIKELIEST = 2000
"""Next tokens of PEFT's that are kept: more than any server gives."""
TOLERANCE = 0.25
"""Share by which the fitted scale may differ from the one that is set."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a running server makes of an adapter; differences are mean absolute ones of log-probabilities, in nats.

    Attributes
    ----------
    server, adapter : str
        Which kind answers, and what the adapter is called there.
    prompts : int
    noise : float
        Between two equal requests without the adapter.
    effect : float
        Between requests with and without it.
    set_scale : float or None
        What the server says it scales the adapter by.
    fitted_scale : float or None
        The scale at which PEFT comes nearest to the server; None without a base.
    fit, misfit : float or None
        How far PEFT is from the server at that scale, and without the adapter.

    Examples
    --------
    >>> Asked("llama.cpp", "small.gguf", prompts=8, noise=0.0, effect=0.41, set_scale=1.0).acts
    True
    """

    server: str
    adapter: str
    prompts: int
    noise: float
    effect: float
    set_scale: float | None
    fitted_scale: float | None = None
    fit: float | None = None
    misfit: float | None = None

    @property
    def acts(self) -> bool:
        """Whether the adapter changes more than a second equal request does."""
        return self.effect > max(BEYOND * self.noise, LEAST)

    @property
    def wanted_scale(self) -> float:
        """What was asked of the server: its own setting, or 1 where that is off or not told."""
        return self.set_scale or 1.0

    @property
    def scaled_right(self) -> bool | None:
        """Whether the fitted scale is the one asked for; None where none was fitted."""
        if self.fitted_scale is None:
            return None
        return abs(self.fitted_scale - self.wanted_scale) <= TOLERANCE * abs(self.wanted_scale)

    def to_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {**asdict(self), "acts": self.acts, "scaled_right": self.scaled_right}


def ask_server(
    url: str,
    adapter: str | Path,
    *,
    name: str | None = None,
    base: str | Path | None = None,
    prompts: Sequence[str] = PROMPTS,
    dtype: str = "float32",
) -> Asked:
    """Ask a running llama.cpp or OpenAI-compatible server for log-probabilities with and without an adapter.

    Three requests a prompt, of one token each; with a base also a few dozen passes of PEFT over the
    prompts.

    Parameters
    ----------
    url : str
    adapter : path
        The adapter as it lies here; with ``base`` a directory that PEFT opens.
    name : str, optional
        Which of the server's adapters is meant; see `client.connect`.
    base : str or path, optional
        To fit the scale: the base as `calibration.base_model.load_base` takes it.
    prompts : sequence of str
        One token is asked for after each.
    dtype : str
        Of the base.

    Returns
    -------
    Asked
        Whether the adapter acts, and with a base at which scale.

    Raises
    ------
    LsrError
        If the server cannot be asked, or torch is missing where a base is given.
    CheckpointError
        If adapter and base do not fit.
    """
    path = Path(adapter)
    if not path.exists():
        raise CheckpointError("no such file or directory", path=path)
    texts: list[Prompt] = list(prompts)
    client = connect(url, name, path)
    expected: Callable[[float], Sequence[Mapping[Token, float]]] | None = None
    if base is not None:
        if not path.is_dir():
            text = "is no directory: the scale is fitted beside PEFT, which opens those; name the one it was made from"
            raise CheckpointError(text, path=path)
        model = ScaledModel(base, path, prompts, dtype)
        texts, expected = list(model.tokens), model.at
    plain = [client.ask(text, adapted=False) for text in texts]
    again = [client.ask(text, adapted=False) for text in texts]
    adapted = [client.ask(text, adapted=True) for text in texts]
    measured = (
        client.server,
        client.adapter,
        len(texts),
        _distance(plain, again),
        _distance(plain, adapted),
    )
    if expected is None:
        return Asked(*measured, client.scale)
    scale, fit = fitted_scale(lambda s: _distance(adapted, expected(s)))
    return Asked(*measured, client.scale, scale, fit, _distance(adapted, expected(0.0)))


class ScaledModel:
    """PEFT with the adapter at any scale: a base asked for next tokens after given prompts; needs torch."""

    def __init__(self, base: str | Path, adapter: Path, prompts: Sequence[str], dtype: str) -> None:
        with needs("fitting the scale", "peft"):
            from lsrdecomp.calibration.base_model import load_base
        loaded = load_base(base, adapter, dtype=dtype)
        self.model: Any = loaded.model
        self.tokens: list[list[int]] = [loaded.tokenizer(text)["input_ids"] for text in prompts]
        self._scaled: list[Any] = [
            module for module in self.model.modules() if hasattr(module, "scale_layer")
        ]
        self._text = cache(lambda token: str(loaded.tokenizer.decode([token])))

    def at(self, scale: float) -> list[Mapping[Token, float]]:
        """Of each prompt, the likeliest next tokens by number and by text, with the adapter at a scale."""
        if scale == 0.0:
            with self.model.disable_adapter():
                return list(map(self._answer, self.tokens))
        for module in self._scaled:
            module.scale_layer(scale)
        try:
            return list(map(self._answer, self.tokens))
        finally:
            for module in self._scaled:
                module.unscale_layer(scale)

    def _answer(self, tokens: list[int]) -> Mapping[Token, float]:
        import torch

        with torch.no_grad():
            logits = (
                self.model(input_ids=torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float()
            )
        best = logits.log_softmax(-1).topk(min(LIKELIEST, logits.numel()))
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        # Two tokens may read alike: the likelier one is what a server would name.
        named: dict[Token, float] = {self._text(token): value for token, value in reversed(pairs)}
        return {**named, **dict(pairs)}


def fitted_scale(distance: Callable[[float], float]) -> tuple[float, float]:
    """Where a distance is least among `SCALES`, refined between the neighbours; and how much it is there."""
    from scipy.optimize import minimize_scalar

    seen = [distance(scale) for scale in SCALES]
    best = int(np.argmin(seen))
    low, high = SCALES[max(best - 1, 0)], SCALES[min(best + 1, len(SCALES) - 1)]
    options = {"maxiter": REFINEMENTS, "xatol": 1e-3}
    nearest = minimize_scalar(distance, bounds=(low, high), method="bounded", options=options)
    if nearest.fun < seen[best]:
        return float(nearest.x), float(nearest.fun)
    return SCALES[best], seen[best]


def _distance(
    first: Sequence[Mapping[Token, float]], second: Sequence[Mapping[Token, float]]
) -> float:
    """Mean absolute difference over the first's tokens; where the second does not give one, it is at most its least."""
    both = zip(first, second, strict=True)
    return float(
        np.mean(
            [
                abs(p - seen.get(t, min([p, *seen.values()])))
                for asked, seen in both
                for t, p in asked.items()
            ]
        )
    )
