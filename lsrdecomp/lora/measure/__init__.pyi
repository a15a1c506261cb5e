# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .ask import ServerMeasurement as ServerMeasurement
from .ask import ask_server as ask_server
from .evaluator import Evaluator as Evaluator
from .fidelity import Fidelity as Fidelity
from .fidelity import Measurement as Measurement
from .meter import Comparison as Comparison
from .meter import measure as measure
from .symptoms import Reason as Reason
from .verify_files import LayerCheck as LayerCheck
from .verify_files import Verification as Verification
from .verify_files import accept as accept
from .verify_files import verify as verify
