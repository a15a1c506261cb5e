"""Which number format for which factor: fewest bytes under a bound on the square error, by a Lagrange multiplier."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Choice: TypeAlias = "tuple[int, ...] | None"
"""For one term: the index of the format of each factor, or None if the term is dropped."""
BISECTIONS = 100


def cheapest(
    weights: np.ndarray, squares: np.ndarray, sizes: np.ndarray, budget: float, overhead: int
) -> tuple[Choice, ...]:
    """Minimise bytes subject to Σ_dropped λ_k² + Σ_kept λ_k² Σ_i ρ_{k,i}² ≤ ε².

    For a multiplier μ the problem falls apart into one choice a factor and one drop a term; bisection on μ finds the
    best point of the convex hull of (bytes, error), and a greedy pass spends what error is left.

    Parameters
    ----------
    weights : ndarray, shape (s,)
        λ.
    squares : ndarray, shape (s, d, formats)
        Measured relative square errors ρ².
    sizes : ndarray, shape (d, formats)
        Bytes of each factor in each format.
    budget : float
        ε, absolute.
    overhead : int
        Bytes a kept term costs beside its factors.

    Returns
    -------
    tuple of Choice
        The most accurate choice of all if even that exceeds the budget.

    References
    ----------
    Y. Shoham and A. Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE Trans. ASSP 36 (1988).
    doi:10.1109/29.90373
    """
    if len(weights) == 0:
        return ()
    energy = weights.astype(float) ** 2
    scale = float(energy.sum())
    if scale == 0.0 or budget**2 >= scale:
        return (None,) * len(weights)
    energy, allowed = energy / scale, budget**2 / scale
    errors = energy[:, None, None] * squares
    low, high = -20.0, 60.0
    best = _choose(energy, errors, sizes, overhead, None)
    if _error(energy, errors, best) > allowed:
        return tuple(best)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        tried = _choose(energy, errors, sizes, overhead, 10.0**middle)
        if _error(energy, errors, tried) <= allowed:
            high, best = middle, tried
        else:
            low = middle
    return tuple(_spend(energy, errors, sizes, overhead, best, allowed))


def _choose(
    energy: np.ndarray, errors: np.ndarray, sizes: np.ndarray, overhead: int, price: float | None
) -> list[Choice]:
    """The choice that minimises bytes + price × error; with no price the most accurate one."""
    if price is None:
        order = np.lexsort((np.broadcast_to(sizes, errors.shape), errors), axis=-1)[..., 0]
        return [tuple(int(t) for t in row) for row in order]
    cost = sizes[None, :, :] + price * errors
    formats = np.argmin(cost, axis=2)
    kept = np.min(cost, axis=2).sum(axis=1) + overhead
    return [tuple(int(t) for t in formats[k]) if kept[k] < price * energy[k] else None for k in range(len(energy))]


def _error(energy: np.ndarray, errors: np.ndarray, choices: list[Choice]) -> float:
    return float(sum(_term_error(energy, errors, k, choice) for k, choice in enumerate(choices)))


def _term_error(energy: np.ndarray, errors: np.ndarray, k: int, choice: Choice) -> float:
    return float(energy[k]) if choice is None else float(sum(errors[k, i, t] for i, t in enumerate(choice)))


def _spend(
    energy: np.ndarray, errors: np.ndarray, sizes: np.ndarray, overhead: int, choices: list[Choice], allowed: float
) -> list[Choice]:
    """Single changes that save bytes and still fit, the largest saving first, until there is none."""
    choices = list(choices)
    spent = _error(energy, errors, choices)
    while True:
        best: tuple[float, float, int, Choice] | None = None
        for k, choice in enumerate(choices):
            if choice is None:
                continue
            now, size = _term_error(energy, errors, k, choice), overhead + _size(sizes, choice)
            for other in (None, *_neighbours(choice, sizes)):
                extra = _term_error(energy, errors, k, other) - now
                saved = size - (0 if other is None else overhead + _size(sizes, other))
                if saved > 0 and spent + extra <= allowed and (best is None or (saved, -extra) > best[:2]):
                    best = float(saved), -extra, k, other
        if best is None:
            return choices
        spent -= best[1]
        choices[best[2]] = best[3]


def _neighbours(choice: tuple[int, ...], sizes: np.ndarray) -> list[tuple[int, ...]]:
    """Choices that differ in the format of one factor."""
    return [
        (*choice[:i], t, *choice[i + 1 :]) for i in range(len(choice)) for t in range(sizes.shape[1]) if t != choice[i]
    ]


def _size(sizes: np.ndarray, choice: tuple[int, ...]) -> int:
    return int(sum(sizes[i, t] for i, t in enumerate(choice)))
