"""Targets: what is approximated, the norms it is measured in, and the measured error.

`as_target` chooses one: `Dense` for arrays, `LowRank` for a pair B A, `Sparse` and `Operator` for
scipy's, `Separated` for a sum of Kronecker products, `RowStream` for a matrix that does not fit
into memory. `KnownEntries` is a matrix with missing entries. `NormWeights` holds the two weights of
a norm ‖G^½ X C^½‖_F, such as `LowRankPlusIdentity`.
"""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
