"""Candidates for every layer of a LoRA, and their choice under one budget; without torch.

`search_adapter` solves once for many budgets; each is then drawn by `SearchedAdapter.compress`,
which gives a `Compression` to `save`. `adapter_curves` shows what a number of terms would cost.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
