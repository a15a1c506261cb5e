# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .fleet_run import find_adapters as find_adapters
from .fleet_run import run_fleet as run_fleet
from .fleet_run import summary as summary
from .manifest import Outcome as Outcome
from .runners import joblib_runner as joblib_runner
from .runners import ray_runner as ray_runner
