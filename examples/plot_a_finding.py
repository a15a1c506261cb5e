"""
A finding of a property test, explained
=======================================

This Kronecker product passes the tests one thinks of. ``check_kron`` tries fifteen identities and
shows the smallest factors that break one: a real times a complex matrix loses its imaginary part.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp.testing import IdentityError, check_kron


def my_kron(a, b):
    (m, n), (p, q) = a.shape, b.shape
    out = np.zeros((m * p, n * q), dtype=a.dtype)  # the bug: the type of `a` alone
    for i in range(m):
        for j in range(n):
            out[i * p : (i + 1) * p, j * q : (j + 1) * q] = a[i, j] * b
    return out


# %%
# What the check prints:

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # NumPy warns of the bug too
    try:
        check_kron(my_kron)
    except IdentityError as error:
        print(error)

# %%
# The same on a larger case. The real part is right, so comparing real numbers finds nothing; the
# difference is the imaginary part.

rng = np.random.default_rng(0)
a, b = rng.standard_normal((3, 3)), rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3))
expected = np.kron(a, b)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    returned = my_kron(a, b)
pictures = {
    "expected, real part": expected.real,
    "returned": returned,
    "difference": np.abs(expected - returned),
}
fig, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for ax, (title, values) in zip(axes, pictures.items(), strict=True):
    image = ax.imshow(values, cmap="RdBu_r", vmin=-4, vmax=4)
    ax.set(title=title, xticks=[], yticks=[])
fig.colorbar(image, ax=axes, shrink=0.8)
plt.show()
