# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .compress import Compression as Compression
from .compress import compress as compress
from .curves import adapter_curves as adapter_curves
from .export import export_lora as export_lora
from .html_report import html_report as html_report
from .plan import CompressionPlan as CompressionPlan
from .report import LayerReport as LayerReport
from .report import Totals as Totals
from .verify import LayerCheck as LayerCheck
from .verify import Verification as Verification
from .verify import verify as verify
