"""All layers of an adapter under one budget: `lsrdecomp.compress` gives a `Compression`, to `save`.

`adapter_curves` shows what a budget would cost, `html_report` puts a result on one page, `verify`
measures two files against each other, `export_lora` writes a plain LoRA of the same ΔW.
`search_adapter` solves once for many budgets; each is then drawn by `SearchedAdapter.compress`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
