"""Every public name shows what it is for, in an example that the doctests run; those without one yet are listed."""

import importlib
import inspect

import pytest

import lsrdecomp

ROOMS = (
    "lsrdecomp",
    "lsrdecomp.kronecker",
    "lsrdecomp.operators",
    "lsrdecomp.solvers",
    "lsrdecomp.analysis",
    "lsrdecomp.targets",
)
WITHOUT = {
    "lsrdecomp": {
        "distil",
    },
}
"""Names still without an example; this may only shrink. Exceptions and protocols need none."""


def offered(room):
    module = importlib.import_module(room)
    names = getattr(module, "__all__", None) or dir(module)
    for name in names:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)):
            needs_none = inspect.isclass(value) and (
                issubclass(value, BaseException) or getattr(value, "_is_protocol", False)
            )
            if not needs_none:
                yield name, value


def without_example(room):
    return {name for name, value in offered(room) if ">>>" not in (inspect.getdoc(value) or "")}


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_example_or_is_listed(room):
    assert without_example(room) == WITHOUT.get(room, set())


def test_the_root_offers_what_is_looked_for():
    assert lsrdecomp.decompose in dict(offered("lsrdecomp")).values()
