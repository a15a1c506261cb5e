"""What a compressed adapter keeps of its LoRA's effect, measured on a base; needs torch."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
