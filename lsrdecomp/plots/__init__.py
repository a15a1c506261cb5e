"""Pictures of what `analysis` computed; needs matplotlib when one is drawn, not before."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
