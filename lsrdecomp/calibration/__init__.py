"""Fisher statistics of a base model's layers (`calibrate`), and how answers change (`Reference`); needs torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
