"""
Error curves of a LoRA
======================

The adapter that ships with the package: twelve layers of rank 8, trained on the sentiment of film
reviews. Each curve cuts every layer alike. In Frobenius norm truncated SVD is the one to beat.
"""

from importlib.resources import files

import matplotlib.pyplot as plt

from lsrdecomp.analysis import gaussian_limit, layer_grid
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.curves import adapter_curves
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.plots import plot_error_curves, plot_layer_grid

lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
curves = adapter_curves(lora)

fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
plot_error_curves(curves, storages=("bfloat16",), ax=ax)
ax.axvline(lora.adapter_parameters, color="0.5", linewidth=1.0)
ax.set_title(f"{lora.adapter_parameters:,} LoRA parameters")
plt.show()

# %%
# On the axis of bytes there is a limit: if the entries of the singular vectors look like Gaussian
# noise, no way to code them goes below the dashed line. Sixteen bits a number are far from it,
# which is why fewer bits for weaker components pay.

pairs = {layer.name: layer_pair(lora, layer) for layer in lora.layers}
fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
plot_error_curves(curves, against="bytes", limits=[gaussian_limit(list(pairs.values()))], ax=ax)
plt.show()

# %%
# Layers differ: what rank 2 leaves of each, by block and module. A budget shared over the layers
# uses that.

left = {}
for name, pair in pairs.items():
    sigma = pair.svd[1]
    left[name] = float((sigma[2:] ** 2).sum() ** 0.5 / pair.norm)
plot_layer_grid(
    layer_grid(left, "relative error at rank 2"),
    ax=plt.figure(figsize=(6.8, 3.2), layout="constrained").subplots(),
)
plt.show()
