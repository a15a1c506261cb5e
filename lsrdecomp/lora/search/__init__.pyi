# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .curves import adapter_curves as adapter_curves
from .effort import ResourceLimits as ResourceLimits
from .measured_settings import MeasuredSettings as MeasuredSettings
from .plan import CompressionPlan as CompressionPlan
from .plan import Resources as Resources
from .plan import Search as Search
from .result import Compression as Compression
from .result import LayerReport as LayerReport
from .result import Totals as Totals
from .searched import SearchedAdapter as SearchedAdapter
from .searched import search_adapter as search_adapter
