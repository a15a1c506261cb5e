# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .compress_lora import MeasuredCompression as MeasuredCompression
from .compress_lora import compress as compress
from .distill_lora import Distilled as Distilled
from .distill_lora import distill as distill
from .distill_settings import DistillSettings as DistillSettings
from .export import export_lora as export_lora
from .html_report import html_report as html_report
from .truncate import truncate as truncate
from .truncation import Truncation as Truncation
