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
        f"lsrdecomp.lora.peft needs torch and PEFT: {_way_to_install('peft')}", name=_error.name
    ) from _error

from lsrdecomp.lora.peft.adapted import rescale
from lsrdecomp.lora.peft.direct import DirectConfig, KronAConfig
from lsrdecomp.lora.peft.exchange import save_pretrained, to_lora
from lsrdecomp.lora.peft.factors import formed_once
from lsrdecomp.lora.peft.layer import LsrLayer
from lsrdecomp.lora.peft.lsr_config import LsrConfig
from lsrdecomp.lora.peft.lsr_model import LsrModel
from lsrdecomp.lora.peft.transformers_loading import plain_transformers

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
