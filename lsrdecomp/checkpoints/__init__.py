"""Adapters on disk: open any known format as records, write LSR and LoRA directories."""

from lsrdecomp.checkpoints.diffusers_format import write_diffusers
from lsrdecomp.checkpoints.formats import FORMATS, open_checkpoint
from lsrdecomp.checkpoints.kohya_format import write_kohya
from lsrdecomp.checkpoints.lsr_writer import write_lsr
from lsrdecomp.checkpoints.peft_writer import write_lora
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, LsrLayer
from lsrdecomp.checkpoints.tensors import StoredTensor

__all__ = [
    "FORMATS",
    "Checkpoint",
    "LoraLayer",
    "LsrLayer",
    "StoredTensor",
    "open_checkpoint",
    "write_diffusers",
    "write_kohya",
    "write_lora",
    "write_lsr",
]
