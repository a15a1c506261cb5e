"""Geometries: how ΔW acts in each type of layer, and where it lies in the layer's weight.

ΔW is a matrix (out, in), or a pair B̂ (out, r) and Â (r, in) whose product it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from peft.tuners.tuners_utils import _get_in_out_features
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lsrdecomp.errors import UnsupportedLayerError

CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Convolutions by the number of axes of their window."""
LINEAR = (nn.Linear, Conv1D)
NOT_LINEAR = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_measured(layer: nn.Module) -> bool:
    """Return whether statistics of a layer can be measured: Linear ones, and images' convolutions.

    Of a convolution they are those of the matrix that acts on every patch of its input.
    """
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and layer.padding != "same"
    return isinstance(layer, LINEAR)


@dataclass(frozen=True, slots=True)
class LinearGeometry:
    """``y = x Wᵀ``; the stored weight is W, or Wᵀ in a transformers ``Conv1D``."""

    matrix_shape: tuple[int, int]  # out, in
    transposed: bool = False

    @property
    def fan_in(self) -> int:
        """Entries of a row of ΔW that one output sums over, for the spread of starting values."""
        return self.matrix_shape[1]

    def pair_output(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return what the pair (left, right) adds to the output, without forming ΔW."""
        return F.linear(F.linear(x, right), left)

    def matrix_output(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return what ΔW adds to the output."""
        return F.linear(x, matrix)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the shape of the stored weight."""
        return matrix.T if self.transposed else matrix

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return a stored weight as a matrix."""
        return weight.T if self.transposed else weight

    def along_output(self, vector: Tensor) -> Tensor:
        """Return one number per output in a shape that broadcasts against the output."""
        return vector


@dataclass(frozen=True, slots=True)
class EmbeddingGeometry:
    """Rows of the weight are looked up: out is the embedding dimension, in the vocabulary."""

    matrix_shape: tuple[int, int]  # out, in
    padding_idx: int | None
    fan_in = 1  # a look-up picks one entry of each row

    def pair_output(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return what the pair (left, right) adds to the output, without forming ΔW."""
        return F.linear(F.embedding(x, right.T, padding_idx=self.padding_idx), left)

    def matrix_output(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return what ΔW adds to the output."""
        return F.embedding(x, matrix.T, padding_idx=self.padding_idx)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the shape of the stored weight."""
        return matrix.T

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return a stored weight as a matrix."""
        return weight.T

    def along_output(self, vector: Tensor) -> Tensor:
        """Return one number per output in a shape that broadcasts against the output."""
        return vector


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """A convolution in one to three dimensions; in is channels of one group times the window."""

    weight_shape: tuple[int, ...]  # output channels, channels of one group, window
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    pad: tuple[int, ...] | None  # what to pad the input by, for a mode other than zeros
    padding_mode: str

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out, in) of ΔW."""
        return self.weight_shape[0], math.prod(self.weight_shape[1:])

    @property
    def fan_in(self) -> int:
        """Entries of a row of ΔW that one output sums over, for the spread of starting values."""
        return self.matrix_shape[1]

    def pair_output(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return what the pair (left, right) adds to the output, without forming ΔW."""
        # Every group sees the same Â on its own channels, and its own rows of B̂.
        window = right.reshape(-1, *self.weight_shape[1:])
        n_axes = window.ndim - 2
        inner = self._convolve(x, window.repeat(self.groups, *[1] * (window.ndim - 1)))
        pointwise = left.reshape(*left.shape, *[1] * n_axes)
        return CONVOLUTIONS[n_axes](inner, pointwise, groups=self.groups)  # type: ignore[no-any-return]

    def matrix_output(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return what ΔW adds to the output."""
        return self._convolve(x, self.to_weight(matrix))

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the shape of the stored weight."""
        return matrix.reshape(self.weight_shape)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return a stored weight as a matrix."""
        return weight.reshape(self.matrix_shape)

    def along_output(self, vector: Tensor) -> Tensor:
        """Return one number per output in a shape that broadcasts against the output."""
        return vector.reshape(-1, *[1] * (len(self.weight_shape) - 2))

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        padding = self.padding
        if self.pad is not None:
            x = F.pad(x, self.pad, mode=self.padding_mode)
            padding = 0
        convolve = CONVOLUTIONS[weight.ndim - 2]
        return convolve(  # type: ignore[no-any-return]
            x,
            weight,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )


Geometry = LinearGeometry | EmbeddingGeometry | ConvGeometry


def geometry_of(layer: nn.Module, quantized: bool = False) -> Geometry:
    """Return the geometry of a layer of the base model.

    Parameters
    ----------
    layer : nn.Module
        The layer, without adapters.
    quantized : bool
        Take any layer with the sizes of a linear layer for one.

    Raises
    ------
    UnsupportedLayerError
        For any other type of module.
    """
    if isinstance(layer, Conv1D):
        rows, columns = layer.weight.shape
        return LinearGeometry((columns, rows), transposed=True)
    if isinstance(layer, nn.Linear) or quantized:
        n_inputs, n_outputs = _get_in_out_features(layer)
        if n_inputs is not None and n_outputs is not None:
            return LinearGeometry((n_outputs, n_inputs))
    if isinstance(layer, nn.Embedding):
        return EmbeddingGeometry((layer.embedding_dim, layer.num_embeddings), layer.padding_idx)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        pads_with_zeros = layer.padding_mode == "zeros"
        return ConvGeometry(
            weight_shape=tuple(layer.weight.shape),
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            pad=None if pads_with_zeros else tuple(layer._reversed_padding_repeated_twice),
            padding_mode="constant" if pads_with_zeros else layer.padding_mode,
        )
    raise UnsupportedLayerError(
        f"Target module {layer} is not supported. Currently, only the following modules are "
        "supported: `torch.nn.Linear`, `torch.nn.Embedding`, `torch.nn.Conv1d`, `torch.nn.Conv2d`, "
        "`torch.nn.Conv3d`, `transformers.pytorch_utils.Conv1D`, and quantized linear layers that "
        "PEFT knows."
    )
