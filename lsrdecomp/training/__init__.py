"""Fine-tuning of adapters: `finetune` with `FinetuneSettings` gives a `FinetuneRecord`."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
