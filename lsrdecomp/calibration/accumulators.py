"""Running sums of one layer's statistics, the memory they take, and the weights they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsrdecomp.calibration.covariance import Covariance, CovarianceSettings
from lsrdecomp.calibration.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.calibration.gradients import LayerGradients
    from lsrdecomp.targets.weights import LowRankPlusIdentity


@dataclass(frozen=True, slots=True)
class Counts:
    """What a calibration has read so far."""

    batches: int = 0
    examples: int = 0
    answers: int = 0  # predictions: one an example, or one a token for language models
    effect: float = 0.0  # Σ KL(adapter ‖ no adapter) over predictions, nats

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both."""
        return Counts(
            self.batches + other.batches,
            self.examples + other.examples,
            self.answers + other.answers,
            self.effect + other.effect,
        )


@dataclass(frozen=True, slots=True)
class LayerSpectra:
    """The two weights of a layer's norm ½ ‖G^½ D C^½‖_F²."""

    input: LowRankPlusIdentity  # C, with the trace E‖x_t‖²
    output: LowRankPlusIdentity  # G
    fisher_trace: float  # tr G · tr C = E‖W‖_F² per prediction


class LayerSums:
    """Σ W Wᵀ and Σ Wᵀ W over examples, for the gradient W = Σ_t g_t x_tᵀ of a layer's weight.

    W is never formed: with the Gram matrices of an example's tokens, K_x = X Xᵀ and K_g = G Gᵀ, the
    two products are Gᵀ K_x G and Xᵀ K_g X, and both have the trace ‖W‖_F². An example of T tokens
    costs O(T²(m + n) + T(m² + n²)).

    Parameters
    ----------
    size : (int, int)
        Rows m and columns n of the weight.
    settings : CovarianceSettings
        What is kept of each sum.
    device : torch.device
        Where they are added up.
    """

    def __init__(
        self, size: tuple[int, int], settings: CovarianceSettings, device: torch.device
    ) -> None:
        m, n = size
        self.output = Covariance(m, settings, device)
        self.input = Covariance(n, settings, device)
        self.squared_inputs = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, layer: LayerGradients) -> None:
        """Add the inputs and gradients of one batch."""
        x, g = layer.inputs, layer.gradients
        used = layer.used_tokens()
        # Rows are tokens: Σ_i Wᵀ W = Σ_i Xᵀ (G Gᵀ X), so a covariance sees rows x and partners
        # G Gᵀ x.
        self.input.add(x.flatten(0, 1), (g @ g.mT @ x).flatten(0, 1))
        self.output.add(g.flatten(0, 1), (x @ x.mT @ g).flatten(0, 1))
        self.squared_inputs += x[used].double().square().sum()
        self.tokens += used.sum()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is added up, by name.

        Saved, and filled again in another process, the sums go on from there.
        """
        return {
            "output.total": self.output.total,
            "output.trace": self.output.trace,
            "input.total": self.input.total,
            "input.trace": self.input.trace,
            "squared_inputs": self.squared_inputs,
            "tokens": self.tokens,
        }

    def spectra(self, predictions: int) -> LayerSpectra:
        """Return the weights of the layer's norm, per prediction."""
        # Both sums have the trace Σ‖W‖². C takes the mean squared length of an input, and G what
        # is left of the product.
        input_trace = float(self.input.trace)
        output_trace = float(self.output.trace)
        fisher_trace = output_trace / predictions
        mean_square = float(self.squared_inputs) / int(self.tokens)
        if not (fisher_trace > 0 and mean_square > 0):
            return LayerSpectra(self.input.spectrum(0.0), self.output.spectrum(0.0), 0.0)
        return LayerSpectra(
            self.input.spectrum(mean_square / input_trace),
            self.output.spectrum(fisher_trace / mean_square / output_trace),
            fisher_trace,
        )


def sums_memory(size: tuple[int, int], settings: CovarianceSettings) -> int:
    """Return the bytes that the sums of a layer with an (m, n) weight take."""
    rows, columns = size
    return settings.memory(rows) + settings.memory(columns)


def group_by_memory(memory: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Return layers in their order, in as few groups as fit into ``limit`` bytes each.

    Raises
    ------
    CalibrationError
        If one layer alone takes more.
    """
    if limit is None:
        return [list(memory)]
    groups: list[list[str]] = [[]]
    free = limit
    for name, size in memory.items():
        if size > limit:
            raise CalibrationError(
                f"{name}: its sums take {size:,} bytes, more than the {limit:,} of max_memory; "
                "allow more, or a smaller max_full or rank"
            )
        if size > free:
            groups.append([])
            free = limit
        free -= size
        groups[-1].append(name)
    return groups
