"""Pictures of what `analysis` computed; needs matplotlib when one is drawn, not before."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
