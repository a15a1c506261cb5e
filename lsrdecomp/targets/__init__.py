"""Targets: matrices to approximate, the norms they are measured in, and the measured error.

`as_target` chooses one: `Dense` for arrays, `LowRank` for a pair B A, `Sparse` and `Operator` for
scipy's, `Separated` for a sum of Kronecker products, `RowStream` for a matrix that does not fit
into memory. `KnownEntries` is a matrix with missing entries. `NormWeights` holds the two weights of
a norm ‖G^½ X C^½‖_F, such as `LowRankPlusIdentity`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
