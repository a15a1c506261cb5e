# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .ask import ServerMeasurement as ServerMeasurement
from .ask import ask_server as ask_server
from .check import SERVERS as SERVERS
from .check import check_served as check_served
from .report import ModuleFate as ModuleFate
from .report import ServingCheck as ServingCheck
