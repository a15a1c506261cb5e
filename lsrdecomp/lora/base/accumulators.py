"""Running sums of one layer's statistics, and the weights C and G that they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.covariance import Covariance, CovarianceSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.lora.base.sampled_gradients import LayerGradients
    from lsrdecomp.targets.weights import LowRankPlusIdentity


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of what a calibration has read so far."""

    batches: int = 0
    examples: int = 0
    answers: int = 0  # predictions: one per example, or one per token for language models
    effect: float = 0.0  # Σ KL(adapter ‖ no adapter) over predictions, nats

    def __add__(self, other: Counts) -> Counts:
        """Return the sums of both counts."""
        return Counts(
            self.batches + other.batches,
            self.examples + other.examples,
            self.answers + other.answers,
            self.effect + other.effect,
        )


@dataclass(frozen=True, slots=True)
class LayerSpectra:
    """The weights C and G of a layer's norm ½ ‖G^½ D C^½‖_F² of a change D."""

    input: LowRankPlusIdentity  # C, with the trace E‖x_t‖²
    output: LowRankPlusIdentity  # G
    fisher_trace: float  # tr G · tr C = E‖W‖_F² per prediction


class LayerSums:
    """Σ W Wᵀ and Σ Wᵀ W over examples, for the gradient W of a layer's weight in each example.

    For an example of T tokens let x be the T × n matrix of the layer's inputs and g the T × m
    matrix of gradients at its outputs, both with a row for each token. Then W = gᵀ x, and

        W Wᵀ = gᵀ (x xᵀ g),  Wᵀ W = xᵀ (g gᵀ x),

    at a cost of O(T²(m + n) + T(m² + n²)) if W is not formed, which it is where an example has more
    tokens than that pays for, as an image has. Both have the trace ‖W‖_F².

    Parameters
    ----------
    size : (int, int)
        Rows m and columns n of the weight.
    settings : CovarianceSettings
        Sizes of the two sums.
    device : torch.device
        Device of the sums.

    Attributes
    ----------
    output, input : Covariance
        Σ W Wᵀ (m × m) and Σ Wᵀ W (n × n).
    squared_inputs : Tensor, shape ()
        Σ ‖x_t‖² over tokens.
    tokens : Tensor, shape ()
        Number of tokens that a prediction depends on.
    """

    def __init__(
        self, size: tuple[int, int], settings: CovarianceSettings, device: torch.device
    ) -> None:
        m, n = size
        self.output = Covariance(m, settings, device)
        self.input = Covariance(n, settings, device)
        self.squared_inputs = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, batch: LayerGradients) -> None:
        """Add the inputs and gradients of one batch."""
        x = batch.inputs
        g = batch.gradients
        used = batch.used_tokens()
        m, n = g.shape[-1], x.shape[-1]
        if x.shape[1] * (m + n) > 2 * m * n:  # forming W takes fewer products
            weight_gradient = g.mT @ x
            of_input, of_output = g @ weight_gradient, x @ weight_gradient.mT
        else:
            of_input, of_output = g @ g.mT @ x, x @ x.mT @ g
        self.input.add(x.flatten(0, 1), of_input.flatten(0, 1))
        self.output.add(g.flatten(0, 1), of_output.flatten(0, 1))
        squares = torch.where(used, x.double().square().sum(-1), 0.0)
        self.squared_inputs += squares.sum()
        self.tokens += used.sum()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All running sums by name, so that another process can save them and fill them again."""
        return {
            "output.total": self.output.total,
            "output.trace": self.output.trace,
            "input.total": self.input.total,
            "input.trace": self.input.trace,
            "squared_inputs": self.squared_inputs,
            "tokens": self.tokens,
        }

    def spectra(self, predictions: int) -> LayerSpectra:
        """Return the weights of the layer's norm, per prediction.

        C is proportional to Σ Wᵀ W and G to Σ W Wᵀ, with traces such that tr C = E‖x_t‖² and
        tr G · tr C = E‖W‖_F².
        """
        input_trace = float(self.input.trace)
        output_trace = float(self.output.trace)
        fisher_trace = output_trace / predictions  # E‖W‖_F², the trace of either sum
        mean_square = float(self.squared_inputs) / int(self.tokens)
        if not (fisher_trace > 0 and mean_square > 0):
            return LayerSpectra(self.input.spectrum(0.0), self.output.spectrum(0.0), 0.0)
        input_scale = mean_square / input_trace
        output_scale = fisher_trace / mean_square / output_trace
        return LayerSpectra(
            self.input.spectrum(input_scale), self.output.spectrum(output_scale), fisher_trace
        )


def sums_memory(size: tuple[int, int], settings: CovarianceSettings) -> int:
    """Return the bytes that the sums of a layer with an (m, n) weight take."""
    rows, columns = size
    return settings.memory(rows) + settings.memory(columns)


def group_by_memory(memory: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Split layers, in their order, into the fewest groups of at most ``limit`` bytes each.

    Parameters
    ----------
    memory : Mapping of name to int
        Bytes that each layer takes.
    limit : int, optional
        Absent, all layers are one group.

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
