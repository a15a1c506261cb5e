# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .mixed_precision import StoredMatrix as StoredMatrix
from .mixed_precision import StoredTerm as StoredTerm
from .mixed_precision import smallest as smallest
from .number_formats import FORMATS as FORMATS
from .number_formats import Format as Format
from .number_formats import StoredFactor as StoredFactor
from .number_formats import round_factor as round_factor
from .number_formats import storage_format as storage_format
from .quantized import QuantizedMatrix as QuantizedMatrix
from .quantized import QuantizedProduct as QuantizedProduct
from .quantized import SpectralCode as SpectralCode
from .stored import FloatProduct as FloatProduct
from .stored import Stored as Stored
