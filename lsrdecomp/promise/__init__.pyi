# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .bench import Bench as Bench
from .distil import Distilled as Distilled
from .distil import distil as distil
from .front import Promised as Promised
from .record import Promise as Promise
