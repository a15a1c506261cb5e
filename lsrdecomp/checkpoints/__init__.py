"""Adapters on disk: open any known format as records, write LSR and LoRA directories."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
