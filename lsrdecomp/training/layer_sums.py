"""The running sums of one layer's statistics, and the matrices they become."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lsrdecomp.training.covariance import Covariance, Spectrum
from lsrdecomp.training.fisher import Pairs

State = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a calibration has seen; answers are examples, or predicted tokens for language models."""

    batches: int = 0
    examples: int = 0
    answers: int = 0


class LayerSums:
    """Both covariances of a layer with ``size`` (m, n), tokens seen, and the exact trace of its Fisher matrix."""

    def __init__(self, size: tuple[int, int], *, max_full: int, rank: int, seed: int, device: torch.device) -> None:
        m, n = size
        self.output = Covariance(m, max_full=max_full, rank=rank, seed=seed, device=device)
        self.input = Covariance(n, max_full=max_full, rank=rank, seed=seed, device=device)
        self.fisher_trace = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, pairs: Pairs) -> None:
        """Add what one batch showed."""
        used = pairs.used()
        self.input.add(pairs.inputs[used])
        self.output.add(pairs.gradients[used])
        self.fisher_trace += pairs.squared_gradient_norm()
        self.tokens += int(used.sum())

    def state(self) -> State:
        """What to save so that the sums can go on in another process."""
        both = {"output": self.output.state(), "input": self.input.state()}
        parts = {f"{side}.{part}": value for side, state in both.items() for part, value in state.items()}
        return parts | {"fisher_trace": self.fisher_trace.cpu().numpy(), "tokens": np.array(self.tokens)}

    def load(self, state: State) -> None:
        """Go on from a saved state."""
        for side, covariance in (("output", self.output), ("input", self.input)):
            covariance.load({part: state[f"{side}.{part}"] for part in ("total", "trace")})
        self.fisher_trace.copy_(torch.from_numpy(np.asarray(state["fisher_trace"])))
        self.tokens = int(state["tokens"])

    def spectra(self, answers: int) -> tuple[Spectrum, Spectrum, float]:
        """C = E[x xᵀ] over tokens, G scaled to the Fisher trace per answer, and that trace."""
        into, out = self.input.spectrum(), self.output.spectrum()
        fisher = float(self.fisher_trace) / answers
        input_scale = 1 / self.tokens
        mixed = into.trace * input_scale * out.trace
        return _scaled(into, input_scale), _scaled(out, fisher / mixed if mixed > 0 else 0.0), fisher


def _scaled(spectrum: Spectrum, factor: float) -> Spectrum:
    return replace(
        spectrum, values=spectrum.values * factor, rest=spectrum.rest * factor, trace=spectrum.trace * factor
    )
