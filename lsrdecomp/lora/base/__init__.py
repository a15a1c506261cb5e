"""A base model and what it does: opened, run on texts, and the Fisher statistics of its layers.

`find_base` finds its files, `calibrate` measures statistics, `Reference` compares outputs. Needs
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
