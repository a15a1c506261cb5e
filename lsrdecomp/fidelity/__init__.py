"""A compressed adapter measured against what its LoRA does: `Evaluator`, and `Fidelity`, what is kept; needs torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
