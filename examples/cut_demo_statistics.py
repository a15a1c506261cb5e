"""Cut the demo's calibration statistics to the eigenpairs that fit into the package.

    lsrdecomp calibrate ENCODER --adapter lsrdecomp/cli/demo_adapter --task GLUE/SST-2 --samples 1024 --out FULL
    python examples/cut_demo_statistics.py FULL lsrdecomp/cli/demo_statistics

The rest of each covariance is kept as one mean eigenvalue, so traces stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from lsrdecomp.checkpoints.statistics import METADATA, TENSORS, read_statistics
from lsrdecomp.checkpoints.writing import TensorWriter

RANK = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("full", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    statistics = read_statistics(arguments.full)
    metadata = json.loads((arguments.full / METADATA).read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    with TensorWriter(arguments.out) as writer:
        for name, layer in statistics.items():
            for side, weight in (("input", layer.input), ("output", layer.output)):
                cut = weight.truncated(RANK)
                parts = {"eigenvectors": cut.eigenvectors, "eigenvalues": cut.eigenvalues, "rest": cut.rest}
                for part, value in parts.items():
                    writer.add(f"{name}.{side}.{part}", np.asarray(value, dtype=np.float32))
            metadata["layers"][name]["ranks"] = [RANK, RANK]
        writer.write(arguments.out / TENSORS, {"format": metadata["format"], "version": str(metadata["version"])})
    metadata["settings"]["base"] = "sentence-transformers/all-MiniLM-L6-v2"
    metadata["settings"]["cut_to"] = RANK
    (arguments.out / METADATA).write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
