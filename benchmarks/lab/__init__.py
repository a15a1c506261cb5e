"""The laboratory: what compares methods over tasks and seeds; no part of the package.

``python -m benchmarks.lab compare suite.toml --out comparison/`` and ``python -m benchmarks.lab
recover …`` run suites.
"""

from lsrdecomp.lora.train.methods import METHODS, Method

METHODS["kadaptation"] = Method("benchmarks.lab.compare.kadaptation:KAdaptationConfig")
