"""
How far is this covariance from separable?
==========================================

A covariance over space and time is *separable* if it is one Kronecker product, of a covariance in
space and one in time: then likelihoods and predictions cost what the two parts cost. The distance
to the nearest Kronecker product says how much is lost by assuming that, and the number of terms
what a sum of a few products would need.
"""

import matplotlib.pyplot as plt
import numpy as np

import lsrdecomp as lsr

# %%
# Gneiting's covariance has a number for it: at interaction 0 it is separable, at 1 the least so.

places = np.linspace(0.0, 3.0, 24)
times = np.linspace(0.0, 3.0, 20)
distances = np.abs(places[:, None] - places[None, :])
lags = np.abs(times[:, None] - times[None, :])


def covariance(interaction):
    """Return the covariance of all places at all times, the places outermost."""
    decay = 1.0 + lags[None, :, None, :]
    spread = distances[:, None, :, None] / decay ** (interaction / 2.0)
    return (np.exp(-spread) / decay).reshape(480, 480)


shape = (24, 24)  # of the part in space; that in time follows
interactions = np.linspace(0.0, 1.0, 11)
one_term, terms = [], []
for interaction in interactions:
    curve = lsr.error_curve(covariance(interaction), shape)
    one_term.append(curve.relative_errors[1])
    terms.append(curve.rank_for(1e-3))

for interaction, error, count in list(zip(interactions, one_term, terms, strict=True))[::5]:
    print(f"interaction {interaction:.1f}: one product misses {error:.2%}, {count} reach 0.1 %")

# %%
# Of a sample covariance part of the distance is noise, and no sum of few terms should fit it. How
# much, a separable covariance with as many samples tells.

rng = np.random.default_rng(0)


def distance_of_samples(interaction, count):
    """Return the distance of a sample covariance from its nearest product."""
    root = np.linalg.cholesky(covariance(interaction) + 1e-10 * np.eye(480))
    samples = root @ rng.standard_normal((480, count))
    return lsr.decompose(samples @ samples.T / count, shape, rank=1).relative_error


counts = (500, 2000, 8000)
separable = [distance_of_samples(0.0, count) for count in counts]
interacting = [distance_of_samples(1.0, count) for count in counts]

fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
left.plot(interactions, one_term, marker=".")
left.set(xlabel="interaction of space and time", ylabel="distance from separable, relative")
right.loglog(counts, interacting, marker=".", label="interaction 1")
right.loglog(counts, separable, marker=".", label="separable")
right.axhline(one_term[-1], color="0.45", linestyle=":", label="interaction 1, exact")
right.set(xlabel="samples, log scale", ylabel="distance from separable, relative, log scale")
right.set_xticks(counts, [f"{count:,}" for count in counts])
right.minorticks_off()
right.legend(frameon=False)
plt.show()

# %%
# The nearest product itself is positive definite, and inverts factor by factor.

nearest = lsr.operators.nearest_kronecker(covariance(1.0), shape)
in_space, in_time = nearest.terms()[0]
print(f"smallest eigenvalues {np.linalg.eigvalsh(in_space)[0]:.2g}", end=" and ")
print(f"{np.linalg.eigvalsh(in_time)[0]:.2g}")
