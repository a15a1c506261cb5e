# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .compress import SearchedAdapter as SearchedAdapter
from .compress import search_adapter as search_adapter
from .curves import adapter_curves as adapter_curves
from .export import export_lora as export_lora
from .html_report import html_report as html_report
from .result import Compression as Compression
from .result import LayerReport as LayerReport
from .result import Totals as Totals
from .settings import CompressionPlan as CompressionPlan
from .settings import ProgressUpdate as ProgressUpdate
from .settings import Resources as Resources
from .settings import Search as Search
from .truncate import Truncation as Truncation
from .truncate import truncate as truncate
from .verify import LayerCheck as LayerCheck
from .verify import Verification as Verification
from .verify import verify as verify
