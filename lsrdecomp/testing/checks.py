"""Checks of whole functions: draw many cases, shrink the one that fails, name the identity it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, Namespace, norm, to_numpy
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.testing import identities, representations
from lsrdecomp.testing.agreement import require_agreement
from lsrdecomp.testing.strategies import invertible_matrices, kronecker_shapes, matrices, small_matrices

EXAMPLES = 25
"""Cases drawn for each identity."""
Draw = Callable[[Any], Any]
Case = Callable[["Cases"], None]


def check_kron(
    kron: identities.Kron, *, xp: Namespace = np, complex_values: bool = True, max_examples: int = EXAMPLES
) -> None:
    """Try every identity of the Kronecker product of two matrices on ``kron``.

    Parameters
    ----------
    kron : callable (A, B) -> A ⊗ B
        Takes and returns arrays of ``xp``.
    xp : namespace
        Array library in which the cases are handed over: ``numpy``, ``torch``, any of the array API standard.
    complex_values : bool
        Also draw complex matrices.
    max_examples : int
        Cases drawn for each identity; they are the same in each run.

    Raises
    ------
    IdentityError
        With the name of the identity and the smallest case found that breaks it.

    Examples
    --------
    >>> check_kron(np.kron)
    >>> check_kron(lambda a, b: np.kron(b, a))                                  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, (A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]: ...
    """
    names = identities
    for case in (
        lambda d: names.definition(kron, *d.pair()),
        lambda d: names.bilinearity(kron, *d.with_sum()),
        lambda d: names.associativity(kron, *d.of_shape(d.shape(3))),
        lambda d: names.mixed_product(kron, *d.chain()),
        lambda d: names.transpose(kron, *d.pair()),
        lambda d: names.conjugate_transpose(kron, *d.pair()),
        lambda d: names.vec(kron, *d.with_middle()),
        lambda d: names.commutation(kron, *d.pair()),
        lambda d: names.trace(kron, *d.of_shape(d.shape(2, square=True))),
        lambda d: names.inverse(kron, *d.invertible()),
        lambda d: names.determinant(kron, *d.invertible()),
        lambda d: names.eigenvectors(kron, *d.of_shape(d.shape(2, square=True))),
        lambda d: names.rank(kron, *d.partial_isometries()),
        lambda d: names.singular_values(kron, *d.pair()),
        lambda d: names.norms(kron, *d.pair()),
    ):
        _try(case, xp, complex_values, max_examples)


def check_apply(
    apply: Callable[[Sequence[Array], Array], Array],
    *,
    xp: Namespace = np,
    complex_values: bool = True,
    max_examples: int = EXAMPLES,
) -> None:
    """Try a product that is never formed: ``apply([A, B, …], x)`` must be (A ⊗ B ⊗ …) x for x of shape (n, columns).

    Raises `IdentityError`. One to four factors are drawn, one-row and one-column ones among them.
    """

    def case(d: Cases) -> None:
        shape = d.shape(None)
        factors = d.of_shape(shape)
        x = d.matrix((shape.matrix_shape[1], d.draw(st.integers(1, 3))))
        formed = np.ones((1, 1))
        for factor in factors:
            formed = np.kron(formed, to_numpy(factor))
        require_agreement(
            f"apply, (A ⊗ B ⊗ …) x, {shape}",
            apply(factors, x),
            formed @ to_numpy(x),
            bound=norm(formed) * norm(x),
            size=formed.shape[1],
            inputs=(*factors, x),
        )

    _try(case, xp, complex_values, max_examples)


def check_rearrange(
    rearrange: representations.Rearrange,
    inverse: representations.Rearrange | None = None,
    *,
    order: int | None = 2,
    columns: bool = False,
    xp: Namespace = np,
    max_examples: int = EXAMPLES,
) -> None:
    """Try a Van Loan–Pitsianis rearrangement ``rearrange(matrix, shape)``, and its ``inverse(tensor, shape)`` if given.

    Parameters
    ----------
    order : int or None
        Number of factors it can do; ``None`` for any.
    columns : bool
        Blocks are counted and read column by column, as Van Loan and Pitsianis do; absent, row by row, as this library.

    Raises `IdentityError`.
    """
    cases: list[Case] = [
        lambda d: representations.isometry(rearrange, *d.numbered(order)),
        lambda d: representations.outer_product(rearrange, d.of_shape(d.shape(order)), columns),
    ]
    if order == 2:
        cases.append(lambda d: representations.rearranged_blocks(rearrange, *d.numbered(2), columns))
    if inverse is not None:
        cases.append(lambda d: representations.inverse_of_rearrange(rearrange, inverse, *d.numbered(order)))
    for case in cases:
        _try(case, xp, False, max_examples)


def check_sum(
    form: Callable[[Array, Sequence[Array]], Array],
    *,
    order: int | None = None,
    xp: Namespace = np,
    complex_values: bool = True,
    max_examples: int = EXAMPLES,
) -> None:
    """Try ``form(weights, factors)``, which must be Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ for stacks of factors (s, m_i, n_i).

    Raises `IdentityError`.
    """

    def case(d: Cases) -> None:
        weights, factors = d.terms(d.shape(order))
        representations.sum_of_terms(form, weights, factors)

    _try(case, xp, complex_values, max_examples)


def check_decomposition(
    decompose: representations.Decompose,
    *,
    xp: Namespace = np,
    complex_values: bool = True,
    max_examples: int = EXAMPLES,
) -> None:
    """Try ``decompose(matrix, shape, rank) -> (weights, (left, right))``, which must give the best terms there are.

    Shapes have two factors. Weights must descend, factors have norm one, and the residual the norm that Eckart and
    Young's theorem says. Raises `IdentityError`.
    """

    def case(d: Cases) -> None:
        shape = d.shape(2)
        rank = d.draw(st.integers(1, shape.max_separation_rank))
        representations.best_terms(decompose, d.matrix(shape.matrix_shape), shape, rank)

    _try(case, xp, complex_values, max_examples)


class Cases:
    """Draws the matrices an identity needs, in the array library that is asked for."""

    def __init__(self, draw: Draw, xp: Namespace, complex_values: bool) -> None:
        self.draw = draw
        self._xp = xp
        self._complex = complex_values and draw(st.booleans())

    def shape(self, order: int | None, square: bool = False) -> KroneckerShape:
        shape: KroneckerShape = self.draw(kronecker_shapes(order=order, max_entries=400, square=square))
        return shape

    def matrix(self, shape: tuple[int, int]) -> Array:
        integers = small_matrices(shape, complex_values=self._complex)
        return self._moved(self.draw(integers | matrices(shape, scale=1.0, complex_values=self._complex)))

    def of_shape(self, shape: KroneckerShape) -> tuple[Array, ...]:
        return tuple(self.matrix(pair) for pair in shape.factors)

    def pair(self) -> tuple[Array, ...]:
        return self.of_shape(self.shape(2))

    def with_sum(self) -> tuple[Array, ...]:
        a, b = self.pair()
        return a, b, self.matrix(a.shape)

    def with_middle(self) -> tuple[Array, ...]:
        a, b = self.pair()
        return a, b, self.matrix((int(b.shape[1]), int(a.shape[1])))

    def chain(self) -> tuple[Array, ...]:
        a, b = self.pair()
        columns = self.shape(2).columns
        return a, b, *(self.matrix((int(x.shape[1]), n)) for x, n in zip((a, b), columns, strict=True))

    def invertible(self) -> tuple[Array, ...]:
        rows = self.shape(2, square=True).rows
        return tuple(self._moved(self.draw(invertible_matrices(m, self._complex))) for m in rows)

    def partial_isometries(self) -> tuple[Array, ...]:
        """Matrices whose singular values are one or zero."""
        cut = []
        for m, n in self.shape(2).factors:
            r = self.draw(st.integers(0, min(m, n)))
            u, v = (np.linalg.qr(to_numpy(self.draw(matrices((size, size), scale=1.0))))[0] for size in (m, n))
            cut.append(self._moved(u[:, :r] @ v[:, :r].T))
        return tuple(cut)

    def numbered(self, order: int | None) -> tuple[Array, KroneckerShape]:
        """A matrix whose entries are 1, 2, 3, …: a permutation has nowhere to hide."""
        shape = self.shape(order)
        rows, columns = shape.matrix_shape
        return self._moved(np.arange(1.0, rows * columns + 1).reshape(rows, columns)), shape

    def terms(self, shape: KroneckerShape) -> tuple[Array, tuple[Array, ...]]:
        s = self.draw(st.integers(1, 4))
        weights = self._xp.asarray(np.arange(s, 0.0, -1.0))
        stacks = []
        for pair in shape.factors:
            stack = np.stack([to_numpy(self.matrix(pair)) for _ in range(s)])
            stacks.append(self._xp.asarray(stack))
        return weights, tuple(stacks)

    def _moved(self, matrix: Any) -> Array:
        return self._xp.asarray(matrix)


def _try(case: Callable[[Cases], None], xp: Namespace, complex_values: bool, max_examples: int) -> None:
    # Cases must not depend on an earlier run or the machine's speed: no database, no deadline.
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.nested_given],
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )
    @given(data=st.data())
    def every_case(data: st.DataObject) -> None:
        case(Cases(data.draw, xp, complex_values))

    every_case()
