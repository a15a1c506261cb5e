"""Fine-tuning of adapters on a task: `finetune` with `FinetuneSettings` gives a `FinetuneRecord`; needs torch."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
