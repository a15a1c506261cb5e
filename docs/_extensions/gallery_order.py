"""The order of the gallery: from the idea to its uses, names by alphabet after those."""

from __future__ import annotations

FIRST = (
    "plot_adapter.py",
    "plot_share_of_a_lora.py",
    "plot_four_matrices.py",
    "plot_a_finding.py",
    "plot_gaussian_kernel.py",
    "plot_lora_curves.py",
    "plot_compress_and_recover.py",
)


class Order:
    """A sort key as sphinx-gallery calls it: made with a folder, asked for each file name."""

    def __init__(self, src_dir: str) -> None:
        self.src_dir = src_dir

    def __call__(self, filename: str) -> tuple[int, str]:
        return (FIRST.index(filename) if filename in FIRST else len(FIRST), filename)
