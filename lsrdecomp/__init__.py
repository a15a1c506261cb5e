"""Matrices and LoRA adapters as short sums of Kronecker products (low separation rank)."""

from lsrdecomp.analysis import ErrorCurve as ErrorCurve
from lsrdecomp.analysis import error_curve as error_curve
from lsrdecomp.checkpoints import open_checkpoint as open_checkpoint
from lsrdecomp.compression.plan import CompressionPlan as CompressionPlan
from lsrdecomp.compression.run import compress as compress
from lsrdecomp.compression.statistics import read_statistics as read_statistics
from lsrdecomp.decompose import decompose as decompose
from lsrdecomp.errors import CheckpointError as CheckpointError
from lsrdecomp.errors import LsrError as LsrError
from lsrdecomp.errors import PrecisionError as PrecisionError
from lsrdecomp.errors import ShapeError as ShapeError
from lsrdecomp.precision import ErrorBudget as ErrorBudget
from lsrdecomp.precision import unit_roundoff as unit_roundoff
from lsrdecomp.product import SeparatedProduct as SeparatedProduct
from lsrdecomp.separated import SeparatedMatrix as SeparatedMatrix
from lsrdecomp.shape import KroneckerShape as KroneckerShape
from lsrdecomp.shape import ProductShape as ProductShape
from lsrdecomp.solution import Decomposition as Decomposition
from lsrdecomp.targets import LowRank as LowRank
