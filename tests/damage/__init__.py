"""A grammar of damage: files from a stranger, sound or broken, each written by code.

`SOUND` and `FAULTS` are adapters, mostly as the bytes of their files: whole ones, and ones that are
broken in a way that has a name. Opening a fault, or at the latest loading its layers, must end in a
`CheckpointError` of one line.

`READERS` read one file each. Fuzzing gives them sound contents, what it has found before, the
contents of the faults, and mutations of all these (`mutated`). A reader may answer, or raise
`LsrError` with one printable line; anything else is a find.
"""

# Importing these modules fills the tables.
from damage import adapter_readers as adapter_readers
from damage import configs as configs
from damage import formats as formats
from damage import gateway_kinds as gateway_kinds
from damage import headers as headers
from damage import layers as layers
from damage import other_readers as other_readers
from damage import packed_readers as packed_readers
from damage import places as places
from damage import torch_files as torch_files
from damage.adapter import FAULTS as FAULTS
from damage.adapter import SOUND as SOUND
from damage.adapter import Files as Files
from damage.mutation import mutated as mutated
from damage.reader import FOUND as FOUND
from damage.reader import MAX_BYTES as MAX_BYTES
from damage.reader import READERS as READERS
from damage.reader import corpus as corpus
