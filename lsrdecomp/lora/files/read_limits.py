"""Limits on what a file may ask for: a few bytes must not cost a machine's memory, or years.

Adapters come from strangers. SECURITY.md says what else is promised, and how it is tested. Those
that one module keeps stand there. All were chosen by hand, far above what any adapter has; what a
user chooses is ``max_memory`` of `lsrdecomp.lora.files.open_checkpoint`.
"""

TEXT_BYTES = 16 * 2**20
"""Bytes of a pickle inside a torch file, or that the index of packed layers may unpack to."""
STORED_TEXT_BYTES = 100_000_000
"""Bytes of a JSON file, or of a safetensors header: as many as that library reads. They are in
the file, and cost memory by their length."""
MAX_AXES = 16
"""Axes of a tensor, or Kronecker factors of a layer."""
MAX_NUMBERS = 2**29
"""Numbers of a tensor that is not stored but computed from stored ones, as LoHa's are."""
