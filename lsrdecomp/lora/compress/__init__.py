"""From a LoRA to a smaller one: `compress` and `distill`, and what belongs to them.

`truncate` cuts a LoRA in its own format, `export_lora` writes a plain LoRA of the same ΔW,
`html_report` puts a result on one page. Torch is loaded only where a base is given.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
