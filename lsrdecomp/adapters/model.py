"""The LSR model: PEFT's view of a base model with LSR adapters."""

from __future__ import annotations

from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.tuner import KroneckerTuner


class LsrModel(KroneckerTuner):
    """A base model with LSR adapters, usually made through `peft.get_peft_model` or `peft.PeftModel.from_pretrained`.

    Parameters
    ----------
    model : torch.nn.Module
        The base model; its targeted layers are replaced in place.
    peft_config : LsrConfig
        The settings.
    adapter_name : str
        Name of the adapter.
    low_cpu_mem_usage : bool
        Create the factors on the meta device, to be filled by loading.
    """

    prefix = "lsr_"
    tuner_layer_cls = LsrLayer
