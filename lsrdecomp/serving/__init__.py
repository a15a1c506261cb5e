"""Servers: whether what was written applies there, by their rules or by asking one that runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
