"""Ways to apply an adapter that no measurement has shown to win yet: kept to be measured on a GPU, not shipped.

``arena``: every factor of a model in one parameter. ``triton_expansion``, ``triton_passes``: the same sums, and a pair
added in one pass each way, in Triton. ``modes``: W + αB̂Â formed for one product, and the Triton passes as a layer.
What wins in ``benchmarks.adapters.speed`` on a GPU moves into ``lsrdecomp.adapters.kernels`` and its dispatch.
"""
