# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .contract import Rearranged as Rearranged
from .contract import Target as Target
from .convert import as_target as as_target
from .known_entries import KnownEntries as KnownEntries
from .operator import Operator as Operator
from .row_stream import RowStream as RowStream
from .separated_target import Separated as Separated
from .sparse import Sparse as Sparse
from .target import Dense as Dense
from .target import LowRank as LowRank
from .weighted import weighted_norm as weighted_norm
from .weighted import weighted_residual_norm as weighted_residual_norm
from .weights import LowRankPlusIdentity as LowRankPlusIdentity
from .weights import NormWeights as NormWeights
from .weights import Weight as Weight
