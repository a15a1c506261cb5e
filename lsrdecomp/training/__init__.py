"""Fine-tuning of adapters: `finetune` with `FinetuneSettings` gives a `FinetuneRecord`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
