"""LSR adapters, and their Kronecker relatives, inside PEFT. Importing this package makes PEFT know them."""

from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.direct import DirectConfig
from lsrdecomp.adapters.exchange import from_lokr, from_lora, to_lora
from lsrdecomp.adapters.krona import KronAConfig
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.loraplus import loraplus_groups
from lsrdecomp.adapters.model import LsrModel
from lsrdecomp.adapters.rescale import rescale
from lsrdecomp.adapters.saving import save_pretrained

__all__ = [
    "DirectConfig",
    "KronAConfig",
    "LsrConfig",
    "LsrLayer",
    "LsrModel",
    "from_lokr",
    "from_lora",
    "loraplus_groups",
    "rescale",
    "save_pretrained",
    "to_lora",
]
