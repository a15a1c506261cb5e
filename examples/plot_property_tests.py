"""
Property tests: rounding follows γ
==================================

The strategies of ``lsrdecomp.testing`` draw separated matrices whose condition γ is asked for. Here
hypothesis draws a few hundred, and each shows how far it moves when its factors are stored as
float16: about γ·μ.
"""

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lsrdecomp import unit_roundoff
from lsrdecomp.plots import COLOURS
from lsrdecomp.testing import check_kron, kronecker_shapes, separated_matrices

points = []


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # of a machine with other work
)
@given(
    kronecker_shapes(order=2).filter(lambda shape: max(shape.sizes) > 3),
    st.floats(0.0, 3.0),
    st.data(),
)
def rounding_follows_the_condition(shape, decades, data):
    case = data.draw(separated_matrices(shape=shape, condition=10.0**decades))
    moved = np.linalg.norm(case.round_to("float16").to_matrix() - case.to_matrix()) / case.norm
    points.append((case.condition, moved))
    assert moved <= 2.5 * case.condition * unit_roundoff("float16")


rounding_follows_the_condition()

# %%
gamma, moved = np.array(points).T
fig, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
ax.loglog(gamma, np.maximum(moved, 1e-7), ".", color=COLOURS[0], markersize=4, alpha=0.6)
line = np.array([0.9, 1100.0])
ax.loglog(line, line * unit_roundoff("float16"), color=COLOURS[1], linewidth=1.2)
ax.annotate(
    "γ·μ",
    (200.0, 220.0 * unit_roundoff("float16")),
    (-6, 6),
    textcoords="offset points",
    ha="right",
    color=COLOURS[1],
)
ax.set(xlabel="condition γ, log scale", ylabel="relative change when stored as float16, log scale")
ax.spines[["top", "right"]].set_visible(False)
ax.grid(linewidth=0.4, alpha=0.5)
plt.show()

# %%
# The same package checks Kronecker code of your own: this line tries fifteen identities on
# ``numpy.kron``.

check_kron(np.kron, max_examples=5)
