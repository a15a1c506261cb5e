"""A running server: whether an adapter acts there, and at which scale, by asking it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
