"""Adapters on disk: open any known format as records, write LSR and LoRA directories."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
