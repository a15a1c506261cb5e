# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .compress import MeasuredCompression as MeasuredCompression
from .distil import Distilled as Distilled
from .evaluate import Evaluator as Evaluator
from .fidelity import Fidelity as Fidelity
from .fidelity import Measurement as Measurement
from .settings import DistilSettings as DistilSettings
