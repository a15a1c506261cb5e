"""LSR adapters, and their Kronecker relatives, inside PEFT.

Importing this package makes PEFT know them, and transformers' `load_adapter` open their
directories: a member is added to PEFT's closed enum, entries to its tables, and one function is put
before that of transformers, for the whole process. `plain_transformers` and
``LSRDECOMP_TRANSFORMERS=0`` leave transformers alone.
"""

from lsrdecomp.errors import way_to_install as _way_to_install

try:
    import peft as _peft  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"lsrdecomp.adapters needs torch and PEFT: {_way_to_install('peft')}", name=_error.name
    ) from _error

from lsrdecomp.adapters.adapted import rescale
from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.direct import DirectConfig, KronAConfig
from lsrdecomp.adapters.exchange import save_pretrained, to_lora
from lsrdecomp.adapters.factors import formed_once
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.model import LsrModel
from lsrdecomp.adapters.transformers_loading import plain_transformers

__all__ = [
    "DirectConfig",
    "KronAConfig",
    "LsrConfig",
    "LsrLayer",
    "LsrModel",
    "formed_once",
    "plain_transformers",
    "rescale",
    "save_pretrained",
    "to_lora",
]
