"""Records to understand an approximation by: error curves, fronts, spectra, limits, grids."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
