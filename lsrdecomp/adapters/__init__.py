"""LSR adapters, and their Kronecker relatives, inside PEFT. Importing this package makes PEFT know them."""

from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.direct import DirectConfig, DirectModel
from lsrdecomp.adapters.exchange import from_lokr, from_lora, to_lora
from lsrdecomp.adapters.kadaptation import KAdaptationConfig, KAdaptationModel
from lsrdecomp.adapters.krona import KronAConfig, KronAModel
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.model import LsrModel
from lsrdecomp.adapters.register import register
from lsrdecomp.adapters.rescale import rescale
from lsrdecomp.adapters.saving import save_pretrained

register("lsr", LsrConfig, LsrModel)
register("dlsr", DirectConfig, DirectModel)
register("krona", KronAConfig, KronAModel)
register("kadaptation", KAdaptationConfig, KAdaptationModel)

__all__ = [
    "DirectConfig",
    "KAdaptationConfig",
    "KronAConfig",
    "LsrConfig",
    "LsrLayer",
    "LsrModel",
    "from_lokr",
    "from_lora",
    "rescale",
    "save_pretrained",
    "to_lora",
]
