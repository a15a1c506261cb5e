# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .finetune import evaluate as evaluate
from .finetune import finetune as finetune
from .record import FinetuneRecord as FinetuneRecord
from .record import read_record as read_record
from .settings import FinetuneSettings as FinetuneSettings
from .settings import SettingsError as SettingsError
