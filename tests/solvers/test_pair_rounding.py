"""Integer codes solved for in the norm: nearer than plain rounding, and of the same size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_pair import CUBE, SMALL, low_rank, norms

from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import LsrCandidate, lsr_candidate, materialize
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.quantize import quantized_product, refitted_product
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.pair.quantization_aware import quantize_sequentially
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import weighted_residual_norm
from lsrdecomp.targets.weights import NormWeights

KINDS = ("frobenius", "all eigenpairs", "low rank")


def in_int4(candidate: LsrCandidate) -> LsrCandidate:
    return replace(candidate, storage="int4")


def norm_of(rng: np.random.Generator, shape: ProductShape, kind: str) -> NormWeights:
    return (
        NormWeights.frobenius(shape.matrix_shape)
        if kind == "frobenius"
        else norms(rng, shape, kind)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "shape"), [(3, SMALL), (4, CUBE)])
def test_solving_takes_back_most_of_what_rounding_loses(
    bits: int, shape: ProductShape, kind: str
) -> None:
    lost = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        target, weights = low_rank(rng, shape, 4), norm_of(rng, shape, kind)
        found = JointALS(sweeps=10).solve(target, shape, (3, 3), weights=weights)
        layer = Layer.of("layer", target, weights)
        ways = quantized_product(found.product, bits), refitted_product(layer, found.product, bits)
        assert ways[0].bytes == ways[1].bytes
        errors = [weighted_residual_norm(target, way.dequantized(), weights) for way in ways]
        lost.append([error**2 - found.error**2 for error in errors])
    plain, solved = np.median(lost, axis=0)
    assert 0.0 < solved < 0.7 * plain


def test_codes_are_found_again(rng: np.random.Generator) -> None:
    sides = []
    for shape in (SMALL.left, SMALL.right):
        codes = [rng.integers(-7, 8, (2, m, n)).astype(float) for m, n in shape.factors]
        for code in codes:
            code[:, 0, 0] = 7.0  # the largest code, so that the step is that of the codes
        sides.append(SeparatedMatrix.from_factors(codes))
    exact = SeparatedProduct(*sides)
    target = LowRank(*exact.to_lora())
    out, into = quantize_sequentially(target, exact, 4)
    coded = SeparatedProduct(
        *(
            SeparatedMatrix.from_factors([c.astype(float) for c in codes], scales)
            for codes, scales in (out, into)
        )
    )
    assert target.residual_norm(coded) <= 1e-10 * target.norm


def test_a_layer_takes_the_nearer_of_both(rng: np.random.Generator) -> None:
    layer = Layer.of("layer", low_rank(rng, SMALL, 4), norms(rng, SMALL, "all eigenpairs"))
    candidate = in_int4(
        lsr_candidate(JointALS().solve(layer.pair, SMALL, 3, weights=layer.norms), SpillCache())
    )
    plain, solved = (
        quantized_product(candidate.product(), 4),
        materialize(layer, candidate, SpillCache()),
    )
    assert solved.candidate.squared_error < layer.squared_error(plain.dequantized())
    assert solved.candidate.bytes == plain.bytes
    assert solved.candidate.squared_error == pytest.approx(
        layer.squared_error(solved.product), rel=1e-12
    )
    assert solved.stored().storage == solved.candidate.storage == "int4"


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_scales_do_not_matter(scale: float, rng: np.random.Generator) -> None:
    pair = low_rank(rng, SMALL, 3)
    layer = Layer.of("layer", LowRank(scale * pair.left, pair.right))
    candidate = lsr_candidate(JointALS().solve(layer.pair, SMALL, 2), SpillCache())
    coded = materialize(layer, in_int4(candidate), SpillCache())
    assert coded.candidate.squared_error <= 0.9 * layer.squared_norm
