"""LSR adapters inside PEFT. Importing this package makes PEFT know ``peft_type: LSR``."""

from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.exchange import from_lokr, from_lora, to_lora
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.model import LsrModel
from lsrdecomp.adapters.register import register
from lsrdecomp.adapters.rescale import rescale

register("lsr", LsrConfig, LsrModel)

__all__ = ["LsrConfig", "LsrLayer", "LsrModel", "from_lokr", "from_lora", "rescale", "to_lora"]
