"""Servers: whether what was written applies there, by their rules or by asking one that runs."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
