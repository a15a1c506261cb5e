"""Fisher statistics of a base model's layers (`calibrate`), and how answers change (`Reference`); needs torch."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
