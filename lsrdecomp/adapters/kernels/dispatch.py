"""Which way of applying an adapter is fastest for given sizes, from crossovers measured by benchmarks/adapters.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

import torch

Choice = Literal["plain", "blas", "merged", "fused"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of one application of an adapter: ``tokens`` rows, W of ``out`` x ``into``, inner rank ``rank``."""

    tokens: int
    out: int
    into: int
    rank: int
    compute: torch.dtype = torch.float32
    storage: torch.dtype = torch.float32
    device: str = "cpu"
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Measured limits on one kind of device; a limit of None means that the mode never won there.

    ``blas_from_tokens``: least number of tokens at which one node beats composed operations.
    ``merged_from``: least ratio of tokens to w1 w2 / (w1 + w2) at which forming W + ΔW wins.
    ``fused_from_tokens``: least number of tokens at which the two Triton passes win.
    ``rows_at_once``: rows of a block, where adding the pair block by block wins over all rows in one go.
    ``masked_to_rank``: largest summed inner rank at which many adapters run best as one masked wide pair.
    """

    blas_from_tokens: int | None
    merged_from: float | None
    fused_from_tokens: int | None
    rows_at_once: int | None
    masked_to_rank: int
    source: str


@cache
def crossovers(device: str) -> Crossovers:
    """The stored crossovers of a kind of device; those of the CPU for one never measured."""
    stored = json.loads(files(__package__).joinpath("crossovers.json").read_text("utf-8"))
    return Crossovers(**stored.get(device, stored["cpu"]))


def choose(problem: Problem, limits: Crossovers | None = None) -> Choice:
    """The fastest way to apply an expanded pair.

    Parameters
    ----------
    problem : Problem
        The sizes.
    limits : Crossovers, optional
        By default those stored for the problem's device.

    Returns
    -------
    str
        A mode of `linear.adapted_linear`.
    """
    limits = limits or crossovers(problem.device)
    exact = problem.storage in (torch.float32, torch.float64) and not problem.dropout
    balance = problem.out * problem.into / (problem.out + problem.into)
    if exact and limits.merged_from is not None and problem.tokens >= limits.merged_from * balance:
        return "merged"
    if limits.fused_from_tokens is not None and problem.tokens >= limits.fused_from_tokens and _fusable(problem):
        return "fused"
    if limits.blas_from_tokens is not None and problem.tokens >= limits.blas_from_tokens:
        return "blas"
    return "plain"


@lru_cache(maxsize=1024)
def chosen(*sizes: Any) -> Choice:
    """`choose` for the fields of a `Problem`, remembered: a layer asks at every call."""
    return choose(Problem(*sizes))


def _fusable(problem: Problem) -> bool:
    from lsrdecomp.adapters.kernels.triton_support import usable

    return not problem.dropout and problem.compute != torch.float64 and usable(problem.device)


def structured_pays(tokens: int, terms: int, inner: tuple[int, int], into: tuple[int, int]) -> bool:
    """Whether applying the in side's factors to each token beats expanding them.

    Operations for ``tokens`` inputs: expanding costs 2 s r w once and 2 r w a token; structured application costs
    2 s r2 w + 2 s r b1 a token, that is ``s (1 + r1/b2) / r1`` of the former.

    Parameters
    ----------
    tokens, terms : int
        Rows of the input, and s.
    inner, into : tuple of int
        (r1, r2) and (b1, b2).
    """
    share = terms * (1 + inner[0] / into[1]) / inner[0]
    return share <= 1 or tokens < terms / (share - 1)


def kronecker_pays(terms: int, out: tuple[int, int], into: tuple[int, int]) -> bool:
    """Whether a direct sum of Kronecker products costs fewer operations applied than its formed matrix does."""
    (a, c), (b, d) = out, into
    return terms * min(b * c * d + a * b * c, a * b * d + a * c * d) < a * b * c * d


__all__ = ["Choice", "Crossovers", "Problem", "choose", "chosen", "crossovers", "kronecker_pays", "structured_pays"]
