"""The leading coordinates of a norm: fewer eigenpairs where the others weigh nearly alike, for faster solves."""

from __future__ import annotations

import numpy as np

from lsrdecomp.arrays import to_numpy
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights, Weight

SPREAD = 0.02
"""What eigenvalues that are replaced by their mean may differ from it, in all, as a share of the trace. On a language
model's layers norms and errors then agree with those of the whole weight to a thousandth."""

STEP = 16
"""Eigenpairs come in multiples of this, so that layers of one size can share a batch without much padding."""


def leading_norms(norms: NormWeights, spread: float = SPREAD) -> NormWeights:
    """Both weights with as few eigenpairs as ``spread`` allows; weights of other kinds stay as they are."""
    return NormWeights(leading_weight(norms.output, spread), leading_weight(norms.input, spread))


def leading_weight(weight: Weight, spread: float = SPREAD) -> Weight:
    """V diag(λ) Vᵀ + ρ(I − VVᵀ) with only the largest λ, the others replaced by their mean; the trace stays.

    A weight without eigenpairs is returned as it is, one that needs most of them keeps all.
    """
    if not isinstance(weight, LowRankPlusIdentity) or weight.basis.ndim != 2:
        return weight
    values, size = to_numpy(weight.values), weight.size
    order, rest = np.argsort(-values, kind="stable"), float(weight.rest)
    spectrum = np.concatenate([values[order], np.full(size - len(values), rest)])
    spectrum = np.sort(spectrum)[::-1]
    total = spectrum.sum()
    for count in range(STEP, min(len(values), size - 1), STEP):
        mean = spectrum[count:].mean()
        if np.sum(np.abs(spectrum[count:] - mean)) <= 2.0 * spread * total:
            picked = order[:count]
            return LowRankPlusIdentity(weight.basis[:, picked], weight.values[picked], mean)
    return LowRankPlusIdentity(weight.basis, weight.values, weight.rest)
