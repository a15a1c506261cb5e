"""Fine-tuning of adapters on a task: `finetune` with `FinetuneSettings` gives a `Record`; needs torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
