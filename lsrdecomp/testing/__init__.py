"""Property tests for Kronecker code: strategies that draw cases, checks that find wrong code.

For your code as well as ours. Needs hypothesis: ``pip install -e '.[testing]'`` in a clone. Each
check takes *your* function, `check_operator` your class. The identities that they try are also
functions by themselves, in `identities`, `khatri_rao`, `kronecker_sum`, `vectorization`,
`partial_trace` and `representations`.
"""

from lsrdecomp.errors import way_to_install as _way_to_install

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"lsrdecomp.testing needs hypothesis: {_way_to_install('testing')}"
    ) from _error

from lsrdecomp.testing import identities as identities
from lsrdecomp.testing.agreement import IdentityError as IdentityError
from lsrdecomp.testing.cases import Options as Options
from lsrdecomp.testing.identities import check_kron as check_kron
from lsrdecomp.testing.khatri_rao import check_khatri_rao as check_khatri_rao
from lsrdecomp.testing.kronecker_sum import check_kron_sum as check_kron_sum
from lsrdecomp.testing.operators import check_operator as check_operator
from lsrdecomp.testing.partial_trace import check_partial_trace as check_partial_trace
from lsrdecomp.testing.representations import check_apply as check_apply
from lsrdecomp.testing.representations import check_decomposition as check_decomposition
from lsrdecomp.testing.representations import check_rearrange as check_rearrange
from lsrdecomp.testing.representations import check_sum as check_sum
from lsrdecomp.testing.strategies import SIZES as SIZES
from lsrdecomp.testing.strategies import LoraCase as LoraCase
from lsrdecomp.testing.strategies import graded_matrices as graded_matrices
from lsrdecomp.testing.strategies import invertible_matrices as invertible_matrices
from lsrdecomp.testing.strategies import kronecker_shapes as kronecker_shapes
from lsrdecomp.testing.strategies import lora_layers as lora_layers
from lsrdecomp.testing.strategies import low_rank_pairs as low_rank_pairs
from lsrdecomp.testing.strategies import matrices as matrices
from lsrdecomp.testing.strategies import separated_matrices as separated_matrices
from lsrdecomp.testing.strategies import small_matrices as small_matrices
from lsrdecomp.testing.strategies import special_matrices as special_matrices
from lsrdecomp.testing.vectorization import check_vec as check_vec
