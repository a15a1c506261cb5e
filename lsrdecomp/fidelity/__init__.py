"""What a compressed adapter keeps of its LoRA's effect, measured on a base; needs torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
