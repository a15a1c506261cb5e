"""
How much of a LoRA is left
==========================

The adapter that ships with the package, at many sizes: the share of its gain in loss that is left
on 872 film reviews, by their sentiment labels. Nothing was retrained.
"""

import json
from importlib.resources import files

import matplotlib.pyplot as plt

from lsrdecomp.plots import plot_shares

room = files("lsrdecomp.cli")
rows = json.loads((room / "demo_kept.json").read_text())["rows"]
whole = next(row["parameters"] for row in rows if row["method"] == "lora")
methods = {
    "lsr-kfac": "LSR, calibrated",
    "svd-kfac": "truncated SVD, calibrated",
    "svd-frobenius": "truncated SVD",
}
shares = {
    label: [(whole / row["ratio"], row["share"]) for row in rows if row["method"] == method]
    for method, label in methods.items()
}

# %%
# Calibrated means: by statistics of the layers' inputs and gradients (Fisher norm), so that errors
# count by what they change in the outputs.

fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
plot_shares(shares, whole=whole, ax=ax)
plt.show()
