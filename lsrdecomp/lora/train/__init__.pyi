# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .finetune_record import FinetuneRecord as FinetuneRecord
from .finetune_record import read_record as read_record
from .finetune_run import evaluate as evaluate
from .finetune_run import finetune as finetune
from .finetune_settings import FinetuneSettings as FinetuneSettings
from .finetune_settings import SettingsError as SettingsError
