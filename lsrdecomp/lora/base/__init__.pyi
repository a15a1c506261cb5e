# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .any_adapter import open_adapter as open_adapter
from .any_adapter import takes_base as takes_base
from .base_files import find_base as find_base
from .behaviour import Behaviour as Behaviour
from .calibrate import calibrate as calibrate
from .dataset import DataError as DataError
from .dataset import read_examples as read_examples
from .divergence import Reference as Reference
