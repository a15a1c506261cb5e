"""How much of a LoRA is left.

`measure` compares it with another adapter, a model that it was merged into, or a server; `verify`
measures its files against their records and needs no torch; `Evaluator` serves a search.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
