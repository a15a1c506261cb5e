"""Matrices and LoRA adapters as short sums of Kronecker products (low separation rank)."""

from lsrdecomp.analysis import ErrorCurve as ErrorCurve
from lsrdecomp.analysis import error_curve as error_curve
from lsrdecomp.checkpoints import open_checkpoint as open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics as read_statistics
from lsrdecomp.compression.compress import compress as compress
from lsrdecomp.compression.plan import CompressionPlan as CompressionPlan
from lsrdecomp.decompose import decompose as decompose
from lsrdecomp.errors import CheckpointError as CheckpointError
from lsrdecomp.errors import LsrError as LsrError
from lsrdecomp.errors import PrecisionError as PrecisionError
from lsrdecomp.errors import ShapeError as ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct as SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix as SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape as KroneckerShape
from lsrdecomp.kronecker.shape import ProductShape as ProductShape
from lsrdecomp.precision import ErrorBudget as ErrorBudget
from lsrdecomp.precision import unit_roundoff as unit_roundoff
from lsrdecomp.solvers.base import Decomposition as Decomposition
from lsrdecomp.targets.base import LowRank as LowRank
