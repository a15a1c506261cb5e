"""Adapters on disk: open any known format as records, write LSR and LoRA directories."""

from lsrdecomp.checkpoints.format_table import FORMATS, open_checkpoint
from lsrdecomp.checkpoints.readers.diffusers import write_diffusers
from lsrdecomp.checkpoints.readers.kohya import write_kohya
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, LsrLayer
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.checkpoints.writers.lsr import write_lsr
from lsrdecomp.checkpoints.writers.peft import write_lora

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
