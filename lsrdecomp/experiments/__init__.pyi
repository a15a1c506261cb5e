# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .compare import Results as Results
from .compare import read_results as read_results
from .recover_plan import RecoverPlan as RecoverPlan
from .suite import Suite as Suite
from .suite import read_suite as read_suite
