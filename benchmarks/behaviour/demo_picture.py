"""The picture of docs/evidence/accuracy.md: what is kept of the demo, by structure and size.

python -m benchmarks.behaviour.demo_picture benchmarks/results/demo_function.json
docs/images/demo-function.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lsrdecomp import plots

ARMS = {
    "lsr-kfac": "LSR, Fisher norm",
    "svd-kfac": "truncated SVD, Fisher norm",
    "svd-frobenius": "truncated SVD, Frobenius norm",
}


def main(source: Path, out: Path) -> None:
    rows = json.loads(source.read_text(encoding="utf-8"))["rows"]
    whole = next(row["parameters"] for row in rows if row["method"] == "lora")
    shares = {
        label: [(whole / row["ratio"], row["share"]) for row in rows if row["method"] == method]
        for method, label in ARMS.items()
    }
    plots.save_figure(plots.plot_shares(shares, whole=whole), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
