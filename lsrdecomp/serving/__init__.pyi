# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .ask import ServerMeasurement as ServerMeasurement
from .ask import ask_server as ask_server
