"""A Kronecker product of your own, compiled by JAX: array-api-extra marks, `check_kron` tests it.

    pip install -e '.[jax,testing]' array-api-extra pytest
    pytest examples/test_kronecker_in_jax.py

A branch on values, such as ``if a.max() > 0``, passes without compilation and fails here.
"""

import jax.numpy as jnp
from array_api_compat import array_namespace
from array_api_extra.testing import lazy_xp_function, patch_lazy_xp_functions

from lsrdecomp.testing import check_kron


def kron(a, b):
    xp = array_namespace(a, b)
    (m, n), (p, q) = a.shape, b.shape
    return xp.reshape(a[:, None, :, None] * b[None, :, None, :], (m * p, n * q))


lazy_xp_function(kron)


def test_kron_compiled(request):
    with patch_lazy_xp_functions(request, xp=jnp):
        check_kron(kron, xp=jnp, dtype="float32", complex_values=False, max_examples=2)
