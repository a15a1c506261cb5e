"""Whether an adapter acts in a running server, and at which scale: from log-probabilities alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.gateway import printable
from lsrdecomp.lora.measure.server_client import Prompt, Token, connect

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


SCALES = (0.0, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
"""Scales at which PEFT is asked first, from off to sixteen times; by hand."""
MAX_REFINEMENTS, SCALE_PRECISION = 8, 1e-3
"""Further scales between the neighbours of the nearest of these, and what ends them; by hand."""
NOISE_FACTOR, MIN_EFFECT = 3.0, 1e-4
"""An effect counts above so many times the noise, and above so many nats; by hand, where adapters
that were served in our tests change 0.3 nats and more."""
SCALE_TOLERANCE = 0.25
"""Share by which the fitted scale may differ from the requested one; by hand, where llama.cpp's
rounding moves it by 4 %."""
N_TOKENS = 2000
"""Likeliest next tokens of PEFT that are kept: more than any server gives."""


@dataclass(frozen=True, slots=True)
class ServerMeasurement:
    """What a running server makes of an adapter.

    Differences are mean absolute ones of log-probabilities, in nats.

    Attributes
    ----------
    server, adapter : str
        The kind of server that answers, and what the adapter is called there.
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
    >>> names = ("llama.cpp", "small.gguf")
    >>> ServerMeasurement(*names, prompts=8, noise=0.0, effect=0.41, set_scale=1.0).acts
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
        """Return whether the adapter changes more than a second equal request does."""
        return self.effect > max(NOISE_FACTOR * self.noise, MIN_EFFECT)

    @property
    def requested_scale(self) -> float:
        """The server's own setting, or 1 where that is off or not told."""
        return self.set_scale or 1.0

    @property
    def scaled_right(self) -> bool | None:
        """Return whether the fitted scale is the requested one; None where none was fitted."""
        if self.fitted_scale is None:
            return None
        difference = abs(self.fitted_scale - self.requested_scale)
        return difference <= SCALE_TOLERANCE * abs(self.requested_scale)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, for machines."""
        return {**asdict(self), "acts": self.acts, "scaled_right": self.scaled_right}


def ask_server(
    url: str,
    adapter: str | Path,
    *,
    name: str | None = None,
    base: str | Path | None = None,
    prompts: Sequence[str] = PROMPTS,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> ServerMeasurement:
    """Ask a running server for log-probabilities with and without an adapter.

    It is llama.cpp's, or compatible with OpenAI's. Three requests a prompt, of one token each; with
    a base also a few dozen passes of PEFT over the prompts.

    Parameters
    ----------
    url : str
    adapter : path
        The adapter as it lies here; with ``base`` a directory that PEFT opens.
    name : str, optional
        Name of the adapter in the server; see `client.connect`.
    base : str or path, optional
        To fit the scale: the base as `lora.base.open_bases.load_base` takes it.
    prompts : sequence of str
        One token is asked for after each.
    dtype : str
        Of the base.
    trust_remote_code : bool
        Whether program code that the base brings is run.

    Returns
    -------
    ServerMeasurement
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
    # 1. The server, and PEFT beside it where there is a base: then prompts are token numbers.
    client = connect(url, name, path)
    inputs: list[Prompt] = list(prompts)
    model = None
    if base is not None:
        if not path.is_dir():
            raise CheckpointError(
                "is no directory: the scale is fitted beside PEFT, which opens those; "
                "name the one it was made from",
                path=path,
            )
        model = ScaledModel(base, path, prompts, dtype, trust_remote_code=trust_remote_code)
        inputs = list(model.tokens)
    # 2. Each prompt twice without the adapter, which gives the noise, and once with it.
    plain = [client.ask(prompt, adapted=False) for prompt in inputs]
    again = [client.ask(prompt, adapted=False) for prompt in inputs]
    adapted = [client.ask(prompt, adapted=True) for prompt in inputs]
    measured = ServerMeasurement(
        client.server,
        printable(client.adapter),
        prompts=len(inputs),
        noise=_distance(plain, again),
        effect=_distance(plain, adapted),
        set_scale=client.scale,
    )
    if model is None:
        return measured

    # 3. The scale at which PEFT says the same.
    def distance(scale: float) -> float:
        return _distance(adapted, model.logprobs_at(scale))

    scale, fit = fitted_scale(distance)
    return replace(measured, fitted_scale=scale, fit=fit, misfit=distance(0.0))


class ScaledModel:
    """PEFT with the adapter at any scale, asked for next tokens after prompts; needs torch."""

    def __init__(
        self,
        base: str | Path,
        adapter: Path,
        prompts: Sequence[str],
        dtype: str,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        with needs("fitting the scale", "peft"):
            from lsrdecomp.lora.base.open_bases import load_base
        loaded = load_base(base, adapter, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model: Any = loaded.model
        self.tokens: list[list[int]] = [loaded.tokenizer(text)["input_ids"] for text in prompts]
        self._scaled: list[Any] = [
            module for module in self.model.modules() if hasattr(module, "scale_layer")
        ]
        self._text = cache(lambda token: str(loaded.tokenizer.decode([token])))

    def logprobs_at(self, scale: float) -> list[Mapping[Token, float]]:
        """Return log-probabilities of the likeliest next tokens, with the adapter at a scale.

        Of each prompt, and of each token by its number and by its text.
        """
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
            output = self.model(input_ids=torch.tensor([tokens]), logits_to_keep=1)
        logits = output.logits[0, -1].float()
        best = logits.log_softmax(-1).topk(min(N_TOKENS, logits.numel()))
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        # Two tokens may read alike: the likelier one is what a server would name.
        logprobs: dict[Token, float] = {}
        for token, value in reversed(pairs):
            logprobs[self._text(token)] = value
        return logprobs | dict(pairs)


def fitted_scale(distance: Callable[[float], float]) -> tuple[float, float]:
    """Return the scale at which a distance is least, and how much it is there."""
    from scipy.optimize import minimize_scalar

    distances = [distance(scale) for scale in SCALES]
    best = int(np.argmin(distances))
    bounds = SCALES[max(best - 1, 0)], SCALES[min(best + 1, len(SCALES) - 1)]
    options = {"maxiter": MAX_REFINEMENTS, "xatol": SCALE_PRECISION}
    refined = minimize_scalar(distance, bounds=bounds, method="bounded", options=options)
    if refined.fun < distances[best]:
        return float(refined.x), float(refined.fun)
    return SCALES[best], distances[best]


def _distance(
    first: Sequence[Mapping[Token, float]], second: Sequence[Mapping[Token, float]]
) -> float:
    """Return the mean absolute difference over the tokens of the first.

    A token that the second does not name is at most as likely as the least likely that it names.
    """
    differences = []
    for expected, found in zip(first, second, strict=True):
        for token, logprob in expected.items():
            other = found.get(token)
            if other is None:
                other = min(logprob, *found.values()) if found else logprob
            differences.append(abs(logprob - other))
    return float(np.mean(differences))
