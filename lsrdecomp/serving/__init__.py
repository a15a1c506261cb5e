"""A running server: whether an adapter acts there, and at which scale, by asking it."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
