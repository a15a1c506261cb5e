"""The running sums of one layer's statistics, the memory they take, and the matrices they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsrdecomp.calibration.covariance import Covariance
from lsrdecomp.calibration.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.calibration.gradients import LayerGradients
    from lsrdecomp.targets.weights import LowRankPlusIdentity


@dataclass(frozen=True, slots=True)
class Counts:
    """What a calibration has seen; answers are examples, or predicted tokens for language models."""

    batches: int = 0
    examples: int = 0
    answers: int = 0
    effect: float = 0.0  # Σ KL(adapter ‖ no adapter), nats


class LayerSums:
    """Σ W Wᵀ and Σ Wᵀ W over examples, for the gradient W = Σ_t g_t x_tᵀ of a layer's weight, of ``size`` (m, n).

    W is never formed: with the Gram matrices of an example's tokens, K_x = X Xᵀ and K_g = G Gᵀ, the
    two products are Gᵀ K_x G and Xᵀ K_g X, and both have the trace ‖W‖_F². An example of T tokens
    costs O(T²(m + n) + T(m² + n²)).
    """

    def __init__(
        self, size: tuple[int, int], *, max_full: int, rank: int, seed: int, device: torch.device
    ) -> None:
        m, n = size
        self.output = Covariance(m, max_full=max_full, rank=rank, seed=seed, device=device)
        self.input = Covariance(n, max_full=max_full, rank=rank, seed=seed, device=device)
        self.squared_inputs = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    @staticmethod
    def memory(size: tuple[int, int], max_full: int, rank: int) -> int:
        """Bytes that the sums of a layer of this size take."""
        return sum(Covariance.memory(side, max_full, rank) for side in size)

    def add(self, pairs: LayerGradients) -> None:
        """Add what one batch showed."""
        x, g, used = pairs.inputs, pairs.gradients, pairs.used_tokens()
        # Rows are tokens: Σ_i Wᵀ W = Σ_i Xᵀ (G Gᵀ X), so covariances see rows x and partners G Gᵀ
        # x.
        self.input.add(x.flatten(0, 1), (g @ g.mT @ x).flatten(0, 1))
        self.output.add(g.flatten(0, 1), (x @ x.mT @ g).flatten(0, 1))
        self.squared_inputs += x[used].double().square().sum()
        self.tokens += used.sum()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is added up, by name: what to save, and to fill so that the sums go on in another process."""
        sides = {"output": self.output, "input": self.input}
        parts = {
            f"{side}.{part}": getattr(sums, part)
            for side, sums in sides.items()
            for part in ("total", "trace")
        }
        return parts | {"squared_inputs": self.squared_inputs, "tokens": self.tokens}

    def spectra(self, answers: int) -> tuple[LowRankPlusIdentity, LowRankPlusIdentity, float]:
        """C with the trace E‖x_t‖², G with tr G · tr C = E‖W‖_F² per answer, and that product."""
        # Both sums have the trace Σ‖W‖². C takes the mean squared length of an input, G what is
        # left of the product.
        into, out = float(self.input.trace), float(self.output.trace)
        fisher, length = out / answers, float(self.squared_inputs) / int(self.tokens)
        if not (fisher > 0 and length > 0):
            return self.input.spectrum(0.0), self.output.spectrum(0.0), 0.0
        return (
            self.input.spectrum(length / into),
            self.output.spectrum(fisher / length / out),
            fisher,
        )


def in_groups(memory: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Layers in their order, in as few runs as possible of which none takes more than ``most`` bytes.

    Raises
    ------
    CalibrationError
        If one layer alone takes more.
    """
    if most is None:
        return [list(memory)]
    groups: list[list[str]] = [[]]
    left = most
    for name, size in memory.items():
        if size > most:
            raise CalibrationError(
                f"{name}: its sums take {size:,} bytes, more than the {most:,} of max_memory; allow more, or a "
                "smaller max_full or rank"
            )
        if size > left:
            groups.append([])
            left = most
        left -= size
        groups[-1].append(name)
    return groups
