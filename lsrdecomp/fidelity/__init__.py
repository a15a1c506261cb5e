"""A compressed adapter measured against what its LoRA does: `Evaluator`, and `Fidelity`, what is kept; needs torch."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
