# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from . import base as base
from . import compress as compress
from . import files as files
from . import fleet as fleet
from . import measure as measure
from . import search as search
from . import train as train
