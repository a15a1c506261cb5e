"""Kronecker shapes, the rearrangement of Van Loan and Pitsianis, and sums of Kronecker products.

`SeparatedMatrix` is Σ λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾, `SeparatedProduct` a product of two of them, as in
an adapter; `KroneckerShape` and `ProductShape` are their sizes. `rearrange` makes separation rank a
rank. Its algebra is in its methods. `to_cp` and `from_cp` exchange terms with TensorLy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
