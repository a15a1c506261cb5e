"""Fisher statistics of a base's layers (`calibrate`), and how outputs change (`Reference`).

Needs torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
