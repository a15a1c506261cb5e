"""Runs that train an adapter: on examples (`finetune`), or on the outputs of its LoRA.

`finetune` with `FinetuneSettings` gives a `FinetuneRecord`. Distillation is `lsrdecomp.distill` and
``compress(…, distill=…)``; its trainer is here. Needs torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
