"""Choices of a search are fields: each is read, and what it says is done."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import lsrdecomp.compression
from lsrdecomp import LowRank
from lsrdecomp.compression import Search, SearchEffort
from lsrdecomp.compression.candidates import equal_bits_candidates, water_filled_candidates
from lsrdecomp.compression.effort import (
    FileFilling,
    ResourceLimits,
    Screening,
    ShapeGrid,
    SolveEffort,
)
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.search import search_layers
from lsrdecomp.compression.settings import Budget
from lsrdecomp.compression.shapes import coarse_grid

VALUES = (SearchEffort, ShapeGrid, Screening, SolveEffort, ResourceLimits, FileFilling)
FIELDS = [field.name for value in VALUES for field in dataclasses.fields(value)]


def attributes_read() -> set[str]:
    """Every attribute that a file of the room reads."""
    room = Path(lsrdecomp.compression.__file__).parent
    names = set()
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
    return names


def test_every_field_is_read() -> None:
    assert set(FIELDS) <= attributes_read()


@pytest.fixture
def layer(rng: np.random.Generator) -> Layer:
    pair = LowRank(rng.standard_normal((24, 12)), rng.standard_normal((12, 36)))
    return Layer.of("q", pair)


def test_the_sizes_of_low_rank_in_integers_are_as_many_as_asked(layer: Layer) -> None:
    effort = SearchEffort(max_code_sizes=5, consecutive_ranks=3)
    assert len(water_filled_candidates(layer, effort=effort)) == 5
    ranks = [candidate.rank for candidate in equal_bits_candidates(layer, 4, effort)]
    assert ranks[:3] == [1, 2, 3]
    assert ranks[-1] == 12
    assert len(ranks) <= 5


def test_the_grid_of_a_search_is_the_one_that_is_asked(layer: Layer) -> None:
    grid = ShapeGrid(terms_of_two=((1, 1),), terms_with_inner=((1, 1),))
    (request,) = coarse_grid(layer.shape, (2,), 1e9, grid)
    assert request.terms == ((1, 1),)
    effort = SearchEffort(grid=grid, screening=Screening(min_advantage=0.0))
    search = Search(orders=(2,), rounds=0, effort=effort)
    table = search_layers([layer], [Budget(parameters=300)], search=search)
    assert {product.ranks for product in table.products(0)} == {(1, 1)}
