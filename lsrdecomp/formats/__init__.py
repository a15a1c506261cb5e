"""Number formats of stored factors: rounding, bit packing, codes, and which pays where.

`smallest` stores a separated matrix in the fewest bytes within an error; `FORMATS` lists the
formats.
"""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
