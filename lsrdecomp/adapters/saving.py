"""Save an adapter as PEFT does, and beside it as plain LoRA for programs that do not know LSR."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from safetensors.torch import save_file

from lsrdecomp.adapters.exchange import to_lora


def save_pretrained(
    model: PeftModel,
    folder: str | Path,
    adapter_name: str = "default",
    *,
    also_lora: bool = False,
    lora_rank: int | None = None,
) -> None:
    """Save one adapter of a model.

    Parameters
    ----------
    model : PeftModel
        A model with the adapter.
    folder : path
        Where to; as PEFT does, an adapter not named ``default`` goes into a subfolder of its name.
    adapter_name : str
        Which adapter.
    also_lora : bool
        Write the same adapter as plain LoRA, exactly, into the subfolder ``lora`` of the adapter's.
    lora_rank : int, optional
        Rank to pad the LoRA to; see `to_lora`.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.adapters import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder, also_lora=True)
    ...     sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.safetensors"))
    ['adapter_model.safetensors', 'lora/adapter_model.safetensors']
    """
    model.save_pretrained(str(folder), selected_adapters=[adapter_name])
    if not also_lora:
        return
    target = Path(folder) / ("" if adapter_name == "default" else adapter_name) / "lora"
    config, tensors = to_lora(model, adapter_name, lora_rank)
    config.inference_mode = True
    config.save_pretrained(str(target))
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
