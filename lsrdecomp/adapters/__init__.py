"""LSR adapters, and their Kronecker relatives, inside PEFT.

Importing this package makes PEFT know them.
"""

try:
    import peft as _peft  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "lsrdecomp.adapters needs torch and PEFT: pip install 'lsrdecomp[peft]'"
    ) from _error

from lsrdecomp.adapters.adapted import rescale
from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.direct import DirectConfig, KronAConfig
from lsrdecomp.adapters.exchange import save_pretrained, to_lora
from lsrdecomp.adapters.factors import formed_once
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.loraplus import loraplus_groups
from lsrdecomp.adapters.model import LsrModel

__all__ = [
    "DirectConfig",
    "KronAConfig",
    "LsrConfig",
    "LsrLayer",
    "LsrModel",
    "formed_once",
    "loraplus_groups",
    "rescale",
    "save_pretrained",
    "to_lora",
]
