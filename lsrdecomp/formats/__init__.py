"""Number formats of stored factors: rounding, bit packing, codes, and which pays where.

`smallest` stores a separated matrix in the fewest bytes within an error; `FORMATS` lists the
formats.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
