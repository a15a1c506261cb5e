"""Fisher statistics of a base's layers (`calibrate`), and how outputs change (`Reference`).

Needs torch.
"""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
