"""How much of a LoRA is left.

`verify` measures its files, `Evaluator` runs it on a base, `ask_server` asks a server that has it.
`verify` needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
