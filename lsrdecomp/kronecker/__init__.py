"""Kronecker shapes, the rearrangement of Van Loan and Pitsianis, and sums of Kronecker products.

`SeparatedMatrix` is Σ λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾, `SeparatedProduct` a product of two of them, as in
an adapter; `KroneckerShape` and `ProductShape` are their sizes. `rearrange` makes separation rank a
rank. Its algebra is in its methods. `to_cp` and `from_cp` exchange terms with TensorLy.
"""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
